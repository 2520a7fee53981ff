"""Garbage collection in processes of the project's own: never again through what imports made.

Torch and what it loads are 300,000 objects that stay, and a collection takes a quarter of a second
to walk through them. While they are made several do: a quarter of the time of the imports.

How a process of somebody else collects, as that of their tests, is theirs to say: it calls neither
`collect_seldom` nor `settle_memory`.
"""

from __future__ import annotations

import gc

_THRESHOLDS_SELDOM = (50_000, 20, 1_000)
_usual: list[tuple[int, int, int]] = []
"""The thresholds of this process, while it collects seldom."""


def collect_seldom() -> None:
    """Collect seldom until `spare_imports`; for the first lines of a process."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(*_THRESHOLDS_SELDOM)


def spare_imports() -> None:
    """Collect as usual again, but not what is there now; nothing where it does anyway."""
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual.pop())


def settle_memory() -> None:
    """Keep what is alive now out of every later collection, for a process with many cases to run.

    What is called later settles what was loaded since.
    """
    if _usual:
        spare_imports()
        return
    gc.collect()
    gc.freeze()
