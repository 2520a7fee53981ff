"""Comparison by digests accepts right values; for others the judge falls back to its reference."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from tests.judge.test_step_digests import CASE, taken
from zero_sim.judge.comparison import expected_steps_of
from zero_sim.reference import Reference
from zero_sim.run.real import WiredSteps
from zero_sim.targets import OwnedPart, Place, StepResult
from zero_sim.workloads import build_workload


@dataclass
class FakeRank:
    """Rank with a store of shared values, as JSON."""

    store: dict[str, str]
    rank: int

    def send(self, value, *, about):
        self.store[about] = json.dumps(value)

    def has_sent(self, rank, *, about):
        return about in self.store

    def receive(self, rank, *, about, seconds):
        if about not in self.store:
            raise TimeoutError
        return json.loads(self.store[about])


def expected_of(group, *, store=None, rank=1):
    reference = Reference(CASE, workload=build_workload(CASE))
    shared = None if store is None else WiredSteps(FakeRank(store, rank), stall_seconds=1)
    return expected_steps_of(group, reference=reference, order_seed=0, shared=shared)


@pytest.fixture
def group():
    return taken()[1]


@pytest.fixture
def store(group):
    """Store that contains both steps."""
    store = {}
    telling = expected_of(group, store=store, rank=0).steps
    for _ in range(2):
        telling.advance()
    return store


def part_of(step, name):
    """Return a right system's part that is one whole param."""
    return OwnedPart(
        place=Place(param=name, start=0, stop=step.masters[name].numel()),
        grad=step.grads[name].reshape(-1).clone(),
        master=step.masters[name].reshape(-1).clone(),
        state={
            key: value.reshape(-1).clone() if value.dim() else value.clone()
            for key, value in step.state[name].items()
        },
    )


def all_of(owed, group, step, parts, params, result):
    """Compare everything; rank 0 reports its gradients."""
    comparing = owed.comparison
    group.reporting[0] = True
    found = [*comparing.compare_measured(result, rank=0, step=step)]
    for part in parts:
        found += comparing.compare_part(part, rank=0, step=step)
    return [*found, *comparing.compare_params(params, rank=0, step=step)]


@pytest.fixture
def shown(group):
    """Values of a right system after the first step."""
    step, _ = taken()
    return {
        "parts": [part_of(step, name) for name in step.masters],
        "params": {name: param.clone() for name, param in step.params.items()},
        "result": StepResult(norm=step.norm, zeros=step.measured.zeros),
    }


def test_right_values_agree_and_compare_as_many_elements(group, store, shown):
    hearing, exact = expected_of(group, store=store), expected_of(group)
    counts = []
    for each in (hearing, exact):
        each.steps.advance()
        before = group.comparer.elems
        assert all_of(each, group, 0, **shown) == []
        counts.append(group.comparer.elems - before)
    assert counts[0] == counts[1] > 0
    assert hearing.steps.has_digests


def _master(shown):
    shown["parts"][0].master[0] += 1


def _state(shown):
    shown["parts"][0].state["exp_avg"][0] += 1


def _grad(shown):
    shown["parts"][0].grad[0] += 1


def _no_grad(shown):
    shown["parts"][0] = replace(shown["parts"][0], grad=None)


def _key(shown):
    del shown["parts"][0].state["exp_avg"]


def _dtype(shown):
    shown["parts"][0] = replace(shown["parts"][0], master=shown["parts"][0].master.double())


def _place(shown):
    place = replace(shown["parts"][0].place, start=1)
    shown["parts"][0] = replace(shown["parts"][0], place=place)


def _param(shown):
    next(iter(shown["params"].values())).view(-1)[0] += 1


def _missing(shown):
    shown["params"].popitem()


def _norm(shown):
    lower = torch.nextafter(shown["result"].norm, torch.tensor(0.0))
    shown["result"] = replace(shown["result"], norm=lower)


def _zeros(shown):
    shown["result"] = replace(shown["result"], zeros=shown["result"].zeros + 1)


@pytest.mark.parametrize(
    "spoil",
    [_master, _state, _grad, _no_grad, _key, _dtype, _place, _param, _missing, _norm, _zeros],
)
def test_wrong_value_does_not_agree(group, store, shown, spoil):
    hearing = expected_of(group, store=store)
    hearing.steps.advance()
    spoil(shown)
    assert all_of(hearing, group, 0, **shown)


def test_fallback_finds_the_same_as_the_exact_comparison(group, store, shown):
    _master(shown)
    hearing, exact = expected_of(group, store=store), expected_of(group)
    hearing.steps.advance()
    hearing.steps.fall_back()
    exact.steps.advance()
    (one,), (other,) = (all_of(each, group, 0, **shown) for each in (hearing, exact))
    assert one == other


def test_fallback_continues_at_the_current_step(group, store):
    hearing, exact = expected_of(group, store=store).steps, expected_of(group).steps
    hearing.advance()
    hearing.fall_back()
    del store["owed 1"]
    hearing.forget(0)
    for each in (exact, exact, hearing):
        each.advance()
    assert hearing.steps.keys() == {1}
    for name, master in exact.steps[1].masters.items():
        assert torch.equal(hearing.steps[1].masters[name], master)


def test_missing_step_is_computed_locally(group, store):
    del store["owed 1"]
    hearing = expected_of(group, store=store).steps
    for step in range(2):
        assert hearing.get(step).step == step
    assert hearing.is_local
    assert hearing.steps[1].masters


def test_counts_by_digests_are_restored(group):
    noted = group.noted()
    group.comparer.elems += 5
    group.unobserved.add("norm")
    group.reporting[0] = True
    group.go_back(noted)
    assert group.noted() == noted


def test_stopped_source_shares_no_further_steps(group):
    store = {}
    telling = expected_of(group, store=store, rank=0).steps
    telling.stop_sharing(0)
    telling.advance()
    assert store == {"owing 0": "{}", "owed 0": "null"}
