"""A campaign on a Dask cluster of real processes, one of which is killed."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)

CASES = 200
_QUIET = ("--no-dashboard", "--protocol", "tcp")


def _free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _start(module, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.{module}", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture
def cluster():
    """Start a scheduler with three workers. Yields its address and the workers."""
    address = f"tcp://127.0.0.1:{(port := _free_port())}"
    started = [_start("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), *_QUIET)]
    try:
        workers = [
            _start("dask_worker", address, "--nthreads", "1", "--no-nanny", *_QUIET)
            for _ in range(3)
        ]
        started += workers
        yield address, workers
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait_for_workers(address, count):
    from distributed import Client

    with Client(address) as client:
        client.wait_for_workers(count)


def _fuzz(*options):
    command = [sys.executable, "-m", "zero_sim", "fuzz", "--cases", str(CASES), "--seed", "3"]
    return subprocess.Popen(
        [*command, "--json", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _told(process):
    output, said = process.communicate()
    assert process.returncode == 0, said
    return json.loads(output)


def test_worker_that_is_killed_costs_no_case(cluster, tmp_path):
    address, workers = cluster
    _wait_for_workers(address, 3)
    corpus = tmp_path / "cluster"
    running = _fuzz("--scheduler", address, "--corpus", str(corpus))
    # The kill comes during work: the first batches of all workers have begun and none has ended.
    while not corpus.exists() and running.poll() is None:
        time.sleep(0.05)
    time.sleep(2)
    os.kill(workers[0].pid, signal.SIGKILL)
    on_cluster = _told(running)
    here = _told(_fuzz("--jobs", "1", "--corpus", str(tmp_path / "here")))
    assert on_cluster["cases"] == CASES
    assert on_cluster["lost"] == []
    assert on_cluster["verdicts"] == here["verdicts"]
