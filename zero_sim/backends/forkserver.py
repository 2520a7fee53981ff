"""The process that bears workers: it imports once what they need, then forks.

Importing torch takes seconds, forking milliseconds. It never computes itself, so that no
thread of torch's is alive when it forks.

`Teams` runs it with the module search path of its own process. It speaks JSON lines. On stdin first
`{"address": ..., "authkey": hex, "preload": [module, ...]}`; then `{"fork": {"rank": ...}}`,
answered with `{"pid": ...}`, and `{"reap": pid}`, answered with `{"status": ...}` once it has
ended, or `{"ended": pid}`, answered at once, with a status of null where it runs. It ends when
stdin does; workers end with the connection to who asked for them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Client
from typing import Any

from zero_sim.host.garbage import collect_seldom, spare_imports
from zero_sim.host.signals import leave_to_owner
from zero_sim.host.warnings_once import tell_once


def main() -> None:
    """Serve until stdin ends."""
    # Answers go to who asked; what an imported module prints must not be among them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    leave_to_owner()
    tell_once()
    collect_seldom()
    settings = json.loads(sys.stdin.readline())
    for name in settings["preload"]:
        importlib.import_module(name)
    # Before the forks, which share its pages until a collection writes into them.
    spare_imports()
    for line in sys.stdin:
        request = json.loads(line)
        if "fork" in request:
            answer = {"pid": _fork(settings, request["fork"])}
        elif "ended" in request:
            answer = {"status": _look(request["ended"])}
        else:
            answer = {"status": _reap(request["reap"])}
        print(json.dumps(answer), file=answers, flush=True)


def _fork(settings: Mapping[str, Any], who: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _be_worker(settings, who)
    return pid


def _be_worker(settings: Mapping[str, Any], who: Mapping[str, Any]) -> None:
    """Never comes back: nothing of the fork server's own may run in the child, whatever happens."""
    status = 1
    try:
        # The fork server's stdin is not the child's to read, nor to keep open.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        connection = Client(settings["address"], authkey=bytes.fromhex(settings["authkey"]))
        connection.send_bytes(json.dumps({**who, "pid": os.getpid()}).encode())
        from zero_sim.backends.worker import serve

        serve(connection, rank=who["rank"])
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _look(pid: int) -> int | None:
    """The exit status of a worker that has ended, which is left to be reaped; None if it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _reap(pid: int) -> int:
    """Wait for a worker that has ended or was killed; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
