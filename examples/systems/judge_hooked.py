"""zero_sim judges data parallelism by hooks, with plain optimizers of torch."""

from hooked import HookedDataParallel

from zero_sim.targets import (
    ADAMW_SETTINGS,
    Capabilities,
    Numerics,
    WholeParamEngine,
    plain_optimizer,
)


class Engine(WholeParamEngine):
    def reduce(self):
        """Nothing: hooks did it in backward."""


class Target:
    name = "hooked"
    capabilities = Capabilities(
        stages=(0,),
        optimizers=("adamw", "sgd"),
        follows=(
            *ADAMW_SETTINGS,
            "optimizer.groups",
            "optimizer.warmup_steps",
            "run.micro_batches",
            "model.distinct_start",
            "model.tied",
        ),
    )
    numerics = Numerics(sync="every", divide_each="round", reported_grads="after-division")

    def build(self, module, *, scenario, group):
        optimizer = plain_optimizer(scenario.optimizer, dict(module.named_parameters()))
        engine = Engine(module, optimizer, group=group)
        engine.module = HookedDataParallel(module, group)
        return engine
