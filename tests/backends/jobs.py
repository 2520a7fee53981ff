"""Jobs for worker processes."""

import os
import time

import torch
import torch.distributed as dist


def add_ranks(payload, real_rank):
    with real_rank.world(payload["size"]):
        total = torch.tensor([float(real_rank.rank)])
        dist.all_reduce(total)
        return {"total": total.item(), "pid": os.getpid(), "threads": torch.get_num_threads()}


def exchange(payload, real_rank):
    return real_rank.channel.exchange({"rank": real_rank.rank}, size=payload["size"])


def make_subgroup(payload, real_rank):
    with real_rank.world(2):
        group = dist.new_group([0])
        return 0 if real_rank.rank else dist.get_world_size(group)


def leave_a_collective_open(payload, real_rank):
    with real_rank.world(2):
        if real_rank.rank == 0:
            # Never waited for, because the other rank never calls it.
            real_rank.kept = dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError(f"rank {real_rank.rank} fails")


def leave_at_once(payload, real_rank):
    with real_rank.world(payload["size"]):
        if real_rank.rank == 0:
            raise ValueError("not for long")


def die(payload, real_rank):
    with real_rank.world(payload["size"]):
        if real_rank.rank == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(1))


def hang(payload, real_rank):
    with real_rank.world(payload["size"]):
        if real_rank.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))


def every_collective(payload, real_rank):
    with real_rank.world(payload["size"], order=payload["order"]):
        return collectives_of(real_rank.rank, payload["size"])


def collectives_of(rank, size):
    """Run one collective of each kind on data that differs by rank; return this rank's results."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    got = {}
    for dtype in (torch.float32, torch.bfloat16):
        got[f"all_reduce {dtype}"] = total = draw(13, dtype=dtype)
        dist.all_reduce(total)
        got[f"average {dtype}"] = mean = draw(13, dtype=dtype)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        got[f"reduce_scatter {dtype}"] = shard = torch.empty(5 + rank, dtype=dtype)
        dist.reduce_scatter(shard, [draw(5 + other, dtype=dtype) for other in range(size)])
        got[f"reduce {dtype}"] = rooted = draw(4, dtype=dtype)
        dist.reduce(rooted, dst=1)
    gathered = [torch.empty(3) for _ in range(size)]
    dist.all_gather(gathered, draw(3))
    got["all_gather"] = torch.stack(gathered)
    got["broadcast"] = sent = draw(3, 2)
    dist.broadcast(sent, src=size - 1)
    got["scatter"] = part = torch.empty(3)
    dist.scatter(part, [draw(3) for _ in range(size)] if rank == 0 else None, src=0)
    rows = [torch.zeros(2) for _ in range(size)]
    dist.gather(draw(2), rows if rank == 1 else None, dst=1)
    got["gather"] = torch.stack(rows)
    counts = [1 + other for other in range(size)]
    got["all_to_all"] = mixed = torch.empty(sum(counts))
    dist.all_to_all_single(mixed, draw(size * (1 + rank)), counts, [1 + rank] * size)
    lists = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(lists, [draw(2) for _ in range(size)])
    got["all_to_all list"] = torch.stack(lists)
    halves = [dist.new_group(list(range(start, size, 2))) for start in (0, 1)]
    got["subgroup"] = partial = draw(3)
    dist.all_reduce(partial, group=halves[rank % 2])
    got["asynchronous"] = late = draw(3)
    dist.all_reduce(late, async_op=True).wait()
    got["received"] = token = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(token, 1)
    elif rank == 1:
        dist.recv(token, 0)
    return {name: tensor.float().tolist() for name, tensor in got.items()}
