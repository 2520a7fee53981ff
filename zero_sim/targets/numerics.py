"""Numerics of a target: by which rules it computes, each declared by a word of the field.

Declared facts, never tolerances. They turn the case that a target is given into the case and the
rules that the reference replays, so that the reference knows nothing of targets.
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
"""At which point reduced gradients are told."""
ToldDtype = Literal["sum", "param", "fp32"]
"""In which dtype: that of the sum, of the params, or fp32."""

_SAID: dict[str, Literal["none", "pre", "post", "premul"]] = {
    "premul-fp32": "premul",
    "post-rounded": "post",
    "postmul": "post",
    "postmul-rounded": "post",
}
"""The nearest word that a scenario has for a rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """By which rules a target computes; None where it does as the scenario says.

    A target whose rules depend on the case declares a function of it: `def numerics(self,
    scenario)`.
    """

    scale_loss: ScaleLoss | ScaleLossFunction | None = None
    """Factor of each micro-batch's loss before its backward; None for 1. `micro-batches`: 1 /
    `run.micro_batches`, as in torchtitan and accelerate. `tokens`: ranks / rows of all ranks in the
    step, as in verl and prime-rl, whose engines sum the rows that `start_step` gives them. `cp`:
    context-parallel ranks (`topology.cp`); `1/cp`: its reciprocal. Or a pure function from
    `LossRows` to the factor. The reference multiplies the same loss by the number. `divide` and
    `divide_by` stay what is done to the sum over ranks."""
    scale_second: ScaleLoss | ScaleLossFunction | None = None
    """Factor of a second loss, such as multi-token prediction's or a balance of experts, of a
    system that scales it by itself in `backward_terms`: a word or function as for `scale_loss`, in
    the place of that. None for the factor of the main loss."""
    divide: DivideRule | Literal["avg"] | None = None
    """How the sum over the ranks becomes a mean. Before the sum, in the gradient's dtype: `pre`,
    divided; `premul`, multiplied by the reciprocal that was rounded to that dtype; `premul-fp32`,
    multiplied by the fp32 reciprocal. After it: `post`, divided once it is fp32; `post-rounded`,
    divided in the sum's own dtype; `postmul` and `postmul-rounded`, likewise, but multiplied by the
    fp32 reciprocal. `avg`: by AVG of the collective, which is `post-rounded` everywhere but on
    NCCL, whose rings multiply with the rounded reciprocal before the sum (`premul`). `none`.

    DDP: `premul`; its default comm hook and DeepSpeed's stages 1 to 3: `pre`. Megatron-LM:
    `premul-fp32`. FSDP2: `avg`. DeepSpeed's stage 0: `postmul-rounded`."""
    divide_by: Literal["ranks", "micro-batches", "tokens"] | float | None = None
    """What it is divided by; or a number, as with FSDP2's set_gradient_divide_factor."""
    predivide_by: float | None = None
    """A number by which ranks divide before the sum, which is then divided by the rest, both as
    `divide` says, a rule for after the sum: FSDP1, FSDP2 in fp16, DeepSpeed's
    prescale_gradients."""
    divide_each: DivideEach = "step"
    """Where ranks are summed at every micro-batch: whether the sum of these sums is divided, or
    each of them (`round`)."""
    sync: Sync | None = None
    """The accumulation rule: whether ranks are summed after the last micro-batch or every one; or
    `every-in-block`, every one within each block of ranks (`system.redundancy`), and what comes of
    that over the blocks at last, as HSDP does."""
    grad_dtype: Literal["param", "fp32"] | None = None
    """Dtype in which gradients are accumulated and reduced."""
    accumulate_dtype: GradDtype | None = None
    """Dtype in which they are accumulated, where it is another one than that in which they are
    reduced; with `sync = "every"` that of the sum of the sums."""
    reduce_dtype: GradDtype | None = None
    """Dtype in which ranks are summed, where it is another one: that of DDP's compressing hooks, or
    FSDP's reduce_dtype."""
    copies_dtype: GradDtype | None = None
    """Dtype in which the sums of blocks of ranks (`system.redundancy`) are summed over the blocks,
    if it is another one."""
    unused: Unused = "zeros"
    """What becomes of a param that no rank used in a step: stepped with a gradient of zeros, or
    `left-alone`, as by torch's optimizers where `.grad` is None."""
    nonfinite: NonFiniteRule = "stepped"
    """Result of a step with a NaN or an infinity among its gradients if losses are not scaled. By
    default, no case has one. `skipped`: nothing is updated. `raises`: nothing is updated, and
    `step` raises an ArithmeticError, RuntimeError or ValueError on every rank, as after
    `clip_grad_norm_(error_if_nonfinite=True)`. Training goes on with the next step."""
    grads_told: GradsTold | None = None
    """Whether the reduced gradients that it tells are as the collective left them, or already
    divided where the division comes after the sum, or in fp32 and without the loss scale too
    (`after-unscale`), or what the optimizer was given (`after-clip`). If left out,
    `before-division`; and where a gradient differs then, the point is worked out on cases of 3
    ranks, with SGD if the target has it. A target that tells masters and state without gradients
    gives `OwnedPart(grad=None)`."""
    told_dtype: ToldDtype = "sum"
    """In which dtype it tells them: that of the sum, of the params, or fp32."""
    norm: Norm = "of-elements"
    """What a norm is rounded from. `of-elements`: the root of one fp64 sum over all ranks, rounded
    to fp32 once. `of-params`: the fp32 norm of the fp32 norms of whole gradients, as
    `torch.nn.utils.clip_grad_norm_` computes it on every rank by itself. `of-rows`: the same where
    each rank has rows of them, and one call adds the squares of their norms. `of-own-params`: each
    rank takes the norm of the norms of what it owns of each param, and one fp32 call adds their
    squares: fairscale's OSS and Megatron-LM. `of-shards`: the same with one norm of its whole
    shard. `told`: it is taken as told, in fp32 or fp64, and compared with nothing. A target with a
    norm of norms cannot be asked to clip by it over several cells, or in an unknown order."""
    clip: ClipForm | ClipFunction = "fp32-division"
    """How gradients are clipped by that norm; all forms are one in mathematics and a few units in
    the last place apart. The first word says where the coefficient is computed: `fp32`, in fp32
    tensors, from the fp32 norm; `fp64`, from the fp32 norm in Python's floats, rounded once;
    `fp64-root`, likewise from a root that was never rounded to fp32. The second one says how:
    `division`, min(1, bound / (norm + 1e-6)); `reciprocal`, bound times (1 / (norm + 1e-6));
    `inverse`, 1 / ((norm + 1e-6) / bound); `quotient`, gradients divided by
    max(1, (norm + 1e-6) / bound). With `-without-eps` behind it, 1e-6 is not added. Or a pure
    function of the target's own, from the 0-D norm and the bound to what gradients are multiplied
    by, which is rounded to fp32. A norm that is told in fp64 is not rounded to fp32 before.

    `torch.nn.utils.clip_grad_norm_` and FSDP: `fp32-reciprocal`; `torch.clamp(bound / (norm +
    1e-6), max=1.0)` with a Python number for the bound is that, and with a tensor for it, as in
    fairscale, `fp32-division`. Megatron-LM: `fp64-division`, or `fp64-root-division` where the
    root is taken in Python. DeepSpeed and ColossalAI: `fp32-inverse` where the norm is a tensor,
    `fp64-inverse` or `fp64-root-inverse` where it is a Python number. The LAMB kernels of apex:
    `fp32-quotient-without-eps`."""
    grads_in_params: bool = False
    """Whether the tensors that `params` gives have the reduced gradient in `.grad` after a step,
    unscaled or clipped only where `grads_told` says so."""

    masters: Masters = "fp32"
    """What the optimizer steps: an fp32 master of each param, or (`param`) the working params
    themselves, by gradients that are rounded to their dtype after they were clipped."""
    elementwise: bool = False
    """For a target with an update rule of its own: True if the step of an element depends on that
    element's own value, gradient and state alone. Where the order of addition is not known, such
    rules alone can be judged."""

    def __post_init__(self) -> None:
        """Refuse what is no known rule.

        Raises:
            UsageError: A word that is none, or rules that do not go together.
        """
        for name, choices in _WORDS.items():
            value = getattr(self, name)
            if name in ("clip", "scale_loss", "scale_second") and callable(value):
                continue
            if name == "divide_by" and _is_number(value):
                continue
            check_word(f"Numerics.{name}", value, choices)
        for name in ("divide_by", "predivide_by"):
            value = getattr(self, name)
            if not isinstance(value, str) and value is not None and not _is_factor(value):
                raise UsageError(f"expected Numerics.{name} to be a number above 0, got {value!r}.")
        self._check_together()

    def _check_together(self) -> None:
        if not callable(self.clip) and takes_root(self.clip) and self.norm not in ROOTED:
            raise UsageError(
                f"expected norm = 'of-elements' with clip = {self.clip!r}, which takes the root of "
                f"one fp64 sum, got norm = {self.norm!r}. Try clip = "
                f"{self.clip.replace('fp64-root', 'fp64')!r}."
            )
        after = self.divide is not None and self.divide.startswith("post")
        if self.predivide_by is not None and not after:
            raise UsageError(
                "expected divide to be a rule for after the sum with predivide_by = "
                f"{self.predivide_by}, as part of the division comes after it, got divide = "
                f"{self.divide!r}. Try divide = 'post-rounded'."
            )
        if self.divide_each == "round" and self.sync == "last":
            raise UsageError(
                "expected sync = 'every' with divide_each = 'round', as there is one round where "
                "ranks are summed after the last micro-batch, got sync = 'last'. Try leaving "
                "divide_each out."
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
        """The case that the reference replays in place of the one that the target is given.

        What a scenario has no word for is in `rules` alone.

        Args:
            scenario: As the target is given it.
            added_in: The order in which the backend adds; None for the one that the case names.
        """
        system = scenario.system
        sync = "every" if self.sync == "every-in-block" else self.sync
        declared = replace(
            system,
            divide=_said(self._divide(scenario, added_in)) or system.divide,
            divide_by=self.divide_by if isinstance(self.divide_by, str) else system.divide_by,
            sync=sync or system.sync,
            grad_dtype=self.grad_dtype or system.grad_dtype,
        )
        return replace(scenario, system=declared)

    def rules(self, scenario: Scenario, *, added_in: str | None = None) -> Rules:
        """What the reference is told besides `replayed`; arguments as there."""
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
        """What of a case cannot be judged by these rules, each with the path to it."""
        if scenario.optimizer.clip_norm is not None:
            yield from self._not_clipped(scenario)
        of_parts = self.norm in ("of-rows", "of-own-params", "of-shards")
        # Where the order is not known, such a norm is not owed.
        known = scenario.world.order_known
        if of_parts and known and scenario.world.order not in POSITION_FREE:
            yield Problem(
                path="world.order",
                message="this target adds squares of norms over the ranks in one call of its own, "
                f"of whose place nothing is known, got {show(scenario.world.order)}.",
                suggestion="Try linear, which is the same everywhere.",
            )
        is_clipped = scenario.optimizer.clip_norm is not None
        if scenario.pair is not None and is_clipped and self.norm != "of-elements":
            yield Problem(
                path="optimizer.clip_norm",
                message=f"a norm {self.norm!r} is rounded in another way in another layout.",
                suggestion="Leave this or `pair` out.",
            )
        scales = self.scale_loss is not None or self.scale_second is not None
        if scales and scenario.expect.one_device:
            yield Problem(
                path="expect.one_device",
                message="this target multiplies losses by a rounded factor, which one device does "
                "not.",
                suggestion="Leave it out.",
            )
        world = scenario.world
        if scenario.optimizer.name == "own" and not world.order_known and not self.elementwise:
            yield Problem(
                path="world.order_known",
                message="the step of this target's own update rule may depend on other elements, "
                "for which no bound is proven, got an order that is not known.",
                suggestion="Try an order that is known, or declare Numerics(elementwise=True) if "
                "each element is stepped by itself.",
            )
        if self.masters == "param" and scenario.model.name == "fp8":
            yield Problem(
                path="model.name",
                message="this target has no masters of its params, without which those in fp8 "
                "have no values to step, got 'fp8'.",
            )
        beyond = [name for name in _EXACT_ONLY if getattr(self, name) != _DEFAULTS[name]]
        if self.is_told_wide:
            beyond.append("grads_told")
        if self.nonfinite == "raises":
            beyond.append("nonfinite")
        if self.sync == "every-in-block":
            beyond.append("sync")
        if _said(self.divide) not in (self.divide, None) and self.divide not in ("avg", None):
            beyond.append("divide")
        if isinstance(self.divide_by, float | int):
            beyond.append("divide_by")
        if beyond and not world.order_known:
            yield Problem(
                path="world.order_known",
                message=f"this target declares {beyond[0]} = {show(getattr(self, beyond[0]))}, for "
                "which no bound is proven, got an order that is not known.",
                suggestion="Try an order that is.",
            )

    def _not_clipped(self, scenario: Scenario) -> Iterator[Problem]:
        """Where nothing is known of a gradient that is clipped by such a norm."""
        by_norms = self.norm != "of-elements"
        by_root = not callable(self.clip) and takes_root(self.clip)
        if by_norms and scenario.topology.tp * scenario.topology.pp > 1:
            yield Problem(
                path="optimizer.clip_norm",
                message="this target takes the norm of the params that a rank has, which with tp "
                "or pp are not all.",
                suggestion="Leave it out, or tp and pp.",
            )
        if (by_norms or by_root) and not scenario.world.order_known:
            why = (
                "rounds the norm in fp32, for which no bound is proven"
                if by_norms
                else "clips by a root that it tells rounded to fp32 alone"
            )
            yield Problem(
                path="world.order_known",
                message=f"this target {why}, got "
                f"clip_norm = {show(scenario.optimizer.clip_norm)} and an order that is not known.",
                suggestion="Leave one of them out.",
            )

    def _divide(self, scenario: Scenario, added_in: str | None) -> DivideRule | None:
        if self.divide == "avg":
            return AVERAGES.get(added_in or scenario.world.order, "post-rounded")
        return self.divide


def value_of(numerics: Numerics, name: str) -> object:
    """What a target does anyway, as a field of `system` would say it; None where it may be any.

    Args:
        numerics: What it declares.
        name: Name of the field.
    """
    value = getattr(numerics, name, None)
    return _said(value) if name == "divide" else value


def _said(divide: Any) -> Literal["none", "pre", "post", "premul"] | None:
    """The nearest word of a scenario for a rule of division."""
    return _SAID.get(divide, divide)


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
"""Rules for which there is no bound where the order is not known."""

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
"""What each of the numerics can be."""


def check_word(what: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that something is one of the words that there are for it.

    Raises:
        UsageError: It is none; names them all.
    """
    # True is 1 to Python, and no stage.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        names = ", ".join(map(repr, choices))
        near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        hint = f" Try {near[0]!r}." if near else ""
        raise UsageError(f"expected {what} to be one of {names}, got {value!r}.{hint}")


def check_words(what: str, values: object, choices: tuple[object, ...]) -> None:
    """Check that something is a tuple of such words.

    Raises:
        UsageError: It is none, or has another one among them.
    """
    if not isinstance(values, tuple | list):
        raise UsageError(f"expected {what} to be a tuple, got {values!r}. Try ({values!r},).")
    for value in values:
        check_word(f"every entry of {what}", value, choices)
