"""Kinds of params, dense and expert: what a name says about which of the two it is."""

from __future__ import annotations

from typing import Literal


def is_expert(name: str) -> bool:
    """Whether a param is an expert's, which not every rank holds: a part of its name is `experts`.

    Args:
        name: The param's name in the bare model, dotted.
    """
    return "experts" in name.split(".")


def kind_of(name: str) -> Literal["dense", "expert"]:
    """The kind of a param, by its name in the bare model."""
    return "expert" if is_expert(name) else "dense"
