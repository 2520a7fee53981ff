"""DDP with accumulation, clipping and a checkpoint; `fault` plants a fault.

Micro-batches have `size` rows, so one rank has more of them; 0 is one micro-batch of all rows. With
`stop` the script ends after this many steps, and resumes if it finds a checkpoint.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from gpt import GPT, rows_of
from setting import OPTIMIZERS, setting
from torch.nn.parallel import DistributedDataParallel

use = setting(dtype="float32", optimizer="adamw", size=0, clip=0.5, stop=4, view=1, load=1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = GPT().to(use.dtype)
model = DistributedDataParallel(net, gradient_as_bucket_view=bool(use.view))
params = list(net.parameters())
optimizer = OPTIMIZERS[use.optimizer](model.parameters())
start = 0


def load():
    loaded = torch.load("state.pt")
    net.load_state_dict(loaded["model"])
    if use.fault == "shifted-load":
        with torch.no_grad():
            params[3].copy_(params[3].flatten().roll(rank).view_as(params[3]))
    optimizer.load_state_dict(loaded["optimizer"])
    for state in optimizer.state.values():
        if (use.fault == "steps-lost-on-a-rank" and rank) or use.fault == "steps-lost":
            state["step"].zero_()
        if use.fault == "average-lost":
            state["exp_avg"].zero_()
    return loaded["step"]


if os.path.exists("state.pt"):
    start = load()
for step in range(start, use.stop):
    if step == 2 and start == 0 and use.load:
        load()
    if not (use.fault == "gradients-kept-on-a-rank" and rank == 1):
        optimizer.zero_grad()
    mine = rows_of(step, rank, ranks)
    micros = mine.split(use.size) if use.size else [mine]
    if use.fault == "micro-dropped" and rank == 1:
        micros = micros[:-1]
    for index, micro in enumerate(micros):
        syncs = index == len(micros) - 1 and use.fault != "never-synced"
        with contextlib.nullcontext() if syncs else model.no_sync():
            loss = model(micro[:, :-1], micro[:, 1:])
            if use.fault == "loss-by-rank":
                loss = loss * (1 + 1e-5 * rank)
            (loss if use.fault == "accumulation-not-divided" else loss / len(micros)).backward()
    if use.fault == "reduced-twice":
        dist.all_reduce(net.tokens.weight.grad)
    if use.fault == "rank-factor":
        params[5].grad.mul_(1 + 1e-6 * rank)
    if use.fault == "element" and rank == 1:
        params[5].grad.view(-1)[3] *= 1 + 1e-4
    if use.clip:
        bound = use.clip * (ranks if use.fault == "clip" else 1)
        some = params[: -1 if use.fault == "norm-of-some" and ranks > 1 else None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in some])
        if use.fault == "norm-of-a-rank":
            norm = norm * (1 + 1e-3 * rank)
        eps = 1e-5 if use.fault == "clip-eps" and ranks > 1 else 1e-6
        scale = (bound / (norm + eps)).clamp(max=1.0)
        for p in params:
            p.grad.mul_(scale)
    # A copy for the log, which natively shares no memory with a bfloat16 gradient.
    logged = params[5].grad.float() if use.dtype != torch.float32 else params[5].grad.clone()
    dist.all_reduce(logged)
    if use.fault == "lr-on-a-rank" and rank == 1:
        optimizer.param_groups[0]["lr"] *= 1 + 1e-6
    if use.fault == "decay-on-a-rank" and rank == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.0
    if use.fault == "step-skipped-on-a-rank" and rank == 1 and step == 2:
        params[7].grad = None
    optimizer.step()
    if step == 1 and rank == 0:
        content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**content, "step": step + 1}, "state.pt")
    dist.barrier()
dist.destroy_process_group()
