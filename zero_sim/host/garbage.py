"""Garbage collection in zero_sim's own processes, without repeated passes over imported objects.

Torch and its imports create 300,000 permanent objects, and each full collection takes a quarter of
a second to visit them. Several collections during the imports take a quarter of their time.

A foreign process, such as that of a user's tests, keeps its own settings: it calls neither
`collect_seldom` nor `settle_memory`.
"""

from __future__ import annotations

import gc

_THRESHOLDS_SELDOM = (50_000, 20, 1_000)
# Thresholds of this process before `collect_seldom`; empty if they are in place.
_usual: list[tuple[int, int, int]] = []


def collect_seldom() -> None:
    """Collect rarely until `spare_imports`; called in the first lines of a process."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(*_THRESHOLDS_SELDOM)


def spare_imports() -> None:
    """Restore the usual thresholds and exclude present objects, if `collect_seldom` was called."""
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual.pop())


def settle_memory() -> None:
    """Exclude the objects alive now from later collections, in a process that runs many cases.

    Later calls exclude the objects created since.
    """
    if _usual:
        spare_imports()
        return
    # Collected first, because frozen garbage would stay forever.
    gc.collect()
    gc.freeze()
