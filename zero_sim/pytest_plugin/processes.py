"""A marked test on worker processes. Each of them runs a pytest session.

[Note: outcome of a rank]
Marks such as `xfail` apply twice: in every worker and in the main session. So a worker reports its
rank's outcome without these marks, and separately if they expect a failure. Only the worker can
decide this, because it has the exception. If all ranks pass, the main session applies the marks.
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
    """Failure of a test on worker processes.

    Args:
        message: Failures by rank.
        is_expected: True if marks expect every failure. None if pytest must decide, because no rank
            lived to report a failure.
        reason: The mark's reason.
    """

    # pytest's summaries show the qualified name; keep it short.
    __module__ = "builtins"

    def __init__(self, message: str, *, is_expected: bool | None, reason: str) -> None:
        super().__init__(message, pytrace=False)
        self.is_expected = is_expected
        self.reason = reason


def run_on_processes(resources: SessionResources, item: pytest.Function, wanted: Wanted) -> None:
    """Run a test on worker processes, one per rank.

    Raises:
        Refused: If the mark's settings are invalid.
        RanksFailed: If a rank failed, died or hung.
    """
    if is_given(item):
        pytest.skip(
            "@given needs simulated ranks, because each process would draw its own examples"
        )
    # Before the workers do it, so that errors are the same as in the simulated world.
    program_of(item, wanted)
    _check_settings(item, wanted)
    order = wanted.settings.get("order")
    about = f"{wanted.size} {resources.backend} processes" + (f", order {order}" if order else "")
    item.user_properties.append(("zero_sim.world", about))
    config = item.config
    # Only plain data can be sent to the workers.
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
            # A mark's limit overrides that of the option.
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
    """Return the options that a worker's session needs to collect the same test."""
    option = config.option
    options = [f"--import-mode={option.importmode}"]
    options += [f"-p{name}" for name in option.plugins]
    options += [f"-W{each}" for each in option.pythonwarnings or ()]
    options += [f"-o{each}" for each in option.override_ini or ()]
    options += ["--runxfail"] if option.runxfail else []
    options += ["--noconftest"] if option.noconftest else []
    options += [f"--confcutdir={option.confcutdir}"] if option.confcutdir else []
    # Not -p no:xdist, because the ini file may contain xdist's options.
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
    # Ranks usually fail alike, so show each distinct failure once.
    failed = [
        f"{_ranks_in_words([each.rank for each in endings])}: {crash}\n{endings[0].result['text']}"
        for crash, endings in alike.items()
    ]
    bad = failed + bad
    bad += [f"rank {rank} skipped: {reason}" for rank, reason in skips.items()] if bad else []
    # With a failure, skips help to explain it. Without one, they are judged below.
    if bad:
        # All of them: a mark on one rank's failure must not excuse another failure.
        is_expected = all(each["outcome"] == "xfailed" for each in failures) if failures else None
        reason = failures[0]["reason"] if is_expected else ""
        raise RanksFailed("\n".join(bad), is_expected=is_expected, reason=reason)
    if len(skips) == wanted.size:
        pytest.skip(skips[0])
    check_all_ran(wanted, skips=skips, ended=ended)


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def run_on_rank(payload: Mapping[str, Any], real_rank: RealRank) -> dict[str, Any]:
    """Run a test in this worker process as one rank.

    Args:
        payload: Node id, rootdir, ini file and options of the test.
        real_rank: This process's rank.

    Returns:
        `outcome` (`passed`, `failed`, `xfailed` or `skipped`), `text` that describes it, and for
        `xfailed` the mark's `reason`.
    """
    inside = OnRank(real_rank)
    path, separator, rest = str(payload["nodeid"]).partition("::")
    arguments = [
        f"{Path(str(payload['rootdir']), path)}{separator}{rest}",
        f"--rootdir={payload['rootdir']}",
        *payload["options"],
        # Or all workers would write one cache at once.
        "-pno:cacheprovider",
    ]
    if payload["inifile"]:
        # Or markers and options would differ from the main session.
        arguments += ["-c", str(payload["inifile"])]
    if not any(point.value == _PLUGIN for point in entry_points(group="pytest11")):
        # The plugin is not installed but loaded with -p. pytest refuses it under two names.
        arguments += ["-p", _PLUGIN]
    # The reports contain the test's output, and the main session shows it.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        pytest.main(arguments, plugins=[inside])
    return inside.outcome(printed.getvalue())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """Report of one phase of a test, such as `call`."""

    before: str
    """Outcome before marks apply."""
    report: pytest.TestReport
    reason: str
    """Exception text; empty without an exception."""


class OnRank:
    """Plugin for a worker's session: provides the rank and collects the reports."""

    def __init__(self, real_rank: RealRank) -> None:
        self._real_rank = real_rank
        self._phases: list[_Phase] = []
        self._not_collected: list[str] = []
        self._ended = False

    def run(self, item: pytest.Function, wanted: Wanted) -> None:
        """Run a test as this process's rank.

        Raises:
            Refused: If the arguments contradict the mark, or the test returned a value.
        """
        import numpy as np
        import torch

        program = program_of(item, wanted)
        rank, base = self._real_rank.rank, wanted.settings.get("seed", 0)
        # Seeded like the ranks of a simulated world.
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
        """Publish this rank to the plugin's hooks."""
        config.stash[ON_RANK] = self

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Collect a report together with its outcome before marks apply."""
        # The innermost wrapper, so marks have not changed the report yet. They change this object.
        report = yield
        reason = "" if call.excinfo is None else str(call.excinfo.value)
        self._phases.append(_Phase(before=report.outcome, report=report, reason=reason))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the error of a failed collection."""
        if report.failed:
            self._not_collected.append(report.longreprtext)

    def outcome(self, printed: str) -> dict[str, Any]:
        """Return the test's outcome on this rank; see [Note: outcome of a rank]."""
        ends = [_end_of(phase) for phase in self._phases if phase.before != "passed"]
        # In any phase, a failure outweighs an expected failure, and both outweigh a skip.
        for kind in ("failed", "xfailed", "skipped"):
            for end in ends:
                if end["outcome"] == kind:
                    return {**end, "output": self._output()}
        if self._ended:
            return {"outcome": "passed", "text": "", "output": self._output()}
        # The session ended before the test, for example at collection.
        text = "\n".join(self._not_collected) or printed[-_OUTPUT_CHARS_MAX:]
        return {"outcome": "failed", "text": text, "crash": "the worker did not run it"}

    def _output(self) -> dict[str, str]:
        """Return the end of the test's output, by stream."""
        streams = {"stdout": "capstdout", "stderr": "capstderr"}
        reports = [phase.report for phase in self._phases if phase.report.when == "call"]
        printed = {name: getattr(reports[0], of, "") for name, of in streams.items() if reports}
        return {name: text[-_OUTPUT_CHARS_MAX:] for name, text in printed.items() if text}


def _end_of(phase: _Phase) -> dict[str, str]:
    """Return a phase's outcome and text. Ranks with the same `crash` failed alike."""
    report, expected = phase.report, getattr(phase.report, "wasxfail", None)
    if phase.before == "skipped":
        return {"outcome": "skipped", "text": phase.reason}
    failed = {"outcome": "failed", "text": report.longreprtext, "crash": _crash_of(report)}
    if expected is not None and report.outcome == "skipped":
        return {**failed, "outcome": "xfailed", "reason": expected}
    return failed


def _crash_of(report: pytest.TestReport) -> str:
    """Return an exception's first line, without addresses, because they differ by rank."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else crash.message
    return re.sub(r"0x[0-9a-f]+", "0x...", text.partition("\n")[0])
