"""Scenario files as tests, one per case."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zero_sim.errors import EnvironmentProblem, ScenarioError, ZeroSimError
from zero_sim.pytest_plugin.resources import RESOURCES
from zero_sim.report.commands import replay_command, reproduce_command

if TYPE_CHECKING:
    from zero_sim.findings.records import CaseResult
    from zero_sim.scenario.spec import Scenario


class ScenarioFile(pytest.File):
    """Scenario file, collected as one test per case."""

    def collect(self) -> Iterator[pytest.Item]:
        """Load the file and yield its cases."""
        from zero_sim.scenario.load import load_cases

        try:
            scenarios = load_cases(self.path)
        except ScenarioError as error:
            raise self.CollectError(str(error)) from None
        for scenario in scenarios:
            yield ScenarioCase.from_parent(self, name=scenario.name, scenario=scenario)


class ScenarioCase(pytest.Item):
    """Test of one case."""

    def __init__(self, *, scenario: Scenario, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scenario = scenario

    def runtest(self) -> None:
        """Run and judge the case."""
        # Imported late, so that a session without scenarios does not import torch.
        from zero_sim.targets import find_target, library_target_names, why_missing

        resources = self.config.stash[RESOURCES]
        # Skip if the target's library is missing, as for any optional dependency.
        if self.scenario.system.target in library_target_names():
            why = why_missing(find_target(self.scenario.system.target))
            if why:
                pytest.skip(why)
        result = resources.judge(self.scenario)
        self.user_properties += [
            ("zero_sim.verdict", result.verdict),
            ("zero_sim.scope", result.scope),
            ("zero_sim.compared_elems", result.compared_elems),
        ]
        if result.verdict == "pass":
            return
        reproduce, replay, bundle = self._reproduce(), "", ""
        # Now, because writing the bundle may fail.
        self.user_properties.append(("zero_sim.reproduce", reproduce))
        try:
            bundle = resources.write_bundle(result.twin or self.scenario, result)
        except OSError as error:
            # A full disk must not hide the verdict.
            note = f"no bundle in {resources.bundles}: {error.strerror}"
            self.add_report_section("call", "zero_sim", note)
        if bundle:
            replay = replay_command(bundle, bundles=resources.bundles)
            self.user_properties += [("zero_sim.bundle", bundle), ("zero_sim.replay", replay)]
        raise CaseFailed(result, reproduce=reproduce, replay=replay)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the findings instead of a traceback through the harness."""
        error = excinfo.value
        if isinstance(error, CaseFailed):
            from zero_sim.report.text import render_case
            from zero_sim.scenario.dump import to_chosen_toml

            return render_case(
                error.result,
                case=to_chosen_toml(error.result.twin or self.scenario),
                reproduce=error.reproduce,
                replay=error.replay,
            )
        if isinstance(error, EnvironmentProblem):
            return f"this machine cannot run it: {error}"
        if isinstance(error, ZeroSimError):
            return str(error)
        return "".join(traceback.format_exception(error))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the location for pytest's headings."""
        return self.path, None, f"{self.path.name}: {self.name}"

    def _reproduce(self) -> str:
        return reproduce_command(self.path, self.scenario.name)


class CaseFailed(AssertionError):
    """Failure of a case whose verdict is not `pass`."""

    def __init__(self, result: CaseResult, *, reproduce: str, replay: str) -> None:
        super().__init__(f"verdict {result.verdict}")
        self.result = result
        self.reproduce = reproduce
        self.replay = replay
