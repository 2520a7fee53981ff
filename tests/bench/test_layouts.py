"""What the benchmark counts is done: each drawn layout is looked at."""

from dataclasses import replace

import pytest

from zero_sim.bench.cases import require_cover
from zero_sim.errors import LayoutError
from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers

SPECS = [ParamSpec(name=name, shape=(3,), dtype="fp32") for name in ("a", "b")]
POLICY = LayoutPolicy(shard_count=2)
(BUFFER,) = plan_buffers(SPECS, policy=POLICY)


def without(param):
    """The layout with one of its params left out."""
    (bucket,) = BUFFER.buckets
    kept = tuple(placed for placed in bucket.params if placed.name != param)
    return SPECS, POLICY, (replace(BUFFER, buckets=(replace(bucket, params=kept),)),)


def test_a_layout_that_covers_all_is_taken():
    require_cover((SPECS, POLICY, (BUFFER,)))


@pytest.mark.parametrize("param", ["a", "b"])
def test_elements_without_an_owner_are_refused(param):
    with pytest.raises(LayoutError, match="owne"):
        require_cover(without(param))
