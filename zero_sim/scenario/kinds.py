"""Kinds of params, dense and expert, and of optimizers: what a name says about which it is."""

from __future__ import annotations

from typing import Literal

from zero_sim.scenario.spec import OptimizerName

WHOLE_PARAM_OPTIMIZERS: tuple[OptimizerName, ...] = ("muon", "lamb")
"""Those whose step of an element depends on its whole param."""


def is_expert(name: str) -> bool:
    """Whether a param is an expert's, which not every rank holds: a part of its name is `experts`.

    Args:
        name: The param's name in the bare model, dotted.
    """
    return "experts" in name.split(".")


def kind_of(name: str) -> Literal["dense", "expert"]:
    """The kind of a param, by its name in the bare model."""
    return "expert" if is_expert(name) else "dense"
