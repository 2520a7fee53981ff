"""Ends of scripts, and their description."""

import pytest

from zero_sim.sim import ContractViolation, DataRace, Deadlock, InFlightRace, RankFailed

BEGIN = """import os
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


def test_raising_rank_is_named_with_frames_of_the_script_only(launch):
    run = launch(
        BEGIN + "def step():\n    if rank == 1:\n        raise ValueError('bad batch')\n"
        "    dist.barrier()\nstep()\n"
    )
    assert isinstance(run.failure, RankFailed)
    assert run.ending == "rank 1 raised ValueError at train.py:9: bad batch"
    assert "zero_sim" not in run.failure.report
    assert "in <module>\n    step()" in run.failure.report


@pytest.mark.parametrize(("code", "said"), [("3", "3"), ("'no data'", "'no data'")])
def test_exit_with_an_error_is_named(launch, code, said):
    run = launch(BEGIN + f"if rank == 1:\n    sys.exit({code})\ndist.barrier()\n")
    assert run.ending == f"rank 1 exited with {said} at train.py:8"


def test_failed_import_is_an_error_of_the_rank(launch):
    run = launch(BEGIN + "import no_such_module\n")
    assert run.ending == (
        "rank 0 raised ModuleNotFoundError at train.py:7: No module named 'no_such_module'"
    )
    assert "importlib" not in str(run.failure)


def test_gradient_read_before_its_wait_is_a_race(launch):
    source = (
        BEGIN
        + """
model = torch.nn.Linear(2, 1)
model(torch.ones(1, 2)).sum().backward()
works = [dist.all_reduce(param.grad, async_op=True) for param in model.parameters()]
norm = model.weight.grad.norm()
for work in works:
    work.wait()
"""
    )
    named = launch(source, timing="hostile", races=True)
    assert isinstance(named.failure, DataRace)
    assert "at train.py:11 reads elements [0, 2) of the output" in str(named.failure)
    assert "issued at train.py:10" in str(named.failure)


def test_gradient_changed_in_flight_is_found_without_race_detector(launch):
    run = launch(
        BEGIN
        + """
grad, grads = torch.ones(3), torch.empty(6)
work = dist.all_gather_single(grads, grad, async_op=True)
grad.mul_(2)
work.wait()
""",
        timing="lazy",
    )
    assert isinstance(run.failure, InFlightRace)
    assert "issued at train.py:9" in str(run.failure)


def test_mismatched_calls_are_named_with_both_lines(launch):
    run = launch(
        BEGIN
        + """
def evaluate():
    loss = torch.ones(1)
    dist.all_reduce(loss)

if rank == 0:
    evaluate()
dist.barrier()
"""
    )
    assert isinstance(run.failure, ContractViolation)
    assert "rank 0: all_reduce(float32, 1 elements, SUM) at train.py:10" in str(run.failure)
    assert "rank 1: barrier() at train.py:14" in str(run.failure)


def test_missing_rank_is_in_the_table(launch):
    run = launch(BEGIN + "if rank != 2:\n    dist.barrier()\n", ranks=4)
    assert isinstance(run.failure, Deadlock)
    assert run.ending.endswith("ranks that never came: 2")
    assert "ranks 0-1: waits in barrier #0 of group world at train.py:8" in str(run.failure)
    assert "rank 2: returned" in str(run.failure)


def test_world_is_clean_after_a_failure(launch):
    assert launch(BEGIN + "raise ValueError\n").failure is not None
    assert launch(BEGIN + "print(dist.get_world_size())\n").output == ("2",)


def test_script_runs_on_100_ranks(launch):
    run = launch(
        BEGIN + "import mine\nx = torch.ones(1) * rank\ndist.all_reduce(x)\nprint(x.item())\n",
        files={"mine.py": "GROUP = None"},
        ranks=100,
        shown=frozenset({0}),
    )
    assert run.failure is None, run.failure
    assert run.output == ("4950.0",)
