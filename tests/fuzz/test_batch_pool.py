"""Pools that run batches: processes that may die, and a cluster that may be missing."""

import sys

import pytest

from zero_sim.backends.pool import OwnProcess, is_lost
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz.batch import run_batch
from zero_sim.fuzz.campaign import open_pool
from zero_sim.fuzz.records import Job
from zero_sim.report.text import render_case


def job(tmp_path, **changes):
    usual = {"index": 0, "seed": 1, "cases": 1, "target": "zero_sim", "bundles": str(tmp_path)}
    return Job(**(usual | changes))


def test_one_job_needs_no_process():
    with open_pool(jobs=1) as pool:
        assert isinstance(pool, OwnProcess)


def test_process_that_dies_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    with open_pool(jobs=2) as pool:
        assert pool.slots == 2
        error = pool.submit(run_batch, job(tmp_path, target="deadly:x"), render_case).exception()
        assert error is not None
        assert is_lost(error)
        report = pool.submit(run_batch, job(tmp_path, cases=1), render_case).result()
        assert report.counts.cases == 1


def test_zero_jobs_are_refused():
    with pytest.raises(UsageError, match="at least 1"), open_pool(jobs=0):
        pass


def test_missing_cluster_package_is_an_environment_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    told = pytest.raises(EnvironmentProblem, match=r"zero-sim\[cluster\]")
    with told, open_pool(scheduler="tcp://127.0.0.1:1"):
        pass
