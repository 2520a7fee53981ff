"""Worlds: isolation of ranks, reuse, determinism and bad programs."""

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.sim import (
    ContractViolation,
    DataRace,
    Deadlock,
    InFlightRace,
    RankFailed,
    RankStalled,
    World,
)
from zero_sim.sim.world.baton import Baton


def total_of_ranks(rank):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def change_in_flight():
    x = torch.ones(2)
    work = dist.all_gather_single(torch.empty(4), x, async_op=True)
    x.zero_()
    work.wait()


class TestRanks:
    """A rank sees its own distributed state, random numbers and thread settings."""

    def test_torch_is_unchanged_outside_ranks(self, world_of):
        world_of(2).run(total_of_ranks)
        assert not dist.is_initialized()

    def test_random_numbers_are_private_to_a_rank_and_repeat(self, world_of):
        def program(rank):
            drawn = []
            for _ in range(2):
                drawn += [torch.rand(1).item(), random.random(), np.random.standard_normal()]
                dist.barrier()
            return tuple(drawn)

        def undisturbed(seed):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            drawn = []
            for _ in range(2):
                drawn += [torch.rand(1).item(), random.random(), np.random.standard_normal()]
            return tuple(drawn)

        expected = [undisturbed(7 + rank) for rank in range(3)]
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        before = torch.get_rng_state(), random.getstate(), np.random.standard_normal()
        np.random.seed(1)
        assert world_of(3, seed=7).run(program) == expected
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.standard_normal() == before[2]

    def test_rank_starts_with_one_thread_and_gradients_enabled(self, world_of):
        def program(rank):
            seen = torch.get_num_threads(), torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            return seen

        world = world_of(2)
        assert world.run(program) == [(1, True)] * 2
        assert world.run(program) == [(1, True)] * 2

    def test_another_threads_setting_does_not_reach_a_rank(self):
        def program(rank):
            inputs = torch.arange(2.0**14).reshape(128, 128).sin()
            return torch.get_num_threads(), (inputs @ inputs).sum(0)

        with World(1) as world:
            torch.set_num_threads(2)
            try:
                ((threads, seen),) = world.run(program)
            finally:
                torch.set_num_threads(1)
        assert threads == 1
        assert torch.equal(seen, program(0)[1])

    def test_device_mesh_and_functional_collectives_work(self, world_of):
        from torch.distributed import _functional_collectives as functional
        from torch.distributed.device_mesh import init_device_mesh

        def program(rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            x = functional.all_reduce(torch.tensor([float(rank)]), "sum", mesh["b"].get_group())
            return (x + 0).item()

        assert world_of(4).run(program) == [1.0, 1.0, 5.0, 5.0]


class TestDeterminism:
    """A run is a function of program, schedule and seed."""

    PROGRAM = """
import torch, torch.distributed as dist
from zero_sim.sim import World
def program(rank):
    group = dist.new_group([0, 2])
    for _ in range(5):
        x = torch.rand(3)
        work = dist.all_reduce(x, async_op=True)
        if rank % 2 == 0:
            dist.broadcast(x.clone(), src=0, group=group)
        work.wait()
    return x.tolist()
import sys
with World(4, schedule=sys.argv[1], timing=sys.argv[2], seed=3) as world:
    for _ in range(5):
        results = world.run(program)
        print(world.log.digest(), results)
"""

    @pytest.mark.parametrize(
        ("schedule", "timing"), [("random", "eager"), ("random", "hostile"), ("pct", "lazy")]
    )
    def test_ten_runs_in_two_processes_give_one_log(self, schedule, timing):
        lines = []
        for hash_seed in ("1", "2"):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", self.PROGRAM, schedule, timing],
                capture_output=True,
                text=True,
                check=True,
                env={"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"},
            )
            lines += done.stdout.splitlines()
        assert len(lines) == 10
        assert len(set(lines)) == 1

    def test_another_seed_gives_another_schedule(self, world_of):
        def turns(seed):
            world = world_of(5, schedule="random", seed=seed)
            world.run(total_of_ranks)
            return tuple(world.log.turns)

        assert turns(1) == turns(1)
        assert len({turns(seed) for seed in range(5)}) > 1

    def test_log_records_calls_and_their_sites(self, world_of):
        world = world_of(2)
        world.run(total_of_ranks)
        record = world.log.of_rank(1)[0]
        assert (record.kind, record.group, record.sequence) == ("all_reduce", "world", 0)
        assert (record.dtype, record.elems, record.bytes) == ("float32", 1, 4)
        assert record.detail == "SUM"
        assert record.file == __file__


