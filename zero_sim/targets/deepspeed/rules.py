"""DeepSpeed's rules of arithmetic for a case, and options of its config that change them.

[Note: DeepSpeed's dtypes]
Micro-batches are accumulated in `grad_accum_dtype` and ranks are summed in
`communication_data_type`, both the dtype of the params where a config does not say. Where stages 1
and 2 reduce-scatter, and stage 1 all-reduces what it accumulated in another dtype, a gradient is
divided before it is cast to the dtype of the sum; all other paths cast first. `prescale_gradients`
divides before the sum, `gradient_predivide_factor` multiplies by its reciprocal before it and by
the rest after it; only sums by all-reduce look at either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option
from zero_sim.workloads import EXACT_MODELS

DTYPES = ("fp32", "bf16", "fp16")


def is_all_reduced(scenario: Scenario, *, stage: int) -> bool:
    """Whether gradients are all-reduced whole, divided as `gradient_predivide_factor` says."""
    # Without contiguous gradients reduce_scatter changes nothing.
    system = scenario.system
    return stage == 0 or (stage < 3 and system.sum_by == "all-reduce" and system.contiguous_grads)


def options_for(stage: int) -> Mapping[str, Option]:
    """Options that a stage has; `why_not_together` says what of them goes together."""

    def scaled(scenario: Scenario) -> str:
        return "" if is_all_reduced(scenario, stage=stage) else "a sum that does not look at it"

    found = {"communication": Option(default="param", values=DTYPES)}
    if stage > 0:
        found["accumulation"] = Option(default="param", values=("fp32",))
        found["universal"] = Option(default=False, values=(True,))
    if stage < 3:
        found["predivide"] = Option(default=1.0, values=(2.0, 3.0), fits=scaled)
        found["prescale"] = Option(default=False, values=(True,), fits=scaled)
    return found


def why_not_together(scenario: Scenario, *, stage: int, options: Mapping[str, Any]) -> str:
    """Why there is no rule for what a case asks for; '' where there is one."""
    own = scenario.model.dtype
    wire, wide = own_or(options["communication"], own), own_or(options.get("accumulation"), own)
    if options.get("prescale") and options["predivide"] != 1.0:
        return "prescale_gradients is set, with which DeepSpeed does not look at the factor"
    if (stage, own, wide) == (1, "bf16", "fp32"):
        return "for that stage 1 has another engine, BF16_Optimizer, which is not wrapped"
    if wire == "fp16" != own and scenario.model.name in EXACT_MODELS:
        return f"gradients of the model {scenario.model.name} are more than fp16 holds"
    divides_first = stage in (1, 2) and (
        scenario.system.sum_by == "reduce-scatter" and scenario.system.contiguous_grads
    )
    if divides_first and wire != (wide if stage == 1 else own):
        return f"gradients are divided in another dtype and then cast to {wire} for the sum"
    if stage < 2 and wide not in (wire, "fp32"):
        return f"a sum in {wire} is divided in it and then rounded to {wide}"
    return ""


def own_or(name: str | None, own: str) -> str:
    """The dtype that an option names; `param` is the params' own."""
    return own if name in (None, "param") else name


def numerics_for(scenario: Scenario, *, stage: int, options: Mapping[str, Any]) -> Numerics:
    """By which rules a stage computes a case."""
    own = scenario.model.dtype
    wire, wide = own_or(options["communication"], own), own_or(options.get("accumulation"), own)
    is_mixed = {wire, wide} != {own}
    divide, first, told = "pre", None, "sum"
    if is_mixed or stage == 3:
        # Stage 3 gives parts of gradients as fp32, whatever they are.
        told = "fp32" if wide == "fp32" or stage == 3 else "param"
    if is_all_reduced(scenario, stage=stage) and not options["prescale"]:
        divide = "postmul-rounded"
        first = options["predivide"] if options["predivide"] != 1.0 else None
    elif stage == 0:
        divide = "premul-fp32"
    return Numerics(
        divide=divide,
        divide_by="ranks",
        predivide_by=first,
        divide_each="step" if stage < 2 else "round",
        sync="last" if stage < 2 else "every",
        grad_dtype="param",
        accumulate_dtype=wide if is_mixed else None,  # pyrefly: ignore
        reduce_dtype=wire if is_mixed else None,  # pyrefly: ignore
        nonfinite="stepped" if stage == 0 else "skipped",
        grads_told="after-division",
        told_dtype=told,
        norm="told" if stage < 3 else "of-elements",
        clip="fp32-inverse" if stage < 3 else "fp64-root-inverse",
    )
