"""Order of calls and waits, and use of groups, works and ended programs."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim.sim import CollectiveRecord, Deadlock
from zero_sim.sim.contract.inversions import find_inversion


def two_groups():
    """Create two groups of all ranks, so that a collective fits either of them."""
    ranks = list(range(dist.get_world_size()))
    return dist.new_group(ranks), dist.new_group(ranks)


def sum_async(groups):
    """Start one asynchronous sum on each group, then wait for all."""
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()


class TestInversions:
    """Ranks that share groups must use them in one order, or they may hang."""

    def test_inversion_names_two_ranks_and_two_calls_of_each(self, world_of, violation_of):
        def program(rank):
            a, b = two_groups()
            sum_async([b, a] if rank == 2 else [a, b])

        violation = violation_of(world_of(3), program, "order-inversion")
        text = str(violation).partition("last calls of")[0]
        assert 2 in (violation.rank, violation.other_rank)
        assert "rank 2: all_reduce #0 of group 2 (ranks 0, 1, 2) at" in text
        assert text.count("test_contract_order.py:") == 4
        assert text.count("before all_reduce #0 of group") == 2

    def test_cycle_of_three_ranks_and_three_groups_is_found(self, world_of, violation_of):
        def program(rank):
            groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
            mine = ([groups[2], groups[0]], [groups[0], groups[1]], [groups[1], groups[2]])
            sum_async(mine[rank])

        text = str(violation_of(world_of(3), program, "order-inversion"))
        assert [text.count(f"\n  rank {rank}: all_reduce") for rank in range(3)] == [1, 1, 1]

    def test_shortest_cycle_among_many_calls_is_shown(self, world_of, violation_of):
        def program(rank):
            a, b = two_groups()
            sum_async([a, b] * 20 + ([b, a] if rank else [a, b]) + [a, b] * 20)

        text = str(violation_of(world_of(2), program, "order-inversion"))
        assert "rank 0: all_reduce #20 of group 1 (ranks 0, 1)" in text
        assert "rank 1: all_reduce #20 of group 2 (ranks 0, 1)" in text

    def test_one_order_on_all_ranks_is_accepted(self, world_of):
        def program(rank):
            a, b = two_groups()
            sum_async([a, b, None, b, a])

        world_of(3).run(program)

    def test_groups_that_share_no_two_ranks_may_differ_in_order(self, world_of):
        def program(rank):
            rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
            columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
            alone = [dist.new_group([member]) for member in range(4)]
            # Row 0 and row 1 may differ, as long as the columns come after both.
            order = [alone[rank], rows[rank // 2]]
            sum_async([*(order if rank < 2 else order[::-1]), columns[rank % 2]])

        world_of(4).run(program)

    def test_sends_and_receives_do_not_count(self, world_of):
        def program(rank):
            a, b = two_groups()
            for group in (a, b) if rank else (b, a):
                works = [
                    dist.isend(torch.ones(1), 1 - rank, group=group),
                    dist.irecv(torch.empty(1), 1 - rank, group=group),
                ]
                pending.append(works)
            for works in pending:
                for work in works:
                    work.wait()

        pending = []
        world_of(2).run(program)

    def test_inversion_is_accepted_when_not_strict(self, world_of):
        def program(rank):
            a, b = two_groups()
            sum_async([b, a] if rank else [a, b])

        world_of(2, strict=False).run(program)

    def test_finding_inversions_takes_linear_time(self, world_of):
        def call(rank, group, sequence):
            return CollectiveRecord(
                rank, "barrier", group, (0, 1), sequence, "none", 0, 0, "", True, "program.py", 1
            )

        def seconds(count):
            records = [
                call(rank, group, i) for i in range(count) for rank in (0, 1) for group in "ab"
            ]
            records += [call(rank, group, count) for rank in (0, 1) for group in ("ab", "ba")[rank]]
            times = []
            for _ in range(3):
                started = time.thread_time()
                assert len(find_inversion(records)) == 2
                times.append(time.thread_time() - started)
            return min(times)

        assert seconds(8000) < 16 * 6 * seconds(500)


class TestDeadlocks:
    """A hang reports the cycle of waiting ranks and the last calls of each."""

    def test_blocking_calls_on_two_groups_are_reported_as_a_cycle(self, world_of):
        def program(rank):
            a, b = two_groups()
            for group in (b, a) if rank else (a, b):
                dist.all_reduce(torch.ones(1), group=group)

        with pytest.raises(Deadlock) as caught:
            world_of(2).run(program)
        first, second = caught.value.cycle[1:]
        assert "rank 0 waits in all_reduce #0 of group 1" in first
        assert first.endswith("for rank 1")
        assert "rank 1 waits in all_reduce #0 of group 2" in second
        assert second.endswith("for rank 0")
        assert all(line in str(caught.value) for line in caught.value.cycle)

    def test_missing_rank_is_not_reported_as_a_cycle(self, world_of):
        def program(rank):
            dist.barrier()
            if rank < 2:
                dist.all_reduce(torch.ones(1))

        with pytest.raises(Deadlock) as caught:
            world_of(3).run(program)
        assert caught.value.cycle == ()
        assert str(caught.value).count("after barrier #0 of group world") == 2

    def test_inversion_before_a_deadlock_is_named(self, world_of):
        def program(rank):
            a, b = two_groups()
            sum_async([b, a] if rank else [a, b])
            if rank:
                dist.barrier()

        with pytest.raises(Deadlock) as caught:
            world_of(2).run(program)
        assert "in different order" in caught.value.cycle[0]

    @pytest.mark.parametrize("size", [64, 1024])
    def test_deadlock_of_many_ranks_is_explained_quickly(self, world_of, size):
        seconds = 1.0 if size == 64 else 5.0  # At least ten times the figure of an idle machine.
        called = []

        def program(rank):
            dist.barrier()
            if rank != 40:
                x = torch.ones(1)
                called.append(time.process_time())
                dist.all_reduce(x)

        with pytest.raises(Deadlock) as caught:
            world_of(size).run(program)
        assert time.process_time() - called[-1] < seconds
        assert len(caught.value.statuses) == size
        assert len(str(caught.value).splitlines()) == 7


class TestWaits:
    """Asynchronous calls must be waited for before the program returns."""

    def test_every_unwaited_call_is_named(self, world_of, violation_of):
        def program(rank):
            dist.all_reduce(torch.ones(1), async_op=True)
            dist.barrier(async_op=True).wait()
            dist.broadcast(torch.ones(2), src=0, async_op=True)

        text = str(violation_of(world_of(2), program, "never-waited"))
        message = text.partition("last calls of")[0]
        assert "rank 0 returned without having waited for 2 asynchronous calls" in message
        assert "all_reduce #0" in message
        assert "broadcast #2" in message
        assert "barrier" not in message
        assert "other ranks did the same: 1" in message

    def test_dropped_work_is_reported_on_its_rank(self, world_of, violation_of):
        def program(rank):
            work = dist.all_reduce(torch.ones(1), async_op=True)
            if rank != 1:
                work.wait()

        violation = violation_of(world_of(3), program, "never-waited")
        assert (violation.rank, violation.other_rank) == (1, 1)

    @pytest.mark.parametrize(
        "settle",
        [
            lambda work: work.wait(),
            lambda work: work.synchronize(),
            lambda work: work.get_future().wait(),
            lambda work: [None for _ in iter(work.is_completed, True)],
        ],
    )
    def test_every_way_of_waiting_is_accepted(self, world_of, settle):
        world_of(2).run(lambda rank: settle(dist.all_reduce(torch.ones(1), async_op=True)) and None)

    def test_polling_that_ends_early_is_not_a_wait(self, world_of, violation_of):
        def program(rank):
            group = dist.new_group([0, 1])
            if rank:
                dist.barrier()
                dist.all_reduce(torch.ones(1), group=group)
            else:
                work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
                assert not work.is_completed()
                dist.barrier()

        violation_of(world_of(2), program, "never-waited")

    def test_unwaited_sends_count_and_a_coalesced_wait_covers_its_parts(
        self, world_of, violation_of
    ):
        def program(rank, wait):
            out, group = torch.empty(1), dist.group.WORLD
            group._start_coalescing(torch.device("cpu"))
            dist.isend(torch.ones(1), 1 - rank)
            dist.irecv(out, 1 - rank)
            work = group._end_coalescing(torch.device("cpu"))
            if wait:
                work.wait()

        world = world_of(2)
        text = str(violation_of(world, lambda rank: program(rank, False), "never-waited"))
        assert "send tag 0" in text
        assert "recv tag 0" in text
        world.run(lambda rank: program(rank, True))

    def test_torchs_own_parallelism_waits_for_its_calls(self, world_of):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        def program(rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
            sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            for layer in sharded:
                fully_shard(layer, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            replicated = nn.parallel.DistributedDataParallel(
                nn.Linear(4, 4), find_unused_parameters=True, static_graph=False
            )
            for _ in range(2):
                for module in (sharded, replicated):
                    module(torch.ones(1, 4)).sum().backward()

        world_of(4).run(program)

    def test_unwaited_call_is_accepted_when_not_strict(self, world_of):
        world_of(2, strict=False).run(
            lambda rank: dist.all_reduce(torch.ones(1), async_op=True) and None
        )


class TestGroups:
    """All ranks must create the same groups in one order, members or not."""

    def test_group_mismatch_names_both_calls(self, world_of, violation_of):
        def program(rank):
            for ranks in ([0, 1], [0, 1, 2]) if rank else ([0, 1, 2], [0, 1]):
                dist.new_group(ranks)

        violation = violation_of(world_of(3), program, "group-order")
        text = str(violation)
        assert "new_group of ranks [0, 1, 2] at" in text
        assert "new_group of ranks [0, 1] at" in text
        assert text.count("test_contract_order.py:") == 2

    def test_non_members_must_agree_on_groups(self, world_of, violation_of):
        def program(rank):
            dist.barrier()
            dist.new_group([0] if rank == 2 else [0, 1])

        violation = violation_of(world_of(3), program, "group-order")
        assert 2 in (violation.rank, violation.other_rank)
        assert "last calls of rank 2:\n  barrier" in str(violation)

    def test_group_order_restarts_with_a_new_world(self, world_of):
        def program(rank):
            dist.new_group([0])
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            group = dist.new_group([1, 2])
            if rank:
                dist.all_reduce(torch.ones(1), group=group)
            dist.barrier()

        world_of(3).run(program)


class TestDestroyed:
    """A destroyed group must not be used."""

    @pytest.mark.parametrize("call", [dist.all_reduce, lambda x: dist.broadcast(x, src=0)])
    def test_use_of_a_destroyed_world_is_refused(self, world_of, violation_of, call):
        def program(rank):
            dist.barrier()
            dist.destroy_process_group()
            call(torch.ones(1))

        text = str(violation_of(world_of(2), program, "use-after-destroy"))
        assert "uses group world, which it destroyed" in text
        assert text.partition("last calls")[0].count("test_contract_order.py:") == 2
        assert "barrier #0" in text

    @pytest.mark.parametrize(
        "call",
        [
            lambda group: dist.all_reduce(torch.ones(1), group=group),
            lambda group: dist.broadcast(torch.ones(1), src=0, group=group),
            lambda group: dist.send(torch.ones(1), dst=0, group=group),
            lambda group: dist.destroy_process_group(group),
        ],
    )
    def test_use_of_a_destroyed_sub_group_is_refused(self, world_of, violation_of, call):
        def program(rank):
            group = dist.new_group([0, 1])
            dist.destroy_process_group(group)
            call(group)

        text = str(violation_of(world_of(2), program, "use-after-destroy"))
        assert "group 1 (ranks 0, 1), which it destroyed" in text
        assert text.count("test_contract_order.py:") == 2

    def test_destroying_the_world_destroys_sub_groups(self, world_of, violation_of):
        def program(rank):
            group = dist.new_group([0, 1])
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            group.allreduce([torch.ones(1)]).wait()

        violation_of(world_of(2), program, "use-after-destroy")

    def test_is_initialized_does_not_count_as_use(self, world_of):
        def program(rank):
            dist.destroy_process_group()
            return dist.is_initialized()

        assert world_of(2).run(program) == [False, False]
