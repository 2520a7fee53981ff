"""Suites that start processes, under `--zero-sim-spawn`."""

import os
import sys

import pytest

pytest_plugins = ["pytester"]

SPAWN = """
import os
import multiprocessing
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def join(rank, size):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    dist.init_process_group("gloo", init_method="env://")

def add_up(rank, size, pid):
    join(rank, size)
    assert os.getpid() == pid
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    assert os.environ["RANK"] == str(rank)
    assert value.item() == sum(range(size))
    dist.destroy_process_group()

def test_spawn():
    mp.spawn(add_up, args=(3, os.getpid()), nprocs=3)

def fail(rank):
    join(rank, 2)
    assert rank != 1

def test_fails():
    mp.spawn(fail, nprocs=2)

def test_expects_a_failure():
    with pytest.raises(mp.ProcessRaisedException, match="assert 1 != 1"):
        mp.spawn(fail, nprocs=2)

def uneven(rank):
    join(rank, 2)
    dist.all_reduce(torch.ones(2 + rank))

def test_mismatch():
    processes = [mp.Process(target=uneven, args=(rank,)) for rank in range(2)]
    [process.start() for process in processes]
    [process.join() for process in processes]

def send(rank, queue):
    join(rank, 2)
    queue.put(rank)

def test_queue():
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=send, args=(rank, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    assert sorted(queue.get() for _ in processes) == [0, 1]
    for process in processes:
        process.join()
        assert process.exitcode == 0

def early(rank):
    join(rank, 2)
    value = torch.ones(4)
    work = dist.all_reduce(value, async_op=True)
    value.sum().item()
    work.wait()

def test_race():
    mp.spawn(early, nprocs=2)
"""

CASES = """
import unittest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

class Sums(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=2, store=store)

    def test_sum(self):
        self.join()
        value = torch.ones(2)
        dist.all_reduce(value)
        self.assertEqual(value, torch.full((2,), 2.0))

    def test_fails_on_a_rank(self):
        self.join()
        self.assertEqual(self.rank, 0)
        dist.barrier()

    @skip_if_lt_x_gpu(2)
    def test_needs_gpus(self):
        raise AssertionError

    def test_skips(self):
        raise unittest.SkipTest("why")

    def test_deadlock(self):
        self.join()
        if self.rank == 0:
            dist.all_reduce(torch.ones(2))
"""


@pytest.fixture(autouse=True)
def keep_start_method(monkeypatch):
    """Restore the start method, which MultiProcessTestCase sets for the whole process."""
    import multiprocessing.context

    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)


def test_spawned_processes_run_as_ranks(pytester, run):
    pytester.makepyfile(SPAWN)
    result = run("--zero-sim-spawn")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(["*element count mismatch*", "*rank 0:*", "*rank 1:*"])
    result.stdout.fnmatch_lines(["*-- Process 1 terminated with the following error:*"])


def test_timing_and_race_options_apply_to_spawned_ranks(pytester, run):
    pytester.makepyfile(SPAWN)
    options = ("--zero-sim-timing", "hostile", "--zero-sim-races", "--zero-sim-seed", "3")
    result = run("--zero-sim-spawn", *options, "-k", "test_race or test_spawn")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*DataRace*"])


def test_multi_process_test_case_runs_on_ranks(pytester, run):
    pytester.makepyfile(CASES)
    result = run("--zero-sim-spawn")
    result.assert_outcomes(passed=1, failed=2, skipped=2)
    result.stdout.fnmatch_lines(["*deadlock: 1 of 2 ranks wait*"])
    result.stdout.fnmatch_lines(["*Process 1 exited with error code 10 and exception:*"])


def test_environment_is_restored(pytester, run):
    pytester.makepyfile(SPAWN)
    run("--zero-sim-spawn", "-k", "test_spawn").assert_outcomes(passed=1)
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    "options",
    [
        ("--zero-sim-timing", "lazy"),
        ("--zero-sim-spawn", "--zero-sim-backend", "gloo"),
        ("--zero-sim-cuda-is-cpu", "--zero-sim-backend", "gloo"),
        ("--zero-sim-gpus", "2"),
        ("--zero-sim-cuda-is-cpu", "--zero-sim-gpus", "0"),
    ],
)
def test_options_without_effect_are_refused(pytester, run, options):
    pytester.makepyfile("def test_nothing(): pass")
    result = run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*expected --zero-sim-* got*"])


