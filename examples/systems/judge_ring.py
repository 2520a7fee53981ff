"""zero_sim judges the ring by proven bounds, because its order of addition is its own."""

from ring import RingDataParallel

from zero_sim.targets import (
    ADAMW_SETTINGS,
    Capabilities,
    Numerics,
    WholeParamEngine,
    plain_optimizer,
)


class Engine(WholeParamEngine):
    def __init__(self, module, scenario, group):
        self.parallel = RingDataParallel(module.parameters(), group)
        optimizer = plain_optimizer(scenario.optimizer, dict(module.named_parameters()))
        super().__init__(module, optimizer, group=group)

    def zero_grad(self):
        self.parallel.zero_grad()

    def reduce(self):
        self.parallel.average()


class Target:
    name = "ring"
    follows = (*ADAMW_SETTINGS, "optimizer.groups", "optimizer.warmup_steps", "run.micro_batches")
    capabilities = Capabilities(
        stages=(0,),
        optimizers=("adamw", "sgd"),
        follows=follows,
        only=(("world.order_known", (False,)),),
    )
    numerics = Numerics(reported_grads="after-division")

    def build(self, module, *, scenario, group):
        return Engine(module, scenario, group)
