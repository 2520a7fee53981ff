"""Numerics of a target: its arithmetic, declared in the words of the field.

Declarations are facts, never tolerances. They turn the case that a target gets into the case and
the rules that the reference replays, so the reference knows nothing about targets.
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

GradsTold = Literal["before-division", "after-division", "after-clip", "after-unscale"]
"""Point of a step at which gradients are reported."""
ToldDtype = Literal["sum", "param", "fp32"]
"""Dtype of reported gradients: that of the sum, of the params, or fp32."""

# The reference replays a case with this word, and the exact rule beside it: see `replayed`.
_NEAREST_WORDS: dict[str, Literal["none", "pre", "post", "premul"]] = {
    "premul-fp32": "premul",
    "post-rounded": "post",
    "postmul": "post",
    "postmul-rounded": "post",
}
"""The nearest `system.divide` of a scenario, by rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Arithmetic of a target. None, in any field, follows the scenario.

    If the arithmetic depends on the case, declare a function: `def numerics(self, scenario)`.

    Example:
        Rules of torch's DDP with `clip_grad_norm_`:

        >>> Numerics(divide="premul", norm="of-params", clip="fp32-reciprocal").told_at
        'before-division'
    """

    # Functions of the case alone would not do: rows differ by rank and micro-batch.
    scale_loss: ScaleLoss | ScaleLossFunction | None = None
    """Factor of each micro-batch's loss before its backward. The reference multiplies the same loss
    by the same number. `divide` and `divide_by` still apply to the sum over ranks.

    - None: 1.
    - `micro-batches`: 1 / `run.micro_batches`, as in torchtitan and accelerate.
    - `tokens`: ranks / rows of all ranks in the step, as in verl and prime-rl. Engines sum the rows
      that `start_step` passes.
    - `cp`, `1/cp`: number of context-parallel ranks (`topology.cp`), or its reciprocal.
    - A pure function from `LossRows` to the factor."""
    scale_second: ScaleLoss | ScaleLossFunction | None = None
    """Factor of a second loss, such as multi-token prediction's or a balance of experts, if
    `backward_terms` scales it on its own: a value as for `scale_loss`. None for the factor of the
    main loss."""
    # The forms of division differ in their last bit if the number of ranks is no power of two.
    divide: DivideRule | Literal["avg"] | None = None
    """Division that turns the sum over ranks into a mean.

    - Before the sum, in the gradient's dtype: `pre` divides; `premul` multiplies by the reciprocal
      rounded to that dtype; `premul-fp32` multiplies by the fp32 reciprocal.
    - After it: `post` divides in fp32; `post-rounded` divides in the dtype of the sum; `postmul`
      and `postmul-rounded` multiply by the fp32 reciprocal instead.
    - `avg`: AVG of the collective. This is `post-rounded`, except on NCCL, whose rings multiply by
      the rounded reciprocal before the sum (`premul`).
    - `none`.

    DDP: `premul`. Its default comm hook and DeepSpeed's stages 1 to 3: `pre`. Megatron-LM:
    `premul-fp32`. FSDP2: `avg`. DeepSpeed's stage 0: `postmul-rounded`."""
    divide_by: Literal["ranks", "micro-batches", "tokens"] | float | None = None
    """Divisor: a count, or a number such as 7.0, as in FSDP2's set_gradient_divide_factor."""
    # Two divisions: in 16 bits, one before the sum could underflow and one after it overflow.
    predivide_by: float | None = None
    """Divisor before the sum, above 0. The rest of the division comes after the sum. Both follow
    `divide`, which must be a rule for after the sum. FSDP1, FSDP2 in fp16, DeepSpeed's
    prescale_gradients."""
    divide_each: DivideEach = "step"
    """Object of the division if ranks are summed at every micro-batch: the sum over all of them
    (`step`), or each sum (`round`)."""
    # The order of additions differs: over micro-batches and then ranks, or the other way round.
    sync: Sync | None = None
    """Accumulation rule: ranks are summed after the `last` micro-batch or after `every` one.
    `every-in-block`: after every one within each shard group (`system.redundancy`), and once over
    the replicas at the end, as in HSDP."""
    grad_dtype: Literal["param", "fp32"] | None = None
    """Dtype in which gradients are accumulated and reduced."""
    accumulate_dtype: GradDtype | None = None
    """Dtype in which gradients are accumulated, if it differs from the one in which they are
    reduced. With `sync = "every"`, the dtype in which the sums are added."""
    reduce_dtype: GradDtype | None = None
    """Dtype in which ranks are summed, if it differs: that of DDP's compressing hooks, or FSDP's
    reduce_dtype."""
    copies_dtype: GradDtype | None = None
    """Dtype in which sums of shard groups are summed over the replicas (`system.redundancy`), if
    it differs."""
    # The two differ for optimizers with momentum or weight decay, which move a param whose gradient
    # is zero.
    unused: Unused = "zeros"
    """Treatment of a param that no rank used in a step: stepped with a gradient of zeros, or
    `left-alone`, as torch's optimizers do if `.grad` is None."""
    nonfinite: NonFiniteRule = "stepped"
    """Result of a step with a NaN or an infinity among its gradients if losses are not scaled. By
    default, no case has one. `skipped`: nothing is updated. `raises`: nothing is updated, and
    `step` raises an ArithmeticError, RuntimeError or ValueError on every rank, as after
    `clip_grad_norm_(error_if_nonfinite=True)`. Training goes on with the next step."""
    # The reference has the gradient at every point, so any of them can be compared.
    grads_told: GradsTold | None = None
    """Point of the step at which gradients are reported, in `parts` or `.grad`.

    - `before-division`: as the collective returns them, before a division that comes after the sum.
    - `after-division`: as means.
    - `after-unscale`: in fp32, without the loss scale, not clipped.
    - `after-clip`: as the optimizer gets them.
    - None: compared as `before-division`. If a gradient differs, the point is determined on cases
      of 3 ranks, with SGD if the target has it.

    An engine that reports masters and state without gradients returns `OwnedPart(grad=None)`."""
    told_dtype: ToldDtype = "sum"
    """Dtype of reported gradients: that of the sum, of the params, or fp32."""
    # A norm of rounded norms has other bits than the root of one fp64 sum.
    norm: Norm = "of-elements"
    """Computation of the gradient norm. A target with another one than `of-elements` cannot clip
    with tp or pp, or in an unknown order.

    - `of-elements`: the root of one fp64 sum over all ranks, rounded to fp32 once.
    - `of-params`: the fp32 norm of the fp32 norms of whole gradients, as each rank computes it in
      `torch.nn.utils.clip_grad_norm_`.
    - `of-rows`: the same for ranks with rows of gradients; one call adds the squares of the norms.
    - `of-own-params`: each rank takes the norm of the norms of its parts of params, and one fp32
      call adds the squares: fairscale's OSS and Megatron-LM.
    - `of-shards`: the same with one norm of the rank's whole shard.
    - `told`: the norm that the engine reports, in fp32 or fp64, without comparison."""
    # All forms are equal in mathematics, and a few units in the last place apart in fp32.
    clip: ClipForm | ClipFunction = "fp32-division"
    """Scaling of gradients by that norm, as `WHERE-FORM`, or `WHERE-FORM-without-eps` if 1e-6 is
    not added. WHERE the coefficient is computed:

    - `fp32`: in fp32 tensors, from the fp32 norm.
    - `fp64`: in Python floats from the fp32 norm, rounded once.
    - `fp64-root`: the same, from a root that was never rounded to fp32.

    FORM of the coefficient:

    - `division`: min(1, bound / (norm + 1e-6)).
    - `reciprocal`: bound * (1 / (norm + 1e-6)).
    - `inverse`: 1 / ((norm + 1e-6) / bound).
    - `quotient`: gradients are divided by max(1, (norm + 1e-6) / bound).

    Or a pure function from the 0-D norm and the bound to the factor of the gradients, which is
    rounded to fp32. A norm that is reported in fp64 is not rounded to fp32 first.

    `torch.nn.utils.clip_grad_norm_` and FSDP: `fp32-reciprocal`. `torch.clamp(bound / (norm +
    1e-6), max=1.0)`: `fp32-reciprocal` if the bound is a Python number, `fp32-division` if it is a
    tensor, as in fairscale. Megatron-LM: `fp64-division`, or `fp64-root-division` if the root is
    taken in Python. DeepSpeed and ColossalAI: `fp32-inverse` if the norm is a tensor,
    `fp64-inverse` or `fp64-root-inverse` if it is a Python number. The LAMB kernels of apex:
    `fp32-quotient-without-eps`."""
    grads_in_params: bool = False
    """True if tensors from `params` have the reduced gradient in `.grad` after a step, at the point
    that `grads_told` declares."""

    # Without masters, updates smaller than half an ulp of the param's dtype are lost.
    masters: Masters = "fp32"
    """Tensors that the optimizer steps: an `fp32` master of each param, or (`param`) the working
    params themselves. Gradients are then rounded to the param's dtype after clipping."""
    # Bounds hold for each element on its own.
    elementwise: bool = False
    """True if, in an update rule of the target's own, the step of an element depends only on its
    own value, gradient and state. Cases of unknown order need such a rule."""

    def __post_init__(self) -> None:
        """Check each word, and that rules agree with each other.

        Raises:
            UsageError: A field has an unknown word, or two rules contradict each other.
        """
        for name, choices in _WORDS.items():
            value = getattr(self, name)
            # Functions and numbers are checked when they are used, and below.
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
        # Only one fp64 sum has an unrounded root; a norm of norms has been rounded to fp32.
        if not callable(self.clip) and takes_root(self.clip) and self.norm not in ROOTED:
            raise UsageError(
                f"expected norm = 'of-elements' with clip = {self.clip!r}, which takes the root of "
                f"one fp64 sum, got norm = {self.norm!r}. Try clip = "
                f"{self.clip.replace('fp64-root', 'fp64')!r}."
            )
        # Part of the division comes after the sum, so `divide` must name a rule for it.
        after = self.divide is not None and self.divide.startswith("post")
        if self.predivide_by is not None and not after:
            raise UsageError(
                "expected divide to be a rule for after the sum with predivide_by = "
                f"{self.predivide_by}, because part of the division comes after it, got divide = "
                f"{self.divide!r}. Try divide = 'post-rounded'."
            )
        # With `last` there is one round, so dividing each is dividing their sum.
        if self.divide_each == "round" and self.sync == "last":
            raise UsageError(
                "expected sync = 'every' with divide_each = 'round', because ranks that are summed "
                "after the last micro-batch have one round, got sync = 'last'. Remove divide_each."
            )

    @property
    def told_at(self) -> GradsTold:
        """Point at which gradients are compared."""
        return self.grads_told or "before-division"

    @property
    def is_told_wide(self) -> bool:
        """True if gradients are compared in fp32, without the loss scale."""
        return self.told_at in ("after-unscale", "after-clip")

    def replayed(self, scenario: Scenario, *, added_in: str | None = None) -> Scenario:
        """Return the case that the reference replays in place of the one that the target gets.

        Rules that a scenario has no word for are in `rules` only.

        Args:
            scenario: The case, as the target gets it.
            added_in: Order in which the backend adds. None for the case's own.
        """
        system = scenario.system
        # Scenarios have no word for blocks; `rules` adds that part.
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
        """Return the rules of the reference besides `replayed`; arguments as there."""
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
            copies_dtype=self.copies_dtype,
            unused=self.unused,
            nonfinite=self.nonfinite,
            norm=self.norm,
            clip=self.clip,
            masters=self.masters,
        )

    def problems(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield each field of a case that these rules cannot judge."""
        if scenario.optimizer.clip_norm is not None:
            yield from self._not_clipped(scenario)
        # These norms add squares over the ranks in a call whose offsets no part reports.
        of_parts = self.norm in ("of-rows", "of-own-params", "of-shards")
        # If the order is unknown, such a norm is not compared.
        known = scenario.world.order_known
        if of_parts and known and scenario.world.order not in POSITION_FREE:
            yield Problem(
                path="world.order",
                message="this target adds squares of norms over the ranks in a call with unknown "
                f"offsets, got an order that depends on them, {show(scenario.world.order)}.",
                suggestion="Try linear, which is the same at all offsets.",
            )
        is_clipped = scenario.optimizer.clip_norm is not None
        # The runs of a pair must have equal bits, and so must their norms.
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
                message="an element's step by this target's own update rule may depend on other "
                "elements, for which no bound is proven, got an unknown order.",
                suggestion="Try a known order, or declare Numerics(elementwise=True) if each "
                "element's step depends on that element alone.",
            )
        if self.masters == "param" and scenario.model.name == "fp8":
            yield Problem(
                path="model.name",
                message="this target has no masters, and params in fp8 cannot be stepped without "
                "them, got 'fp8'.",
            )
        # Bounds are proven for the words of a scenario only.
        beyond = [name for name in _EXACT_ONLY if getattr(self, name) != _DEFAULTS[name]]
        if self.is_told_wide:
            beyond.append("grads_told")
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
        """Yield reasons why a case cannot clip by this norm."""
        by_norms = self.norm != "of-elements"
        by_root = not callable(self.clip) and takes_root(self.clip)
        # With tp or pp a rank has some of the params, whose norm is not that of the model.
        if by_norms and scenario.topology.tp * scenario.topology.pp > 1:
            yield Problem(
                path="optimizer.clip_norm",
                message="this target takes the norm of a rank's params, which with tp or pp are "
                "only some of them.",
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
        # AVG divides after the sum, but NCCL's rings multiply before it.
        if self.divide == "avg":
            return AVERAGES.get(added_in or scenario.world.order, "post-rounded")
        return self.divide


def value_of(numerics: Numerics, name: str) -> object:
    """Return the value of a field of `system` that a target implements anyway; None for any value.

    Args:
        numerics: The target's declaration.
        name: Name of the field.
    """
    value = getattr(numerics, name, None)
    return _nearest_word(value) if name == "divide" else value


def _nearest_word(divide: Any) -> Literal["none", "pre", "post", "premul"] | None:
    """Return the nearest word of a scenario for a rule of division."""
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
    "copies_dtype",
    "unused",
    "told_dtype",
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
    "copies_dtype": (None, *get_args(GradDtype)),
    "unused": get_args(Unused),
    "nonfinite": get_args(NonFiniteRule),
    "grads_told": (None, *get_args(GradsTold)),
    "told_dtype": get_args(ToldDtype),
    "norm": NORMS,
    "clip": CLIP_FORMS,
    "masters": get_args(Masters),
    "elementwise": (True, False),
}
"""Words of each field."""


def check_word(what: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that a value is one of some choices.

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
    """Check that a value is a tuple of some choices.

    Raises:
        UsageError: It is no tuple, or an entry is not among the choices.
    """
    if not isinstance(values, tuple | list):
        raise UsageError(f"expected {what} to be a tuple, got {values!r}. Try ({values!r},).")
    for value in values:
        check_word(f"every entry of {what}", value, choices)
