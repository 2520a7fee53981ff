"""Layouts that are drawn and planned, each seen to give every element one owner."""

from __future__ import annotations

import time

import hypothesis

from zero_sim.errors import LayoutError
from zero_sim.fuzz.layouts import Layout, layouts


def layouts_rate(count: int) -> float:
    """Layouts a second that are drawn, planned and seen to give every element one owner.

    Args:
        count: How many.
    """
    seen = 0

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=count,
        phases=(hypothesis.Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(layouts())
    def cover_all(layout: Layout) -> None:
        nonlocal seen
        seen += 1
        require_cover(layout)

    started = time.process_time()
    cover_all()
    return seen / (time.process_time() - started)


def require_cover(layout: Layout) -> None:
    """Refuse a drawn layout in which some element of a param has no owner, or two.

    Raises:
        LayoutError: Names the first such element.
    """
    _, policy, buffers = layout
    for buffer in buffers:
        for bucket in buffer.buckets:
            reached = bucket.span.start
            for shard in range(policy.shard_count):
                for fragment in bucket.fragments(shard):
                    if fragment.in_buffer.start != reached:
                        raise LayoutError(
                            f"Expected element {reached} to be owned once, but bucket "
                            f"{bucket.index} of buffer {buffer.key} goes on with {fragment}."
                        )
                    reached = fragment.in_buffer.stop
            if reached != bucket.padding.start:
                raise LayoutError(
                    f"Expected an owner of every element, but nobody has those of "
                    f"[{reached}, {bucket.padding.start}) of buffer {buffer.key}."
                )
