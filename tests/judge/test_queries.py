"""Queries of an engine reach all ranks, even if one rank has a finding."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.judge.by_owner import OwnerEngine, judge, target
from zero_sim.judge.exact import ExactComparison
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    ReloadSpec,
    WorldSpec,
)
from zero_sim.targets.own import ZeroSimEngine

FROZEN = ModelSpec(
    name="params", shapes=((2,), (2,)), freeze=(FreezeSpec(param="p1", start=0, stop=1),)
)
ORDERS = pytest.mark.parametrize("known", [True, False], ids=["known order", "unknown order"])


@ORDERS
def test_none_for_a_frozen_param_is_expected(judged, known):
    world = WorldSpec(size=2, order="tree", order_known=known)
    result = judge(judged, target(follows=("model.freeze",)), model=FROZEN, world=world)
    assert (result.verdict, result.findings) == ("pass", ())
    assert "reduced gradients" not in result.unobserved


def test_none_for_a_trained_param_is_inconclusive(judged):
    # The rank owns no other gradient, so the engine may report none at all.
    result = judge(judged, target(hides=[(0, 1, "p1")]))
    assert [finding.check for finding in result.findings] == ["guard.not-followed"]
    assert "reduced gradients" in result.unobserved


@ORDERS
def test_none_beside_reported_gradients_is_a_finding(judged, known):
    world = WorldSpec(size=2, order="tree", order_known=known)
    model = ModelSpec(name="params", shapes=((2,), (2,), (2,)))
    result = judge(judged, target(hides=[(1, 0, "p2")]), model=model, world=world)
    assert result.findings[0].check == "equality.grad"
    assert "the system has no gradient of this param" in result.findings[0].message


@ORDERS
@pytest.mark.parametrize("rank", [0, 1])
def test_finding_on_one_rank_ends_no_queries(judged, known, rank):
    world = WorldSpec(size=2, order="tree", order_known=known)
    result = judge(judged, target(spoils=[(0, rank)]), world=world)
    assert result.verdict == "fail"
    assert {finding.step for finding in result.findings} == {0}
    assert not [each for each in result.findings if each.check.startswith("world.")]


def test_notes_are_requested_on_all_ranks_and_kept_from_the_first(judged):
    notes = judge(judged, target()).notes
    assert "rank 0 ran" in notes
    assert "rank 1 ran" not in notes


def test_rank_after_a_load_is_queried_if_the_reference_is_ahead(judged, monkeypatch):
    asked = []
    for query in ("params", "parts", "settings"):
        right = getattr(ZeroSimEngine, query)

        def noted(engine, *, right=right, query=query):
            asked.append((query, dist.get_rank()))
            return right(engine)

        monkeypatch.setattr(ZeroSimEngine, query, noted)

    def is_ahead(self, engine, *, rank):
        asked.append(("compared", rank))
        return iter(())

    monkeypatch.setattr(ExactComparison, "compare_loaded", is_ahead)
    judged(world=WorldSpec(size=2), reload=ReloadSpec(step=1, world_size=2))
    for rank in range(2):
        of_rank = [query for query, other in asked if other == rank]
        at = of_rank.index("compared")
        assert of_rank[at - 3 : at] == ["parts", "params", "settings"]


class UnwrapsOnSomeRanks(OwnerEngine):
    """Only the engine of rank 0 has `unwrap`."""

    def __init__(self, module, group, **wrong):
        super().__init__(module, group, **wrong)
        if self.rank == 0:
            self.unwrap = self._unwrap

    def _unwrap(self):
        raise AssertionError("not to be asked")


def test_unwrap_is_called_on_all_ranks_or_none(judged):
    assert judge(judged, target(UnwrapsOnSomeRanks)).verdict == "pass"


class SkipsWhatRequiresNoGradient(OwnerEngine):
    def backward(self, loss, *, last_micro, rows):
        self.losses = [*getattr(self, "losses", ()), loss.requires_grad]
        if loss.requires_grad:
            loss.backward()

    def notes(self):
        super().notes()
        return [f"losses require gradients: {self.losses}"]


@ORDERS
def test_loss_of_frozen_params_requires_no_gradient(judged, known):
    world = WorldSpec(size=2, order="tree", order_known=known)
    freeze = tuple(FreezeSpec(param=name, start=1, stop=2) for name in ("p0", "p1"))
    model = ModelSpec(name="params", shapes=((2,), (2,)), freeze=freeze)
    system = target(SkipsWhatRequiresNoGradient, follows=("model.freeze",))
    result = judge(judged, system, model=model, world=world)
    assert (result.verdict, result.findings) == ("pass", ())
    assert "losses require gradients: [True, False, True]" in result.notes
