"""Simulated timeouts of barriers and stores, with gloo's messages; uncaught, they are deadlocks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero_sim.sim import Deadlock

SECOND = timedelta(seconds=1)


def test_barrier_times_out_after_its_groups_timeout(world_of):
    def program(rank):
        group = dist.new_group([0, 1], timeout=SECOND)
        if rank == 0:
            with pytest.raises(
                RuntimeError, match=r"barrier #0 .* Timed out waiting 1000ms; not there: 1"
            ):
                dist.barrier(group)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert world_of(2).run(program) == [2.0, 2.0]


def test_shortest_timeout_is_raised_and_closes_other_ranks(world_of):
    def program(rank):
        group = dist.new_group([0, 1, 2])
        if rank == 2:
            return ""
        with pytest.raises(RuntimeError) as error:
            dist.barrier(group, timeout=(2 - rank) * SECOND)
        return str(error.value)

    closed, timed_out, _ = world_of(3).run(program)
    assert timed_out.endswith("Timed out waiting 1000ms; not there: 2")
    assert closed == f"Connection closed by peer: {timed_out}"


def test_rank_late_to_an_abandoned_barrier_gets_an_error(world_of):
    def program(rank):
        group = dist.new_group([0, 1], timeout=SECOND)
        store = c10d._get_default_store()
        if rank:
            store.wait(["given up"])
        words = "^Connection closed by peer: .* Timed out" if rank else "^.waits in barrier"
        with pytest.raises(RuntimeError, match=words):
            dist.barrier(group)
        store.set("given up", "yes")

    world_of(2).run(program)


def test_no_timeout_expires_while_any_rank_can_run(world_of):
    def program(rank):
        group = dist.new_group([0, 1], timeout=timedelta(milliseconds=1))
        others = dist.new_group([1, 2])
        for _ in range(50 if rank else 0):
            dist.all_reduce(torch.ones(1), group=others)
        if rank < 2:
            dist.barrier(group)

    world_of(3).run(program)


def test_uncaught_timeout_is_a_deadlock(world_of):
    def program(rank):
        if rank == 0:
            dist.barrier(dist.group.WORLD, timeout=SECOND)

    with pytest.raises(Deadlock, match=r"rank 0: waits in barrier #0 of group world .*there: 1"):
        world_of(2).run(program)


def test_torchs_default_timeout_never_expires(world_of):
    def program(rank):
        dist.init_process_group("nccl")
        if rank == 0:
            with pytest.raises(RuntimeError):
                dist.barrier()

    with pytest.raises(Deadlock):
        world_of(2).run(program)


@pytest.mark.parametrize(("wait_all_ranks", "who"), [(False, "Rank 1"), (True, "Ranks 1, 2")])
def test_monitored_barrier_names_missing_ranks_on_rank_0(world_of, wait_all_ranks, who):
    def program(rank):
        dist.init_process_group("gloo")
        words = {
            0: f"{who} failed to pass monitoredBarrier in 1000 ms",
            3: "Rank 3 successfully reached monitoredBarrier, but received errors",
        }
        if rank in words:
            with pytest.raises(RuntimeError, match=words[rank]):
                dist.monitored_barrier(timeout=SECOND, wait_all_ranks=wait_all_ranks)

    world_of(4).run(program)


def test_monitored_barrier_with_zero_timeout_fails_on_rank_0(world_of):
    def program(rank):
        dist.init_process_group("gloo")
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
            dist.group.WORLD.monitored_barrier(timedelta(0))

    world_of(1).run(program)


def test_wait_for_a_key_times_out(world_of):
    def program(rank):
        store = c10d._get_default_store()
        if rank == 0:
            with pytest.raises(
                dist.DistStoreError, match=r"wait timeout after 1000ms, keys: .*key"
            ):
                store.wait(["key"], SECOND)
            store.set("key", "value")
        return store.get("key")

    assert world_of(2).run(program) == [b"value", b"value"]
