"""Program of the collectives that NCCL implements differently, and its comparison under torchrun.

`python -m torch.distributed.run ... -m tests.gpu.collectives nccl cuda` runs it on real ranks and
on simulated ranks in one process, and prints the differences.
"""

import os
import sys

import torch
import torch.distributed as dist

from zero_sim.sim import World

ELEMS = 1000


def contribution(rank, elems, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(elems, generator=generator).to(dtype)


def program(rank, *, device, premul=True, uneven_gather=True):
    """Return all results of a rank by name, on the CPU."""
    size, results = dist.get_world_size(), {}

    def mine(elems, dtype=torch.float32):
        return contribution(rank, elems, dtype).to(device)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = mine(ELEMS, dtype)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        results[f"AVG {dtype}"] = x
        if premul:
            x = mine(ELEMS, dtype)
            dist.all_reduce(x, op=dist._make_nccl_premul_sum(1 / 3))
            results[f"PREMUL_SUM {dtype}"] = x
    # The last rank receives nothing.
    shares = [10 * (size - 1 - each) for each in range(size)]
    out = torch.empty(shares[rank], device=device)
    dist.reduce_scatter(out, list(mine(sum(shares)).split(shares)))
    results["uneven reduce_scatter"] = out
    if uneven_gather:
        parts = [torch.empty(share, device=device) for share in shares]
        dist.all_gather(parts, mine(shares[rank]))
        results["uneven all_gather"] = torch.cat(parts)
    # Rank r sends (r + s) % size elements to rank s, so that some splits are zero.
    splits = [(rank + each) % size for each in range(size)]
    out = torch.empty(sum(splits), device=device)
    dist.all_to_all_single(out, mine(sum(splits)), splits, splits)
    results["all_to_all with zero splits"] = out
    return {name: value.cpu() for name, value in results.items()}


def differences(real, simulated):
    """Return the names of results that differ in any bit."""
    assert real.keys() == simulated.keys()
    return [name for name, value in real.items() if not torch.equal(value, simulated[name])]


def main(backend, device):
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend)
    rank, size, is_nccl = dist.get_rank(), dist.get_world_size(), backend == "nccl"
    how = {"device": device, "premul": is_nccl, "uneven_gather": is_nccl}
    real = program(rank, **how)
    dist.destroy_process_group()
    order = "nccl-ring" if backend == "nccl" else backend
    with World(size, order=order) as world:
        simulated = world.run(lambda each: program(each, **how))
    different = differences(real, simulated[rank])
    sys.exit(f"rank {rank}: other bits on real ranks: {different}" if different else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
