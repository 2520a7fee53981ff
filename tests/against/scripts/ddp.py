"""DDP with accumulation, clipping, AdamW and a checkpoint; the first argument plants a fault."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from gpt import GPT, rows_of
from torch.nn.parallel import DistributedDataParallel

FAULT, DTYPE = sys.argv[1], getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "float32")
STEPS, MICROS = 4, 2
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = GPT().to(DTYPE)
model = DistributedDataParallel(net)
params = list(net.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
for step in range(STEPS):
    if step == 2 and os.path.exists("state.pt"):
        loaded = torch.load("state.pt")
        net.load_state_dict(loaded["model"])
        if FAULT == "shifted-load":
            with torch.no_grad():
                params[3].copy_(params[3].flatten().roll(rank).view_as(params[3]))
        optimizer.load_state_dict(loaded["optimizer"])
        if FAULT == "steps-lost-on-a-rank" and rank:
            for state in optimizer.state.values():
                state["step"].zero_()
    optimizer.zero_grad()
    micros = rows_of(step, rank, ranks).chunk(MICROS)
    if FAULT == "micro-dropped" and rank == 1:
        micros = micros[:-1]
    for index, micro in enumerate(micros):
        is_last = index == len(micros) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(micro[:, :-1], micro[:, 1:])
            (
                loss if FAULT == "accumulation-not-divided" else loss / MICROS * ranks / ranks
            ).backward()
    if FAULT == "reduced-twice":
        dist.all_reduce(net.tokens.weight.grad)
    if FAULT == "rank-factor":
        params[5].grad.mul_(1 + 1e-6 * rank)
    if FAULT == "element" and rank == 1:
        params[5].grad.view(-1)[3] *= 1 + 1e-4
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5 if FAULT != "clip" else 0.5 * ranks)
    # A copy for the log, which natively shares no memory with a bfloat16 gradient.
    logged = params[5].grad.float() if torch.float32 != DTYPE else params[5].grad.clone()
    dist.all_reduce(logged)
    if FAULT == "lr-on-a-rank" and rank == 1:
        optimizer.param_groups[0]["lr"] *= 1 + 1e-6
    optimizer.step()
    if step == 1 and rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
    dist.barrier()
dist.destroy_process_group()
