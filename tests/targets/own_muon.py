"""A Muon as its authors write it: whole params per owner, padded gathers, no fp32 masters."""

import torch
import torch.distributed as dist

from zero_sim.targets import Capabilities, Numerics, OwnedPart, Place, StepResult, flat_state


def orthogonal(matrix):
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@torch.no_grad()
def muon_step(param, grad, state, settings):
    """Step with momentum in the param's dtype and an fp32 second moment per row, as in NorMuon."""
    if not state:
        state["momentum"] = torch.zeros_like(param)
        state["of_rows"] = torch.zeros(param.shape[:1], dtype=torch.float32)
    move_with(state["momentum"], param, grad, state, settings)


@torch.no_grad()
def move_with(momentum, param, grad, state, settings):
    momentum.lerp_(grad, 1 - settings["momentum"])
    update = momentum.clone()
    if param.dim() == 2:
        update = orthogonal(update)
        state["of_rows"].lerp_(update.float().square().mean(1), 0.05)
        update /= (state["of_rows"].sqrt().unsqueeze(1) + 1e-8).to(update.dtype)
    param.add_(update, alpha=-settings["lr"])


class Stacked(torch.optim.Optimizer):
    """The same rule with one momentum tensor for all params of a shape."""

    def __init__(self, params, **settings):
        super().__init__(params, settings)

    @staticmethod
    def by_shape(params):
        shapes = {}
        for param in params:
            shapes.setdefault(param.shape, []).append(param)
        return shapes

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for params in self.by_shape(group["params"]).values():
            first = self.state[params[0]]
            if "momentum" not in first:
                first["momentum"] = torch.stack([torch.zeros_like(each) for each in params])
            for index, param in enumerate(params):
                state = self.state[param]
                rows = torch.zeros(param.shape[:1], dtype=torch.float32)
                state.setdefault("of_rows", rows)
                move_with(first["momentum"][index], param, param.grad, state, group)


@torch.no_grad()
def low_bit_step(param, grad, state, settings):
    """Step Adam with 8-bit moments, one scale per row."""
    if not state:
        state["mean"] = torch.zeros_like(param, dtype=torch.int8)
        state["square"] = torch.zeros_like(param, dtype=torch.uint8)
        state["mean_scale"] = torch.ones((*param.shape[:-1], 1))
        state["square_scale"] = torch.ones((*param.shape[:-1], 1))
    moments = []
    for key, value, most in (("mean", grad.float(), 127), ("square", grad.float().square(), 255)):
        scale = state[f"{key}_scale"]
        moment = (state[key].float() * scale).mul_(0.9).add_(value, alpha=0.1)
        scale.copy_(moment.abs().amax(-1, keepdim=True).div_(most).clamp_(min=1e-30))
        state[key].copy_((moment / scale).round_())
        moments.append(moment)
    param.sub_((moments[0] / (moments[1].sqrt() + 1e-8)).mul_(settings["lr"]).to(param.dtype))


class OwnMuon:
    """A target around this Muon.

    Args:
        mistake: Name of its fault; empty for none.
    """

    name = "own-muon"
    capabilities = Capabilities(
        models=("params",),
        dtypes=("bf16", "fp32"),
        scalar_params=False,
        empty_params=False,
        stages=(1,),
        follows=("optimizer.momentum", "optimizer.warmup_steps"),
    )
    numerics = Numerics(
        divide="post-rounded", grad_dtype="param", reported_grads="after-division", masters="param"
    )
    reference_step = rule = staticmethod(muon_step)

    def __init__(self, mistake=""):
        self.mistake = mistake

    def build(self, module, *, scenario, group):
        return Engine(self, module, scenario, group)

    def clip(self, params, norm_max):
        """Clip nothing; return the norm to report."""


class LowBitAdam(OwnMuon):
    """Moments in int8 and uint8. Mistake `code` changes the last code of each shard."""

    reference_step = staticmethod(low_bit_step)

    def rule(self, param, grad, state, settings):
        low_bit_step(param, grad, state, settings)
        if self.mistake == "code":
            state["mean"].view(-1)[-1:] += 1
        elif self.mistake == "dtype":
            state["mean"] = state["mean"].float()


class StackedMuon(OwnMuon):
    """A target whose reference keeps one momentum for all params of a shape."""

    reference_step = None

    def reference_optimizer(self, named_params, scenario):
        spec = scenario.optimizer
        return Stacked(named_params.values(), lr=spec.lr, momentum=spec.momentum)

    def reference_state(self, optimizer, named_params):
        told = {}
        for params in Stacked.by_shape(named_params.values()).values():
            stacked = optimizer.state[params[0]].get("momentum") if params else None
            for index, param in enumerate(params):
                rows = optimizer.state.get(param, {}).get("of_rows")
                if stacked is not None:
                    told[param] = {"momentum": stacked[index], "of_rows": rows}
        return {name: told.get(param, {}) for name, param in named_params.items()}


class Engine:
    def __init__(self, target, module, scenario, group):
        self.target, self.module, self.group = target, module, group
        self.named = dict(module.named_parameters())
        self.state = {name: {} for name in list(self.named)[group.rank() :: group.size()]}
        self.settings_now = {"lr": scenario.optimizer.lr, "momentum": scenario.optimizer.momentum}
        self.clip_norm = scenario.optimizer.clip_norm

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        for param in self.named.values():
            dist.all_reduce(param.grad, group=self.group)
            param.grad /= self.group.size()
        norm = self.target.clip(self.named.values(), self.clip_norm)
        settings = self.settings_now | {"lr": self.settings_now["lr"] * lr_factor}
        names, size = list(self.named), self.group.size()
        for start in range(0, len(names), size):
            dealt = names[start : start + size]
            mine = names[start + self.group.rank()] if self.group.rank() < len(dealt) else None
            if mine is not None and not (self.target.mistake == "last" and mine == names[-1]):
                self.target.rule(
                    self.named[mine], self.named[mine].grad, self.state[mine], settings
                )
            self.spread(dealt, mine)
        return StepResult(norm=norm)

    def spread(self, dealt, mine):
        longest = max(self.named[name].numel() for name in dealt)
        sent = self.named[dealt[0]].new_zeros(longest)
        if mine is not None:
            sent[: self.named[mine].numel()] = self.named[mine].detach().reshape(-1)
        came = [torch.empty_like(sent) for _ in range(self.group.size())]
        dist.all_gather(came, sent, group=self.group)
        for name, flat in zip(dealt, came, strict=False):
            param = self.named[name]
            param.data.copy_(flat[: param.numel()].view_as(param))

    def params(self):
        return dict(self.named)

    def parts(self):
        for name, state in self.state.items():
            param = self.named[name]
            yield OwnedPart(
                place=Place(param=name, start=0, stop=param.numel()),
                grad=None if param.grad is None else param.grad.reshape(-1),
                master=param.detach().reshape(-1),
                state=flat_state(state),
            )
