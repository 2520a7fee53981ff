"""Campaigns of mutants: each is found by a check, and the system is restored."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from zero_sim import run_case
from zero_sim.errors import LayoutError
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.fuzz.choices import Drawable
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.mutants import campaign, find_mutants
from zero_sim.mutants.campaign import (
    DRAWING,
    REFUSED,
    Budget,
    check_unbroken,
    found_by,
    hunt,
    run_campaign,
)
from zero_sim.mutants.records import mutant
from zero_sim.mutants.score import score_of
from zero_sim.run import CaseResult
from zero_sim.scenario.checks import Check
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, WorldSpec
from zero_sim.shrink import Size, size_of
from zero_sim.zero.unit import Unit

PLAIN = Scenario(schema=1, model=ModelSpec(name="params", shapes=((1,),)))


def test_mutant_is_found_and_the_system_restored(pool):
    (one,) = find_mutants(["M05"])
    trial = hunt(one, pool=pool, budget=Budget(cases_max=40))
    assert trial.killed
    assert trial.check.startswith(("invariant.", "equality."))
    assert trial.armed > 0
    assert not check_unbroken(pool=pool, budget=Budget(cases_max=5)).killed


def test_harmless_mutant_survives(pool):
    def plant(patch):
        """Change nothing."""

    harmless = mutant("X", "NORM", seen_in="nothing")(plant)
    trial = hunt(harmless, pool=pool, budget=Budget(cases_max=3))
    assert (trial.killed, trial.cases, trial.armed) == (False, 3, 0)


def test_mutant_that_no_longer_fits_is_not_killed(pool):
    def plant(patch):
        """Use a removed attribute."""

        patch[Unit.reduce, "self._end_reduce()"] = "self.gone()"

    trial = hunt(mutant("X", "NORM", seen_in="nothing")(plant), pool=pool)
    assert not trial.killed
    assert "no longer fits the system: AttributeError" in trial.error


def test_hunts_of_one_seed_are_identical(pool):
    (one,) = find_mutants(["M13"])
    first, second = (hunt(one, pool=pool, budget=Budget(cases_max=30)) for _ in range(2))
    assert (first.cases, first.check) == (second.cases, second.check)


@pytest.fixture(scope="module")
def shrunk(pool):
    (off_by_one,) = find_mutants(["L01"])
    return hunt(off_by_one, pool=pool, budget=Budget(cases_max=200, shrinks=True))


def test_off_by_one_shrinks_to_two_ranks_and_two_elements(shrunk):
    assert shrunk.size == Size(ranks=2, params=1, elements=2, steps=1, features=0)


def test_smallest_case_finds_only_the_mutant(shrunk, pool):
    (smallest,) = parse_cases(shrunk.smallest, source="x", stem="x")
    assert size_of(smallest) == shrunk.size
    assert run_case(smallest, pool=pool).verdict == "pass"
    with find_mutants(["L01"])[0].apply():
        assert run_case(smallest, pool=pool).verdict == "fail"


def test_shrinking_does_not_change_the_hunt(shrunk, pool):
    plain = hunt(find_mutants(["L01"])[0], pool=pool, budget=Budget(cases_max=200))
    assert (plain.check, plain.cases) == (shrunk.check, shrunk.cases)
    assert (plain.size, plain.smallest) == (None, "")


def test_harness_error_is_not_a_kill(pool, monkeypatch):
    from zero_sim.judge.judge import Judge

    def breaks(*args, **named):
        raise RuntimeError("the judge is ill")

    monkeypatch.setattr(Judge, "observe", breaks)
    trial = hunt(find_mutants(["M73"])[0], pool=pool, budget=Budget(cases_max=5))
    assert not trial.killed
    assert "the judge is ill" in trial.error


def test_refusal_of_a_valid_case_is_a_kill():
    assert found_by(CaseResult(id="x", verdict="error", seconds=0.0, error="no")) == REFUSED
    assert found_by(CaseResult(id="x", verdict="inconclusive", seconds=0.0)) == ""


def test_score_counts_survivors(pool):
    chosen = find_mutants(["M73", "M05"])
    trials = list(run_campaign(["M73", "M05"], budget=Budget(cases_max=1, seed=1)))
    score = score_of(trials, chosen, seconds=1.0)
    assert score.all.of == score.core.of == 2
    assert score.all.killed == sum(trial.killed for trial in trials)
    assert {kills.name for kills in score.by_class} == {"LAYOUT", "NORM"}
    assert score.exit_status == (score.all.killed < 2)
    assert torch.get_num_threads() >= 1


def test_failure_to_draw_a_case_is_a_kill(pool):
    def fails(choices):
        raise LayoutError("no such layout")

    (one,) = find_mutants(["M05"])
    trial = hunt(one, pool=pool, cases=Drawable(fails))
    assert (trial.killed, trial.check, trial.cases) == (True, DRAWING, 0)


def test_failure_outside_of_drawing_is_raised(pool, monkeypatch):
    def fails(*args, **named):
        raise LayoutError("the harness is ill")

    monkeypatch.setattr(campaign, "run_case", fails)
    with pytest.raises(LayoutError, match="ill"):
        hunt(find_mutants(["M05"])[0], pool=pool)


class TestOrderOfCases:
    """Cases without the features of the mutant's smallest case are judged last."""

    @pytest.fixture
    def judged(self, monkeypatch):
        order = []

        def run(scenario, **named):
            order.append(scenario)
            verdict = "fail" if scenario in self.finders else "pass"
            finding = Finding(check=Check.EQUALITY_GRAD, step=0, phase=Phase.REDUCE, message="x")
            return CaseResult(id="x", verdict=verdict, seconds=0.0, findings=(finding,))

        monkeypatch.setattr(campaign, "run_case", run)
        one_rank = replace(PLAIN, world=WorldSpec(size=1))
        accumulates = replace(one_rank, run=RunSpec(steps=1, micro_batches=2))
        monkeypatch.setattr(campaign, "smallest_cases", lambda: {"X": accumulates})
        self.finders = ()
        return order

    def hunt(self, pool, **named):
        def plant(patch):
            """Change nothing."""

        harmless = mutant("X", "NORM", seen_in="nothing")(plant)
        return hunt(harmless, pool=pool, budget=Budget(cases_max=12, **named))

    @staticmethod
    def drawn(count=12):
        return [*islice(draws(drawn_cases(), seed="0/X"), count)]

    def test_cases_with_its_features_come_first_and_survivors_meet_all(self, pool, judged):
        trial = self.hunt(pool)
        accumulating = [case for case in self.drawn() if case.run.micro_batches > 1]
        others = [case for case in self.drawn() if case.run.micro_batches == 1]
        assert accumulating
        assert others
        assert judged == [*accumulating, *others]
        assert (trial.killed, trial.cases, trial.judged) == (False, 12, 12)

    def test_finding_case_is_reported_by_its_place_in_the_series(self, pool, judged):
        place = max(i for i, case in enumerate(self.drawn(), 1) if case.run.micro_batches > 1)
        self.finders = (self.drawn()[place - 1],)
        trial = self.hunt(pool)
        having = sum(case.run.micro_batches > 1 for case in self.drawn(place))
        assert (trial.killed, trial.cases, trial.judged) == (True, place, having)

    def test_case_without_its_features_is_found_at_its_own_place(self, pool, judged):
        place = max(i for i, case in enumerate(self.drawn(), 1) if case.run.micro_batches == 1)
        self.finders = (self.drawn()[place - 1],)
        trial = self.hunt(pool)
        assert (trial.killed, trial.cases, trial.judged) == (True, place, 12)

    def test_every_case_is_judged_in_order_on_request(self, pool, judged):
        self.hunt(pool, every_case=True)
        assert judged == self.drawn()
