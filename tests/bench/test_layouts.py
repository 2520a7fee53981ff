"""Layout benchmark: every drawn layout is checked."""

from dataclasses import replace

import pytest

from zero_sim.bench.cases import require_cover
from zero_sim.errors import LayoutError
from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers

SPECS = [ParamSpec(name=name, shape=(3,), dtype="fp32") for name in ("a", "b")]
POLICY = LayoutPolicy(shard_count=2)
(BUFFER,) = plan_buffers(SPECS, policy=POLICY)


def without(param):
    """Return the layout without one of its params."""
    (bucket,) = BUFFER.buckets
    kept = tuple(placed for placed in bucket.params if placed.name != param)
    return SPECS, POLICY, (replace(BUFFER, buckets=(replace(bucket, params=kept),)),)


def test_complete_layout_is_accepted():
    require_cover((SPECS, POLICY, (BUFFER,)))


@pytest.mark.parametrize("param", ["a", "b"])
def test_elements_without_an_owner_are_refused(param):
    with pytest.raises(LayoutError, match="owne"):
        require_cover(without(param))
