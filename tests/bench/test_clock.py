"""Processor time of a process tree."""

import subprocess
import sys

from zero_sim.bench.cases import pairs, ratio, tree_seconds

_WORK = "import time; began = time.process_time()\nwhile time.process_time() - began < {}: pass"


def spend(seconds):
    subprocess.run([sys.executable, "-c", _WORK.format(seconds)], check=True)


def test_time_of_an_ended_process_counts():
    began = tree_seconds()
    spend(0.2)
    assert tree_seconds() - began >= 0.2


def test_time_of_a_living_process_counts():
    began = tree_seconds()
    code = f"{_WORK.format(0.2)}\nprint(flush=True)\ninput()"
    living = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    living.stdout.readline()
    counted = tree_seconds() - began
    living.communicate("\n")
    assert counted >= 0.2


def test_pair_contains_the_time_of_each():
    ((one, other),) = pairs(lambda: spend(0.3), lambda: None, 1)
    assert one >= 0.3
    assert other < one


def test_ratio_is_the_median_of_pairs():
    assert ratio([(1.0, 1.0), (6.0, 2.0), (100.0, 1.0)]) == 3.0
