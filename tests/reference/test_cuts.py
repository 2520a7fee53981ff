"""Bits of elements under any cut, and detection of rules that are not elementwise."""

import pytest
import torch

from tests.reference.test_own_rule import SPEC, own
from tests.targets.own_adamw import adamw_step
from zero_sim.reference.cuts import CutStep, probe, why_unknown
from zero_sim.reference.rules import Rules
from zero_sim.reference.stepping import Stepper, same_elements


def rules_of(move):
    return Rules(own=own(step=move, elementwise=True))


def probed(move, shape=(3, 4)):
    return probe(SPEC, rules=rules_of(move), params={"w": torch.ones(shape)})


def ends(move, shape=(3, 4)):
    params = {"w": torch.ones(shape)}
    return why_unknown(SPEC, rules=rules_of(move), params=params, shows_cuts=False)


def by_pow(param, grad, state, settings):
    average = state.setdefault("average", torch.zeros_like(param))
    state["count"] = state.get("count", torch.tensor(0.0)) + 1
    average.mul_(0.9).add_(torch.sigmoid(grad).pow(0.37))
    param.sub_(average.bfloat16().sigmoid(), alpha=settings["lr"])


class TestProbe:
    @pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
    def test_finds_nothing_in_usual_rules(self, shape):
        found = probed(adamw_step, shape)
        assert (found.problem, found.counters) == ("", {"step"})
        assert not ends(adamw_step, shape)

    def test_finds_ends_of_loops(self):
        assert not probed(by_pow).problem
        assert "of param 'w', and this case's cuts are not known" in ends(by_pow)

    @pytest.mark.parametrize(
        "factor",
        [
            lambda p: p.square().sum(),
            lambda p: p.numel(),
            lambda p: torch.arange(p.numel()).view_as(p),
        ],
        ids=["other elements", "their number", "their places"],
    )
    def test_finds_rules_that_read_more_than_the_element(self, factor):
        def move(param, grad, state, settings):
            param.sub_(grad / (1 + factor(param)))

        assert "in the value of param 'w', and not only at its end" in probed(move).problem

    def test_is_made_once_for_equal_settings(self):
        steps = []

        def counted(param, grad, state, settings):
            steps.append(1)

        probed(counted)
        first = len(steps)
        probed(counted)
        assert len(steps) == first


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("steps", [0, 1])
def test_bits_of_any_cut_are_found(seed, steps):
    draws = torch.Generator().manual_seed(seed)
    stepper = Stepper(SPEC, params={"w": torch.randn(20, 30, generator=draws)}, rules=RULES)
    for _ in range(steps):
        stepper.step({"w": torch.randn(20, 30, generator=draws)})
    grad = torch.randn(20, 30, generator=draws)
    size, start = (int(torch.randint(1, 300, (), generator=draws)) for _ in range(2))
    index = torch.arange(start, start + size)
    cut = stepper.picked("w", index, counters={"count"})
    cut.step({"w": grad.reshape(-1)[index].view(1, -1)})
    shown = cut.values("w", counters={"count"})
    taken = CutStep(start=stepper, name="w", grad=grad, factor=1.0, counters=frozenset({"count"}))

    def holds(elems, values):
        same = [same_elements(shown[k][elems - start], v) for k, v in values.items()]
        return torch.stack(same).all(0)

    found = taken.bits_elsewhere(index, holds=holds)
    assert {key: found[key].tolist() for key in found} == {
        key: shown[key].tolist() for key in ("", "average")
    }


def test_impossible_bits_are_not_found():
    stepper = Stepper(SPEC, params={"w": torch.ones(40)}, rules=RULES)
    taken = CutStep(start=stepper, name="w", grad=torch.ones(40), factor=1.0, counters=frozenset())

    def holds(elems, values):
        return elems != 39

    assert taken.bits_elsewhere(torch.arange(40), holds=holds) is None


RULES = rules_of(by_pow)
