"""Swarm testing: each case switches on a random subset of the features.

Most real bugs need two or three features at once, and many hide behind others; a generator that
gives every case a little of everything never shows either kind (Groce et al., Swarm Testing, ISSTA
2012).
"""

from __future__ import annotations

from hypothesis import strategies as st

_LEVELS = 8
_SHARES = (2, 1, 4)
"""Of `_LEVELS`: how many of the features a case has on average; the first one is the usual."""


class Swarm:
    """Which features one case has: asked feature by feature, while the case is drawn.

    Args:
        draw: Of the strategy that draws the case.
    """

    chosen: set[str]
    """Features that were switched on."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._least = _LEVELS - draw(st.sampled_from(_SHARES))
        self.chosen = set()

    def on(self, feature: str) -> bool:
        """Draw whether the case has a feature; it shrinks to not having it.

        Args:
            feature: What it is called in statistics.
        """
        # Not a draw of a bool, whose weight could not be chosen; and one draw a feature, so that
        # each can be dropped by itself.
        chosen = self._draw(st.integers(0, _LEVELS - 1)) >= self._least
        if chosen:
            self.chosen.add(feature)
        return chosen