class TestBadPrograms:
    """A bad program gives one clear error that names the rank, and the world stays usable."""

    def failing(self, world, program, error):
        with pytest.raises(error) as caught:
            world.run(program)
        assert world.run(total_of_ranks) == [sum(range(world.world_size))] * world.world_size
        return caught.value

    def test_raising_rank_is_named_with_its_traceback(self, world_of):
        def program(rank):
            if rank == 1:
                raise ValueError("my own mistake")
            dist.barrier()

        failure = self.failing(world_of(3), program, RankFailed)
        assert failure.rank == 1
        assert isinstance(failure.error, ValueError)
        assert str(failure) == "rank 1 raised ValueError: my own mistake"
        assert failure.report.startswith(f"{failure}\nTraceback (most recent call last):\n")
        assert "test_world.py" in failure.traceback_text
        assert failure.__cause__ is failure.error

    def test_rank_that_returns_early_is_reported_missing(self, world_of):
        def program(rank):
            if rank != 2:
                dist.all_reduce(torch.ones(1))

        failure = self.failing(world_of(4), program, Deadlock)
        text = str(failure)
        assert "3 of 4 ranks wait" in text
        assert "ranks that never came: 2" in text
        assert "ranks 0-1: waits in all_reduce #0 of group world at" in text
        assert "rank 2: returned" in text
        assert [status.missing for status in failure.statuses] == [(2,), (2,), (), (2,)]

    def test_receive_without_a_send_is_a_deadlock(self, world_of):
        def program(rank):
            if rank == 0:
                dist.recv(torch.empty(1), src=1)

        assert "waits in recv from rank 1" in str(self.failing(world_of(2), program, Deadlock))

    def test_endless_polling_is_a_deadlock(self, world_of):
        def program(rank):
            if rank == 0:
                work = dist.all_reduce(torch.ones(1), async_op=True)
                while not work.is_completed():
                    pass

        assert "rank 0: waits in all_reduce" in str(self.failing(world_of(2), program, Deadlock))

    def test_rank_that_never_calls_is_interrupted_and_shown(self, stall_clock):
        def program(rank):
            while rank == 1 and stall_clock.runs_out():
                pass
            dist.barrier()

        with World(2) as world:
            failure = self.failing(world, program, RankStalled)
        assert failure.rank == 1
        assert "while rank == 1" in str(failure)
        # No frames of the rank's start.
        head = "It was here:\n  File "
        assert head in str(failure)
        assert str(failure).partition(head)[2].startswith(f'"{__file__}"')
        assert "_run_program" not in str(failure)

    def test_rank_that_was_only_woken_has_not_stalled(self, world_of, stall_clock, monkeypatch):
        """A busy machine may take long to let its thread run."""
        right = Baton._put_in_place

        def put_late(baton, owner):
            if owner == 1:
                stall_clock.passes(times=3)
            right(baton, owner)

        monkeypatch.setattr(Baton, "_put_in_place", put_late)
        assert world_of(2).run(lambda rank: rank) == [0, 1]

    @pytest.mark.parametrize(
        ("act", "error", "settings"),
        [
            (lambda rank: dist.all_reduce(torch.ones(2 + rank)), ContractViolation, {}),
            (lambda rank: change_in_flight(), InFlightRace, {"timing": "lazy"}),
            (lambda rank: change_in_flight(), DataRace, {"races": True}),
        ],
        ids=["mismatch", "in-flight race", "data race"],
    )
    def test_program_cannot_swallow_a_violation(self, world_of, act, error, settings):
        def program(rank):
            try:
                act(rank)
            except Exception:  # noqa: BLE001  The test is about this.
                dist.barrier()

        self.failing(world_of(2, **settings), program, error)

    def test_cleanup_may_call_collectives(self, world_of):
        def program(rank):
            try:
                if rank == 0:
                    raise KeyError("first")
                dist.barrier()
            finally:
                dist.barrier()

        assert self.failing(world_of(3), program, RankFailed).rank == 0

    def test_a_world_cannot_run_inside_its_own_rank(self, world_of):
        world = world_of(2)
        failure = self.failing(world, lambda rank: world.run(total_of_ranks), RankFailed)
        assert isinstance(failure.error, UsageError)


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": 0},
        {"world_size": 5000},
        {"world_size": 2, "order": "lineer"},
        {"world_size": 2, "schedule": "fair"},
        {"world_size": 2, "schedule": "pct", "depth": 0},
        {"world_size": 2, "timing": "late"},
    ],
    ids=str,
)
def test_bad_argument_message_names_the_expected_value(arguments):
    name = list(arguments)[-1]
    with pytest.raises(UsageError, match=f"expected {name} .*got"):
        World(**arguments)


def test_run_in_a_closed_world_is_refused():
    world = World(1)
    world.close()
    with pytest.raises(UsageError, match="closed"):
        world.run(total_of_ranks)


def test_program_may_create_the_default_group(world_of):
    def program(rank):
        before = dist.is_initialized()
        dist.init_process_group("gloo")
        with pytest.raises(ValueError, match="default process group twice"):
            dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        return before, dist.is_initialized(), x.item()

    world = world_of(2)
    world.run(lambda rank: dist.barrier())
    world.configure(initialized=False)
    assert world.run(program) == world.run(program) == [(False, True, 2.0)] * 2
    world.configure(initialized=True)
    assert world.run(lambda rank: dist.is_initialized()) == [True, True]


def test_failure_to_start_threads_is_an_environment_problem(monkeypatch):
    """Started threads are ended, and torch is left unchanged."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(EnvironmentProblem, match=r"expected to start 4 threads.* after 2 of them"):
        World(4)
    assert not any(thread.is_alive() for thread in started)
    assert not dist.is_initialized()
