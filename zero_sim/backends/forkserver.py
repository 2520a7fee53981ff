"""The process that bears workers: it imports once what they need, then forks.

Importing torch takes seconds, forking milliseconds. It never computes itself, so that no
thread of torch's is alive when it forks.

`Teams` runs it with the module search path of its own process. It speaks JSON over a connection.
First it gets the names of the modules to import; then `{"fork": rank}` and the descriptor of the
worker's own connection, answered with the process id, and `{"reap": pid}`, answered with the exit
status once it has ended. It ends when the connection does; so does each worker with its own.
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
from zero_sim.host.warnings_once import tell_once


def main(requests: Connection) -> None:
    """Serve until the connection ends."""
    leave_to_owner()
    tell_once()
    collect_seldom()
    for name in json.loads(requests.recv_bytes()):
        importlib.import_module(name)
    # Before the forks, which share its pages until a collection writes into them.
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
            # Negative for a signal.
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        requests.send_bytes(json.dumps(answer).encode())


def _be_worker(requests: Connection, connection: Connection, *, rank: int) -> None:
    """Never comes back: nothing of the fork server's own may run in the child, whatever happens."""
    status = 1
    try:
        # Or nobody would notice that the fork server ended while a worker runs.
        requests.close()
        from zero_sim.backends.worker import serve

        serve(connection, rank=rank)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
