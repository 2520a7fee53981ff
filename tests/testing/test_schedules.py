"""Exhaustive exploration of schedules, and schedules that shrink."""

import subprocess
import sys

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from zero_sim.errors import UsageError
from zero_sim.sim import Choices, RankFailed, Replay, World
from zero_sim.testing import explore
from zero_sim.testing.worlds import schedules, world_settings


def independent(rank):
    """Take one turn per rank."""
    return rank


def barriers(rank):
    dist.barrier()
    dist.barrier()


def last_comes_first(rank):
    """Fail if rank 2 sends before the others do."""
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return None
    first = torch.empty(1)
    source = dist.recv(first)
    dist.recv(torch.empty(1))
    if source == 2:
        raise ValueError("rank 2 came first")
    return source


async def unrun(results):
    """Is never awaited."""


def yields(results):
    yield results


class TestExplore:
    """explore(): depth first, each schedule once, failures with their schedule."""

    @pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 2), (3, 6), (4, 24)])
    def test_independent_ranks_have_one_schedule_per_permutation(self, size, count):
        result = explore(independent, size, runs_max=100)
        assert (result.runs, result.complete, result.failures) == (count, True, ())
        assert result.interleavings == 1

    def test_runs_max_stops_exploration(self):
        result = explore(independent, 4, runs_max=5)
        assert (result.runs, result.complete) == (5, False)

    def test_interleavings_are_counted_separately(self):
        result = explore(barriers, 2, runs_max=1000)
        assert result.complete
        assert 1 < result.interleavings <= result.runs

    @pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
    def test_failure_contains_a_schedule_that_repeats_it(self, timing):
        result = explore(last_comes_first, 3, runs_max=1000, timing=timing)
        assert result.complete
        assert 0 < len(result.failures) < result.runs
        for failure in result.failures[:3]:
            for schedule in (Choices(failure.choices), Replay(failure.turns)):
                with World(3, schedule=schedule, timing=timing) as world:
                    with pytest.raises(RankFailed, match="rank 2 came first"):
                        world.run(last_comes_first)
                    assert tuple(world.log.turns) == failure.turns

    def test_failed_check_of_results_fails_the_run(self):
        def source(rank):
            try:
                return last_comes_first(rank)
            except ValueError:
                return 2

        def check(results):
            assert results[0] == 1

        result = explore(source, 3, runs_max=1000, check=check)
        assert result.complete
        assert {type(failure.error) for failure in result.failures} == {AssertionError}

    @pytest.mark.parametrize(
        ("returned", "failures"), [(None, 0), (True, 0), (False, 2), (torch.tensor(False), 2)]
    )
    def test_check_that_returns_false_fails_the_run(self, returned, failures):
        result = explore(independent, 2, check=lambda results: returned)
        assert len(result.failures) == failures
        for failure in result.failures:
            assert "got " + repr(returned) + " for the results [0, 1]" in str(failure.error)

    @pytest.mark.parametrize("calls", [unrun, yields])
    def test_check_that_returns_a_coroutine_or_generator_fails_the_run(self, calls):
        result = explore(independent, 2, check=lambda results: calls(results))
        assert len(result.failures) == 2

    def test_check_without_a_truth_value_fails_the_run(self):
        result = explore(independent, 1, check=lambda results: torch.ones(2) == 1)
        assert [type(failure.error) for failure in result.failures] == [RuntimeError]

    @pytest.mark.parametrize("check", ["r[0] == 1", 5, False, unrun, yields])
    def test_check_that_is_no_function_is_refused(self, check):
        with pytest.raises(UsageError, match=r"^expected check to .*, got .*\. Pass a function of"):
            explore(independent, 2, check=check)

    @pytest.mark.parametrize("schedule", ["random", Choices(()), None])
    def test_schedule_argument_is_refused(self, schedule):
        with pytest.raises(UsageError, match="expected no schedule, because explore runs all"):
            explore(independent, 2, schedule=schedule)

    @pytest.mark.parametrize(
        ("bound", "words"), [("5", "expected runs_max to be an integer"), (0, "runs_max")]
    )
    def test_invalid_runs_max_is_refused(self, bound, words):
        with pytest.raises(UsageError, match=words):
            explore(independent, 2, runs_max=bound)

    def test_runs_max_is_1000_by_default(self):
        result = explore(independent, 7)
        assert (result.runs, result.complete) == (1000, False)


SMALLEST = hypothesis.settings(
    database=None, derandomize=True, deadline=None, max_examples=300, phases=hypothesis.Phase
)


class TestStrategies:
    """Schedules drawn by Hypothesis: they shrink to the few choices that matter."""

    def test_planted_fault_shrinks_to_the_choice_it_needs(self, world_of):
        def fails(recipe):
            try:
                world_of(3, schedule=recipe).run(last_comes_first)
            except RankFailed:
                return True
            return False

        assert not fails(Choices())
        smallest = hypothesis.find(schedules(picks_max=20, ready_max=3), fails, settings=SMALLEST)
        # The fewest and smallest numbers that let rank 2 run before rank 1.
        shorter = [Choices(()), Choices((0,)), Choices((1,)), Choices((0, 0))]
        assert smallest in (Choices((2,)), Choices((0, 1)))
        assert not any(fails(recipe) for recipe in shorter)

    def test_settings_shrink_to_eager_round_robin(self):
        smallest = hypothesis.find(world_settings(), lambda found: True, settings=SMALLEST)
        assert smallest == {"schedule": Choices(()), "timing": "eager", "seed": 0}

    def test_missing_wait_shrinks_to_the_first_late_timing(self, world_of):
        def fails(settings):
            def program(rank):
                x = torch.ones(1)
                work = dist.all_reduce(x, async_op=True)
                dist.barrier()
                seen = x.item()
                work.wait()
                return seen

            return world_of(2, **settings).run(program) != [2.0, 2.0]

        smallest = hypothesis.find(world_settings(picks_max=8), fails, settings=SMALLEST)
        assert smallest == {"schedule": Choices(()), "timing": "lazy", "seed": 0}

    def test_case_and_its_schedule_shrink_together(self, world_of):
        cases = st.tuples(st.integers(0, 50), schedules(picks_max=10, ready_max=3))

        def fails(case):
            elems, recipe = case

            def program(rank):
                dist.broadcast(torch.zeros(elems), src=0)
                return last_comes_first(rank)

            try:
                world_of(3, schedule=recipe).run(program)
            except RankFailed:
                return elems >= 3
            return False

        elems, recipe = hypothesis.find(cases, fails, settings=SMALLEST)
        assert elems == 3
        assert sum(recipe.choices) <= 2

    def test_simulator_does_not_import_hypothesis(self):
        script = "import sys, zero_sim.sim; print('hypothesis' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "False"