STATE = """
class State:
    _shared_state = {}
"""

RANK_LOCAL = """
import torch.distributed as dist
import torch.multiprocessing as mp
from %s import State

def work(rank):
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    State._shared_state["rank"] = rank
    dist.barrier()
    assert State._shared_state == {"rank": rank}

def test_work():
    mp.spawn(work, nprocs=2)
    assert not State._shared_state
"""


def test_accelerate_state_is_rank_local(pytester, run, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    pytester.makepyfile(
        **{"accelerate/__init__": "", "accelerate/state": STATE + "GradientState = State"}
    )
    pytester.syspathinsert()
    pytester.makepyfile(RANK_LOCAL % "accelerate.state")
    run("--zero-sim-spawn").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("State._shared_state", "passed"), ("Other.state", "failed"), ("State.other", "failed")],
)
def test_declared_names_are_rank_local(pytester, run, name, outcome):
    pytester.makepyfile(states_of_ranks=STATE)
    pytester.syspathinsert()
    pytester.makepyfile(RANK_LOCAL % "states_of_ranks")
    pytester.makeini(f"[pytest]\nzero_sim_rank_local = states_of_ranks:{name}")
    run("--zero-sim-spawn").assert_outcomes(**{outcome: 1})


WANTS_GPUS = """
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

def work(rank):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=GPUS)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=GPUS)
    rpc.shutdown()
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    assert total.item() == GPUS == 2
    assert torch.cuda.current_device() == rank

def test_spawned():
    mp.spawn(work, nprocs=GPUS)

@pytest.mark.world_size(2)
def test_marked(rank):
    work(rank)

def test_alone(tmp_path):
    where = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=where)
    dist.all_reduce(torch.ones(1, device="cuda"))
    dist.new_group(backend="nccl")
    dist.destroy_process_group()
    torch.utils.data.DataLoader([1], pin_memory=True)

def call(rank):
    rpc.rpc_sync("rank0", print)

def test_remote_call():
    with pytest.raises(mp.ProcessRaisedException, match="expected no remote calls in ranks"):
        mp.spawn(call, nprocs=1)
"""


def test_simulated_gpus_run_gpu_tests(pytester, run):
    pytester.makepyfile(WANTS_GPUS)
    options = ("--zero-sim-spawn", "--zero-sim-cuda-is-cpu", "--zero-sim-gpus", "2")
    run(*options).assert_outcomes(passed=4)
    run("--zero-sim-spawn").assert_outcomes(skipped=4)


LATE = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank):
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1), async_op=True)

def test_work():
    mp.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize(
    ("options", "outcome"), [((), "failed"), (("--zero-sim-no-strict",), "passed")]
)
def test_unwaited_call_fails_only_in_strict_mode(pytester, run, options, outcome):
    pytester.makepyfile(LATE)
    run("--zero-sim-spawn", *options).assert_outcomes(**{outcome: 1})


STARTER_JOINS = """
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank):
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)

def test_starter_is_rank_0():
    mp.spawn(work, args=(), nprocs=1, join=False)
    work(0)
"""


def test_starter_as_a_rank_is_refused(pytester, run):
    pytester.makepyfile(STARTER_JOINS)
    result = run("--zero-sim-spawn")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*expected all ranks of a group to be started processes, got 1 *"])


CONTINUOUS = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class Sums(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def check(self):
        value = torch.tensor([self.rank])
        dist.all_reduce(value, group=self.pg)
        self.assertEqual(value.item(), 1)

    def test_a(self):
        self.check()

    def test_b(self):
        self.check()

    def test_c(self):
        self.assertEqual(self.rank, 0)
"""


def test_multi_proc_continuous_test_runs_on_ranks(pytester, run):
    pytester.makepyfile(CONTINUOUS)
    run("--zero-sim-spawn").assert_outcomes(passed=2, failed=1)
