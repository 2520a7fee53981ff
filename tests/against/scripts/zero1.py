"""ZeRO-1 with masters in float32: each bucket's gradients are scattered, updated and gathered.

`fault` plants a fault.
"""

import torch
import torch.distributed as dist
from gpt import GPT, rows_of
from setting import OPTIMIZERS, setting

use = setting(dtype="bfloat16", optimizer="adam", bucket=2000, clip=0.5)
STEPS, FAULT, DTYPE = 4, use.fault, use.dtype
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = GPT().to(DTYPE)
params = list(model.parameters())
if FAULT == "order-by-rank" and rank:
    params = params[1:] + params[:1]


class Bucket:
    def __init__(self, params):
        self.params = params
        elems = sum(p.numel() for p in params)
        self.padded = -(-elems // ranks) * ranks
        self.flat = torch.zeros(self.padded, dtype=DTYPE)
        self.grads = torch.zeros(self.padded, dtype=torch.float32)
        start = 0
        for p in params:
            view = self.flat[start : start + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            start += p.numel()
        size = self.padded // ranks
        self.own = slice(rank * size, (rank + 1) * size)
        self.master = self.flat[self.own].detach().float().clone().requires_grad_()

    def reduce(self):
        start = 0
        for p in self.params:
            self.grads[start : start + p.numel()] = p.grad.flatten().float()
            p.grad = None
            start += p.numel()
        size = self.padded // ranks
        if FAULT == "tail-unreduced":
            dist.all_reduce(self.grads[: self.padded - 2])
            self.master.grad = self.grads[self.own] / ranks
            return
        shard = torch.empty(size)
        dist.reduce_scatter_tensor(shard, self.grads)
        if FAULT == "last-bucket-unreduced" and self is buckets[-1]:
            shard = self.grads[self.own] * ranks
        if FAULT == "stale-gradient" and self.master.grad is not None and rank == 1:
            return
        self.master.grad = shard / (ranks if FAULT != "sum-for-mean" else 1)

    def gather(self):
        if FAULT == "no-copy-back" and rank == 1:
            own = self.flat[self.own].clone()
        else:
            own = self.master.detach().to(DTYPE)
        if FAULT == "own-shifted" and ranks > 1:
            own = own.roll(1)
        if FAULT == "last-bucket-not-gathered" and self is buckets[-1]:
            self.flat[self.own] = own
            return
        dist.all_gather_into_tensor(self.flat, own)


buckets, waiting = [], []
for p in params:
    waiting.append(p)
    if sum(each.numel() for each in waiting) >= use.bucket:
        buckets.append(Bucket(waiting))
        waiting = []
if waiting:
    buckets.append(Bucket(waiting))
optimizer = OPTIMIZERS[use.optimizer]([bucket.master for bucket in buckets])
for step in range(STEPS):
    mine = rows_of(step, rank, ranks)
    model(mine[:, :-1], mine[:, 1:]).backward()
    for bucket in buckets:
        bucket.reduce()
    square = sum(bucket.master.grad.square().sum() for bucket in buckets)
    if FAULT != "norm-of-shard":
        dist.all_reduce(square)
    if FAULT == "norm-twice":
        dist.all_reduce(square)
    scale = (use.clip / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for bucket in buckets if use.clip else []:
        bucket.master.grad.mul_(scale)
    if FAULT == "gather-before-step" and ranks > 1:
        for bucket in buckets:
            bucket.gather()
    optimizer.step()
    if FAULT != "gather-before-step" or ranks == 1:
        for bucket in buckets:
            bucket.gather()
dist.destroy_process_group()
