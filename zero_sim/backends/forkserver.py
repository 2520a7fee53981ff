"""Fork server: a process that imports once what workers need, then forks them.

Importing torch takes seconds, forking milliseconds. This process never computes, so no thread of
torch is alive when it forks.

`Teams` runs it with the module search path of its own process. Messages are JSON over a connection.
First come the names of the modules to import. Then `{"fork": rank}`, with the descriptor of the
worker's connection, is answered by the process id, and `{"reap": pid}` by the exit status after the
process has ended. The server ends with its connection, and each worker with its own.
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
    """Serve requests until the connection ends."""
    leave_to_owner()
    tell_once()
    collect_seldom()
    for name in json.loads(requests.recv_bytes()):
        importlib.import_module(name)
    # Before the forks, because a collection writes into the pages that they share.
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
    """Serve as a worker, and exit. Nothing of the fork server may run in the child after this."""
    status = 1
    try:
        # While a worker keeps this open, `Teams` would not notice the end of the fork server.
        requests.close()
        from zero_sim.backends.worker import serve

        serve(connection, rank=rank)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
