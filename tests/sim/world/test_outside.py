"""Threads, forked processes, profilers and process exits: each is refused with a clear message."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.sim import ContractViolation, RankFailed, World


@pytest.mark.parametrize("is_handed_a_group", [False, True])
def test_collective_from_a_ranks_own_thread_is_refused(world_of, is_handed_a_group):
    def program(rank):
        group = dist.new_group([0, 1]) if is_handed_a_group else None
        asyncio.run(asyncio.to_thread(dist.all_reduce, torch.ones(1), group=group))

    with pytest.raises(RankFailed, match="is no rank: while a") as failure:
        world_of(2).run(program)
    assert isinstance(failure.value.error, UsageError)


def test_thread_started_by_a_rank_sees_the_ranks_groups(world_of):
    def look():
        return dist.is_initialized(), dist.get_rank(), dist.get_world_size()

    def look_from_another():
        return asyncio.run(asyncio.to_thread(look))

    def program(rank):
        dist.barrier()
        return asyncio.run(asyncio.to_thread(look_from_another))

    assert world_of(2).run(program) == [(True, 0, 2), (True, 1, 2)]
    assert asyncio.run(asyncio.to_thread(dist.is_initialized)) is False


def test_refusal_in_a_thread_ends_the_world_if_unread(world_of):
    def program(rank):
        if rank == 1:
            with ThreadPoolExecutor(1) as executor:
                executor.submit(dist.all_reduce, torch.ones(1))

    with pytest.raises(RankFailed, match=r"rank 1 raised UsageError: This thread, .* is no rank"):
        world_of(2).run(program)
    assert world_of(2).run(lambda rank: rank) == [0, 1]


def test_thread_cannot_create_the_default_group_of_its_rank():
    world = World(2, initialized=False)

    def program(rank):
        asyncio.run(asyncio.to_thread(dist.init_process_group, "gloo"))

    with world, pytest.raises(RankFailed, match="is no rank: while a"):
        world.run(program)


def test_os_exit_ends_the_world_and_not_the_process(world_of):
    def program(rank):
        try:
            if rank:
                os._exit(7)
        except Exception:  # noqa: BLE001  A program may catch all.
            pass
        dist.barrier()

    with pytest.raises(RankFailed, match=r"got os._exit\(7\) at .*test_outside.py") as failure:
        world_of(2).run(program)
    assert failure.value.rank == 1


@pytest.mark.parametrize("what", ["collective", "wait", "returns"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_that_calls_the_world_fails(world_of, what, capfd):
    def program(rank):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        status = None
        if rank == 0 and (child := os.fork()) == 0:
            if what == "collective":
                dist.all_reduce(torch.ones(1))
            if what == "wait":
                work.wait()
            return None
        if rank == 0:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        work.wait()
        return status

    expected = 0 if what == "returns" else 1
    assert world_of(2).run(program) == [expected, None]
    told = "a process that rank 0 forked" in capfd.readouterr().err
    assert told == (what != "returns")


@pytest.mark.parametrize(
    "use",
    [
        lambda group: dist.all_reduce(torch.ones(1), group=group),
        lambda group: dist.broadcast(torch.ones(1), 0, group=group),
        lambda group: dist.isend(torch.ones(1), 0, group=group),
        lambda group: dist.get_rank(group),
    ],
    ids=["all_reduce", "broadcast", "isend", "get_rank"],
)
def test_group_of_another_rank_is_refused(world_of, use):
    kept = {}

    def program(rank):
        kept["group"] = dist.new_group([0, 1])
        dist.barrier()
        use(kept["group"])

    with pytest.raises(ContractViolation, match="module global") as violation:
        world_of(2).run(program)
    assert violation.value.aspect == "foreign-group"
    assert {violation.value.rank, violation.value.other_rank} == {0, 1}


def test_a_group_cannot_be_split(world_of):
    with pytest.raises(RankFailed, match="expected new_group, got split_group of group world"):
        world_of(2).run(lambda rank: dist.group.WORLD.split_group([0, 1]))


def test_one_rank_at_a_time_may_profile(world_of):
    def program(rank):
        with torch.profiler.profile():
            dist.barrier()

    def in_turns(rank):
        for turn in range(2):
            if turn == rank:
                with torch.profiler.profile() as profiler:
                    torch.ones(2).sum()
                seen = len(profiler.events()) > 0
            dist.barrier()
        return seen

    world = world_of(2)
    with pytest.raises(RankFailed, match="one rank at a time to use torch's profiler") as failure:
        world.run(program)
    assert isinstance(failure.value.error, UsageError)
    assert world.run(in_turns) == [True, True]
