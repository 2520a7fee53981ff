"""Worker processes shared by the tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zero_sim.backends.team import Ending, Teams

JOBS = "zero_sim_test_jobs"


@pytest.fixture(scope="package")
def teams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teams]:
    """Teams of gloo workers that can import the jobs of jobs.py."""
    folder = tmp_path_factory.mktemp("jobs")
    source = Path(__file__).with_name("jobs.py").read_text()
    folder.joinpath(f"{JOBS}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")
        with Teams() as opened:
            yield opened


@pytest.fixture
def run_job(teams: Teams) -> Callable[..., tuple[Ending, ...]]:
    """Run a job of jobs.py on every worker of a team."""

    def run(name: str, size: int, *, timeout_seconds: float = 600.0, **payload: object):
        return teams.run(
            f"{JOBS}:{name}", {"size": size, **payload}, size=size, timeout_seconds=timeout_seconds
        )

    return run
