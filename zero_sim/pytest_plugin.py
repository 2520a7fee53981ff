"""pytest plugin: scenario files as tests, and tests that run on every rank of a world.

- `@pytest.mark.world_size(4)` runs the test function on four ranks at once; inside it
  `torch.distributed` works as anywhere, and the fixture `rank` tells which one it is. What else the
  mark takes goes to the simulated world: `order`, `schedule`, `timing`, `seed`, `races`, `strict`.
- A scenario file is collected where it is named on the command line, or lies under a path of the
  ini option `zero_sim_scenarios`; each of its cases is one test.
- `--zero-sim-backend gloo` runs both on real processes instead.
- A scenario that fails leaves a bundle in `--zero-sim-bundles`. How to run it again, the bundle and
  the line that replays it are in the failure and, as `zero_sim.*`, among the test's properties,
  which JUnit files and xdist carry along.

Nothing of torch is imported before a test needs it. A plain `World` may be had as well, from the
fixture `simulated_world`: a function of the size.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from zero_sim.cli_parts import DEFAULT_BUNDLES, replay_command, reproduce_command
from zero_sim.errors import EnvironmentProblem, ScenarioError, ZeroSimError

if TYPE_CHECKING:
    from zero_sim.launch.real import RealRank
    from zero_sim.scenario.spec import Scenario
    from zero_sim.sim import World
    from zero_sim.verify.records import CaseResult

_MARK = "world_size"
_SEAT: pytest.StashKey[RealRank] = pytest.StashKey()
_STAGE: pytest.StashKey[_Stage] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("zero_sim", "multi-rank tests and scenarios")
    group.addoption(
        "--zero-sim-backend",
        choices=("sim", "gloo", "nccl"),
        default="sim",
        help="What carries the collectives of multi-rank tests and scenarios (default: sim).",
    )
    group.addoption(
        "--zero-sim-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="After how long a rank on real processes counts as hung (default: 60).",
    )
    group.addoption(
        "--zero-sim-bundles",
        default=str(DEFAULT_BUNDLES),
        metavar="DIR",
        help=f"Where failing scenarios leave their bundles (default: {DEFAULT_BUNDLES}).",
    )
    parser.addini(
        "zero_sim_scenarios",
        "Files and folders whose *.toml are scenarios to run as tests.",
        type="paths",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and what is opened once a session."""
    config.addinivalue_line(
        "markers",
        f"{_MARK}(size, **world): run the test on every rank of a world of this size; the rest is "
        "handed to zero_sim.sim.World.",
    )
    config.stash[_STAGE] = _Stage(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what was opened."""
    stage = config.stash.get(_STAGE, None)
    if stage is not None:
        stage.close()


class _Stage:
    """Worlds and worker processes of one session, opened when first needed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.backend: Literal["sim", "gloo", "nccl"] = config.getoption("--zero-sim-backend")
        self.timeout_seconds: float = config.getoption("--zero-sim-timeout")
        self.bundles = Path(config.getoption("--zero-sim-bundles"))
        self._stack = contextlib.ExitStack()
        self._worlds: dict[int, World] = {}
        self._judge: Any = None
        self._teams: Any = None

    def world(self, size: int, settings: Mapping[str, Any]) -> World:
        """An open world of a size, with the defaults but for the settings."""
        from zero_sim.sim import World

        world = self._worlds.get(size)
        if world is None or world.closed:
            world = self._worlds[size] = World(size)
            self._stack.callback(world.close)
        # All of them, or what one test sets would stay for the next.
        named = inspect.signature(World).parameters.values()
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        world.configure(**{**defaults, **settings})
        return world

    def teams(self) -> Any:
        """Worker processes for real backends."""
        if self._teams is None:
            from zero_sim.launch.team import Teams

            preload = ("zero_sim.launch.worker", "zero_sim.pytest_plugin")
            self._teams = self._stack.enter_context(Teams(backend=self.backend, preload=preload))
        return self._teams

    def judge(self, scenario: Scenario) -> Any:
        """Judge a scenario's case."""
        if self._judge is None:
            from zero_sim.cli import open_judge

            self._judge = self._stack.enter_context(open_judge(backend=self.backend))
        return self._judge(scenario)

    def write_bundle(self, scenario: Scenario, result: CaseResult) -> str:
        """Write the bundle of a failed case; its id, or nothing where there is none to write.

        Raises:
            OSError: It cannot be written.
        """
        if result.verdict != "fail" or not result.findings:
            return ""
        from zero_sim.bundle import write_bundle

        return write_bundle(scenario, result, folder=self.bundles).name

    def close(self) -> None:
        """Close everything, the latest first."""
        self._stack.close()


# Tests that run on every rank.


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank on which the test runs; -1 while its other fixtures are set up."""
    if request.node.get_closest_marker(_MARK) is None:
        raise pytest.UsageError(
            f"the fixture `rank` needs @pytest.mark.{_MARK}(n) on {request.node.name}"
        )
    return -1


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks on which the test runs."""
    marker = request.node.get_closest_marker(_MARK)
    if marker is None:
        raise pytest.UsageError(
            f"the fixture `world_size` needs @pytest.mark.{_MARK}(n) on {request.node.name}"
        )
    return _size_of(marker)


@pytest.fixture
def simulated_world(request: pytest.FixtureRequest) -> Callable[..., World]:
    """A function of size and settings that gives an open `World`, reused from test to test."""
    stage = request.config.stash[_STAGE]
    return lambda size, **settings: stage.world(size, settings)


def _size_of(marker: pytest.Mark) -> int:
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or marker.args[0] < 1:
        raise pytest.UsageError(
            f"expected @pytest.mark.{_MARK}(n) with one positive integer, got {marker.args}"
        )
    return marker.args[0]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test on every rank."""
    marker = pyfuncitem.get_closest_marker(_MARK)
    if marker is None:
        return None
    size, config = _size_of(marker), pyfuncitem.config
    # Of all fixtures, those that the function names; autouse ones are not handed to it.
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}

    def program(rank: int) -> None:
        own = {"rank": rank} if "rank" in arguments else {}
        pyfuncitem.obj(**{**arguments, **own})

    seat = config.stash.get(_SEAT, None)
    stage = config.stash[_STAGE]
    if seat is not None:
        with seat.world(size):
            program(seat.rank)
    elif stage.backend == "sim":
        _run_simulated(stage.world(size, marker.kwargs), program, pyfuncitem)
    else:
        _run_on_processes(stage, pyfuncitem, size)
    return True


def _run_simulated(
    world: World, program: Callable[[int], None], pyfuncitem: pytest.Function
) -> None:
    from zero_sim.sim import RankFailed, WorldFailure

    settings = _describe(world)
    try:
        world.run(program)
    except RankFailed as failed:
        # The rank's own exception, so that pytest shows its assertion and its line.
        error = failed.error
        error.add_note(f"on rank {failed.rank} of {settings}")
        raise error from None
    except WorldFailure as failed:
        pytest.fail(f"{failed}\nin a world of {settings}", pytrace=False)
    finally:
        pyfuncitem.user_properties.append(("zero_sim.world", settings))


def _describe(world: World) -> str:
    """What decides what a program does in a world."""
    schedule = world.schedule if isinstance(world.schedule, str) else type(world.schedule).__name__
    return (
        f"{world.world_size} ranks, order {world.order.name}, schedule {schedule}, "
        f"timing {world.timing}, seed {world.seed}"
    )


def _run_on_processes(stage: _Stage, pyfuncitem: pytest.Function, size: int) -> None:
    config = pyfuncitem.config
    payload = {
        "nodeid": pyfuncitem.nodeid,
        "rootdir": str(config.rootpath),
        "inifile": "" if config.inipath is None else str(config.inipath),
        "invocation": str(config.invocation_params.dir),
    }
    endings = stage.teams().run(
        "zero_sim.pytest_plugin:run_on_rank",
        payload,
        size=size,
        timeout_seconds=stage.timeout_seconds,
    )
    pyfuncitem.user_properties.append(("zero_sim.world", f"{size} {stage.backend} processes"))
    bad = []
    for ending in endings:
        if ending.how != "done":
            bad.append(f"rank {ending.rank} {ending.how}: {ending.error}\n{ending.detail}")
        elif ending.result["outcome"] == "failed":
            bad.append(f"rank {ending.rank} failed:\n{ending.result['text']}")
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)
    skipped = [ending.result["text"] for ending in endings if ending.result["outcome"] == "skipped"]
    if skipped:
        pytest.skip(skipped[0])


def run_on_rank(payload: Mapping[str, Any], seat: RealRank) -> dict[str, str]:
    """Run one test on this process, as one of its ranks; what a worker calls.

    Args:
        payload: Node id, rootdir and ini file of the test.
        seat: This process's rank.

    Returns:
        The outcome, `passed`, `failed` or `skipped`, and what there is to say of it.
    """
    inside = _OnRank(seat)
    path, separator, rest = str(payload["nodeid"]).partition("::")
    arguments = [
        f"{Path(str(payload['rootdir']), path)}{separator}{rest}",
        f"--rootdir={payload['rootdir']}",
        "-p", "no:xdist", "-p", "no:cacheprovider",
    ]  # fmt: skip
    if payload["inifile"]:
        arguments += ["-c", str(payload["inifile"])]
    if not any(point.value == __name__ for point in entry_points(group="pytest11")):
        # Not installed as a plugin, but named with -p; pytest refuses it under both names.
        arguments += ["-p", __name__]
    # The session that asked shows what there is to show.
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(arguments, plugins=[inside])
    return inside.outcome()


class _OnRank:
    """The plugin of the session inside a worker: it knows the rank and keeps the reports."""

    def __init__(self, seat: RealRank) -> None:
        self._seat = seat
        self._reports: list[pytest.TestReport | pytest.CollectReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[_SEAT] = self._seat

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._reports.append(report)

    def outcome(self) -> dict[str, str]:
        for report in self._reports:
            if report.outcome != "passed":
                return {"outcome": report.outcome, "text": report.longreprtext}
        if not self._reports:
            return {"outcome": "failed", "text": "the test was not found in the worker"}
        return {"outcome": "passed", "text": ""}


# Scenario files.


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect scenario files that were asked for."""
    if file_path.suffix != ".toml" or file_path.name == "pyproject.toml":
        return None
    folders: list[Path] = parent.config.getini("zero_sim_scenarios")
    wanted = parent.session.isinitpath(file_path) or any(
        file_path.is_relative_to(folder) for folder in folders
    )
    return ScenarioFile.from_parent(parent, path=file_path) if wanted else None


class ScenarioFile(pytest.File):
    """A scenario file; each of its cases is a test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Load it and give its cases."""
        from zero_sim.scenario.load import load_cases

        try:
            scenarios = load_cases(self.path)
        except ScenarioError as error:
            raise self.CollectError(str(error)) from None
        for scenario in scenarios:
            yield ScenarioCase.from_parent(self, name=scenario.name, scenario=scenario)


class ScenarioCase(pytest.Item):
    """One case of a scenario file."""

    def __init__(self, *, scenario: Scenario, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scenario = scenario

    def runtest(self) -> None:
        """Run and judge it."""
        stage = self.config.stash[_STAGE]
        result = stage.judge(self.scenario)
        self.user_properties += [
            ("zero_sim.verdict", result.verdict),
            ("zero_sim.compared_elems", result.compared_elems),
        ]
        if result.verdict == "pass":
            return
        reproduce, replay, bundle = self._reproduce(), "", ""
        self.user_properties.append(("zero_sim.reproduce", reproduce))
        try:
            bundle = stage.write_bundle(self.scenario, result)
        except OSError as error:
            # A full disk must not cost the case its verdict.
            said = f"no bundle in {stage.bundles}: {error.strerror}"
            self.add_report_section("call", "zero_sim", said)
        if bundle:
            replay = replay_command(bundle, bundles=stage.bundles)
            self.user_properties += [("zero_sim.bundle", bundle), ("zero_sim.replay", replay)]
        raise CaseFailed(result, reproduce=reproduce, replay=replay)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The findings, not a traceback through the harness."""
        error = excinfo.value
        if isinstance(error, CaseFailed):
            from zero_sim.report.text import render_case
            from zero_sim.scenario.dump import to_chosen_toml

            return render_case(
                error.result,
                case=to_chosen_toml(self.scenario),
                reproduce=error.reproduce,
                replay=error.replay,
            )
        if isinstance(error, EnvironmentProblem):
            return f"this machine cannot run it: {error}"
        if isinstance(error, ZeroSimError):
            return str(error)
        return "".join(traceback.format_exception(error))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where it stands."""
        return self.path, None, f"{self.path.name}: {self.name}"

    def _reproduce(self) -> str:
        return reproduce_command(self.path, self.scenario.name)


class CaseFailed(AssertionError):
    """A case whose verdict is not `pass`."""

    def __init__(self, result: CaseResult, *, reproduce: str, replay: str) -> None:
        super().__init__(f"verdict {result.verdict}")
        self.result = result
        self.reproduce = reproduce
        self.replay = replay
