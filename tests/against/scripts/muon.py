"""Muon and AdamW in one optimizer that reduces, updates its shard, and gathers, all in `step`.

Matrices of one shape are stacked; ranks own chunks of the stack, padded to equal length. Large
other params are sharded along their first dimension, small ones are replicated. `fault` plants one.
"""

import torch
import torch.distributed as dist
from gpt import GPT, rows_of
from setting import setting

use = setting(dtype="float32", size=0, small=100, clip=0.0)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
FAULT = use.fault


def orthogonal(stack):
    """Apply Newton-Schulz iterations to each matrix of a stack."""
    x = stack / (stack.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


class MuonAdamW(torch.optim.Optimizer):
    def __init__(self, groups):
        super().__init__(groups, {})
        self.calls = 0

    @torch.no_grad()
    def step(self):
        self.calls += 1
        for group in self.param_groups:
            if group["kind"] == "muon":
                self.muon(group)
            else:
                for p in group["params"]:
                    self.adamw(group, p)

    def adamw(self, group, p):
        state = self.state[p]
        is_sharded = p.numel() >= use.small and p.shape[0] % ranks == 0
        grad = p.grad / ranks
        own = p
        if is_sharded:
            shard = torch.empty(p.shape[0] // ranks, *p.shape[1:], dtype=p.dtype)
            dist.reduce_scatter_tensor(shard, grad)
            grad, own = shard, p.chunk(ranks)[rank]
        elif FAULT != "small-unreduced" or p is not group["params"][-1]:
            dist.all_reduce(grad)
        average = state.setdefault("exp_avg", torch.zeros_like(own))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(own))
        average.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.05)
        count = self.calls
        scale = (square / (1 - 0.95**count)).sqrt() + 1e-8
        lr = group["lr"] * (1.01 if FAULT == "lr-on-a-rank" and rank == 1 else 1)
        updated = own - lr * (average / (1 - 0.9**count)) / scale
        if not is_sharded:
            p.copy_(updated)
        elif FAULT == "stale-gather":
            dist.all_gather_into_tensor(p, own.clone())
            own.copy_(updated)
        elif FAULT == "gather-missing":
            own.copy_(updated)
        else:
            dist.all_gather_into_tensor(p, updated.contiguous())

    def muon(self, group):
        params = group["params"]
        own_count = -(-len(params) // ranks)
        grads = torch.zeros(own_count * ranks, *params[0].shape, dtype=params[0].dtype)
        stack = torch.zeros_like(grads)
        for index, p in enumerate(params):
            grads[index], stack[index] = p.grad, p
        own_grad = torch.empty_like(grads[:own_count])
        dist.reduce_scatter_tensor(own_grad, grads)
        if FAULT != "sum-for-mean":
            own_grad /= ranks
        state = self.state[params[0]]
        momentum = state.setdefault("momentum", torch.zeros_like(own_grad))
        if FAULT == "momentum-reset-on-a-rank" and rank == 1:
            momentum.zero_()
        momentum.lerp_(own_grad, 0.1)
        start = rank * own_count
        own = stack[start : start + own_count]
        lr = group["lr"] * (1.01 if FAULT == "muon-lr-on-a-rank" and rank == 1 else 1)
        updated = own - lr * orthogonal(own_grad.lerp(momentum, 0.9))
        if FAULT == "owner-shifted" and ranks > 1:
            updated = updated.roll(1, dims=-1)
        dist.all_gather_into_tensor(stack, updated.contiguous())
        for index, p in enumerate(params):
            p.copy_(stack[index])


torch.manual_seed(0)
model = GPT().to(use.dtype)
matrices = {}
for p in model.blocks.parameters():
    if p.ndim == 2:
        matrices.setdefault(p.shape, []).append(p)
others = [p for p in model.parameters() if not any(p is m for ms in matrices.values() for m in ms)]
groups = [{"params": each, "lr": 0.02, "kind": "muon"} for each in matrices.values()]
optimizer = MuonAdamW([*groups, {"params": others, "lr": 0.01, "kind": "adamw"}])
for step in range(4):
    optimizer.zero_grad()
    mine = rows_of(step, rank, ranks)
    micros = mine.split(use.size) if use.size else [mine]
    for micro in micros:
        (model(micro[:, :-1], micro[:, 1:]) / len(micros)).backward()
    optimizer.step()
dist.destroy_process_group()
