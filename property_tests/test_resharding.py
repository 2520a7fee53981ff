"""Resharding between drawn layouts: every element is read from its only saved position."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import at_most
from zero_sim.checkpoint.pieces import PieceIndex, assign_writers, find_cover_problems
from zero_sim.fuzz.choices import Shrinking
from zero_sim.fuzz.shapes import bucket_size, param_shapes
from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers


@st.composite
def policies(draw, sizes):
    uneven = draw(st.booleans())
    return LayoutPolicy(
        shard_count=draw(st.integers(1, 8)),
        align_elems=1 if uneven else draw(st.integers(1, 5)),
        bucket_elems=bucket_size(Shrinking(draw), sizes) if draw(st.booleans()) else None,
        param_order=draw(st.sampled_from(["registration", "reverse"])),
        partition="uneven" if uneven else "padded",
    )


@st.composite
def changes(draw):
    """Draw params and two layouts of them."""
    shapes = param_shapes(Shrinking(draw), draw(st.integers(1, 6)))
    specs = [ParamSpec(name=f"p{i}", shape=shape, dtype="fp32") for i, shape in enumerate(shapes)]
    sizes = [spec.numel for spec in specs]
    before, after = (plan_buffers(specs, policy=draw(policies(sizes)))[0] for _ in range(2))
    return specs, before, after


def owned(plan, *, copies=1):
    """Return every rank's owned ranges, as a checkpoint lists them."""
    shards = [
        [(fragment.param, fragment.in_param) for fragment in plan.fragments(shard)]
        for shard in range(plan.policy.shard_count)
    ]
    return shards * copies


@given(change=changes(), copies=st.integers(1, 3))
@settings(max_examples=at_most(1000))
def test_every_element_is_written_once(change, copies):
    specs, before, _ = change
    numels = {spec.name: spec.numel for spec in specs}
    pieces = owned(before, copies=copies)
    chosen = assign_writers(numels, pieces)
    written = {name: [] for name in numels}
    for rank, indices in enumerate(chosen):
        for index in indices:
            name, span = pieces[rank][index]
            written[name].append(span)
    assert find_cover_problems(numels, written) == []
    # Only the first replica writes.
    assert not any(chosen[before.policy.shard_count :])


@given(change=changes())
@settings(max_examples=at_most(1000))
def test_resharded_elements_are_read_back_unchanged(change):
    """Elements hold their own index; after both layouts each is at its position."""
    specs, before, after = change
    stored = {spec.name: [] for spec in specs}
    for shard in owned(before):
        for name, span in shard:
            stored[name].append(span)
    for shard in owned(after):
        for name, wanted in shard:
            got = []
            for part in PieceIndex(stored[name]).find(wanted):
                start = stored[name][part.piece].start + part.in_piece.start
                assert len(got) == part.in_wanted.start
                got.extend(range(start, start + part.in_piece.numel))
            assert got == list(range(wanted.start, wanted.stop))
