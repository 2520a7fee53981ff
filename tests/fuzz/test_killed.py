"""Campaigns killed at any moment resume with no case lost or counted twice."""

import json
import subprocess
import sys

KILLS = 25
BATCHES = 200
# One process imports everything once and forks a campaign for each kill: it has no threads. Each
# child dies after a number of lines of Python, which no load changes.
SCRIPT = f"""
import json, os, random, signal, sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tests.fuzz.corpus_reports import HEAD, found, report_of
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

def run(batches, folder=folder):
    plan = Plan(head=HEAD, cases=50 * batches, corpus=folder)
    return run_campaign(plan, pool=Pool(), render=str, on_batch=lambda totals: None)

def count_lines(note):
    def trace(frame, event, arg):
        note()
        return trace
    sys.settrace(trace)

lines = 0
def one_more():
    global lines
    lines += 1

count_lines(one_more)
run(2, folder=folder / "measured")
sys.settrace(None)
for _ in range({KILLS}):
    left = random.randrange(lines)
    def one_less():
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if not child:
        count_lines(one_less)
        run({BATCHES})
        os._exit(0)
    os.waitpid(child, 0)
totals = run({BATCHES})
print(json.dumps({{
    "earlier": totals.earlier_cases, "cases": totals.counts.cases, "batches": totals.batches,
    "keys": totals.counts.keys, "features": totals.coverage.features, "found": len(totals.found),
    "verdicts": totals.counts.verdicts,
}}))
"""


def test_killed_campaigns_lose_no_case_and_count_none_twice(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "corpus")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # If not, every kill came before the first batch or after the last one.
    assert 0 < told.pop("earlier") < 50 * BATCHES, told
    assert told == {
        "cases": 50 * BATCHES,
        "batches": BATCHES,
        "keys": {"a||||": BATCHES},
        "features": {"reload": BATCHES},
        "found": 7,
        "verdicts": {"pass": 50 * BATCHES},
    }
