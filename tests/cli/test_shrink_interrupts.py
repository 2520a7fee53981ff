"""Ctrl-C during `zero-sim shrink`: the smallest case so far is kept."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from zero_sim.host.signals import SAME_SECONDS
from zero_sim.rules import judging
from zero_sim.scenario.load import load_scenario
from zero_sim.shrink import size_of

WAITING = """
import time
from pathlib import Path

import torch

from zero_sim.cli.main import main
from zero_sim.backends import stop
from zero_sim.zero.optimizer import DistributedOptimizer

right, calls = DistributedOptimizer.step, []
right_listening = stop.listening


def listening(ask):
    def ask_and_tell():
        ask()
        Path("asked").touch()

    return right_listening(ask_and_tell)


def undivided(self):
    calls.append(self)
    if len(calls) == 12:
        Path("waits").touch()
    while len(calls) >= 12 and not Path("goes-on").exists():
        time.sleep(0.01)
    with torch.no_grad():
        self.ddp.divisor.fill_(1.0)
    return right(self)


DistributedOptimizer.step = undivided
stop.listening = listening
main()
"""
"""The command line with a system that does not divide and that pauses during the search."""


def wait_for(path, process):
    """Wait until a living process has made a file."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@contextmanager
def at_work(folder):
    """Start a search and yield its process in the middle of it."""
    (folder / "one.toml").write_text(
        'schema = 1\n[model]\nname = "mlp"\n[run]\nsteps = 1\nstall_seconds = 600.0\n'
        "[world]\nsize = 3\n"
    )
    command = [sys.executable, "-c", WAITING, "shrink", "one.toml", "--output", "small.toml"]
    with subprocess.Popen(
        [*command, "--seconds", "600"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:  # fmt: skip
        try:
            wait_for(folder / "waits", process)
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the files and the output of a search interrupted once, in a case."""
    folder = tmp_path_factory.mktemp("interrupted")
    with at_work(folder) as process:
        process.send_signal(signal.SIGINT)
        wait_for(folder / "asked", process)
        (folder / "goes-on").touch()
        stdout, stderr = process.communicate()
    (folder / "said").write_text(f"{stdout}{stderr}{process.returncode}\n")
    return folder


def test_interrupted_search_has_the_status_of_its_failing_case(folder):
    said = (folder / "said").read_text()
    assert said.startswith("FAIL  "), said
    assert said.endswith("\n1\n")


def test_interrupt_is_printed(folder):
    said = (folder / "said").read_text()
    assert re.search("  smallest .* s; interrupted, a smaller one may exist\n", said)


def test_smallest_case_so_far_is_written(folder):
    small = load_scenario(folder / "small.toml")
    assert size_of(small) < size_of(load_scenario(folder / "one.toml"))


def test_bundle_of_the_smallest_case_is_written(folder):
    (bundle,) = (folder / ".zero-sim/bundles").iterdir()
    small = load_scenario(folder / "small.toml")
    assert load_scenario(bundle / "case.toml").model == small.model


def test_interrupt_is_in_json(invoke, broken, monkeypatch):
    broken(True)
    judge, count = judging.run_case, 0

    def interrupting(scenario, **options):
        nonlocal count
        count += 1
        if count == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return judge(scenario, **options)

    monkeypatch.setattr(judging, "run_case", interrupting)
    told = json.loads(invoke("shrink", "one.toml", "--json").stdout)
    assert (told["stopped"], told["complete"], told["cases"]) == ("interrupt", False, 3)


def test_second_interrupt_ends_at_once(tmp_path):
    with at_work(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        wait_for(tmp_path / "asked", process)
        # Two interrupts in quick succession count as one.
        time.sleep(SAME_SECONDS)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, "Interrupted.\n")
    assert not (tmp_path / "small.toml").exists()
