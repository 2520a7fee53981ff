"""pytest plugin: tests on every rank of a world, and scenario files as tests.

- `@pytest.mark.world_size(4)` runs a test function on four ranks at once. `torch.distributed` works
  as usual in it, and the fixture `rank` is the calling rank. `world_size(2, 4)` makes two tests.
  Keyword arguments configure the simulated world: `order`, `schedule`, `timing`, `seed`, `races`,
  `strict`.
- Under Hypothesis's `@given`, each example is drawn once and runs on all ranks.
- Scenario files are collected from the command line and from the ini option `zero_sim_scenarios`.
  Each case is a test.
- `--zero-sim-backend gloo` runs tests and scenarios on real processes instead.
- `--zero-sim-spawn` turns a test's own processes into simulated ranks.
- A failing scenario leaves a bundle in `--zero-sim-bundles`. The failure shows the commands that
  run the case and replay the bundle. JUnit files and xdist carry them as properties `zero_sim.*`.
- The summary counts scenarios and conformance tests with passes by params only.

torch is imported only if a test needs it. The fixture `simulated_world` opens a plain `World` of a
given size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zero_sim.pytest_plugin.given import allow_rank_fixtures, is_given
from zero_sim.pytest_plugin.mark import (
    MARK,
    WANTED,
    Refused,
    Wanted,
    parametrize_sizes,
    read_mark,
)
from zero_sim.pytest_plugin.processes import ON_RANK, RanksFailed, run_on_processes
from zero_sim.pytest_plugin.ranks import run_simulated
from zero_sim.pytest_plugin.resources import GPUS, RESOURCES, SessionResources
from zero_sim.pytest_plugin.scenarios import ScenarioFile
from zero_sim.pytest_plugin.started import add_options, check_options, processes_as_ranks
from zero_sim.report.commands import DEFAULT_BUNDLES

if TYPE_CHECKING:
    from zero_sim.sim import World

SECONDS_MAX = 10**6


class _EveryRank(int):
    """Value of the fixture `rank` outside the ranks; Hypothesis prints it."""

    def __repr__(self) -> str:
        return "<every rank>"


_RUN: pytest.StashKey[bool] = pytest.StashKey()
"""True once the ranks of a marked test were started."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("zero_sim", "multi-rank tests and scenarios")
    group.addoption(
        "--zero-sim-backend",
        choices=("sim", "gloo", "nccl"),
        default="sim",
        help="Backend of multi-rank tests and scenarios (default: sim).",
    )
    group.addoption(
        "--zero-sim-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="Time after which a rank on real processes counts as hung (default: 60).",
    )
    group.addoption(
        "--zero-sim-bundles",
        default=str(DEFAULT_BUNDLES),
        metavar="DIR",
        help=f"Folder for bundles of failing scenarios (default: {DEFAULT_BUNDLES}).",
    )
    group.addoption(
        "--zero-sim-cuda-is-cpu",
        action="store_true",
        help="Simulate GPUs on the CPU, so that tests that need a GPU are not skipped.",
    )
    group.addoption(
        "--zero-sim-gpus",
        type=int,
        metavar="N",
        help=f"With --zero-sim-cuda-is-cpu: number of simulated GPUs (default: {GPUS}).",
    )
    add_options(parser, group)
    parser.addini(
        "zero_sim_scenarios",
        "Files and folders whose *.toml files are run as scenarios.",
        type="paths",
        default=[],
    )


