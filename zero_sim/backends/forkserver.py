"""Fork server: a process that imports modules for workers once, then forks workers.

Importing torch takes seconds, forking milliseconds. This process never computes, so torch has no
threads when it forks.

`Teams` starts it with its own module search path. Messages are JSON over a connection. The first
message has the names of modules to import. `{"fork": rank}`, with the descriptor of the worker's
connection, returns the process id. `{"reap": pid}` waits for the process's end and returns its exit
status. The server ends with its connection, and each worker with its own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from zero_sim.host.garbage import collect_seldom, spare_imports
from zero_sim.host.signals import leave_to_owner
from zero_sim.host.warnings_once import show_warnings_once


def main(requests: Connection) -> None:
    """Serve requests until the connection ends."""
    leave_to_owner()
    show_warnings_once()
    collect_seldom()
    for name in json.loads(requests.recv_bytes()):
        importlib.import_module(name)
    # Before forking, because a collection would write into pages that workers share.
    spare_imports()
    while True:
        try:
            request = json.loads(requests.recv_bytes())
        except (EOFError, ConnectionError):
            return
        if "fork" in request:
            with Connection(recv_handle(requests)) as connection:
                answer = os.fork()
                if answer == 0:
                    _be_worker(requests, connection, rank=request["fork"])
        else:
            # Negative if a signal ended the process.
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        requests.send_bytes(json.dumps(answer).encode())


def _be_worker(requests: Connection, connection: Connection, *, rank: int) -> None:
    """Serve as a worker, and exit. The fork server's code must not go on in the child."""
    status = 1
    try:
        # If a worker kept this open, `Teams` would not notice the fork server's end.
        requests.close()
        from zero_sim.backends.worker import serve

        serve(connection, rank=rank)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
