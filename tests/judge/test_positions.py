"""Engines that omit positions of gradients, in orders that depend on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_sim.scenario.spec import SystemSpec, WorldSpec
from zero_sim.targets.own import ZeroSimEngine

RING = WorldSpec(size=3, order="ring")


class Partial:
    """zero_sim's own engine with some methods removed or replaced."""

    name = "partial"
    capabilities = None

    def __init__(self, *, without=(), **instead):
        self._without, self._instead = without, instead

    def build(self, module, *, scenario, group):
        return _Less(ZeroSimEngine(module, scenario=scenario, group=group), self)

    def answer(self, engine, name):
        if name in self._without:
            raise AttributeError(name)
        if name in self._instead:
            return lambda: self._instead[name](engine)
        return getattr(engine, name)


class _Less:
    def __init__(self, engine, target):
        self._engine, self._target, self.module = engine, target, engine.module

    def __getattr__(self, name):
        return self._target.answer(self._engine, name)


def hidden(field):
    """Return the engine's parts with one field of each place set to None."""
    return lambda engine: [
        replace(part, place=replace(part.place, **{field: None})) for part in engine.parts()
    ]


def refused(result):
    return (result.verdict, result.findings) == ("error", ())


def test_engine_without_parts_is_refused_with_the_order(judged):
    result = judged(Partial(without=("parts",)), world=RING)
    assert refused(result)
    assert "expected target 'partial' to report the positions of its gradients" in result.error
    assert "world.order = 'ring'" in result.error
    assert "got an engine without `parts`. Implement" in result.error


@pytest.mark.parametrize("field", ["call_elems", "call_offset", "shard"])
def test_missing_field_of_a_place_is_named(judged, field):
    result = judged(Partial(parts=hidden(field)), world=RING)
    assert refused(result)
    assert f"got {field} = None for param '" in result.error


@pytest.mark.parametrize("field", ["flat_start", "shard_start", "shard_stop"])
def test_replicas_need_positions_in_the_shard(judged, field):
    world, system = WorldSpec(size=4, order="gloo"), SystemSpec(redundancy=2)
    result = judged(Partial(parts=hidden(field)), world=world, system=system)
    assert refused(result)
    assert f"got {field} = None for param '" in result.error


@pytest.mark.parametrize(
    "world",
    [replace(RING, order="linear"), replace(RING, order_known=False)],
    ids=["the order needs no places", "the order is not told"],
)
@pytest.mark.parametrize(
    "target",
    [Partial(without=("parts",)), Partial(parts=hidden("call_offset"))],
    ids=["no parts", "no place in a call"],
)
def test_positions_are_not_required_if_nothing_depends_on_them(judged, world, target):
    result = judged(target, world=world)
    assert result.error == ""
    # With neither parts nor an order, the gradient of a step is unknown.
    guards = [found.check for found in result.findings]
    assert guards in ([], ["guard.not-followed"])


def test_parts_that_omit_a_param_are_a_finding(judged):
    less = Partial(parts=lambda engine: list(engine.parts())[1:])
    result = judged(less, world=RING)
    assert result.findings[0].check == "invariant.ownership"


@pytest.mark.parametrize("order", ["linear", "ring"])
@pytest.mark.parametrize("params", [None, ["up"]], ids=["nothing", "a list"])
def test_params_that_are_not_a_mapping_are_refused(judged, order, params):
    target = Partial(params=lambda engine: params)
    result = judged(target, world=replace(RING, order=order))
    assert refused(result)
    assert "expected `params` of _Less to return a mapping of names to tensors" in result.error
