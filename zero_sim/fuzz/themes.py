"""Themes of drawn cases: features that meet where something goes wrong, and what they need.

[Note: conjunctions]
What takes five features at once comes up in one case of a hundred where each is in four of ten, and
in one of a thousand where it needs a certain model and number of ranks as well. A case with a theme
has nearly all of the theme's features, and of all others as many as any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import ModelName, OptimizerName


@dataclass(frozen=True, slots=True)
class Theme:
    """What a case is mostly about."""

    features: frozenset[str] = frozenset()
    """Names of features, as `Swarm.on` is asked for them, that nearly every such case has."""
    without: frozenset[str] = frozenset()
    """Features that it has not, as they would be in the way."""
    models: tuple[ModelName, ...] = ()
    """Models to draw from; any where empty."""
    optimizers: tuple[OptimizerName, ...] = ()
    """Optimizers to draw from where it is not the usual one; any where empty."""
    ranks: tuple[int, ...] = ()
    """Ranks of a dp-cp group to draw from; any number where empty."""
    stages: tuple[int, ...] = ()
    """Stages above 1 to draw from; any where empty."""


ANYTHING = Theme()
_OVERFLOW = {"loss scale", "overflow", "accumulation"}
_FROZEN = {"freeze", "reload", "accumulation", "unused params"}
_SAVED = {"reload", "saved async", "16-bit params", "uneven", "buckets"}
_JOINED = {"accumulation", "ranks join", "buckets", "overlap grads", "overlap params", "timing"}
_OVERLAPPED = {"buckets", "overlap params", "timing", "any order"}
_AT_FIRST_RANK = {"summed to all", "16-bit params", "divide", "accumulation"}
_REDUCED_IN_BUFFERS = {"reduce buffers", "accumulation", "fp32 grads", "16-bit params", "buckets"}
_STAGE_3 = {"stage 2 or 3", "accumulation", "buckets", "prefetch", "timing"}
_OTHER_EXPERTS = {*_STAGE_3, "groups", "buffers by group", "summed to all"} - {"accumulation"}
_COPIED = {"copies", "uneven", "buckets"}
_COPIES_SUMMED_AT_FIRST = {"copies", "uneven", "buckets", "summed to all"}
_WHOLE_PARAMS = {"any optimizer", "copies", "groups"}
_ABOUT = (
    Theme(frozenset(_OVERFLOW), without=frozenset({"reload"})),
    Theme(frozenset(_FROZEN)),
    Theme(frozenset(_SAVED)),
    Theme(frozenset(_JOINED), ranks=(2, 2, 3)),
    Theme(frozenset(_OVERLAPPED), without=frozenset({"stage 0", "stage 2 or 3"}), ranks=(2, 3)),
    Theme(frozenset(_AT_FIRST_RANK), ranks=(3, 3, 4)),
    Theme(frozenset(_REDUCED_IN_BUFFERS), stages=(2,)),
    Theme(frozenset(_STAGE_3), ranks=(2, 2, 3), stages=(3,)),
    Theme(frozenset(_COPIED), ranks=(2, 4)),
    Theme(frozenset(_COPIES_SUMMED_AT_FIRST), ranks=(4,)),
    Theme(frozenset(_WHOLE_PARAMS), optimizers=WHOLE_PARAM_OPTIMIZERS, ranks=(2, 2, 4)),
    Theme(frozenset({"split blocks", "checkpoints"}), models=("tp-block",), ranks=(1, 1, 2)),
    Theme(frozenset({"copies", "sync every"}), models=("moe",), ranks=(2, 2, 4)),
    Theme(frozenset(_OTHER_EXPERTS), models=("moe",), ranks=(1, 2, 2), stages=(3,)),
    Theme(frozenset({"reload", "copies"}), models=("fp8",)),
)
THEMES = (ANYTHING,) * (2 * len(_ABOUT)) + _ABOUT
"""A third of all cases have one."""
