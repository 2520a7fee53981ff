"""The race detector, compared with intersections of enumerated sets of bytes."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import event, given
from hypothesis import strategies as st

from zero_sim.sim import DataRace, World
from zero_sim.sim.shared_memory import shared_elems

BUFFER_ELEMS = 24


@pytest.fixture(scope="module")
def world():
    with World(1, races=True, strict=False) as opened:
        yield opened


def byte_sets(tensor):
    """Return the bytes of each element, in row-major order, by plain arithmetic."""
    indices = [()]
    for size in tensor.shape:
        indices = [(*index, i) for index in indices for i in range(size)]
    places = [
        tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in indices
    ]
    width = tensor.element_size()
    return [set(range(place * width, (place + 1) * width)) for place in places]


def expected_range(lent, other):
    """Return the expected `shared_elems` of two views of one storage."""
    theirs = set().union(*byte_sets(other)) if other.numel() else set()
    hit = [i for i, mine in enumerate(byte_sets(lent)) if mine & theirs]
    return (hit[0], hit[-1] + 1) if hit else None


@st.composite
def views(draw, *, overlapping=True):
    """Draw a view of the flat buffer: shape, strides, offset and optionally element width."""
    count = draw(st.integers(0, 3))
    sizes = st.sampled_from((1, 2, 3, 4, 4, 3, 2, 0))
    shape = draw(st.lists(sizes, min_size=count, max_size=count))
    if overlapping:
        strides = draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    else:
        # Each dimension steps over all previous ones, so no element occurs twice.
        strides, reach = [], 1
        for size in shape:
            strides.append(reach + draw(st.integers(0, 2)))
            reach = strides[-1] * max(size, 1)
        order = draw(st.permutations(range(count)))
        shape, strides = [shape[i] for i in order], [strides[i] for i in order]
    last = sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    if last >= BUFFER_ELEMS:
        shape, strides, last = [draw(st.integers(1, 6))], [draw(st.integers(1, 4))], 20
    return shape, strides, draw(st.integers(0, BUFFER_ELEMS - 1 - last))


def cut(buffer, view):
    return buffer.as_strided(*view)


@given(lent=views(), other=views(), as_bytes=st.booleans())
def test_shared_elements_match_byte_sets(lent, other, as_bytes):
    buffer = torch.zeros(BUFFER_ELEMS)
    mine = cut(buffer, lent)
    theirs = cut(buffer.view(torch.int16) if as_bytes else buffer, other)
    got = shared_elems(mine, theirs)
    event("shared" if got else "apart")
    assert got == expected_range(mine, theirs)


ISSUE = {
    "input": lambda v: dist.broadcast(v, src=0, async_op=True),
    "output": lambda v: dist.all_gather([v], torch.zeros(v.shape), async_op=True),
    "both": lambda v: dist.all_reduce(v, async_op=True),
}
OPERATIONS = {
    "read": lambda v: v.sum(),
    "read by name": lambda v: torch.add(torch.ones(()), other=v),
    "read in a list": lambda v: torch.stack([v, v]),
    "view": lambda v: v.unsqueeze(0).detach(),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(torch.ones(v.shape)),
    "out": lambda v: torch.mul(torch.ones(v.shape), 2, out=v),
    "foreach": lambda v: torch._foreach_add_([v], 1.0),
}


@given(
    lent=st.lists(
        st.tuples(
            views(overlapping=False),
            st.sampled_from(sorted(ISSUE)),
            st.sampled_from([False, False, True]),
        ),
        min_size=1,
        max_size=4,
    ),
    other=views(overlapping=False),
    name=st.sampled_from(sorted(OPERATIONS)),
)
def test_races_match_byte_sets(world, lent, other, name):
    kind = "none" if name == "view" else "read" if name.startswith("read") else "write"

    def program(rank):
        buffer = torch.zeros(BUFFER_ELEMS)
        works = []
        for view, role, _ in lent:
            works.append(ISSUE[role](cut(buffer, view)))
        for (_, _, waited), work in zip(lent, works, strict=True):
            if waited:
                work.wait()
        OPERATIONS[name](cut(buffer, other))

    buffer = torch.zeros(BUFFER_ELEMS)
    theirs = cut(buffer, other)
    races = any(
        expected_range(cut(buffer, view), theirs)
        for view, role, waited in lent
        if not waited and (kind == "write" or (kind == "read" and role != "input"))
    )
    event(f"{kind}: {'race' if races else 'clean'}")
    if not races:
        world.run(program)
        return
    with pytest.raises(DataRace) as caught:
        world.run(program)
    race = caught.value
    assert race.access.writes == (kind == "write")
    # The collective's tensor is in its own run's buffer, at the same storage offset.
    assert (race.access.start, race.access.stop) == expected_range(race.buffer.tensor, theirs)