def _seconds(text: str) -> float:
    """Parse a number of seconds."""
    seconds = float(text)
    if not 0 < seconds <= SECONDS_MAX:
        # argparse reports this type as a usage error.
        raise argparse.ArgumentTypeError(
            f"expected more than 0 and at most {SECONDS_MAX:,} seconds, got {text}."
        )
    return seconds


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, check the options and open the session's resources."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(*sizes, **settings): run the test on every rank of a simulated world, once for "
        "each size. The settings are those of zero_sim.sim.World.",
    )
    # First, so that a wrong option costs nothing.
    check_options(config)
    for path in config.getini("zero_sim_scenarios"):
        if not path.exists():
            raise pytest.UsageError(
                f"expected zero_sim_scenarios to name files and folders, got {path}, which does "
                "not exist. Correct the path in the ini file."
            )
    config.stash[RESOURCES] = SessionResources(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the session's resources."""
    resources = config.stash.get(RESOURCES, None)
    if resources is not None:
        resources.close()


# Tests that run on every rank.


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per size in the mark."""
    parametrize_sizes(metafunc)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """Rank on which the test runs."""
    _wanted(request, "rank")
    # `program_of` passes the real rank when it calls the test.
    return _EveryRank(-1)


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks in the test's world."""
    return _wanted(request, MARK).size


@pytest.fixture
def simulated_world(request: pytest.FixtureRequest) -> Callable[..., World]:
    """Function of size and settings that opens a `World`. Tests share worlds of one size."""
    resources = request.config.stash[RESOURCES]
    return lambda size, **settings: resources.world(size, settings)


def _wanted(request: pytest.FixtureRequest, fixture: str) -> Wanted:
    wanted = request.node.stash.get(WANTED, None)
    if wanted is None:
        # Without a trace, which would show only frames of this plugin.
        pytest.fail(
            f"expected @pytest.mark.{MARK}(n) on {request.node.name}, because it uses the fixture "
            f"`{fixture}`, got no mark. Add the mark.",
            pytrace=False,
        )
    return wanted


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    """Refuse a fixture that uses `rank`, because no rank exists when fixtures are set up."""
    # `tryfirst`, so that the fixture's function does not run.
    if "rank" in fixturedef.argnames and request.node.stash.get(WANTED, None) is not None:
        raise Refused(
            request.node,
            f"expected fixtures without `rank`, because fixtures are set up outside of the ranks, "
            f"got `{fixturedef.argname}`. Return a function from it, and call that with the rank "
            "in the test.",
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run processes of the test and its fixtures as ranks, under `--zero-sim-spawn`."""
    with processes_as_ranks(item.config):
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Read the test's mark before its fixtures are set up."""
    wanted = read_mark(item)
    if wanted is not None:
        item.stash[WANTED] = wanted
        item.stash[_RUN] = False
        if is_given(item):
            allow_rank_fixtures(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test on every rank."""
    # `tryfirst`, because a plugin that calls the function itself would run it on no rank.
    wanted = pyfuncitem.stash.get(WANTED, None)
    if wanted is None:
        return None
    # Before the run, which may raise. A False means that another plugin took the test.
    pyfuncitem.stash[_RUN] = True
    # Set only in a worker's session.
    inside = pyfuncitem.config.stash.get(ON_RANK, None)
    resources = pyfuncitem.config.stash[RESOURCES]
    if inside is not None:
        inside.run(pyfuncitem, wanted)
    elif resources.backend == "sim":
        run_simulated(resources, pyfuncitem, wanted)
    else:
        run_on_processes(resources, pyfuncitem, wanted)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Add the function's properties to the test, and check that this plugin ran it on ranks.

    Raises:
        Refused: If another plugin ran the test.
    """
    yield
    # Set by `zero_sim.testing.conformance`. Importing its constant would import torch.
    found = getattr(getattr(item, "obj", None), "zero_sim_properties", {})
    item.user_properties += [(f"zero_sim.{name}", value) for name, value in found.items()]
    if item.stash.get(WANTED, None) is not None and not item.stash[_RUN]:
        raise Refused(
            item,
            f"expected this plugin to run a test with the mark {MARK}, got a run by another "
            "plugin, on no rank. Remove the mark, or the other plugin's marks and fixtures.",
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the ranks decide if a failure was expected. A wrong mark is never expected."""
    # The outermost wrapper, so marks have already changed the report.
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    is_expected = None
    if isinstance(error, Refused):
        is_expected = False
    elif isinstance(error, RanksFailed):
        is_expected = error.is_expected
    if is_expected:
        assert isinstance(error, RanksFailed)
        # As pytest reports an expected failure.
        report.outcome, report.wasxfail = "skipped", error.reason
    elif is_expected is not None:
        report.outcome = "failed"
        # With this attribute, pytest counts the report as an expected failure or unexpected pass.
        if hasattr(report, "wasxfail"):
            del report.wasxfail
    return report


# Scenario files.


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a scenario file named on the command line or in the ini file."""
    # Most roots contain a pyproject.toml, which is never a scenario.
    if file_path.suffix != ".toml" or file_path.name == "pyproject.toml":
        return None
    folders: list[Path] = parent.config.getini("zero_sim_scenarios")
    wanted = parent.session.isinitpath(file_path) or any(
        file_path.is_relative_to(folder) for folder in folders
    )
    return ScenarioFile.from_parent(parent, path=file_path) if wanted else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count tests that passed by params only, because their dots look like any other."""
    passed = terminalreporter.getreports("passed")
    count = sum(("zero_sim.scope", "params-only") in each.user_properties for each in passed)
    if count:
        terminalreporter.write_line(
            f"zero_sim: {count} passed by params only: neither an averaged gradient nor optimizer "
            "state was compared in some or all of their cases"
        )
