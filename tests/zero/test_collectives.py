"""Collectives of ZeRO over explicit groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.zero.collectives import (
    all_gather,
    all_gather_uneven,
    all_reduce_sum,
    broadcast_from_first,
    reduce_scatter_sum,
    reduce_scatter_uneven_sum,
    size_and_rank,
)


class TestSizeAndRank:
    """Size and rank inside an explicit group."""

    def test_rank_is_relative_to_the_group(self, run_ranks):
        """Ranks 2 and 3 of a world are 0 and 1 of their own group."""

        def program(rank):
            group = dist.new_group([2, 3])
            return size_and_rank(group) if rank >= 2 else None

        results, _ = run_ranks(4, program)
        assert results == [None, None, (2, 0), (2, 1)]

    def test_refuses_none_as_group(self):
        """torch reads None as all ranks; here it is a mistake."""
        with pytest.raises(UsageError, match=r"explicit process group.*group\.WORLD"):
            size_and_rank(None)

    def test_refuses_a_group_without_this_rank(self, run_ranks):

        def program(rank):
            group = dist.new_group([1])
            if rank == 0:
                with pytest.raises(UsageError, match="without global rank 0"):
                    size_and_rank(group)

        run_ranks(2, program)


class TestInPlace:
    """Shards exchanged in the flat memory itself."""

    def test_reduce_scatter_into_own_shard(self, run_ranks):

        def program(rank):
            flat = torch.arange(6.0) * 10**rank
            own = flat.narrow(0, 2 * rank, 2)
            reduce_scatter_sum(own, flat, group=dist.group.WORLD)
            return own.tolist()

        results, _ = run_ranks(3, program)
        assert results == [[0, 111], [222, 333], [444, 555]]

    def test_all_gather_from_own_shard(self, run_ranks):

        def program(rank):
            flat = torch.full((6,), float("nan"))
            own = flat.narrow(0, 2 * rank, 2).fill_(float(rank))
            all_gather(flat, own, group=dist.group.WORLD)
            return flat.tolist()

        results, _ = run_ranks(3, program)
        assert results == [[0, 0, 1, 1, 2, 2]] * 3


class TestUneven:
    """Shards of different lengths, some empty."""

    SIZES = (2, 1, 0)

    def test_reduce_scatter_into_own_shard(self, run_ranks):

        def program(rank):
            flat = torch.arange(1.0, 4.0) * 10**rank
            own = flat.split(self.SIZES)[rank]
            reduce_scatter_uneven_sum(own, flat, sizes=self.SIZES, group=dist.group.WORLD)
            return own.tolist()

        results, _ = run_ranks(3, program)
        assert results == [[111, 222], [333], []]

    def test_all_gather_from_own_shard(self, run_ranks):

        def program(rank):
            flat = torch.full((3,), float("nan"))
            own = flat.split(self.SIZES)[rank].fill_(float(rank))
            all_gather_uneven(flat, own, sizes=self.SIZES, group=dist.group.WORLD)
            return flat.tolist()

        results, _ = run_ranks(3, program)
        assert results == [[0, 0, 1]] * 3

    def test_on_real_processes_of_one_rank(self, lone_group):
        """gloo accepts both calls."""
        flat = torch.tensor([1.0, 2.0])
        reduce_scatter_uneven_sum(flat, flat, sizes=[2], group=lone_group)
        all_gather_uneven(flat, flat, sizes=[2], group=lone_group)
        assert flat.tolist() == [1, 2]


class TestAsynchronous:
    """Collectives with async_op, which return a handle at once."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda flat, own, **how: all_reduce_sum(flat, **how),
            lambda flat, own, **how: reduce_scatter_sum(own, flat, **how),
            lambda flat, own, **how: reduce_scatter_uneven_sum(own, flat, sizes=[2, 2], **how),
            lambda flat, own, **how: all_gather(flat, own, **how),
            lambda flat, own, **how: all_gather_uneven(flat, own, sizes=[2, 2], **how),
        ],
    )
    def test_wait_gives_the_blocking_result(self, run_ranks, call):
        """The values are equal, and a blocking call returns None."""

        def program(rank):
            results = []
            for async_op in (False, True):
                flat = torch.arange(4.0) + rank
                own = flat.split(2)[rank]
                work = call(flat, own, group=dist.group.WORLD, async_op=async_op)
                assert (work is not None) == async_op
                if work is not None:
                    work.wait()
                results.append((flat.tolist(), own.tolist()))
            return results

        for first, second in run_ranks(2, program)[0]:
            assert first == second


class TestBroadcast:
    """broadcast_from_first copies rank 0's tensors to all ranks."""

    def test_copies_any_shape_stride_and_dtype(self, run_ranks):
        """Transposed, scalar, empty, integer and bool tensors arrive unchanged."""

        def program(rank):
            tensors = [
                torch.full((2, 3), float(rank)).t(),
                torch.arange(6.0).reshape(2, 3).t() * (rank == 0),
                torch.tensor(rank + 5),
                torch.zeros(0),
                torch.tensor([rank == 0]),
            ]
            broadcast_from_first(tensors, group=dist.group.WORLD)
            return [tensor.tolist() for tensor in tensors]

        results, _ = run_ranks(3, program)
        assert (
            results
            == [
                [[[0, 0]] * 3, [[0, 3], [1, 4], [2, 5]], 5, [], [True]],
            ]
            * 3
        )

    def test_makes_one_collective_per_dtype(self, run_ranks):
        """Five fp32 tensors and one of integers make two broadcasts."""

        def program(rank):
            tensors = [torch.zeros(3) for _ in range(5)] + [torch.tensor(rank)]
            broadcast_from_first(tensors, group=dist.group.WORLD)

        _, log = run_ranks(2, program)
        assert [(r.kind, r.elems) for r in log.of_rank(0)] == [("broadcast", 15), ("broadcast", 1)]

    def test_large_tensor_has_its_own_broadcast(self, run_ranks):
        """A tensor of more than a megabyte gets a broadcast of its own."""
        large = (1 << 18) + 1

        def program(rank):
            group = dist.new_group([1, 2])
            tensors = [torch.full((large,), float(rank)), torch.full((3,), float(rank))]
            if rank:
                broadcast_from_first(tensors, group=group)
            return [tensor.unique().tolist() for tensor in tensors]

        results, log = run_ranks(3, program)
        assert results == [[[0], [0]], [[1], [1]], [[1], [1]]]
        assert [r.elems for r in log.of_rank(1) if r.kind == "broadcast"] == [large, 3]

    def test_source_is_the_first_rank_of_the_group(self, run_ranks):

        def program(rank):
            group = dist.new_group([1, 2])
            value = torch.tensor([float(rank)])
            if rank:
                broadcast_from_first([value], group=group)
            return value.item()

        results, _ = run_ranks(3, program)
        assert results == [0, 1, 1]
