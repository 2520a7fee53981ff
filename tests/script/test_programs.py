"""Scripts like public examples run unmodified under every timing."""

import sys

import pytest
import torch

from tests.script.against_gloo import COMPARED, Program, by_rank, difference, on_gloo

ALL = (
    *((program, program.name == "fsdp2.py") for program in COMPARED),
    *(
        (Program(name, arguments), True)
        for name, arguments in (
            ("ddp_tutorial.py", ("2", "1")),
            ("gpt.py", ()),
            ("tensor_parallel.py", ()),
        )
    ),
)
"""Programs, each with True if its devices are named cuda."""


# torch's warnings are meant for the authors of such scripts.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("program", "cuda_is_cpu"),
    ALL,
    ids=[f"{program.name}{'-cuda' * cuda}" for program, cuda in ALL],
)
def test_programs_print_the_same_eager_and_hostile(launch, tmp_path, capfd, program, cuda_is_cpu):
    printed = []
    for how in ({}, {"timing": "hostile", "schedule": "random", "races": True}):
        run = launch(
            "",
            *program.arguments,
            program=program.name,
            ranks=program.ranks,
            cuda_is_cpu=cuda_is_cpu,
            **how,
        )
        assert run.failure is None, run.failure
        printed.append(by_rank(capfd.readouterr().out, program.ranks))
        for file in tmp_path.glob("*.pt"):
            file.unlink()
    assert sum(map(len, printed[0].values())) >= program.line_count
    assert printed[0] == printed[1]


def test_snapshot_is_found_by_the_next_run(launch, tmp_path):
    how = {"program": "ddp_tutorial.py", "ranks": 2, "cuda_is_cpu": True}
    launch("", "1", "1", **how)
    assert set(torch.load(tmp_path / "snapshot.pt")["MODEL_STATE"]) == {"weight", "bias"}
    run = launch("", "2", "1", **how)
    assert run.failure is None
    assert "Resuming training from snapshot at Epoch 0" in run.output
    assert "datautils" not in sys.modules


def test_output_equals_that_of_real_processes(launch, tmp_path, capfd):
    # Slow, because four real processes import torch and meet over gloo. `make scripts` covers the
    # other programs and hostile timing.
    (gpt,) = (program for program in COMPARED if program.name == "gpt.py")
    real = on_gloo(gpt, tmp_path)
    assert sum(map(len, real.values())) >= gpt.line_count
    for cuda_is_cpu in (False, True):
        run = launch("", program=gpt.name, ranks=gpt.ranks, order="gloo", cuda_is_cpu=cuda_is_cpu)
        assert run.failure is None, run.failure
        assert difference(real, by_rank(capfd.readouterr().out, gpt.ranks)) == ""


def test_differing_line_is_reported():
    assert difference({0: ["a"], 1: ["b"]}, {0: ["a"], 1: ["c"]}) == (
        "rank 1, line 1: simulated 'c', gloo 'b'"
    )
    assert difference({0: ["a"], 1: ["b"]}, {0: ["a"]}) == "rank 1: simulated 0 lines, gloo 1"
