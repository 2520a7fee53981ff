"""Replay of bundles: the recorded turns, and outcome FIXED, FAILED or ERROR."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from zero_sim import run_case
from zero_sim.bundle import read_bundle, replay_bundle, write_bundle
from zero_sim.errors import EnvironmentProblem
from zero_sim.judge import verdict
from zero_sim.report.text import render_replay
from zero_sim.scenario.load import load_cases
from zero_sim.scenario.spec import ExpectSpec
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.zero import unit as unit_module


@pytest.mark.usefixtures("broken")
def test_replay_with_the_fault_fails_in_the_same_way(bundle, pool):
    replayed = replay_bundle(bundle, pool=pool)
    assert (replayed.outcome, replayed.exit_status) == ("failed", 1)
    assert replayed.same
    assert replayed.same_events
    assert render_replay(replayed).splitlines()[0].startswith(f"FAILED {bundle.id}  broken/size=3")
    assert "the same first finding after the same events" in render_replay(replayed)


def test_replay_without_the_fault_is_fixed(bundle, pool):
    replayed = replay_bundle(bundle, pool=pool)
    assert (replayed.outcome, replayed.exit_status) == ("fixed", 0)
    assert replayed.now is None
    assert "FIXED" in render_replay(replayed)
    assert "in the bundle: equality." in render_replay(replayed)


def test_replay_with_another_fault_reports_it(bundle, pool, monkeypatch):
    monkeypatch.setattr(unit_module, "all_gather", lambda *args, **kwargs: None)
    replayed = replay_bundle(bundle, pool=pool)
    assert replayed.outcome == "failed"
    assert not replayed.same
    assert "another first finding; in the bundle: equality." in render_replay(replayed)
    assert "equality.params" in render_replay(replayed)


@pytest.mark.usefixtures("broken")
def test_replay_takes_recorded_turns(bundle, pool):
    run = dataclasses.replace(bundle.scenario.world, schedule="round-robin")
    changed = dataclasses.replace(bundle, scenario=dataclasses.replace(bundle.scenario, world=run))
    assert replay_bundle(changed, pool=pool).same_events
    without = dataclasses.replace(changed, logs=())
    assert not replay_bundle(without, pool=pool).same_events


def test_turns_that_cannot_be_taken_are_noted(bundle, pool):
    bundle.logs[0].turns[3:] = [2] * 5
    replayed = replay_bundle(bundle, pool=pool)
    assert replayed.outcome == "fixed"
    assert "note: world 1 left the recorded turns at turn" in render_replay(replayed)


def test_next_case_takes_its_own_turns(bundle, scenario, pool):
    replay_bundle(bundle, pool=pool)
    digests = {run_case(scenario, pool=pool).log_digest for _ in range(2)}
    assert len(digests) == 1


class Refusing(ZeroSimTarget):
    def build(self, module, *, scenario, group):
        raise EnvironmentProblem("expected scikit-learn, which is not installed.")


def test_environment_problem_is_an_error(bundle, pool):
    replayed = replay_bundle(bundle, pool=pool, target=Refusing())
    assert (replayed.outcome, replayed.exit_status) == ("error", 4)
    assert "cannot run here: expected scikit-learn" in render_replay(replayed)


def test_inconclusive_case_is_not_fixed(bundle, pool, monkeypatch):
    monkeypatch.setattr(verdict, "_doubts", lambda scenario, judges: [bundle.findings[0]])
    replayed = replay_bundle(bundle, pool=pool)
    assert (replayed.outcome, replayed.exit_status) == ("error", 3)
    assert "inconclusive now" in render_replay(replayed)


def test_another_environment_is_reported(bundle, pool):
    old = dataclasses.replace(bundle.environment, torch="2.11.0", threads=99)
    replayed = replay_bundle(dataclasses.replace(bundle, environment=old), pool=pool)
    assert len(replayed.differences) == 2
    assert "differs: torch: 2.11.0 in the bundle, " in render_replay(replayed)


def test_bundle_is_replayed_in_another_process(path):
    # The only test that starts a process, which takes seconds: a bundle must not depend on this
    # one.
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import broken_division
from zero_sim.bundle import read_bundle, replay_bundle
bundle = read_bundle(__import__("pathlib").Path({str(path)!r}))
print(replay_bundle(bundle).outcome)
with broken_division():
    again = replay_bundle(bundle)
print(again.outcome, again.same, again.same_events)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["fixed", "failed", "True", "True"]


def test_planned_faults_do_not_change_the_events(pool, folder):
    """Faults are in no file of the bundle; turns and calls are the same."""
    (scenario,) = load_cases(Path("scenarios/faults/params.toml"))[:1]
    scenario = dataclasses.replace(scenario, expect=ExpectSpec())
    result = run_case(scenario, pool=pool)
    bundle = read_bundle(write_bundle(scenario, result, folder=folder))
    replayed = replay_bundle(bundle, pool=pool)
    assert replayed.same
    assert "the same first finding after the same events" in render_replay(replayed)
    bundle.logs[0].collectives.pop()
    assert not replay_bundle(bundle, pool=pool).same_events
