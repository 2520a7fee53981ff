"""Program of many reductions, and real gloo processes that run it.

As a script, `reducing.py RANK_COUNT FOLDER` forks one process per rank, so that torch is imported
once, and writes each rank's results to `FOLDER/<rank>.json`.
"""

import hashlib
import json
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from zero_sim.backends.probe import by_calling, compare, observe
from zero_sim.backends.probe_models import by_model

# The name in torch 2.13.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PROBED_ELEMS = 60
AVERAGED = (7, 1000)
SIZES = (1, 2, 3, 7, 8, 1000, 65_537, 300_001)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
GROUPS = ((0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (4, 1, 3), (2, 4))
COALESCED = (5, 1, 640, 33, 0)


def contribution(rank, numel, dtype):
    """Contribution of a rank: numbers of many magnitudes, so that every order gives other bits."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return (torch.randn(numel, generator=generator) * 3.0**rank).to(dtype)


def digest(tensor):
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def all_kinds(group, rank, size, dtype):
    """Yield name and result (or a rank's part of it) of each reducing call on `size` elements."""
    count, me = group.size(), group.rank()
    x = contribution(rank, size, dtype)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[: 1 + (size in AVERAGED)]:
        whole = x.clone()
        dist.all_reduce(whole, op=op, group=group)
        yield f"all_reduce {op}", whole
        even = x.repeat(count)[: size * count] * 0.75
        part = torch.empty(size, dtype=dtype)
        reduce_scatter_single(part, even, op=op, group=group)
        yield f"reduce_scatter {op}", part
        sizes = [size + r * (size % 2) for r in range(count)]
        out = torch.empty(sizes[me], dtype=dtype)
        entries = [contribution(rank, n, dtype) for n in sizes]
        dist.reduce_scatter(out, entries, op=op, group=group)
        yield f"reduce_scatter_list {op}", out
    for root in (0, count - 1):
        whole = x.clone()
        dist.reduce(whole, group_dst=root, group=group)
        if me == root:
            yield f"reduce to {root}", whole


def coalesced_kinds(group, rank, dtype):
    """Yield name and result of each coalesced call."""
    count = group.size()
    tensors = [contribution(rank, size, dtype) for size in COALESCED]
    with _coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    yield from ((f"coalesced all_reduce {i}", tensor) for i, tensor in enumerate(tensors))
    inputs = [contribution(rank, size * count, dtype) for size in COALESCED]
    outputs = [torch.empty(size, dtype=dtype) for size in COALESCED]
    with _coalescing_manager(group=group):
        for output, whole in zip(outputs, inputs, strict=True):
            reduce_scatter_single(output, whole, group=group)
    yield from ((f"coalesced reduce_scatter {i}", output) for i, output in enumerate(outputs))


def probed(group, rank_count):
    """Yield name and verdict of each order probe of gloo."""
    for kind in ("all_reduce", "reduce_scatter"):
        for dtype in (torch.bfloat16, torch.float32):
            elems = PROBED_ELEMS
            seen, expected = (
                observe(reduction, rank_count=rank_count, elems=elems, dtype=dtype)
                for reduction in (
                    by_calling(kind, group=group, elems=elems),
                    by_model(kind, order="gloo", rank_count=rank_count, elems=elems),
                )
            )
            yield f"probe {kind} {dtype}", compare(expected, seen, name="gloo")


def program(rank):
    """Run every reduction of every group of `rank`, and return a digest by name of the call."""
    seen = {}
    for ranks in GROUPS:
        group = dist.new_group(list(ranks))
        if rank not in ranks:
            continue
        for dtype in DTYPES if ranks in GROUPS[1:4:2] else DTYPES[::2]:
            # Large sizes take most of the time.
            large = 2 if ranks == GROUPS[3] and dtype.itemsize in (2, 8) else ranks == GROUPS[4]
            sizes = SIZES[: len(SIZES) - 2 + large]
            for size in sizes:
                for name, got in all_kinds(group, rank, size, dtype):
                    seen[f"{name} of {size} {dtype} on {ranks}"] = digest(got)
            for name, got in coalesced_kinds(group, rank, dtype):
                seen[f"{name} {dtype} on {ranks}"] = digest(got)
        for name, verdict in probed(group, len(ranks)) if ranks in GROUPS[3:5] else ():
            seen[f"{name} on {ranks}"] = verdict
    return seen


def _run_rank(rank, rank_count, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), rank_count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=rank_count)
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(program(rank), file)
    dist.barrier()


def _main(rank_count, folder):
    warnings.simplefilter("ignore")
    children = []
    for rank in range(rank_count):
        child = os.fork()
        if child == 0:
            try:
                _run_rank(rank, rank_count, folder)
                os._exit(0)
            finally:
                # Only reached after an error.
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
