"""zero_sim judges Shampoo: its arithmetic is the reference, its sharding is under test."""

from shampoo import Shampoo, whole
from torch.distributed.device_mesh import DeviceMesh

from zero_sim.targets import Capabilities, Numerics, WholeParamEngine


def shampoo(named_params, scenario, mesh=None):
    spec = scenario.optimizer
    settings = {"lr": spec.lr, "momentum": spec.momentum, "eps": spec.eps}
    return Shampoo(named_params.values(), **settings, mesh=mesh)


class Engine(WholeParamEngine):
    def reduce(self):
        self.optimizer.average_gradients()

    def state_of(self, param):
        return {key: whole(tensor) for key, tensor in self.optimizer.state[param].items()}


class Target:
    name = "shampoo"
    follows = ("optimizer.momentum", "optimizer.eps", "optimizer.warmup_steps", "run.micro_batches")
    capabilities = Capabilities(stages=(0,), follows=follows)
    numerics = Numerics(reported_grads="after-division")
    reference_optimizer = staticmethod(shampoo)

    def build(self, module, *, scenario, group):
        mesh = DeviceMesh.from_group(group, "cpu")
        optimizer = shampoo(dict(module.named_parameters()), scenario, mesh)
        return Engine(module, optimizer, group=group)
