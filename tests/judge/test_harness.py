"""Errors and time of the harness are not charged to the system."""

import pytest
import torch

from zero_sim.errors import EnvironmentProblem
from zero_sim.judge import ownership
from zero_sim.judge.exact import ExactComparison
from zero_sim.judge.judge import Judge
from zero_sim.reference import Reference
from zero_sim.run import contexts
from zero_sim.scenario.spec import OptimizerSpec, ReloadSpec, RunSpec
from zero_sim.targets.own import ZeroSimEngine, ZeroSimTarget


def raising(error):
    def fail(*args, **named):
        raise error

    return fail


def assert_ours(result, *words):
    assert result.verdict == "error", result
    assert [finding.check for finding in result.findings] == ["internal.judge"]
    assert "the judge itself failed" in result.error
    text = result.error + result.findings[0].detail
    assert all(word in text for word in ("Traceback", *words)), text


class TestFailures:
    """An exception is charged to the code that raised it."""

    def test_broken_reference_is_an_error(self, judged, monkeypatch):
        monkeypatch.setattr(Reference, "begin", raising(KeyError("lost")))
        assert_ours(judged(), "KeyError: 'lost'")

    def test_broken_judge_is_an_error(self, judged, monkeypatch):
        monkeypatch.setattr(ExactComparison, "compare_part", raising(RuntimeError("confused")))
        assert_ours(judged(), "RuntimeError: confused")

    @pytest.mark.parametrize("name", ["note_facts", "before_backward", "observe", "observe_params"])
    def test_broken_judge_method_is_an_error(self, judged, monkeypatch, name):
        monkeypatch.setattr(Judge, name, raising(ValueError("confused")))
        assert_ours(judged(), "confused")

    def test_usage_error_of_the_reference_is_an_error(self, judged, monkeypatch):
        from zero_sim.errors import UsageError

        monkeypatch.setattr(Reference, "begin", raising(UsageError("spans do not tile")))
        assert_ours(judged(), "spans do not tile")

    @pytest.mark.parametrize("name", ["build", "batch"])
    def test_broken_workload_is_an_error(self, judged, monkeypatch, name):
        real = contexts.build_workload

        class Broken:
            def __init__(self, scenario):
                self._inner = real(scenario)
                self._asked = 0

            def __getattr__(self, asked):
                return getattr(self._inner, asked)

        def fail(self, *args, **named):
            self._asked += 1
            # The reference builds its own module first, outside any rank.
            if name == "batch" or self._asked > 1:
                raise RuntimeError("no data")
            return getattr(self._inner, name)(*args, **named)

        setattr(Broken, name, fail)
        monkeypatch.setattr(contexts, "build_workload", Broken)
        assert_ours(judged(), "no data")

    def test_broken_reference_after_a_reload_is_an_error(self, judged, monkeypatch):
        right = Reference.continue_as

        def breaks(self, *args, **named):
            right(self, *args, **named)
            self.begin = raising(KeyError("lost"))

        monkeypatch.setattr(Reference, "continue_as", breaks)
        assert_ours(judged(reload=ReloadSpec(step=1), run=RunSpec(steps=3)), "lost")

    def test_environment_problem_is_raised(self, judged, monkeypatch):
        monkeypatch.setattr(Reference, "begin", raising(EnvironmentProblem("no memory")))
        with pytest.raises(EnvironmentProblem, match="no memory"):
            judged()

    @pytest.mark.parametrize("name", ["params", "parts", "stray_gradients", "stray_padding"])
    def test_error_of_an_engine_query_is_a_finding(self, judged, monkeypatch, name):
        monkeypatch.setattr(ZeroSimEngine, name, raising(RuntimeError("nothing to tell")))
        result = judged()
        assert result.verdict == "fail"
        assert [finding.check for finding in result.findings] == ["world.rank-failed"]
        assert "RuntimeError: nothing to tell" in result.findings[0].message

    def test_earlier_finding_stands(self, judged, monkeypatch):
        def confused(replicas, *, shapes, step):
            from zero_sim.findings.records import Finding

            yield Finding(check="invariant.ownership", message="lost", step=step, phase="forward")

        monkeypatch.setattr(ownership, "check_ownership", confused)
        monkeypatch.setattr(Reference, "begin", raising(KeyError("lost")))
        result = judged()
        assert result.verdict == "fail"
        assert [finding.check for finding in result.findings] == ["invariant.ownership"]
        assert any("judge itself failed" in note for note in result.notes)

    def test_missing_param_is_a_finding(self, judged, monkeypatch):
        right = ZeroSimEngine.params

        def forgetful(self):
            reported = dict(right(self))
            if self._optimizer.inner.state:
                reported.pop("0.up.weight")
            return reported

        monkeypatch.setattr(ZeroSimEngine, "params", forgetful)
        result = judged()
        assert result.verdict == "fail"
        assert "does not have this param" in result.findings[0].message

    def test_next_case_passes_after_an_error(self, judged, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(Reference, "step", raising(KeyError("lost")))
            judged()
        assert judged().verdict == "pass"


class TestTime:
    """The stall limit applies to the system only."""

    LIMIT = RunSpec(steps=1, stall_seconds=1.0)

    @staticmethod
    def endless(right, clock):
        def call(*args, **named):
            while clock.runs_out():
                torch.ones(1)
            return right(*args, **named)

        return call

    def test_slow_reference_is_no_stall(self, judged, monkeypatch, stall_clock):
        right = Reference.step

        def slow(*args, **named):
            stall_clock.passes(times=3)
            return right(*args, **named)

        monkeypatch.setattr(Reference, "step", slow)
        assert judged(run=self.LIMIT).verdict == "pass"

    def test_slow_system_stalls(self, judged, monkeypatch, stall_clock):
        monkeypatch.setattr(ZeroSimEngine, "step", self.endless(ZeroSimEngine.step, stall_clock))
        result = judged(run=self.LIMIT)
        assert [finding.check for finding in result.findings] == ["world.stalled"]
        assert "more than 1 s" in result.findings[0].message

    def test_slow_engine_query_stalls(self, judged, monkeypatch, stall_clock):
        monkeypatch.setattr(ZeroSimEngine, "parts", self.endless(ZeroSimEngine.parts, stall_clock))
        result = judged(run=self.LIMIT)
        assert [finding.check for finding in result.findings] == ["world.stalled"]


class TestNotObserved:
    """Values that a target does not report are listed in a note."""

    def test_unreported_step_values_are_noted(self, judged, monkeypatch):
        from zero_sim.targets import StepResult

        right = ZeroSimEngine.step

        def silent(self, *, lr_factor):
            right(self, lr_factor=lr_factor)
            return StepResult()

        monkeypatch.setattr(ZeroSimEngine, "step", silent)
        result = judged(optimizer=OptimizerSpec())
        assert result.verdict == "pass"
        assert (
            "not observed, because the target does not report it: norm, skipped, zeros"
            in result.notes
        )

    def test_unreported_padding_is_noted(self, judged):
        class Reticent:
            def __init__(self, engine):
                self._engine = engine

            def __getattr__(self, name):
                if name == "stray_padding":
                    raise AttributeError(name)
                return getattr(self._engine, name)

        class ReticentTarget:
            name = "reticent"
            capabilities = None

            def build(self, module, *, scenario, group):
                return Reticent(ZeroSimTarget().build(module, scenario=scenario, group=group))

        result = judged(target=ReticentTarget())
        assert result.verdict == "pass"
        assert any("padding of params and masters" in note for note in result.notes)

    def test_own_system_reports_everything(self, judged):
        assert not any("not observed" in note for note in judged().notes)
