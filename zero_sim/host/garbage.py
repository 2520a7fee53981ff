"""Faster garbage collection in zero_sim's own processes.

torch and its imports create 300,000 permanent objects. Each full collection takes 0.25 s to visit
them, and collections during the imports take a quarter of the import time.

Foreign processes, such as a user's tests, keep their own settings.
"""

from __future__ import annotations

import gc

_THRESHOLDS_SELDOM = (50_000, 20, 1_000)
# Thresholds before `collect_seldom`; empty if they are in place.
_usual: list[tuple[int, int, int]] = []


def collect_seldom() -> None:
    """Collect rarely until `spare_imports`. Called in the first lines of a process."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(*_THRESHOLDS_SELDOM)


def spare_imports() -> None:
    """Undo `collect_seldom` if it was called, and exclude current objects from collections."""
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual.pop())


def settle_memory() -> None:
    """Exclude current objects from later collections, in processes for many cases."""
    if _usual:
        spare_imports()
        return
    # Collect first, because frozen garbage would stay forever.
    gc.collect()
    gc.freeze()
