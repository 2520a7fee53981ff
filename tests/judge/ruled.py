"""Small data-parallel system that can follow any one rule."""

import itertools

import torch
import torch.distributed as dist

from zero_sim.targets import Capabilities, Numerics, OwnedPart, Place, StepResult

FOLLOWS = (
    "optimizer.clip_norm",
    "optimizer.weight_decay",
    "run.micro_batches",
    "system.redundancy",
    "topology.cp",
)


def fp32(number):
    return torch.tensor(number, dtype=torch.float32)


def times(tensor, number):
    """Multiply by a Python number, rounding the product once."""
    return (tensor.to(torch.float32) * fp32(number)).to(tensor.dtype)


def over(tensor, number):
    return (tensor.to(torch.float32) / fp32(number)).to(tensor.dtype)


BEFORE = {
    "pre": over,
    "premul": lambda grad, count: grad * fp32(1 / count).to(grad.dtype),
    "premul-fp32": lambda grad, count: times(grad, 1 / count),
}
AFTER = {
    "post": lambda total, count: over(total.to(torch.float32), count),
    "post-rounded": over,
    "postmul": lambda total, count: times(total.to(torch.float32), 1 / count),
    "postmul-rounded": lambda total, count: times(total, 1 / count),
}


class Engine:
    """All-reduce of each gradient, a division, Adam on fp32 masters that all ranks hold.

    Args:
        module: The model.
        scenario: The case.
        group: All ranks.
        does: Deviations from the default rules.
    """

    def __init__(self, module, scenario, group, does):
        self.module, self.spec, self.does = module, scenario.optimizer, does
        self.group, self.size, self.cp = group, group.size(), scenario.topology.cp
        named = module.named_parameters()
        self.named = {name: param for name, param in named if param.requires_grad}
        self.masters = {
            name: torch.nn.Parameter(param.detach().to(torch.float32, copy=True).contiguous())
            for name, param in self.named.items()
        }
        spec = scenario.optimizer
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=spec.lr, weight_decay=spec.weight_decay, foreach=False
        )
        self.blocks = scenario.system.redundancy
        self.inside = self.across = None
        if self.blocks > 1:
            share = self.size // self.blocks
            for start in range(0, self.size, share):
                made = dist.new_group(list(range(start, start + share)))
                self.inside = made if group.rank() // share == start // share else self.inside
            for place in range(share):
                made = dist.new_group(list(range(place, self.size, share)))
                self.across = made if group.rank() % share == place else self.across
        self.local, self.sums, self.shown, self.reached = {}, {}, {}, set()
        self.step_rows = None

    def zero_grad(self):
        self.local, self.sums, self.reached = {}, {}, set()
        for param in self.named.values():
            param.grad = None

    def start_step(self, *, rows):
        if "scale" in self.does:
            total = torch.tensor(sum(rows))
            dist.all_reduce(total, group=self.group)
            self.step_rows = int(total)

    def backward_terms(self, loss, second, *, last_micro, rows):
        factor = self.does.get("second", lambda engine: 1)(self)
        scaled = loss + second * factor
        self.backward(scaled, last_micro=last_micro, rows=rows)

    def backward(self, loss, *, last_micro, rows):
        if "scale" in self.does:
            loss = loss * self.does["scale"](self, rows)
        loss.backward()
        for name, param in self.named.items():
            if param.grad is not None:
                self.reached.add(name)
                grad = param.grad.to(self.does.get("accumulate", param.dtype))
                held = self.local.get(name)
                self.local[name] = grad.clone() if held is None else held + grad
                param.grad = None
        if self.does.get("sync", "last") != "last":
            self.reduce(last=False)
        elif last_micro:
            self.reduce(last=True)

    def reduce(self, *, last):
        """Sum the local gradients over the ranks; every rank has all params."""
        divide, count = self.does.get("divide", "post"), self.count()
        for name, param in self.named.items():
            grad = self.local.get(name, torch.zeros_like(param))
            grad = grad.to(self.does.get("reduce", grad.dtype)).contiguous()
            first = self.does.get("predivide")
            if first is not None:
                grad = times(grad, 1 / first) if "mul" in divide else over(grad, first)
            elif divide in BEFORE:
                grad = BEFORE[divide](grad, count)
            group = self.inside if self.does.get("sync") == "every-in-block" else self.group
            if self.blocks > 1 and group is self.group:
                dist.all_reduce(grad, group=self.inside)
                grad = grad.to(self.does.get("copies", grad.dtype))
                dist.all_reduce(grad, group=self.across)
                grad = grad.to(self.does.get("sum", grad.dtype))
            else:
                dist.all_reduce(grad, group=group)
            if self.does.get("each") == "round":
                grad = AFTER[divide](grad, count).to(grad.dtype)
            if not last:
                grad = grad.to(self.does.get("sum", grad.dtype))
            held = self.sums.get(name)
            self.sums[name] = grad if held is None else held + grad
        self.local = {}

    def count(self):
        return self.does.get("by", self.size)

    def step(self, *, lr_factor):
        if self.does.get("sync") == "every-in-block":
            for name, grad in self.sums.items():
                self.sums[name] = grad = grad.to(self.does.get("copies", grad.dtype))
                dist.all_reduce(grad, group=self.across)
        divide, count = self.does.get("divide", "post"), self.count()
        count /= self.does.get("predivide", 1)
        self.shown, wide = dict(self.sums), {}
        for name, grad in self.sums.items():
            if divide in AFTER and self.does.get("each") != "round":
                grad = AFTER[divide](grad, count)
            wide[name] = grad.to(torch.float32)
        if self.does.get("told") == "after-division":
            kept = {n: g.to(self.sums[n].dtype) for n, g in wide.items()}
            self.shown = {n: wide[n] if self.does.get("told in") else kept[n] for n in wide}
        elif self.does.get("told in"):
            self.shown = {n: g.to(self.does["told in"]) for n, g in self.shown.items()}
        wide = self.left(wide)
        skipped = not all(bool(grad.isfinite().all()) for grad in wide.values())
        if "raises" in self.does and self.does["raises"](self.group.rank(), finite=not skipped):
            raise FloatingPointError("a gradient is not finite")
        skipped = skipped and self.does.get("skips", False)
        norm = self.norm(wide)
        if self.spec.clip_norm is not None:
            factor = self.does.get("clip", default_clip)(norm, self.spec.clip_norm)
            wide = {name: grad * factor for name, grad in wide.items()}
        if self.does.get("told") == "after-clip":
            self.shown = wide
        if not skipped:
            self.update(wide)
        return StepResult(norm=None if self.does.get("tells no norm") else norm, skipped=skipped)

    def left(self, wide):
        """Drop params that no rank used, if the system leaves those alone."""
        if not self.does.get("leaves unused"):
            return wide
        used = fp32([float(name in self.reached) for name in self.named])
        dist.all_reduce(used, group=self.group)
        return {
            name: wide[name] for name, any_used in zip(self.named, used, strict=True) if any_used
        }

    def norm(self, wide):
        if "norm" in self.does:
            return self.does["norm"](self, wide)
        return fp32(sum(float(grad.double().square().sum()) for grad in wide.values()) ** 0.5)

    def update(self, wide):
        for name, master in self.masters.items():
            master.grad = wide.get(name)
        self.optimizer.step()
        with torch.no_grad():
            for name, param in self.named.items():
                param.copy_(self.masters[name])

    def owned(self):
        """Names of params that this rank owns: dealt in turn within each shard group."""
        if self.blocks == 1 and not self.does.get("shards"):
            return list(self.named)
        share, rank = self.size // self.blocks, self.group.rank()
        return list(itertools.islice(self.named, rank % share, None, share))

    def parts(self):
        told = self.does.get("told") != "not"
        for name in self.owned():
            grad = self.shown.get(name) if told else None
            yield OwnedPart(
                Place(param=name, start=0, stop=self.named[name].numel()),
                grad,
                self.masters[name].detach(),
                dict(self.optimizer.state.get(self.masters[name], {})),
            )

    def params(self):
        return {name: param.detach() for name, param in self.named.items()}


def default_clip(norm, bound):
    return (fp32(bound) / (norm + 1e-6)).clamp(max=1)


class Target:
    """Target around the engine.

    Args:
        does: Deviations from the default rules.
        declared: Declared numerics.
        able: Further capabilities.
    """

    name = "ruled"

    def __init__(self, does=None, declared=None, **able):
        self.does, self.numerics = does or {}, declared or Numerics()
        able.setdefault("stages", (0,))
        able.setdefault("dtypes", ("fp32", "bf16"))
        able.setdefault("models", ("mlp", "params", "unusual", "multi-token"))
        self.capabilities = Capabilities(follows=FOLLOWS, **able)

    def build(self, module, *, scenario, group):
        return Engine(module, scenario, group, self.does)
