"""Phases of a step, in which a number came to be, in the order of computation."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A phase of a step. What goes wrong in one makes wrong what the later ones compute."""

    LOAD = "load"
    """Before the first step, of a case that is reloaded."""
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    NORM = "norm"
    OPTIMIZER = "optimizer"
    WRITE_BACK = "write-back"
    GATHER = "gather"
