"""Numerics: the arithmetic that a target declares.

Declarations are facts, never tolerances. They turn the target's case into the case and rules that
the reference replays, so the reference does not depend on targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from zero_sim.errors import Problem, UsageError
from zero_sim.reference import (
    AVERAGES,
    CLIP_FORMS,
    DIVIDE_RULES,
    NORMS,
    POSITION_FREE,
    ROOTED,
    ClipForm,
    ClipFunction,
    DivideEach,
    DivideRule,
    GradDtype,
    Masters,
    NonFiniteRule,
    Norm,
    Rules,
    ScaleLoss,
    ScaleLossFunction,
    Sync,
    Unused,
    takes_root,
)
from zero_sim.scenario.fields import show
from zero_sim.scenario.spec import Scenario

ReportedGrads = Literal["before-division", "after-division", "after-clip", "after-unscale"]
"""Point in a step at which gradients are reported."""
ReportedDtype = Literal["sum", "param", "fp32"]
"""Dtype of reported gradients: the sum's, the params', or fp32."""

# The reference replays a case with this word, and takes the exact rule from `Numerics.rules`.
_NEAREST_WORDS: dict[str, Literal["none", "pre", "post", "premul"]] = {
    "premul-fp32": "premul",
    "post-rounded": "post",
    "postmul": "post",
    "postmul-rounded": "post",
}
"""The nearest `system.divide` for each rule that scenarios lack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """A target's arithmetic. Fields that are None follow the scenario.

    If the arithmetic depends on the case, declare a function: `def numerics(self, scenario)`.

    Example:
        Rules of torch's DDP with `clip_grad_norm_`:

        >>> Numerics(divide="premul", norm="of-params", clip="fp32-reciprocal").reported_at
        'before-division'
    """

    # A function takes `LossRows` and not the case, because rows differ by rank and micro-batch.
    scale_loss: ScaleLoss | ScaleLossFunction | None = None
    """Factor of each micro-batch's loss before its backward. The reference multiplies the same loss
    by the same number. `divide` and `divide_by` still apply to the sum over ranks.

    - None: 1.
    - `micro-batches`: 1 / `run.micro_batches`, as in torchtitan and accelerate.
    - `tokens`: number of ranks / rows on all ranks in the step, as in verl and prime-rl. Engines
      sum the rows that they get in `start_step`.
    - `cp`, `1/cp`: number of context-parallel ranks (`topology.cp`), or its reciprocal.
    - A pure function from `LossRows` to the factor."""
    scale_second: ScaleLoss | ScaleLossFunction | None = None
    """Factor of a second loss, such as a multi-token prediction or expert balance loss, if
    `backward_terms` scales it separately. Values as for `scale_loss`; None for the same factor as
    the main loss."""
    # The forms of division differ in the last bit unless the number of ranks is a power of two.
    divide: DivideRule | Literal["avg"] | None = None
    """Division that turns the sum over ranks into a mean.

    - Before the sum, in the gradient's dtype: `pre` divides; `premul` multiplies by the reciprocal
      rounded to that dtype; `premul-fp32` multiplies by the fp32 reciprocal.
    - After the sum: `post` divides in fp32; `post-rounded` divides in the sum's dtype; `postmul`
      and `postmul-rounded` multiply by the fp32 reciprocal instead.
    - `avg`: the collective's AVG. This is `post-rounded`, except on NCCL, whose rings multiply by
      the rounded reciprocal before the sum (`premul`).
    - `none`: no division.

    DDP: `premul`. Its default comm hook and DeepSpeed's stages 1 to 3: `pre`. Megatron-LM:
    `premul-fp32`. FSDP2: `avg`. DeepSpeed's stage 0: `postmul-rounded`."""
    divide_by: Literal["ranks", "micro-batches", "tokens"] | float | None = None
    """Divisor: a count, or a number such as 7.0, as in FSDP2's set_gradient_divide_factor."""
    # In 16 bits, a single division could underflow before the sum, or the sum overflow before it.
    predivide_by: float | None = None
    """Divisor before the sum, above 0. The rest of the division comes after the sum. Both follow
    `divide`, which must be a rule for after the sum. Used by FSDP1, FSDP2 in fp16, and DeepSpeed's
    prescale_gradients."""
    divide_each: DivideEach = "step"
    """If ranks are summed after every micro-batch: divide the total (`step`), or each sum
    (`round`)."""
    # Decides whether micro-batches or ranks are added first.
    sync: Sync | None = None
    """Sum over ranks: after the `last` micro-batch, or after `every` micro-batch. With
    `every-in-block`, shard groups (`system.redundancy`) sum after every micro-batch, and replicas
    once at the end, as in HSDP."""
    grad_dtype: Literal["param", "fp32"] | None = None
    """Dtype in which gradients are accumulated and reduced."""
    accumulate_dtype: GradDtype | None = None
    """Dtype in which gradients are accumulated, if it differs from the reduction's. With `sync =
    "every"`, the sums over ranks are added in this dtype."""
    reduce_dtype: GradDtype | None = None
    """Dtype in which ranks are summed, if it differs, as with DDP's compression hooks or FSDP's
    reduce_dtype."""
    replica_dtype: GradDtype | None = None
    """Dtype in which shard group sums are added over the replicas (`system.redundancy`), if it
    differs."""
    # These differ because momentum and weight decay move a param even if its gradient is zero.
    unused: Unused = "zeros"
    """Treatment of a param that no rank used in a step: stepped with a `zeros` gradient, or
    `left-alone`, as torch's optimizers do if `.grad` is None."""
    nonfinite: NonFiniteRule = "stepped"
    """Treatment of a step with NaN or infinite gradients if losses are not scaled. `stepped`: as
    any other step, so cases contain none. `skipped`: nothing is updated. `raises`: nothing is
    updated, and `step` raises an ArithmeticError, RuntimeError or ValueError on every rank, like
    `clip_grad_norm_(error_if_nonfinite=True)`. Training goes on with the next step."""
    # The reference has the gradient at every point, so it can compare any of them.
    reported_grads: ReportedGrads | None = None
    """Point in the step at which `parts` or `.grad` report gradients.

    - `before-division`: as returned by the collective, before any division after the sum.
    - `after-division`: as means.
    - `after-unscale`: in fp32, without the loss scale, not clipped.
    - `after-clip`: as passed to the optimizer.
    - None: compared as `before-division`. If a gradient differs, zero_sim finds the point by
      running cases on 3 ranks, with SGD if the target supports it.

    If an engine reports masters and state without gradients, return `OwnedPart(grad=None)`."""
    reported_dtype: ReportedDtype = "sum"
    """Dtype of reported gradients: the sum's, the params', or fp32."""
    # A norm of rounded norms has other bits than the root of a single fp64 sum.
    norm: Norm = "of-elements"
    """Computation of the gradient norm. With any value but `of-elements`, a target cannot clip with
    tp or pp, or in an unknown order.

    - `of-elements`: the root of a single fp64 sum over all ranks, rounded to fp32 once.
    - `of-params`: each rank takes the fp32 norm of each whole gradient, and the fp32 norm of these,
      as in `torch.nn.utils.clip_grad_norm_`.
    - `of-rows`: the same for ranks with rows of gradients; one call adds the squared norms.
    - `of-own-params`: each rank takes a norm of each of its parts of params, and the norm of these;
      one fp32 call adds the squares, as in fairscale's OSS and Megatron-LM.
    - `of-shards`: the same, with a single norm over the rank's whole shard.
    - `of-squares`: each rank takes `shard.square().sum()`; one fp32 call adds these sums.
    - `reported`: the norm that the engine reports, in fp32 or fp64, without comparison."""
    # All forms are mathematically equal, but differ by a few ulps in fp32.
    clip: ClipForm | ClipFunction = "fp32-division"
    """Computation of the clip coefficient: `WHERE-FORM`, or `WHERE-FORM-without-eps` if 1e-6 is not
    added. WHERE is

    - `fp32`: in fp32 tensors, from the fp32 norm.
    - `fp64`: in Python floats from the fp32 norm, rounded once.
    - `fp64-root`: the same, from a root that was never rounded to fp32.

    FORM is

    - `division`: min(1, bound / (norm + 1e-6)).
    - `reciprocal`: bound * (1 / (norm + 1e-6)).
    - `inverse`: 1 / ((norm + 1e-6) / bound).
    - `quotient`: gradients are divided by max(1, (norm + 1e-6) / bound).

    Alternatively, a pure function from the 0-D norm and the bound to the coefficient, which is
    rounded to fp32. If the norm is reported in fp64, the function gets it unrounded.

    `torch.nn.utils.clip_grad_norm_` and FSDP: `fp32-reciprocal`. `torch.clamp(bound / (norm +
    1e-6), max=1.0)`: `fp32-reciprocal` if the bound is a Python number, `fp32-division` if it is a
    tensor, as in fairscale. Megatron-LM: `fp64-division`, or `fp64-root-division` if the root is
    taken in Python. DeepSpeed and ColossalAI: `fp32-inverse` if the norm is a tensor,
    `fp64-inverse` or `fp64-root-inverse` if it is a Python number. The LAMB kernels of apex:
    `fp32-quotient-without-eps`."""
    grads_in_params: bool = False
    """True if tensors from `params` have the reduced gradient in `.grad` after a step, at the point
    declared in `reported_grads`."""

    # Without masters, updates smaller than half an ulp of the param's dtype are lost.
    masters: Masters = "fp32"
    """Tensors that the optimizer steps: `fp32` masters, or the working params (`param`). With
    `param`, gradients are rounded to the param's dtype after clipping."""
    # Bounds are proven element by element.
    elementwise: bool = False
    """True if the target has its own update rule, and an element's step depends only on the
    element's value, gradient and state. Cases with an unknown order need such a rule."""

    def __post_init__(self) -> None:
        """Check each field, and that fields do not contradict each other.

        Raises:
            UsageError: A field has an unknown value, or two fields contradict each other.
        """
        for name, choices in _WORDS.items():
            value = getattr(self, name)
            # Functions are checked when they are used, numbers below.
            if name in ("clip", "scale_loss", "scale_second") and callable(value):
                continue
            if name == "divide_by" and _is_number(value):
                continue
            check_word(f"Numerics.{name}", value, choices)
        # Words of `divide_by` have been checked above.
        for name in ("divide_by", "predivide_by"):
            value = getattr(self, name)
            if not isinstance(value, str) and value is not None and not _is_factor(value):
                raise UsageError(f"expected Numerics.{name} to be a number above 0, got {value!r}.")
        self._check_together()

    def _check_together(self) -> None:
        # Only a single fp64 sum has an unrounded root; a norm of norms is already rounded to fp32.
        if not callable(self.clip) and takes_root(self.clip) and self.norm not in ROOTED:
            raise UsageError(
                f"expected norm = 'of-elements' with clip = {self.clip!r}, which takes the root of "
                f"a single fp64 sum, got norm = {self.norm!r}. Try clip = "
                f"{self.clip.replace('fp64-root', 'fp64')!r}."
            )
        # Part of the division comes after the sum, so `divide` must name a rule for it.
        after = self.divide is not None and self.divide.startswith("post")
        if self.predivide_by is not None and not after:
            raise UsageError(
                "expected a divide rule that applies after the sum with predivide_by = "
                f"{self.predivide_by}, because the rest of the division comes then, got divide = "
                f"{self.divide!r}. Try divide = 'post-rounded'."
            )
        # With `last` there is a single round, so `round` would be the same as `step`.
        if self.divide_each == "round" and self.sync == "last":
            raise UsageError(
                "expected sync = 'every' with divide_each = 'round', got sync = 'last', with which "
                "ranks are summed in one round. Remove divide_each."
            )

    @property
    def reported_at(self) -> ReportedGrads:
        """Point in a step at which gradients are compared."""
        return self.reported_grads or "before-division"

    @property
    def is_reported_wide(self) -> bool:
        """True if gradients are compared in fp32, without the loss scale."""
        return self.reported_at in ("after-unscale", "after-clip")

    def replayed(self, scenario: Scenario, *, added_in: str | None = None) -> Scenario:
        """Return the case that the reference replays: the target's case with declared values.

        Rules that no scenario field can express are in `rules` only.

        Args:
            scenario: The target's case.
            added_in: Order in which the backend adds; None for the case's order.
        """
        system = scenario.system
        # No scenario can express sums within shard groups; `rules` adds them.
        sync = "every" if self.sync == "every-in-block" else self.sync
        declared = replace(
            system,
            divide=_nearest_word(self._divide(scenario, added_in)) or system.divide,
            divide_by=self.divide_by if isinstance(self.divide_by, str) else system.divide_by,
            sync=sync or system.sync,
            grad_dtype=self.grad_dtype or system.grad_dtype,
        )
        return replace(scenario, system=declared)

    def rules(self, scenario: Scenario, *, added_in: str | None = None) -> Rules:
        """Return the reference's rules beyond `replayed`, which has the same arguments."""
        return Rules(
            scale_loss=self.scale_loss,
            scale_second=self.scale_second,
            divide=self._divide(scenario, added_in),
            divide_by=None if isinstance(self.divide_by, str) else self.divide_by,
            predivide_by=self.predivide_by,
            divide_each=self.divide_each,
            sync=self.sync,
            accumulate_dtype=self.accumulate_dtype,
            reduce_dtype=self.reduce_dtype,
            replica_dtype=self.replica_dtype,
            unused=self.unused,
            nonfinite=self.nonfinite,
            norm=self.norm,
            clip=self.clip,
            masters=self.masters,
        )

    def problems(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield each field of a case that cannot be judged by these rules."""
        if scenario.optimizer.clip_norm is not None:
            yield from self._not_clipped(scenario)
        # These norms add squares over ranks in a call whose offsets are not reported.
        of_parts = self.norm in ("of-rows", "of-own-params", "of-shards", "of-squares")
        # If the order is unknown, such a norm is not compared.
        known = scenario.world.order_known
        if of_parts and known and scenario.world.order not in POSITION_FREE:
            yield Problem(
                path="world.order",
                message="this target adds squared norms over ranks in a call with unknown offsets, "
                f"got an order that depends on offsets, {show(scenario.world.order)}.",
                suggestion="Try linear, which does not depend on them.",
            )
        is_clipped = scenario.optimizer.clip_norm is not None
        # Both runs of a pair must have equal bits, including the norm.
        if scenario.pair is not None and is_clipped and self.norm != "of-elements":
            yield Problem(
                path="optimizer.clip_norm",
                message=f"a norm {self.norm!r} is rounded differently in another layout.",
                suggestion="Remove this or `pair`.",
            )
        # One device takes the mean over all rows at once, without a factor.
        scales = self.scale_loss is not None or self.scale_second is not None
        if scales and scenario.expect.one_device:
            yield Problem(
                path="expect.one_device",
                message="this target multiplies losses by a rounded factor, which one device does "
                "not.",
                suggestion="Remove it.",
            )
        world = scenario.world
        if scenario.optimizer.name == "own" and not world.order_known and not self.elementwise:
            yield Problem(
                path="world.order_known",
                message="in this target's own update rule, an element's step may depend on other "
                "elements, for which no bound is proven, got an unknown order.",
                suggestion="Try a known order, or declare Numerics(elementwise=True) if each "
                "element's step depends on this element alone.",
            )
        if self.masters == "param" and scenario.model.name == "fp8":
            yield Problem(
                path="model.name",
                message="this target has no masters, and params in fp8 cannot be stepped without "
                "them, got 'fp8'.",
            )
        # Bounds are only proven for arithmetic that a scenario can express.
        beyond = [name for name in _EXACT_ONLY if getattr(self, name) != _DEFAULTS[name]]
        if self.is_reported_wide:
            beyond.append("reported_grads")
        if self.nonfinite == "raises":
            beyond.append("nonfinite")
        if self.sync == "every-in-block":
            beyond.append("sync")
        if _nearest_word(self.divide) not in (self.divide, None) and self.divide not in (
            "avg",
            None,
        ):
            beyond.append("divide")
        if isinstance(self.divide_by, float | int):
            beyond.append("divide_by")
        if beyond and not world.order_known:
            yield Problem(
                path="world.order_known",
                message=f"this target declares {beyond[0]} = {show(getattr(self, beyond[0]))}, for "
                "which no bound is proven, got an unknown order.",
                suggestion="Try a known order.",
            )

    def _not_clipped(self, scenario: Scenario) -> Iterator[Problem]:
        by_norms = self.norm != "of-elements"
        by_root = not callable(self.clip) and takes_root(self.clip)
        # With tp or pp, a rank only has some params, so its norm is not the model's.
        if by_norms and scenario.topology.tp * scenario.topology.pp > 1:
            yield Problem(
                path="optimizer.clip_norm",
                message="this target takes the norm over a rank's params, but with tp or pp a rank "
                "has only some of them.",
                suggestion="Remove it, or tp and pp.",
            )
        if (by_norms or by_root) and not scenario.world.order_known:
            why = (
                "rounds the norm in fp32, for which no bound is proven"
                if by_norms
                else "clips by a root that it reports only as rounded to fp32"
            )
            yield Problem(
                path="world.order_known",
                message=f"this target {why}, got "
                f"clip_norm = {show(scenario.optimizer.clip_norm)} and an unknown order.",
                suggestion="Remove one of them.",
            )

    def _divide(self, scenario: Scenario, added_in: str | None) -> DivideRule | None:
        # AVG divides after the sum, except in NCCL's rings, which multiply before it.
        if self.divide == "avg":
            return AVERAGES.get(added_in or scenario.world.order, "post-rounded")
        return self.divide


def value_of(numerics: Numerics, name: str) -> object:
    """Return the value of a `system` field that a target declares; None if it declares none."""
    value = getattr(numerics, name, None)
    return _nearest_word(value) if name == "divide" else value


def _nearest_word(divide: Any) -> Literal["none", "pre", "post", "premul"] | None:
    return _NEAREST_WORDS.get(divide, divide)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_factor(value: object) -> bool:
    return _is_number(value) and 0 < float(value) < float("inf")  # pyrefly: ignore


_DEFAULTS: dict[str, object] = {field.name: field.default for field in fields(Numerics)}
_EXACT_ONLY = (
    "predivide_by",
    "divide_each",
    "accumulate_dtype",
    "reduce_dtype",
    "replica_dtype",
    "unused",
    "reported_dtype",
    "masters",
)
"""Rules without a proven bound for an unknown order."""

_WORDS: dict[str, tuple[object, ...]] = {
    "scale_loss": (None, *get_args(ScaleLoss)),
    "scale_second": (None, *get_args(ScaleLoss)),
    "divide": (None, *DIVIDE_RULES, "avg"),
    "divide_by": (None, "ranks", "micro-batches", "tokens"),
    "divide_each": get_args(DivideEach),
    "sync": (None, *get_args(Sync)),
    "grad_dtype": (None, "param", "fp32"),
    "accumulate_dtype": (None, *get_args(GradDtype)),
    "reduce_dtype": (None, *get_args(GradDtype)),
    "replica_dtype": (None, *get_args(GradDtype)),
    "unused": get_args(Unused),
    "nonfinite": get_args(NonFiniteRule),
    "reported_grads": (None, *get_args(ReportedGrads)),
    "reported_dtype": get_args(ReportedDtype),
    "norm": NORMS,
    "clip": CLIP_FORMS,
    "masters": get_args(Masters),
    "elementwise": (True, False),
}
"""Allowed values of each field."""


def check_word(what: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that a value is among the choices.

    Raises:
        UsageError: It is not; the message lists all choices.
    """
    # Compare types as well: True equals 1 in Python, but is no stage.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        names = ", ".join(map(repr, choices))
        near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        hint = f" Try {near[0]!r}." if near else ""
        raise UsageError(f"expected {what} to be one of {names}, got {value!r}.{hint}")


def check_words(what: str, values: object, choices: tuple[object, ...]) -> None:
    """Check that a value is a tuple with entries from the choices.

    Raises:
        UsageError: It is no tuple, or an entry is not among the choices.
    """
    if not isinstance(values, tuple | list):
        raise UsageError(f"expected {what} to be a tuple, got {values!r}. Try ({values!r},).")
    for value in values:
        check_word(f"every entry of {what}", value, choices)
