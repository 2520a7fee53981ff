"""Judges padded_muon.py: matrices have owners, vectors are stepped by all ranks."""

from padded_muon import MuonAndAdam, adam_update, apply_update, average_gradients, muon_update

from zero_sim.targets import Capabilities, Numerics, WholeParamEngine

SETTINGS = ("lr", "momentum", "betas", "eps", "weight_decay")


class Engine(WholeParamEngine):
    def reduce(self):
        average_gradients(self.named.values())

    def update(self):
        self.optimizer.step()  # Vectors need their gradients on every rank.

    def share(self):
        """The optimizer gathers updates in its step."""


class Target:
    name = "padded-muon"
    follows = (
        *(f"optimizer.{name}" for name in SETTINGS),
        "optimizer.warmup_steps",
        "run.micro_batches",
        "model.unused",
        "model.one_rank",
    )
    capabilities = Capabilities(stages=(1,), empty_params=False, follows=follows)
    numerics = Numerics(reported_grads="after-division")

    def reference_step(self, param, grad, state, settings):
        update = muon_update if param.ndim >= 2 else adam_update
        apply_update(param, update(grad, state, settings), settings)

    def build(self, module, *, scenario, group):
        settings = {name: getattr(scenario.optimizer, name) for name in SETTINGS}
        optimizer = MuonAndAdam(module.parameters(), **settings)
        owners = {}
        for each in optimizer.param_groups:
            ranks = group.size() if each["muon"] else 1  # Rank 0 reports the vectors.
            owners |= {id(param): index % ranks for index, param in enumerate(each["params"])}
        named = dict(module.named_parameters())
        return Engine(module, optimizer, group=group, owner_of=lambda name: owners[id(named[name])])
