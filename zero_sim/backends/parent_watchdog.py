"""Worker processes end with the process that started them, however that one ends.

A pool of `concurrent.futures` whose owner is killed leaves its workers behind: each holds the pipe
open that would tell the others.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """Let this process end as soon as its parent has; does nothing where nobody started it.

    To be called once in a process of `multiprocessing`, an initializer of a pool for instance.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        # Nobody is left to hear of what runs here, nor to wait for it.
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
