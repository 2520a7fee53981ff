"""`zero-sim torchrun`: output of a script, and of runs that differ."""

import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.ended import assert_ended
from zero_sim.cli import main as cli
from zero_sim.host import supervisor

BEGIN = """import os
import torch
import torch.distributed as dist
from zero_sim import checkpoint_here
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    """Run a script on two ranks."""
    monkeypatch.chdir(tmp_path)

    def run(source, *options):
        Path("train.py").write_text(BEGIN + source)
        words = ["torchrun", "--nproc-per-node", "2", *options, "train.py", "--lr", "0.1"]
        return CliRunner().invoke(cli.main, words)

    return run


def test_output_is_prefixed_by_rank(torchrun):
    done = torchrun("import sys\nprint(rank, sys.argv)\nsys.stderr.write('to err')\n")
    assert done.exit_code == 0
    assert "[rank 0]: 0 ['train.py', '--lr', '0.1']\n" in done.stdout
    assert "[rank 1]: 1 ['train.py', '--lr', '0.1']\n" in done.stdout
    assert "[rank 0]: to err\n" in done.stderr
    assert done.stderr.endswith(
        "2 ranks finished: seed 0, timing eager, schedule round-robin; no collective was called\n"
    )


def test_output_of_one_rank_can_be_selected(torchrun):
    done = torchrun("print('hello')\ndist.barrier()\n", "--output-of", "1")
    assert done.stdout == "[rank 1]: hello\n"
    assert done.stderr.endswith("; 2 calls of collectives\n")


def test_options_of_torchrun_are_accepted(torchrun):
    done = torchrun(
        "print(os.environ['MASTER_PORT'])\n",
        "--standalone",
        "--rdzv_backend=c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--master_port",
        "1234",
        "--nproc_per_node=1",
    )
    assert done.stdout == "[rank 0]: 1234\n"


def test_failure_is_one_message_with_a_repeat_command(torchrun):
    done = torchrun("dist.barrier()\nraise ValueError('no')\n", "--schedule", "pct", "--seed", "3")
    assert done.exit_code == 1
    assert "raised ValueError: no\nTraceback (most recent call last):\n" in done.stderr
    assert "zero_sim" not in done.stderr
    repeat = done.stderr.rpartition("repeat: zero-sim ")[2]
    again = CliRunner().invoke(cli.main, shlex.split(repeat))
    assert (again.exit_code, again.stderr) == (done.exit_code, done.stderr)


def test_exit_is_reported_without_a_traceback(torchrun):
    done = torchrun("raise SystemExit(7)\n")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: rank 0 exited with 7 at train.py:7\n  repeat: ")


DIFFERS = """
model = torch.nn.Linear(3, 2)
torch.nn.init.ones_(model.weight)
torch.nn.init.zeros_(model.bias)
for step in range(3):
    model.zero_grad()
    torch.manual_seed(step)
    x = torch.rand(2, 3)
    if step == 2 and rank == 1:
        import random
        x *= random.random()
    model(x).sum().backward()
    checkpoint_here("after backward", model)
print("done")
"""


def test_first_differing_tensor_is_named_with_its_line(torchrun):
    done = torchrun(DIFFERS, "--runs", "3")
    assert done.exit_code == 1
    told = done.stderr.splitlines()
    assert told[0] == (
        "Error: runs with seeds 0 and 1 differ: at point 'after backward', visit 2, at "
        "train.py:19, rank 1 differs in weight.grad"
    )
    assert told[1].startswith("  seed 0: ")
    assert told[2].startswith("  seed 1: ")
    assert told[1].split()[-1] != told[2].split()[-1]
    repeat = told[-1].removeprefix("  repeat: zero-sim ")
    assert "--seeds 0,1 train.py --lr 0.1" in repeat
    assert CliRunner().invoke(cli.main, shlex.split(repeat)).stderr == done.stderr


def test_equal_runs_list_the_compared_points(torchrun):
    done = torchrun(DIFFERS.replace("step == 2", "step == 5"), "--runs", "3")
    assert done.exit_code == 0
    assert done.stdout.count("done") == 2
    assert done.stderr == (
        "3 runs of 2 ranks are equal: timing hostile, schedule random; no collective was called; "
        "6 points of all ranks, 1 lines of rank 0\n"
    )


def test_ignored_lines_are_not_compared(torchrun):
    source = "import random\nprint('took', random.random(), 's')\nprint('loss', {loss})\n"
    same = source.format(loss=1)
    assert "line 1 of rank 0's output" in torchrun(same, "--runs", "2").stderr
    assert torchrun(same, "--runs", "2", "--ignore", r"took [\d.]+ s").exit_code == 0
    other = torchrun(source.format(loss="random.random()"), "--runs", "2", "--ignore", "took")
    assert "line 2 of rank 0's output differs\n  seed 0: loss 0." in other.stderr
    assert "--ignore took --seeds 0,1 train.py" in other.stderr


def test_several_runs_detect_races(torchrun):
    source = """
