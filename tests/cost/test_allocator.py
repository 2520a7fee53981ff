"""The simulated allocator: what it takes, splits, joins and leaves in pieces."""

import pytest

from zero_sim.cost.allocator import Allocator, replay
from zero_sim.cost.ledger import MemoryEvent

KIB, MIB = 2**10, 2**20


def states(*steps):
    """What there is after each step: a size is taken, an index gives back what came there."""
    allocator, taken, found = Allocator(), [], []
    for what, number in steps:
        if what == "take":
            taken.append(allocator.take(number))
        else:
            allocator.give_back(taken[number])
        state = allocator.state
        found.append((state.allocated, state.reserved, state.largest_free))
    return found


def test_sizes_are_rounded_up_to_512_bytes():
    assert [allocated for allocated, _, _ in states(("take", 1), ("take", 513))] == [512, 1536]


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (33 * MIB + 1, 34 * MIB),
    ],
)
def test_segments_are_as_long_as_torch_makes_them(size, segment):
    ((_, reserved, _),) = states(("take", size))
    assert reserved == segment


def test_the_rest_of_a_large_block_is_split_off_only_if_it_is_long_enough():
    # 11 MiB in a segment of 12: the rest of 1 MiB is no block of large ones.
    assert states(("take", 11 * MIB))[0] == (12 * MIB, 12 * MIB, 0)
    assert states(("take", 4 * MIB))[0] == (4 * MIB, 20 * MIB, 16 * MIB)


def test_the_smallest_block_that_is_long_enough_is_taken():
    taken = [("take", size * KIB) for size in (300, 100, 200, 100)]
    *_, (allocated, _, _) = states(*taken, ("free", 0), ("free", 2), ("take", 150 * KIB))
    assert allocated == 350 * KIB
    allocator = Allocator()
    places = [allocator.take(size * KIB) for size in (300, 100, 200, 100)]
    allocator.give_back(places[0])
    allocator.give_back(places[2])
    assert allocator.take(150 * KIB) == places[2]


def test_freed_neighbours_become_one_block_again():
    quarters = [("take", 512 * KIB)] * 4
    freed = states(*quarters, ("free", 0), ("free", 2), ("free", 1), ("free", 3))
    assert [largest for _, _, largest in freed[4:]] == [
        512 * KIB,
        512 * KIB,
        1536 * KIB,
        2048 * KIB,
    ]


def test_what_is_free_beside_the_largest_block_is_fragmented():
    allocator = Allocator()
    places = [allocator.take(512 * KIB) for _ in range(4)]
    allocator.give_back(places[0])
    allocator.give_back(places[2])
    assert allocator.state.free == MIB
    assert allocator.state.fragmented == 512 * KIB
    # A MiB is free and cannot be had: there is no piece of it.
    allocator.take(MIB)
    assert allocator.state.reserved == 4 * MIB


def event(serial, size, *, is_birth=True):
    return MemoryEvent(serial, size, is_birth, "backward")


def test_a_run_is_told_by_its_fullest_its_worst_and_its_last_moment():
    births = [event(serial, 512 * KIB) for serial in range(4)]
    deaths = [event(serial, 512 * KIB, is_birth=False) for serial in (0, 2, 1, 3)]
    full, worst, last = replay([*births, *deaths])
    assert (full.what, full.state.allocated) == ("most allocated", 2 * MIB)
    assert (worst.phase, worst.state.fragmented) == ("backward", 512 * KIB)
    assert (last.state.allocated, last.state.fragmented) == (0, 0)


def test_an_arena_leaves_no_holes_where_gradients_would():
    """A textbook run: gradients that stay are born between activations that go."""
    short, stay = 128 * KIB, 64 * KIB
    apart, inside = [], [event(1000, 6 * stay)]
    for turn in range(6):
        pair = [event(2 * turn, short), event(2 * turn + 1, stay)]
        apart += pair
        inside += pair[:1]
    for turn in range(6):
        apart.append(event(2 * turn, short, is_birth=False))
        inside.append(event(2 * turn, short, is_birth=False))
    assert [replay(run)[-1].state.fragmented for run in (apart, inside)] == [6 * short, 0]
