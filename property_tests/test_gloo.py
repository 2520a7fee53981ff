"""Drawn cases on gloo processes, judged as in the simulated world."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.judging import EXPLAINER
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import Setup
from zero_sim.scenario.rules import check_scenario

CASES = 60


@pytest.fixture(scope="module")
def judge():
    with on_workers(Setup(backend="gloo"), explainer=EXPLAINER) as on_gloo:
        yield on_gloo


def in_gloos_order(case):
    return replace(case, world=replace(case.world, order="gloo"))


@pytest.mark.parametrize("ordered", [lambda case: case, in_gloos_order], ids=["folded", "gloo's"])
def test_correct_system_passes_on_gloo(judge, ordered):
    """Sums are folded locally in the case's order, or added by gloo in its own order."""
    drawn = map(ordered, draws(drawn_cases(ranks_max=6, steps_max=3), seed="gloo"))
    cases = islice((case for case in drawn if not check_scenario(case)), CASES)
    results = [judge(case) for case in cases]
    assert [result for result in results if result.verdict in ("fail", "error")] == []
    assert Counter(result.verdict for result in results)["pass"] > CASES // 2
