"""Verdicts on scripts that start their own ranks, and on scripts that need GPUs."""

import pytest
import torch

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
def work(rank, ranks, data, device):
    dist.init_process_group("gloo", "tcp://localhost:1", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    if device:
        model.to(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for rows in data:
        optimizer.zero_grad()
        mine = rows.chunk(ranks)[rank]
        (model(mine) - mine[:, :2].sin()).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= ranks {wrong}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    dist.destroy_process_group()
if __name__ == "__main__":
    torch.manual_seed(1)
    data = torch.randn(3, 8, 4)
"""
SPAWN = "    ranks = int(sys.argv[1])\n    mp.spawn(work, (ranks, data, False), ranks)\n"
GPUS = (
    "    ranks = torch.cuda.device_count()\n    print(data.cuda().device)\n"
    "    mp.spawn(work, (ranks, data, True), ranks)\n"
)


@pytest.mark.parametrize(
    ("wrong", "expected"), [("", "equal"), ("* (1 + (rank == 0))", "different")]
)
def test_script_determines_the_number_of_ranks(judged, wrong, expected):
    code = SCRIPT.replace("{wrong}", wrong) + SPAWN
    comparison = judged("starts.py", "4", one=["1"], code=code, begin="", ranks=2)
    assert comparison.verdict.outcome == expected
    assert (comparison.verdict.expected, comparison.verdict.got) == ("1 rank", "4 ranks")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_script_gets_one_rank_per_simulated_gpu(judged):
    code = SCRIPT.replace("{wrong}", "") + GPUS
    comparison = judged("starts.py", code=code, begin="", ranks=4)
    assert (comparison.verdict.outcome, comparison.verdict.got) == ("equal", "4 ranks")


def test_steps_are_counted_across_worlds(judged):
    code = SCRIPT.replace("{wrong}", "") + SPAWN + SPAWN
    comparison = judged("starts.py", "2", one=["1"], code=code, begin="")
    assert (comparison.verdict.outcome, comparison.verdict.steps) == ("equal", 6)
