"""Swarm testing: each case has a random subset of the features.

Most real bugs need two or three features at once, and some features hide bugs in other features. If
every case has a little of everything, neither kind is found (Groce et al., Swarm Testing, ISSTA
2012).

[Note: themes]
If each feature is in 40 % of the cases, a combination of five features is in 1 %. If it also needs
a certain model and number of ranks, it is in 0.1 %. A case with a theme has nearly all of the
theme's features, and other features as often as any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_sim.fuzz.choices import Choices
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import ModelName, OptimizerName
from zero_sim.targets import EVERYTHING, Capabilities

_LEVELS = 8
# Average share of features per case, in units of 1 / `_LEVELS`. Cases shrink to the first.
_SHARES = (2, 1, 4, 6)

# Settings by feature. A target must follow the setting. Other features need no support.
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


@dataclass(frozen=True, slots=True)
class Theme:
    """A combination of features for a case."""

    features: frozenset[str] = frozenset()
    """Features, as for `Swarm.on`, that nearly every case with this theme has."""
    without: frozenset[str] = frozenset()
    """Features that no case with this theme has, because they exclude the combination."""
    models: tuple[ModelName, ...] = ()
    """Models to draw from; empty for any model."""
    optimizers: tuple[OptimizerName, ...] = ()
    """Optimizers to draw from instead of the usual one; empty for any optimizer."""
    ranks: tuple[int, ...] = ()
    """Sizes of a dp-cp group to draw from; empty for any size."""
    stages: tuple[int, ...] = ()
    """Stages above 1 to draw from; empty for any stage."""


ANYTHING = Theme()
# Combinations that are too rare without a theme; see [Note: themes].
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
# `ANYTHING` first, because choices shrink to the first value.
THEMES = (ANYTHING,) * (2 * len(_ABOUT)) + _ABOUT
"""Themes to draw from; a third of the cases have one."""


class Swarm:
    """Features of a case, drawn one by one together with the case.

    Args:
        choices: Source of choices.
        able: The target's capabilities.
        has_theme: True if the case may have a `Theme`.
    """

    able: Capabilities
    theme: Theme
    chosen: set[str]
    """Features that the case has so far."""

    def __init__(
        self, choices: Choices, *, able: Capabilities = EVERYTHING, has_theme: bool = False
    ) -> None:
        self._choices = choices
        # A feature is on if its draw from 0 to _LEVELS - 1 is not less than this.
        self._least = _LEVELS - choices.among(_SHARES)
        self.theme = choices.among(THEMES) if has_theme else ANYTHING
        self.able = able
        self.chosen = set()

    def follows(self, path: str) -> bool:
        """Return True if the target follows a setting.

        Args:
            path: Path of the setting in a scenario.
        """
        return path in self.able.follows

    def on(self, feature: str, *, fits: bool = True, often: bool = False) -> bool:
        """Draw a feature; return True if the case has it. Shrinks to False.

        Args:
            feature: Name. False without a draw if the target does not follow the feature's setting.
            fits: True if the case can have it.
            often: True to have it in at least half of the fitting cases, because few cases fit.
        """
        path = _PATHS.get(feature)
        if path is not None and not self.follows(path):
            return False
        # An integer, because bools have no weights. A draw per feature, so that each can shrink
        # separately. Draw even if the feature does not fit: if a case shrinks to fewer ranks, later
        # draws must keep their positions.
        least = min(self._least, _LEVELS // 2) if often else self._least
        # Nearly always on, but it can still shrink to False.
        if feature in self.theme.features:
            least = 1
        fits &= feature not in self.theme.without
        chosen = self._choices.integer(0, _LEVELS - 1) >= least and fits
        if chosen:
            self.chosen.add(feature)
        return chosen
