"""Jobs for the workers of test_team."""

import os
import time

import torch
import torch.distributed as dist


def add_ranks(payload, seat):
    with seat.world(payload["size"]):
        total = torch.tensor([float(seat.rank)])
        dist.all_reduce(total)
        return {"total": total.item(), "pid": os.getpid(), "threads": torch.get_num_threads()}


def exchange(payload, seat):
    return seat.exchange({"rank": seat.rank}, size=payload["size"])


def make_subgroup(payload, seat):
    with seat.world(2):
        group = dist.new_group([0])
        return 0 if seat.rank else dist.get_world_size(group)


def leave_a_collective_open(payload, seat):
    with seat.world(2):
        if seat.rank == 0:
            # Not waited for: its other half never comes.
            seat.kept = dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError(f"rank {seat.rank} fails")


def die(payload, seat):
    with seat.world(payload["size"]):
        if seat.rank == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(1))


def hang(payload, seat):
    with seat.world(payload["size"]):
        if seat.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
