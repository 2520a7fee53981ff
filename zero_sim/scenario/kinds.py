"""Kinds of params, dense and expert, and of optimizers: what a name says about which it is."""

from __future__ import annotations

import re
from typing import Literal, TypeGuard

from zero_sim.scenario.spec import OptimizerName, OwnModelName, Scenario

WHOLE_PARAM_OPTIMIZERS: tuple[OptimizerName, ...] = ("muon", "lamb")
"""Those whose step of an element depends on its whole param."""

OWN_MODEL = r"own:[A-Za-z0-9_.-]+"
"""Form of the name of a model that a target brings."""


def is_own_model(name: object) -> TypeGuard[OwnModelName]:
    """True for the name of a model that a target brings."""
    return isinstance(name, str) and re.fullmatch(OWN_MODEL, name) is not None


def may_gather_again(scenario: Scenario) -> bool:
    """True if a forward at stage 3 may use a module, or a tied param, in two places.

    A rank may have to gather its params for each, which closed forms of calls do not count.
    """
    name = scenario.model.name
    return scenario.system.stage == 3 and (name == "gpt" or is_own_model(name))


def is_expert(name: str) -> bool:
    """Whether a param is an expert's, which not every rank holds: a part of its name is `experts`.

    Args:
        name: The param's name in the bare model, dotted.
    """
    return "experts" in name.split(".")


def kind_of(name: str) -> Literal["dense", "expert"]:
    """The kind of a param, by its name in the bare model."""
    return "expert" if is_expert(name) else "dense"
