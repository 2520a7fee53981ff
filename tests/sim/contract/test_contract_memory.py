"""Memory that NCCL misreads because it moves bytes: formats, overlaps and swapped buffers."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import ContractViolation
from zero_sim.sim.callsite import shown_file


def summing(make):
    """Program that sums the tensor that `make(rank)` returns."""
    return lambda rank: dist.all_reduce(make(rank))


def image(memory_format=torch.contiguous_format):
    return torch.ones(2, 3, 4, 5).contiguous(memory_format=memory_format)


class TestShapes:
    """Equal element counts are not enough if rows have different lengths."""

    @pytest.mark.parametrize(
        "shapes",
        [((2, 3), (3, 2)), ((2, 1, 3), (3, 2)), ((4, 3, 2), (2, 3, 4)), ((4, 6), (2, 3, 4))],
    )
    def test_rows_of_another_length_are_refused(self, world_of, violation_of, shapes):
        program = summing(lambda rank: torch.ones(shapes[rank]))
        text = str(violation_of(world_of(2), program, "shape"))
        assert f"shape {shapes[0]}" in text
        assert f"shape {shapes[1]}" in text

    @pytest.mark.parametrize(
        "shapes", [((6,), (2, 3)), ((1, 6), (2, 3)), ((2, 1, 3), (2, 3)), ((0, 3), (3, 0))]
    )
    def test_flat_memory_and_dimensions_of_one_are_accepted(self, world_of, shapes):
        world_of(2).run(summing(lambda rank: torch.ones(shapes[rank])))

    @pytest.mark.parametrize(
        "gather",
        [
            lambda mine: dist.all_gather_single(mine, torch.ones(3)),
            lambda mine: dist.all_gather([mine.clone(), mine.clone()], mine),
        ],
        ids=["outputs", "entries"],
    )
    def test_shapes_of_gathered_tensors_are_compared(self, world_of, violation_of, gather):
        def program(rank):
            gather(torch.ones((2, 3) if rank else (3, 2)))

        violation_of(world_of(2), program, "shape")

    def test_unequal_shapes_are_accepted_when_not_strict(self, world_of):
        shapes = (2, 3), (3, 2)
        world_of(2, strict=False).run(summing(lambda rank: torch.ones(shapes[rank])))


class TestFormats:
    """Memory formats: equal on all ranks, and without gaps."""

    def test_channels_last_against_contiguous_is_refused(self, world_of, violation_of):
        formats = torch.contiguous_format, torch.channels_last
        program = summing(lambda rank: image(formats[rank]))
        assert "memory format mismatch" in str(violation_of(world_of(2), program, "memory-format"))

    def test_channels_last_on_all_ranks_is_accepted(self, world_of):
        world_of(2).run(summing(lambda rank: image(torch.channels_last)))

    def test_channels_last_cannot_be_split_by_rank(self, world_of, violation_of):
        def program(rank):
            out = torch.empty(4, 3, 4, 5)
            dist.all_gather_single(out, image(torch.channels_last))

        assert "channels-last" in str(violation_of(world_of(2), program, "non-contiguous"))

    @pytest.mark.parametrize(
        "make",
        [lambda: torch.ones(2, 3).t(), lambda: torch.ones(6)[::2], lambda: torch.ones(1).expand(3)],
    )
    def test_non_contiguous_strides_are_refused(self, world_of, violation_of, make):
        text = str(violation_of(world_of(2), summing(lambda rank: make()), "non-contiguous"))
        assert "strides" in text
        assert "test_contract_memory.py:" in text

    def test_non_contiguous_strides_are_accepted_when_not_strict(self, world_of):
        world_of(2, strict=False).run(summing(lambda rank: torch.ones(2, 3).t()))


def gather_flat(output, value):
    dist.all_gather_single(output, value)


OVERLAPPING = {
    "gather at another rank's place": lambda rank: gather_flat(
        *(lambda flat: (flat, flat[2 - 2 * rank :][:2]))(torch.ones(4))
    ),
    "gather between two places": lambda rank: gather_flat(
        *(lambda flat: (flat, flat[1:3]))(torch.ones(4))
    ),
    "scatter at another rank's place": lambda rank: dist.reduce_scatter_single(
        *(lambda flat: (flat[2 - 2 * rank :][:2], flat))(torch.ones(4))
    ),
    "entries on each other": lambda rank: dist.all_gather(
        list(torch.ones(3).as_strided((2, 2), (1, 1))), torch.ones(2)
    ),
    "input in another rank's entry": lambda rank: dist.all_gather(
        *(lambda entries: (entries, entries[1 - rank]))(list(torch.ones(4).split(2)))
    ),
    "exchange in place": lambda rank: dist.all_to_all_single(
        *(lambda flat: (flat, flat))(torch.ones(4))
    ),
    "exchange of lists in place": lambda rank: dist.all_to_all(
        *(lambda entries: (entries, entries))(list(torch.ones(4).split(2)))
    ),
    "scatter into an entry of another rank": lambda rank: dist.scatter(
        *(lambda entries: (entries[1], entries if rank == 0 else None))(
            list(torch.ones(4).split(2))
        )
    ),
    "gather into entries on each other": lambda rank: dist.gather(
        torch.ones(2), list(torch.ones(3).as_strided((2, 2), (1, 1))) if rank == 0 else None
    ),
}
"""Programs of two ranks in which one call's buffers overlap."""


