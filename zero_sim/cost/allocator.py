"""Allocator of a device's memory, simulated: where blocks lie, and what falls apart.

Source: torch's caching allocator without options (PyTorch, `c10/cuda/CUDACachingAllocator.cpp`:
`round_size`, `get_allocation_size`, `get_free_block`, `should_split`, `try_merge_blocks`). Sizes
are rounded up to 512 bytes; blocks of at most 1 MiB come out of segments of 2 MiB, others out of
segments of 20 MiB, or from 10 MiB on of their own size in steps of 2 MiB; the smallest free block
that is long enough is taken, the first of several, and split where the rest would serve; what is
freed joins its free neighbours. Here there is one stream, memory never runs out, and so no segment
is ever given back.

[Note: fragmentation]
Free memory is what is reserved and not allocated. A tensor needs one piece of it: what is free
beside the largest free block is fragmented, and a device can be out of memory with all of it free
(ZeRO, arXiv 1910.02054, section 6.3).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zero_sim.cost.ledger import BETWEEN, MemoryEvent

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
"""The largest size that comes out of a segment for small ones."""
SMALL_SEGMENT_BYTES = 2 << 20
OWN_SEGMENT_BYTES = 10 << 20
"""The smallest size that gets a segment of its own."""
LARGE_SEGMENT_BYTES = 20 << 20
SEGMENT_STEP_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorState:
    """What an allocator has, in bytes."""

    allocated: int
    """In blocks that are in use, rounded as they are."""
    reserved: int
    """In all segments."""
    largest_free: int
    """Of the longest block that is not in use."""

    @property
    def free(self) -> int:
        """Reserved and not in use."""
        return self.reserved - self.allocated

    @property
    def fragmented(self) -> int:
        """Free beside the largest free block; see [Note: fragmentation]."""
        return self.free - self.largest_free


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of one segment, in use or free."""

    start: int
    bytes: int
    is_small: bool
    is_free: bool = True
    before: _Block | None = None
    behind: _Block | None = None


@dataclass(slots=True, eq=False)
class Allocator:
    """Gives memory to tensors and takes it back."""

    allocated: int = 0
    reserved: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    """Bytes and start of free blocks, sorted, of small segments and of large ones."""
    _blocks: dict[int, _Block] = field(default_factory=dict)
    """By start."""

    @property
    def state(self) -> AllocatorState:
        """What it has now."""
        largest = max((blocks[-1][0] for blocks in self._free.values() if blocks), default=0)
        return AllocatorState(
            allocated=self.allocated, reserved=self.reserved, largest_free=largest
        )

    def take(self, size: int) -> int:
        """Return the start of a block for a tensor.

        Args:
            size: Its bytes, at least 1.
        """
        wanted = _rounded_up(size, MIN_BLOCK_BYTES)
        is_small = wanted <= SMALL_BYTES
        free = self._free[is_small]
        index = bisect_left(free, (wanted, 0))
        if index == len(free):
            self._add_segment(wanted, is_small=is_small)
            index = bisect_left(free, (wanted, 0))
        block = self._blocks[free.pop(index)[1]]
        rest = block.bytes - wanted
        if rest >= MIN_BLOCK_BYTES if is_small else rest > SMALL_BYTES:
            self._split(block, wanted)
        block.is_free = False
        self.allocated += block.bytes
        return block.start

    def give_back(self, start: int) -> None:
        """Free a block, and join it with its free neighbours.

        Args:
            start: What `take` returned.
        """
        block = self._blocks[start]
        self.allocated -= block.bytes
        block.is_free = True
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                free = self._free[other.is_small]
                free.pop(bisect_left(free, (other.bytes, other.start)))
                first, second = (other, block) if other is block.before else (block, other)
                block = self._join(first, second)
        insort(self._free[block.is_small], (block.bytes, block.start))

    def _add_segment(self, wanted: int, *, is_small: bool) -> None:
        size = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        if wanted >= OWN_SEGMENT_BYTES:
            size = _rounded_up(wanted, SEGMENT_STEP_BYTES)
        block = _Block(self.reserved, size, is_small)
        self._blocks[block.start] = block
        insort(self._free[is_small], (block.bytes, block.start))
        self.reserved += size

    def _split(self, block: _Block, wanted: int) -> None:
        rest = _Block(block.start + wanted, block.bytes - wanted, block.is_small, before=block)
        rest.behind, block.behind, block.bytes = block.behind, rest, wanted
        if rest.behind is not None:
            rest.behind.before = rest
        self._blocks[rest.start] = rest
        insort(self._free[rest.is_small], (rest.bytes, rest.start))

    def _join(self, first: _Block, second: _Block) -> _Block:
        first.bytes += second.bytes
        first.behind = second.behind
        if first.behind is not None:
            first.behind.before = first
        del self._blocks[second.start]
        return first


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorMoment:
    """What an allocator had at one moment of a run."""

    what: str
    """Which moment it is: `most allocated`, `most fragmented`, `between steps`."""
    phase: str
    state: AllocatorState


def replay(events: Iterable[MemoryEvent]) -> Sequence[AllocatorMoment]:
    """Give an allocator all births and deaths of a run, and say what it had when.

    Args:
        events: Of one rank, from the first tensor on.

    Returns:
        The moment with most in use, that with most fragmented, the first of several each, and the
        end.
    """
    allocator, places = Allocator(), dict[int, int]()
    phase = BETWEEN
    fullest = worst = (phase, allocator.state)
    for event in events:
        phase = event.phase
        if event.is_birth:
            places[event.serial] = allocator.take(event.bytes)
        else:
            allocator.give_back(places.pop(event.serial))
        state = allocator.state
        if state.allocated > fullest[1].allocated:
            fullest = phase, state
        if state.fragmented > worst[1].fragmented:
            worst = phase, state
    chosen: Mapping[str, tuple[str, AllocatorState]] = {
        "most allocated": fullest,
        "most fragmented": worst,
        "between steps": (BETWEEN, allocator.state),
    }
    return [
        AllocatorMoment(what=what, phase=at, state=state) for what, (at, state) in chosen.items()
    ]


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step
