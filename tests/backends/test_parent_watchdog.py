"""Workers of a pool whose owner process is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

OWNER = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from zero_sim.backends.pool import end_with_parent

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(2, mp_context=context, initializer=end_with_parent)
    print(*{pool.submit(os.getpid).result() for _ in range(2)}, flush=True)
    time.sleep(3600)
"""


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_with_their_owner_even_if_it_is_killed(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        workers = owner.stdout.readline().split()
        assert workers
        assert all(is_running(pid) for pid in workers)
        owner.send_signal(signal.SIGKILL)
    # Nothing else ends this loop: surviving workers would run the test into its time limit.
    while any(is_running(pid) for pid in workers):
        time.sleep(0.05)
