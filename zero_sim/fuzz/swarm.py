"""Swarm testing: each case switches on a random subset of the features.

Most real bugs need two or three features at once, and many hide behind others; a generator that
gives every case a little of everything never shows either kind (Groce et al., Swarm Testing, ISSTA
2012).

[Note: conjunctions]
What takes five features at once comes up in one case of a hundred where each is in four of ten, and
in one of a thousand where it needs a certain model and number of ranks as well. A case with a theme
has nearly all of the theme's features, and of all others as many as any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_sim.fuzz.choices import Choices
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import ModelName, OptimizerName
from zero_sim.targets import EVERYTHING, Capabilities

_LEVELS = 8
_SHARES = (2, 1, 4, 6)
"""Of `_LEVELS`: how many of the features a case has on average; the first one is the usual."""

_PATHS = {
    "accumulation": "run.micro_batches",
    "aligned": "system.align_elems",
    "amsgrad": "optimizer.amsgrad",
    "arena": "system.arena",
    "betas": "optimizer.betas",
    "buckets": "system.bucket_elems",
    "buffers by group": "system.buffers_by",
    "checkpoints": "system.checkpoints",
    "copies": "system.redundancy",
    "cp": "topology.cp",
    "decay": "optimizer.weight_decay",
    "divide": "system.divide",
    "distinct start": "model.distinct_start",
    "divide by": "system.divide_by",
    "foreach": "optimizer.foreach",
    "fp32 grads": "system.grad_dtype",
    "freeze": "model.freeze",
    "gather chunks": "system.gather_chunk_elems",
    "gathered after step": "system.gather_after_step",
    "groups": "optimizer.groups",
    "large eps": "optimizer.eps",
    "loss scale": "optimizer.loss_scale",
    "momentum": "optimizer.momentum",
    "nesterov": "optimizer.nesterov",
    "kept after forward": "system.reshard_after_forward",
    "not contiguous": "system.contiguous_grads",
    "offloaded": "system.offload_state",
    "offloaded checkpoints": "system.offload_checkpoints",
    "other buckets": "system.bucket_elems",
    "other param order": "system.param_order",
    "other partition": "system.partition",
    "other reduce buffers": "system.reduce_buffer_elems",
    "one-rank params": "model.one_rank",
    "overlap grads": "system.overlap_grads",
    "overlap params": "system.overlap_params",
    "pp": "topology.pp",
    "prefetch": "system.prefetch",
    "ranks join": "run.own_micro_batches",
    "recomputed": "model.recompute",
    "reduce buffers": "system.reduce_buffer_elems",
    "reload": "reload",
    "reverse": "system.param_order",
    "saved async": "reload.async_steps",
    "shared": "topology.shared",
    "skipped params": "model.skip",
    "split blocks": "topology.tp",
    "summed to all": "system.sum_by",
    "step buffer": "system.step_buffer_elems",
    "sync every": "system.sync",
    "tied": "topology.tied",
    "tied params": "model.tied",
    "tp": "topology.tp",
    "uneven": "system.partition",
    "unused params": "model.unused",
    "warmup": "optimizer.warmup_steps",
}
"""The option that a feature sets, which a target may not follow; all others are no target's."""


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
_KEPT_BY_FEW = {"stage 2 or 3", "kept by few", "buckets", "prefetch", "accumulation"}
_OTHER_EXPERTS = {*_STAGE_3, "groups", "buffers by group", "summed to all"} - {"accumulation"}
_COPIED = {"copies", "state over all", "uneven", "buckets"}
_COPIES_SUMMED_AT_FIRST = {"copies", "uneven", "buckets", "summed to all"}
_WHOLE_PARAMS = {"any optimizer", "copies", "state over all", "groups"}
_ABOUT = (
    Theme(frozenset(_OVERFLOW), without=frozenset({"reload"})),
    Theme(frozenset(_FROZEN)),
    Theme(frozenset(_SAVED)),
    Theme(frozenset(_JOINED), ranks=(2, 2, 3)),
    Theme(frozenset(_OVERLAPPED), without=frozenset({"stage 0", "stage 2 or 3"}), ranks=(2, 3)),
    Theme(frozenset(_AT_FIRST_RANK), ranks=(3, 3, 4)),
    Theme(frozenset(_REDUCED_IN_BUFFERS), stages=(2,)),
    Theme(frozenset(_STAGE_3), ranks=(2, 2, 3), stages=(3,)),
    Theme(
        frozenset(_KEPT_BY_FEW),
        without=frozenset({"copies", "kept after forward"}),
        ranks=(4,),
        stages=(3,),
    ),
    Theme(frozenset(_COPIED), ranks=(2, 4)),
    Theme(frozenset({"copies", "stage 2 or 3", "accumulation"}), ranks=(4, 4, 8), stages=(3,)),
    Theme(frozenset(_COPIES_SUMMED_AT_FIRST), without=frozenset({"state over all"}), ranks=(4,)),
    Theme(frozenset(_WHOLE_PARAMS), optimizers=WHOLE_PARAM_OPTIMIZERS, ranks=(2, 2, 4)),
    Theme(frozenset({"split blocks", "checkpoints"}), models=("tp-block",), ranks=(1, 1, 2)),
    Theme(frozenset({"copies", "sync every"}), models=("moe",), ranks=(2, 2, 4)),
    Theme(frozenset(_OTHER_EXPERTS), models=("moe",), ranks=(1, 2, 2), stages=(3,)),
    Theme(frozenset({"reload", "copies", "state over all"}), models=("fp8",)),
    Theme(frozenset({"cp", "accumulation"}), models=("multi-token",), ranks=(2, 2, 3, 4)),
)
THEMES = (ANYTHING,) * (2 * len(_ABOUT)) + _ABOUT
"""A third of all cases have one."""


class Swarm:
    """Which features one case has: asked feature by feature, while the case is drawn.

    Args:
        choices: What the case is drawn with.
        able: What the target of the case can be asked for.
        has_theme: Whether the case may be about something; see `Theme`.
    """

    able: Capabilities
    theme: Theme
    chosen: set[str]
    """Features that were switched on."""

    def __init__(
        self, choices: Choices, *, able: Capabilities = EVERYTHING, has_theme: bool = False
    ) -> None:
        self._choices = choices
        self._least = _LEVELS - choices.among(_SHARES)
        self.theme = choices.among(THEMES) if has_theme else ANYTHING
        self.able = able
        self.chosen = set()

    def follows(self, path: str) -> bool:
        """Whether the target follows an option.

        Args:
            path: Where a scenario has it.
        """
        return path in self.able.follows

    def on(self, feature: str, *, fits: bool = True, often: bool = False) -> bool:
        """Draw whether the case has a feature; it shrinks to not having it.

        Args:
            feature: What it is called in statistics; one that the target does not follow is off
                without a draw.
            fits: Whether the case could have it. It is drawn all the same, and then off: a case
                that shrinks to fewer ranks must find every later draw in its place.
            often: Whether half of the cases that could have it do, as few could.
        """
        path = _PATHS.get(feature)
        if path is not None and not self.follows(path):
            return False
        # Not a draw of a bool, whose weight could not be chosen; and one draw a feature, so that
        # each can be dropped by itself.
        least = min(self._least, _LEVELS // 2) if often else self._least
        if feature in self.theme.features:
            least = 1
        fits &= feature not in self.theme.without
        chosen = self._choices.integer(0, _LEVELS - 1) >= least and fits
        if chosen:
            self.chosen.add(feature)
        return chosen
