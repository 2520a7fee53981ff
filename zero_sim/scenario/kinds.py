"""Param kinds (dense and expert), optimizers and models, by name."""

from __future__ import annotations

import re
from typing import Literal, TypeGuard

from zero_sim.scenario.spec import OptimizerName, OwnModelName, Scenario

WHOLE_PARAM_OPTIMIZERS: tuple[OptimizerName, ...] = ("muon", "lamb")
"""Optimizers whose steps need whole params, not only a rank's elements."""

OWN_MODEL = r"own:[A-Za-z0-9_.-]+"
"""Pattern for names of a target's own models."""


def is_own_model(name: object) -> TypeGuard[OwnModelName]:
    """Return True for the name of a target's own model."""
    return isinstance(name, str) and re.fullmatch(OWN_MODEL, name) is not None


def may_gather_again(scenario: Scenario) -> bool:
    """Return True if a forward at stage 3 may use a module or a tied param twice.

    A rank may then gather its params twice, which closed forms do not count.
    """
    name = scenario.model.name
    # Only `gpt` among the shipped models uses a block twice; own models are unknown.
    return scenario.system.stage == 3 and (name == "gpt" or is_own_model(name))


def is_expert(name: str) -> bool:
    """Return True for an expert's param: its name in the bare model has a part `experts`."""
    return "experts" in name.split(".")


def kind_of(name: str) -> Literal["dense", "expert"]:
    """Return a param's kind by its name in the bare model."""
    return "expert" if is_expert(name) else "dense"
