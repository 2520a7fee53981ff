"""zero_sim judges Dion: its arithmetic is the reference, its sharding is under test."""

from dion import Dion

from zero_sim.targets import Capabilities, Numerics, WholeParamEngine


def dion(named_params, scenario, group=None):
    spec = scenario.optimizer
    settings = {"lr": spec.lr, "momentum": spec.momentum, "weight_decay": spec.weight_decay}
    return Dion(named_params.values(), **settings, group=group)


class Engine(WholeParamEngine):
    def share(self):
        """Nothing: the optimizer sends what it updated."""


class Target:
    name = "dion"
    capabilities = Capabilities(
        stages=(1,),
        follows=(
            "optimizer.momentum",
            "optimizer.weight_decay",
            "optimizer.warmup_steps",
            "run.micro_batches",
        ),
    )
    numerics = Numerics(reported_grads="after-division")
    reference_optimizer = staticmethod(dion)

    def build(self, module, *, scenario, group):
        named = dict(module.named_parameters())
        optimizer = dion(named, scenario, group)
        owners = {name: optimizer.owners[param] for name, param in named.items()}
        return Engine(module, optimizer, group=group, owner_of=owners.get)
