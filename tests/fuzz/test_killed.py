"""Campaigns that are killed at any moment go on without a case lost or counted twice."""

from __future__ import annotations

import json
import subprocess
import sys

KILLS = 25
BATCHES = 100
# One process that imports everything once and forks a campaign for each kill: it has no threads.
SCRIPT = f"""
import json, os, random, signal, sys, time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tests.fuzz.kept_reports import HEAD, found, report_of
from zero_sim.fuzz import campaign
from zero_sim.fuzz.campaign import Plan, run_campaign

class Pool:
    slots = 1

    def prepare(self, *call):
        pass

    def submit(self, run, job, render):
        cases = job.cases - job.start
        report = report_of(job.index, cases=cases, start=job.start, keys={{"a||||": 1}})
        one = found(f"check {{job.index % 7}}", seed=job.index)
        future = Future()
        future.set_result(replace(report, found=(one,), cases_with={{"reload": 1}}))
        return future

    def interrupt(self):
        pass

folder, random = Path(sys.argv[1]), random.Random(7)
campaign.recheck = lambda findings, **options: iter(())

def run(batches, tell=lambda totals: None, folder=folder):
    plan = Plan(head=HEAD, cases=50 * batches, corpus=folder)
    return run_campaign(plan, pool=Pool(), render=str, tell=tell)

run(1, folder=folder / "warm")
for _ in range({KILLS}):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        run({BATCHES}, lambda totals: os.write(writer, b"."))
        os._exit(0)
    # After a few batches, and anywhere in the next one.
    for _ in range(random.randrange(4)):
        os.read(reader, 1)
    time.sleep(random.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
totals = run({BATCHES})
print(json.dumps({{
    "earlier": totals.earlier_cases, "cases": totals.counts.cases, "batches": totals.batches,
    "keys": totals.counts.keys, "features": totals.coverage.features, "found": len(totals.found),
    "verdicts": totals.counts.verdicts,
}}))
"""


def test_no_case_is_lost_or_counted_twice(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "corpus")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # Otherwise every kill came before the first batch or after the last one.
    assert 0 < told.pop("earlier") < 50 * BATCHES, told
    assert told == {
        "cases": 50 * BATCHES,
        "batches": BATCHES,
        "keys": {"a||||": BATCHES},
        "features": {"reload": BATCHES},
        "found": 7,
        "verdicts": {"pass": 50 * BATCHES},
    }
