"""Muon for stacks of matrices of one shape: each rank reduces, steps and gathers a slice."""

import torch
import torch.distributed as dist

COEFFICIENTS = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]


def polar(x):
    """Return the nearest semi-orthogonal matrices of a stack [n, rows, cols], by three steps."""
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def step_stack(stack, grads, state, group):
    """Step matrices [n, rows, cols]: momentum, polar factor, equal rows, cautious decay."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(stack)
        state["row_squares"] = torch.zeros_like(stack[..., :1])
    state["momentum_buffer"].lerp_(grads, 1 - group["momentum"])
    update = polar(grads.lerp(state["momentum_buffer"], group["momentum"]))
    norms = update.norm(dim=(-2, -1), keepdim=True)
    state["row_squares"].lerp_(update.square().mean(dim=-1, keepdim=True), 1 - group["betas"][1])
    update = update * state["row_squares"].clamp_min(1e-10).rsqrt()
    update = update * (norms / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
    lr = group["lr"] * max(1.0, stack.size(-2) / stack.size(-1)) ** 0.5
    decay = (update * stack >= 0) * stack
    stack.sub_(lr * update + lr * group["weight_decay"] * decay)


def step_vector(p, grad, state, group):
    """Step any other param by Adam."""
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    beta1, beta2 = group["betas"]
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt().add_(group["eps"])
    p.add_(state["exp_avg"] / root, alpha=-group["lr"] / (1 - beta1 ** state["step"]))


class StackedMuon(torch.optim.Optimizer):
    """Muon that reduces gradients itself. A stack's state is stored for its first matrix."""

    def __init__(
        self, params, *, lr=0.02, momentum=0.95, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0
    ):
        shapes = {}
        for p in params:
            shapes.setdefault(p.shape if p.ndim == 2 else None, []).append(p)
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        groups = [{"params": ps, "stacked": shape is not None} for shape, ps in shapes.items()]
        super().__init__(groups, {**defaults, "weight_decay": weight_decay})
        self.grads = {}  # This rank's slice of each stack of averaged gradients.

    def slice_of(self, group):
        """Return first matrix and length of a rank's slice, which may end after the last matrix."""
        count = -(-len(group["params"]) // dist.get_world_size())
        return dist.get_rank() * count, count

    def averaged(self, param):
        """Return state and averaged gradient of a param if this rank has them, else None twice."""
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        if not group["stacked"]:
            here = dist.get_rank() == 0  # All ranks have the same.
            return (self.state.get(param, {}), param.grad) if here else (None, None)
        key, (first, count) = group["params"][0], self.slice_of(group)
        index = next(i for i, p in enumerate(group["params"]) if p is param) - first
        if not 0 <= index < count:
            return None, None
        state = {name: stack[index] for name, stack in self.state.get(key, {}).items()}
        return state, self.grads[key][index] if self.grads else None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            (self._step_stack if group["stacked"] else self._step_vectors)(group)

    def _stack(self, tensors, padded):
        stack = tensors[0].new_zeros(padded, *tensors[0].shape)
        torch.stack(tensors, out=stack[: len(tensors)])
        return stack

    def _step_stack(self, group):
        params = group["params"]
        first, count = self.slice_of(group)
        padded = count * dist.get_world_size()
        stack = self._stack([p.grad for p in params], padded)
        grads = self.grads[params[0]] = torch.empty_like(stack[:count])
        dist.reduce_scatter_single(grads, stack, op=dist.ReduceOp.AVG)
        stack = self._stack([p.data for p in params], padded)
        mine = stack[first : first + count].clone()
        step_stack(mine, grads, self.state[params[0]], group)
        dist.all_gather_single(stack, mine)
        torch._foreach_copy_(params, list(stack[: len(params)].unbind(0)))

    def _step_vectors(self, group):
        works = [
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True) for p in group["params"]
        ]
        for p, work in zip(group["params"], works, strict=True):
            work.wait()
            step_vector(p, p.grad, self.state[p], group)
