"""Themes of drawn cases: features that meet where something goes wrong, and what they need.

[Note: conjunctions]
What takes five features at once comes up in one case of a hundred where each is in four of ten, and
in one of a thousand where it needs a certain model and number of ranks as well. A case with a theme
has nearly all of the theme's features, and of all others as many as any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_sim.scenario.spec import ModelName


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """What a case is mostly about."""

    features: frozenset[str] = frozenset()
    """Names of features, as `Swarm.on` is asked for them, that nearly every such case has."""
    models: tuple[ModelName, ...] = ()
    """Models to draw from; any where empty."""
    ranks: tuple[int, ...] = ()
    """Ranks of a dp-cp group to draw from; any number where empty."""
    stages: tuple[int, ...] = ()
    """Stages above 1 to draw from; any where empty."""


ANYTHING = Theme()
_ABOUT = (
    Theme(features=frozenset({"loss scale", "overflow", "accumulation"})),
    Theme(features=frozenset({"freeze", "reload", "accumulation", "unused params"})),
    Theme(features=frozenset({"reload", "saved async", "16-bit params", "uneven", "buckets"})),
    Theme(
        features=frozenset(
            {"accumulation", "ranks join", "buckets", "overlap grads", "overlap params", "timing"}
        ),
        ranks=(2, 2, 3),
    ),
    Theme(
        features=frozenset({"summed to all", "16-bit params", "divide", "accumulation"}),
        ranks=(3, 3, 4),
    ),
    Theme(
        features=frozenset(
            {"reduce buffers", "accumulation", "fp32 grads", "16-bit params", "buckets"}
        ),
        stages=(2,),
    ),
    Theme(
        features=frozenset({"stage 2 or 3", "accumulation", "buckets", "prefetch", "timing"}),
        ranks=(2, 2, 3),
        stages=(3,),
    ),
    Theme(
        features=frozenset({"stage 2 or 3", "kept by few", "buckets", "timing"}),
        ranks=(4,),
        stages=(3,),
    ),
    Theme(
        features=frozenset({"split blocks", "checkpoints"}), models=("tp-block",), ranks=(1, 1, 2)
    ),
    Theme(features=frozenset({"copies", "sync every"}), models=("moe",), ranks=(2, 2, 4)),
    Theme(features=frozenset({"reload", "copies", "state over all"}), models=("fp8",)),
)
THEMES = (ANYTHING,) * (2 * len(_ABOUT)) + _ABOUT
"""A third of all cases have one."""
