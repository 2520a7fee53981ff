"""A marked test on worker processes, each of which runs a pytest session.

[Note: outcome of a rank]
Marks such as `xfail` are evaluated in every worker, and again in the main session. So a worker
returns two things: the outcome of its rank without such marks, and True if a failure was expected.
Only the worker can decide that, because it has the exception. The main session evaluates the marks
for passes.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.pytest_plugin.given import is_given
from zero_sim.pytest_plugin.mark import Refused, Wanted
from zero_sim.pytest_plugin.ranks import check_all_ran, program_of
from zero_sim.pytest_plugin.resources import SessionResources

if TYPE_CHECKING:
    from zero_sim.backends.real import RealRank
    from zero_sim.backends.team import Ending

ON_RANK: pytest.StashKey[OnRank] = pytest.StashKey()
_PLUGIN = "zero_sim.pytest_plugin"
_OUTPUT_CHARS_MAX = 4000


class RanksFailed(pytest.fail.Exception):
    """A test failed on worker processes.

    Args:
        message: Failures by rank.
        is_expected: True if marks expect every failure; None if no rank lived to report one, so
            pytest decides.
        reason: Reason in the mark.
    """

    # pytest's summaries begin with the qualified name; keep it as short as pytest's own.
    __module__ = "builtins"

    def __init__(self, message: str, *, is_expected: bool | None, reason: str) -> None:
        super().__init__(message, pytrace=False)
        self.is_expected = is_expected
        self.reason = reason


def run_on_processes(resources: SessionResources, item: pytest.Function, wanted: Wanted) -> None:
    """Run a test on worker processes, one per rank.

    Raises:
        Refused: If real processes cannot provide the settings of the mark.
        RanksFailed: If a rank failed, died or hung.
    """
    if is_given(item):
        pytest.skip(
            "@given needs simulated ranks, because each process would draw its own examples"
        )
    # Check arguments here too, so that errors are the same as in the simulated world.
    program_of(item, wanted)
    _check_settings(item, wanted)
    order = wanted.settings.get("order")
    about = f"{wanted.size} {resources.backend} processes" + (f", order {order}" if order else "")
    item.user_properties.append(("zero_sim.world", about))
    config = item.config
    # Plain data only, because it is sent to the workers.
    payload = {
        "nodeid": item.nodeid,
        "rootdir": str(config.rootpath),
        "inifile": "" if config.inipath is None else str(config.inipath),
        "options": _options_of(config),
    }
    try:
        endings = resources.teams().run(
            f"{__name__}:run_on_rank",
            payload,
            size=wanted.size,
            timeout_seconds=wanted.settings.get("stall_seconds", resources.timeout_seconds),
        )
    except EnvironmentProblem as error:
        pytest.fail(f"this machine cannot run it: {error}", pytrace=False)
    for ending in endings:
        for stream, text in (ending.result or {}).get("output", {}).items():
            item.add_report_section("call", f"{stream} of rank {ending.rank}", text)
    _conclude(wanted, endings)


def _check_settings(item: pytest.Function, wanted: Wanted) -> None:
    from zero_sim.sim.world.settings import check_settings

    try:
        check_settings(wanted.size, wanted.settings)
    except UsageError as error:
        raise Refused(item, f"{error}.") from None
    if wanted.settings.get("faults"):
        pytest.skip("its mark has `faults`, which need the simulated world")


def _options_of(config: pytest.Config) -> list[str]:
    """Return the options that affect a test's collection and meaning, for a worker's session."""
    option = config.option
    options = [f"--import-mode={option.importmode}"]
    options += [f"-p{name}" for name in option.plugins]
    options += [f"-W{each}" for each in option.pythonwarnings or ()]
    options += [f"-o{each}" for each in option.override_ini or ()]
    options += ["--runxfail"] if option.runxfail else []
    options += ["--noconftest"] if option.noconftest else []
    options += [f"--confcutdir={option.confcutdir}"] if option.confcutdir else []
    # -n0 and not -p no:xdist, because the ini file may have options of xdist.
    options += ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    return options


def _conclude(wanted: Wanted, endings: tuple[Ending, ...]) -> None:
    bad, failures = list[str](), list[dict[str, Any]]()
    alike: dict[str, list[Ending]] = {}
    skips, ended = dict[int, str](), set[int]()
    for ending in endings:
        rank = ending.rank
        outcome = ending.result["outcome"] if ending.how == "done" else ending.how
        if outcome == "passed":
            ended.add(rank)
        elif outcome == "skipped":
            skips[rank] = ending.result["text"]
        elif outcome in ("failed", "xfailed"):
            failures.append(ending.result)
            alike.setdefault(ending.result["crash"], []).append(ending)
        else:
            bad.append(f"rank {rank} {ending.how}: {ending.error}\n{ending.detail}".rstrip())
    # Usually all ranks fail alike, so show each distinct failure once.
    failed = [
        f"{_ranks_in_words([each.rank for each in endings])}: {crash}\n{endings[0].result['text']}"
        for crash, endings in alike.items()
    ]
    bad = failed + bad
    bad += [f"rank {rank} skipped: {reason}" for rank, reason in skips.items()] if bad else []
    # Skips explain a failure, but alone they are judged below.
    if bad:
        is_expected = all(each["outcome"] == "xfailed" for each in failures) if failures else None
        reason = failures[0]["reason"] if is_expected else ""
        raise RanksFailed("\n".join(bad), is_expected=is_expected, reason=reason)
    if len(skips) == wanted.size:
        pytest.skip(skips[0])
    check_all_ran(wanted, skips=skips, ended=ended)


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def run_on_rank(payload: Mapping[str, Any], real_rank: RealRank) -> dict[str, Any]:
    """Run a test on this process as one of the ranks; a worker calls it.

    Args:
        payload: Node id, rootdir, ini file and options of the test.
        real_rank: This process's rank.

    Returns:
        `outcome`: `passed`, `failed`, `xfailed` or `skipped`; `text`: its description; for
        `xfailed`, `reason` of the mark.
    """
    inside = OnRank(real_rank)
    path, separator, rest = str(payload["nodeid"]).partition("::")
    arguments = [
        f"{Path(str(payload['rootdir']), path)}{separator}{rest}",
        f"--rootdir={payload['rootdir']}",
        *payload["options"],
        # Workers would write the same cache at once.
        "-pno:cacheprovider",
    ]
    if payload["inifile"]:
        # The same ini file, or markers and options would differ from the main session.
        arguments += ["-c", str(payload["inifile"])]
    if not any(point.value == _PLUGIN for point in entry_points(group="pytest11")):
        # Not installed, but loaded with -p. pytest refuses a plugin under two names.
        arguments += ["-p", _PLUGIN]
    # The main session shows the output.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        pytest.main(arguments, plugins=[inside])
    return inside.outcome(printed.getvalue())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """Reports of a phase of a test, such as `call`, before and after marks apply."""

    before: str
    report: pytest.TestReport
    reason: str
    """Text of the exception; empty if there was none."""


class OnRank:
    """Plugin of the session inside a worker: provides the rank and collects the reports."""

    def __init__(self, real_rank: RealRank) -> None:
        self._real_rank = real_rank
        self._phases: list[_Phase] = []
        self._not_collected: list[str] = []
        self._ended = False

    def run(self, item: pytest.Function, wanted: Wanted) -> None:
        """Run a test as this process's rank of a world.

        Raises:
            Refused: If its arguments contradict the mark, or it returned a value.
        """
        import numpy as np
        import torch

        program = program_of(item, wanted)
        rank, base = self._real_rank.rank, wanted.settings.get("seed", 0)
        # The same seeds as for the ranks of a simulated world.
        torch.manual_seed(base + rank)
        random.seed(base + rank)
        # numpy only takes seeds below 2**32.
        np.random.seed((base + rank) % 2**32)
        order = wanted.settings.get("order")
        with self._real_rank.world(wanted.size, order=order, order_seed=base):
            program(rank)
        # Not reached if the program raises or skips.
        self._ended = True

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Publish this rank to the hooks of the plugin."""
        config.stash[ON_RANK] = self

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Collect the report, before and after marks apply."""
        # As the innermost wrapper, it gets the report unchanged; outer ones change the same object.
        report = yield
        reason = "" if call.excinfo is None else str(call.excinfo.value)
        self._phases.append(_Phase(before=report.outcome, report=report, reason=reason))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the reason why a file could not be collected."""
        if report.failed:
            self._not_collected.append(report.longreprtext)

    def outcome(self, printed: str) -> dict[str, Any]:
        """Return the outcome of the test on this rank; see [Note: outcome of a rank].

        Args:
            printed: Output of the session.
        """
        ends = [_end_of(phase) for phase in self._phases if phase.before != "passed"]
        # A failure outweighs an expected one, and both outweigh a skip, in any phase.
        for kind in ("failed", "xfailed", "skipped"):
            for end in ends:
                if end["outcome"] == kind:
                    return {**end, "output": self._output()}
        if self._ended:
            return {"outcome": "passed", "text": "", "output": self._output()}
        # No report of the test: the session ended before it, for example at collection.
        text = "\n".join(self._not_collected) or printed[-_OUTPUT_CHARS_MAX:]
        return {"outcome": "failed", "text": text, "crash": "the worker did not run it"}

    def _output(self) -> dict[str, str]:
        """Return the end of the rank's output during the test, by stream."""
        streams = {"stdout": "capstdout", "stderr": "capstderr"}
        reports = [phase.report for phase in self._phases if phase.report.when == "call"]
        printed = {name: getattr(reports[0], of, "") for name, of in streams.items() if reports}
        return {name: text[-_OUTPUT_CHARS_MAX:] for name, text in printed.items() if text}


def _end_of(phase: _Phase) -> dict[str, str]:
    """Return outcome and text of a phase, with `crash`, a line by which ranks are compared."""
    report, expected = phase.report, getattr(phase.report, "wasxfail", None)
    if phase.before == "skipped":
        return {"outcome": "skipped", "text": phase.reason}
    failed = {"outcome": "failed", "text": report.longreprtext, "crash": _crash_of(report)}
    if expected is not None and report.outcome == "skipped":
        return {**failed, "outcome": "xfailed", "reason": expected}
    return failed


def _crash_of(report: pytest.TestReport) -> str:
    """Return the first line of an exception, without addresses, because these differ by rank."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else crash.message
    return re.sub(r"0x[0-9a-f]+", "0x...", text.partition("\n")[0])
