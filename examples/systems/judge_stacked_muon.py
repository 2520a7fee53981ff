"""Judges stacked_muon.py: stacks are reported by matrix, and the reference steps stacks of one."""

from stacked_muon import StackedMuon, step_stack, step_vector

from zero_sim.targets import Capabilities, Numerics, OwnedPart, Place, WholeParamEngine, flat_state

SETTINGS = ("lr", "momentum", "betas", "eps", "weight_decay")
ALSO = ("optimizer.warmup_steps", "run.micro_batches", "model.unused", "model.one_rank")


class Engine(WholeParamEngine):
    def step(self, *, lr_factor):
        self.rates.scale(lr_factor)
        self.optimizer.step()

    def parts(self):
        for name, param in self.named.items():
            state, grad = self.optimizer.averaged(param)
            if state is not None:
                flat = {key: each.reshape(-1) for key, each in state.items() if key != "step"}
                yield OwnedPart(
                    place=Place(param=name, start=0, stop=param.numel()),
                    grad=None if grad is None else grad.reshape(-1),
                    master=param.detach().reshape(-1),
                    state=flat_state(flat),
                )


class Target:
    name = "stacked-muon"
    follows = (*(f"optimizer.{name}" for name in SETTINGS), *ALSO)
    capabilities = Capabilities(stages=(1,), empty_params=False, follows=follows)
    numerics = Numerics(divide="avg", reported_grads="after-division")

    def reference_step(self, param, grad, state, settings):
        if param.ndim == 2:
            step_stack(param[None], grad[None], state, settings)
        else:
            step_vector(param, grad, state, settings)

    def build(self, module, *, scenario, group):
        settings = {name: getattr(scenario.optimizer, name) for name in SETTINGS}
        return Engine(module, StackedMuon(module.parameters(), **settings), group=group)
