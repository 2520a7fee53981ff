"""The collector's memory: what is loaded stays loaded, so that it need not be looked at again."""

from __future__ import annotations

import gc


def settle_memory() -> None:
    """Keep what is alive now out of every later collection, for a process with many cases to run.

    Torch and what it loads are 300,000 objects, which a collection takes a quarter of a second to
    walk through. What is called later settles what was loaded since.
    """
    gc.collect()
    gc.freeze()