class TestAliasing:
    """Input and output may share memory only at rank x count."""

    def test_in_place_at_rank_times_count_is_accepted(self, world_of):
        def program(rank):
            flat = torch.full((6,), float(rank))
            dist.all_gather_single(flat, flat[2 * rank : 2 * rank + 2])
            dist.reduce_scatter_single(flat[2 * rank : 2 * rank + 2], flat)
            entries = list(torch.full((6,), float(rank)).split(2))
            dist.all_gather(entries, entries[rank])
            return flat[2 * rank].item(), [entry[0].item() for entry in entries]

        expected = [(3.0 * rank, [0.0, 1.0, 2.0]) for rank in range(3)]
        assert world_of(3).run(program) == expected

    def test_neighbours_in_one_storage_are_accepted(self, world_of):
        def program(rank):
            flat = torch.ones(6)
            dist.all_gather_single(flat[:4], flat[4:])
            dist.reduce_scatter_single(flat[:2], flat[2:])

        world_of(2).run(program)

    @pytest.mark.parametrize("name", OVERLAPPING)
    def test_any_other_overlap_is_refused(self, world_of, violation_of, name):
        text = str(violation_of(world_of(2), OVERLAPPING[name], "aliasing"))
        assert "bytes with" in text
        assert "test_contract_memory.py:" in text

    def test_overlapping_coalesced_entries_are_refused(self, world_of, violation_of):
        def program(rank):
            flat = torch.ones(4)
            with dist._coalescing_manager():
                dist.all_reduce(flat[:3])
                dist.all_reduce(flat[2:])

        violation_of(world_of(2), program, "aliasing")

    def test_violation_is_accepted_when_not_strict(self, world_of):
        def program(rank):
            flat = torch.arange(4.0)
            dist.all_gather_single(flat, flat[1:3])
            return flat.tolist()

        assert world_of(2, strict=False).run(program) == [[1.0, 2.0, 1.0, 2.0]] * 2


def in_order(*orders, call=dist.all_reduce, parts=3):
    """Program in which each rank passes the parts of its buffer in its own order."""

    def program(rank):
        pieces = torch.ones(4 * parts).split(4)
        for index in orders[rank]:
            call(pieces[index])

    return program


class TestSwaps:
    """Two ranks pass the same two parts of a buffer in opposite order."""

    def test_swap_names_both_collectives_of_both_ranks(self, world_of, violation_of):
        violation = violation_of(world_of(2), in_order((0, 1), (1, 0)), "swapped-buffers")
        text = str(violation)
        for rank, offsets in ((0, (0, 4)), (1, (4, 0))):
            for sequence, offset in enumerate(offsets):
                assert (
                    f"rank {rank}: offset {offset} in #{sequence} at {shown_file(__file__)}:"
                    in text
                )

    def test_swap_is_detected_in_every_arrival_order(self, world_of, violation_of):
        orders = (0, 1, 2), (0, 1, 2), (2, 1, 0)
        for seed in range(4):
            world = world_of(3, schedule="random", seed=seed)
            violation = violation_of(world, in_order(*orders), "swapped-buffers")
            assert 2 in (violation.rank, violation.other_rank)

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: dist.broadcast(x, src=0),
            lambda x: dist.reduce(x, dst=0),
            lambda x: dist.reduce_scatter_single(torch.empty(2), x),
            lambda x: dist.all_gather_single(x, torch.ones(2)),
        ],
    )
    def test_swap_is_detected_in_every_symmetric_collective(self, world_of, violation_of, call):
        program = in_order((0, 1, 2), (0, 2, 1), call=call)
        violation_of(world_of(2), program, "swapped-buffers")

    def test_swap_is_detected_within_a_coalesced_call(self, world_of, violation_of):
        def program(rank):
            parts = torch.ones(8).split(4)
            with dist._coalescing_manager():
                for part in reversed(parts) if rank else parts:
                    dist.all_reduce(part)

        violation_of(world_of(2), program, "swapped-buffers")

    def test_different_offsets_without_a_swap_are_accepted(self, world_of):
        world_of(2).run(in_order((0, 1, 0, 1), (0, 2, 0, 2)))

    def test_different_buffers_of_equal_size_are_accepted(self, world_of):
        def program(rank):
            for offset in (0, 4) if rank else (4, 0):
                flat = torch.ones(8)
                kept.append(flat)
                dist.all_reduce(flat[offset : offset + 4])

        kept = []
        world_of(2).run(program)

    def test_in_place_shards_at_a_ranks_own_offset_are_accepted(self, world_of):
        def program(rank):
            flat = torch.ones(8)
            own = [flat[4 * half + 2 * rank :][:2] for half in (0, 1)]
            for half in (0, 1):
                dist.reduce_scatter_single(own[half], flat[4 * half :][:4])
                dist.all_gather_single(flat[4 * half :][:4], own[half])

        world_of(2).run(program)

    def test_violation_is_accepted_when_not_strict(self, world_of):
        world_of(2, strict=False).run(in_order((0, 1), (1, 0)))

    def test_swap_detector_memory_is_bounded(self, world_of):
        def program(rank):
            flat = torch.ones(1000)
            for offset in range(200):
                dist.all_reduce(flat[2 * offset + (500 * rank) :][:1])

        world = world_of(2)
        world.run(program)
        assert len(world._groups["0"].swaps._sightings) <= 64


def test_memory_violation_names_only_its_own_rank(world_of):
    def program(rank):
        dist.all_reduce(torch.ones(4)[::2] if rank else torch.ones(2))

    with pytest.raises(ContractViolation) as caught:
        world_of(2).run(program)
    assert (caught.value.rank, caught.value.other_rank) == (1, 1)