grad = torch.ones(4) * (rank + 1)
work = dist.all_reduce(grad, async_op=True)
total = grad.sum().item()
work.wait()
"""
    done = torchrun(source, "--runs", "2")
    assert_ended(done, 1, "data race on rank", "at train.py:10 reads elements [0, 4)", on="stderr")
    assert torchrun(source, "--runs", "2", "--no-races").exit_code == 0


def test_failure_in_a_later_run_is_reported(torchrun):
    source = """
import random
if rank == 0 and random.random() < 0.5:
    raise RuntimeError("drawn")
dist.barrier()
"""
    done = torchrun(source, "--seeds", "0,1")
    assert_ended(done, 1, "the runs ended differently", "raised RuntimeError: drawn", on="stderr")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such.py"], "expected a Python script, got 'no_such.py': No such file"),
        (["broken.py"], "expected a Python script, got 'broken.py': "),
        (["--runs", "2", "--seeds", "1,2", "fine.py"], "expected --runs or --seeds, got both"),
        (["--ignore", "(", "fine.py"], "expected a regular expression, got '('"),
        (["--seeds", "a", "fine.py"], "expected numbers such as 0,3; got 'a'"),
        (
            ["--own-modules", "torch", "fine.py"],
            "expected own modules to be top-level Python packages",
        ),
        (["--own-modules", "a.b", "fine.py"], "got 'a.b'"),
        (["--own-modules", "brokem", "fine.py"], "got 'brokem'. Did you mean 'broken'?"),
        (["--ignore", "ms", "fine.py"], "expected --ignore with --runs or --seeds, got it alone"),
        (["--output-of", "4", "fine.py"], "expected to show the output of ranks below 1, got 4"),
        (["--order", "lineal", "fine.py"], "expected order to be one of"),
        (["--nproc-per-node", "0", "fine.py"], "expected a positive number, auto, gpu or cpu"),
        (["--nproc-per-node", "gpus", "fine.py"], "expected a positive number, auto, gpu or cpu"),
        (["--nproc-per-nod", "2", "fine.py"], "--nproc-per-node"),
    ],
)
def test_usage_error_is_refused_before_the_script_runs(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fine.py").write_text("print('ran')")
    Path("broken.py").write_text("def f(:")
    done = CliRunner().invoke(cli.main, ["torchrun", *words])
    assert_ended(done, 2, said, on="stderr")
    assert "ran" not in done.stdout


@pytest.mark.parametrize(
    ("word", "gpus", "count"), [("auto", 0, 3), ("cpu", 5, 3), ("gpu", 0, 2), ("auto", 5, 5)]
)
def test_number_of_ranks_may_be_a_word(torchrun, monkeypatch, word, gpus, count):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    done = torchrun("print('ran')", "--nproc-per-node", word)
    assert done.stdout.count("]: ran\n") == count


def test_script_runs_in_a_supervised_process():
    assert supervisor.foreign_target(["torchrun", "--runs", "2", "a/train.py", "x.py"]) == (
        "a/train.py"
    )
    assert supervisor.foreign_target(["torchrun", "-m", "pkg.train"]) == "the script"


def test_modules_of_the_caller_are_restored(torchrun):
    main = sys.modules["__main__"]
    torchrun("import sys\nsys.modules['__main__'].planted = 1\n")
    assert sys.modules["__main__"] is main
    assert not hasattr(main, "planted")


DRIFTING = """
model = torch.nn.Linear(4, 2)
torch.manual_seed(0)
torch.nn.init.normal_(model.weight)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4) + rank).sum().backward()
    optimizer.param_groups[0]["lr"] *= 1 + rank
    optimizer.step()
"""


def test_different_replicas_are_an_error(torchrun):
    done = torchrun(DRIFTING)
    assert done.exit_code == 1
    assert (
        "Error: replicas differ: weight of DistributedDataParallel, as the first forward after "
        "step 1 used it\n  8 of 8 elements differ; element 0: rank 0 has " in done.stderr
    )
    assert "--allow-drift 'weight'" in done.stderr
    assert "  repeat: zero-sim torchrun --nproc-per-node 2 " in done.stderr


def test_replicas_may_differ_if_allowed_by_name(torchrun):
    found = torchrun(DRIFTING, "--allow-drift", "weight")
    assert "--allow-drift weight" in found.stderr.splitlines()[-1]
    assert "replicas differ: bias" in found.stderr
    done = torchrun(DRIFTING, "--allow-drift", "weight", "--allow-drift", "b*")
    assert done.exit_code == 0
    assert "replicas" not in done.stderr


def test_equal_replicas_are_counted(torchrun):
    done = torchrun(DRIFTING.replace("1 + rank\n", "1\n"))
    assert done.exit_code == 0
    assert done.stderr.endswith("; 2 replicas are equal on all ranks\n")


def test_drifting_tensors_and_rows_read_twice_are_noted(torchrun):
    code = DRIFTING.replace("torch.nn.parallel.DistributedDataParallel(model)", "model")
    done = torchrun(code.replace("torch.ones(2, 4) + rank", "torch.eye(4)[rank:rank + 3]"))
    assert done.exit_code == 0
    assert "Warning: equal on all ranks at first, then not: weight, as the first" in done.stderr
    assert "because nothing declares it to be a replica" in done.stderr
    assert "Note: in step 1 2 of 4 rows of Linear(0) were read by several ranks" in done.stderr
