"""Those who run batches: processes that may die, and a cluster that may not be there."""

import sys

import pytest

from zero_sim.backends.pool import OwnProcess, is_lost
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz.batch_pool import open_batch_pool
from zero_sim.fuzz.records import Job
from zero_sim.report.text import render_case


def job(tmp_path, **changes):
    usual = {"index": 0, "seed": 1, "cases": 1, "target": "zero_sim", "bundles": str(tmp_path)}
    return Job(**(usual | changes))


def test_one_job_needs_no_process():
    with open_batch_pool(render=render_case, jobs=1) as batch_pool:
        assert isinstance(batch_pool.pool, OwnProcess)


def test_a_process_that_dies_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    with open_batch_pool(render=render_case, jobs=2) as batch_pool:
        assert batch_pool.slots == 2
        error = batch_pool.submit(job(tmp_path, target="deadly:x")).exception()
        assert error is not None
        assert is_lost(error)
        report = batch_pool.submit(job(tmp_path, cases=1)).result()
        assert report.cases == 1


def test_no_jobs_cannot_be():
    with pytest.raises(UsageError, match="at least 1"), open_batch_pool(render=render_case, jobs=0):
        pass


def test_without_its_package_a_cluster_is_a_problem_of_the_machine(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    told = pytest.raises(EnvironmentProblem, match=r"zero-sim\[cluster\]")
    with told, open_batch_pool(render=render_case, scheduler="tcp://127.0.0.1:1"):
        pass
