"""DeepSpeed's engine with an optimizer from torch: ZeRO 0, 1, 2 and 3.

[Note: DeepSpeed's dtypes]
Micro-batches are accumulated in `grad_accum_dtype` and ranks are summed in
`communication_data_type`. Both default to the params' dtype. Most paths cast a gradient to the
sum's dtype and then divide it. Two paths divide first: the reduce-scatter in stages 1 and 2, and
the all-reduce in stage 1 if gradients were accumulated in another dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities
from zero_sim.targets.deepspeed.divergences import (
    known_to_go_wrong,
    never,
    universal_goes_wrong,
    why_not_universal,
)
from zero_sim.targets.deepspeed.engine import DeepSpeedEngine, config_of
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options, option_problems
from zero_sim.targets.rank_local import Library, RankLocal
from zero_sim.targets.torch.optim import OPTIMIZERS
from zero_sim.workloads import EXACT_MODELS

DTYPES = ("fp32", "bf16", "fp16")


def is_all_reduced(scenario: Scenario, *, stage: int) -> bool:
    """Return True if whole gradients are all-reduced, with `gradient_predivide_factor`."""
    # DeepSpeed ignores `reduce_scatter` without contiguous gradients.
    system = scenario.system
    return stage == 0 or (stage < 3 and system.sum_by == "all-reduce" and system.contiguous_grads)


def options_for(stage: int) -> Mapping[str, Option]:
    """Return a stage's options; `why_not_together` refuses some combinations."""

    def scaled(scenario: Scenario) -> str:
        return "" if is_all_reduced(scenario, stage=stage) else "a sum that ignores it"

    # `communication_data_type`, in which ranks are summed.
    found = {"communication": Option(default="param", values=DTYPES)}
    if stage > 0:
        # `grad_accum_dtype`, in which micro-batches accumulate.
        found["accumulation"] = Option(default="param", values=("fp32",))
        found["universal"] = Option(default=False, values=(True,))
    # `gradient_predivide_factor` multiplies by its reciprocal before the sum, and by the rest after
    # it. `prescale_gradients` divides before the sum. Both only affect sums by all-reduce.
    if stage < 3:
        found["predivide"] = Option(default=1.0, values=(2.0, 3.0), fits=scaled)
        found["prescale"] = Option(default=False, values=(True,), fits=scaled)
    return found


def why_not_together(scenario: Scenario, *, stage: int, options: Mapping[str, Any]) -> str:
    """Return the reason why no rule describes a case's options; "" if a rule does."""
    # See [Note: DeepSpeed's dtypes].
    own = scenario.model.dtype
    wire, wide = own_or(options["communication"], own), own_or(options.get("accumulation"), own)
    if options.get("prescale") and options["predivide"] != 1.0:
        return "prescale_gradients is set, so DeepSpeed ignores the factor"
    if (stage, own, wide) == (1, "bf16", "fp32"):
        return "stage 1 uses another engine, BF16_Optimizer, which is not wrapped"
    if wire == "fp16" != own and scenario.model.name in EXACT_MODELS:
        return f"gradients of the model {scenario.model.name} exceed the range of fp16"
    divides_first = stage in (1, 2) and (
        scenario.system.sum_by == "reduce-scatter" and scenario.system.contiguous_grads
    )
    if divides_first and wire != (wide if stage == 1 else own):
        return f"gradients are divided in another dtype and then cast to {wire} for the sum"
    if stage < 2 and wide not in (wire, "fp32"):
        return f"a sum in {wire} is divided in it and then rounded to {wide}"
    return ""


def own_or(name: str | None, own: str) -> str:
    """Return the dtype that an option names; `param` and None stand for the params' dtype."""
    return own if name in (None, "param") else name


def numerics_for(scenario: Scenario, *, stage: int, options: Mapping[str, Any]) -> Numerics:
    """Return a stage's arithmetic for a case."""
    own = scenario.model.dtype
    wire, wide = own_or(options["communication"], own), own_or(options.get("accumulation"), own)
    is_mixed = {wire, wide} != {own}
    # Stages 1 to 3 divide by the number of ranks before the sum.
    divide, first, reported = "pre", None, "sum"
    if is_mixed or stage == 3:
        # Stage 3 returns gradient parts of any dtype as fp32.
        reported = "fp32" if wide == "fp32" or stage == 3 else "param"
    if is_all_reduced(scenario, stage=stage) and not options["prescale"]:
        divide = "postmul-rounded"
        first = options["predivide"] if options["predivide"] != 1.0 else None
    elif stage == 0:
        divide = "premul-fp32"
    return Numerics(
        divide=divide,
        divide_by="ranks",
        predivide_by=first,
        # Stages 0 and 1 accumulate micro-batches on each rank and sum ranks once. Stages 2 and 3
        # sum ranks in each micro-batch and accumulate the sums.
        divide_each="step" if stage < 2 else "round",
        sync="last" if stage < 2 else "every",
        grad_dtype="param",
        accumulate_dtype=wide if is_mixed else None,  # pyrefly: ignore
        reduce_dtype=wire if is_mixed else None,  # pyrefly: ignore
        nonfinite="stepped" if stage == 0 else "skipped",
        reported_grads="after-division",
        reported_dtype=reported,
        # Below stage 3, trust the reported norm; stage 3 computes it in fp64.
        norm="reported" if stage < 3 else "of-elements",
        clip="fp32-inverse" if stage < 3 else "fp64-root-inverse",
    )


_BUFFERS = (
    "optimizer.clip_norm",
    "system.overlap_grads",
    "system.sum_by",
    "system.contiguous_grads",
    "system.reduce_buffer_elems",
    "system.gather_chunk_elems",
)
RANK_LOCAL = RankLocal(
    names=(
        "deepspeed:dist",
        "deepspeed.comm.comm:cdb",
        "deepspeed.comm.mori:_init_attempted",
        "deepspeed.runtime.zero.parameter_offload:"
        "DeepSpeedZeRoOffload._register_deepspeed_module(count)",
        "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK",
        "deepspeed.runtime.zero.partition_parameters:Init.param_id",
        "deepspeed.runtime.zero.utils:ZERO_SUPPORTED_OPTIMIZERS",
        "deepspeed.utils.groups:_WORLD_GROUP",
    )
)
"""Declaration that `zero-sim doctor --target` prints for DeepSpeed 0.19.8."""
_FOLLOWS = {
    0: (),
    1: (*_BUFFERS, "model.tied"),
    2: (*_BUFFERS, "model.tied"),
    3: (
        "optimizer.clip_norm",
        "system.bucket_elems",
        "system.prefetch",
        "system.reshard_after_forward",
    ),
}
"""Scenario fields that set a field in DeepSpeed's config, by stage."""


class DeepSpeedZero:
    """A stage of DeepSpeed's ZeRO.

    Args:
        stage: 0 to 3.
        as_is: True to also accept cases that are known to go wrong, as in scenarios/upstream.
    """

    library = Library(
        package="deepspeed",
        extra="deepspeed",
        judged="deepspeed==0.19.8",
        environment=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"), ("LOCAL_RANK", "0")),
    )
    rank_local = RANK_LOCAL

    def __init__(self, stage: int, *, as_is: bool = False) -> None:
        self.name = f"deepspeed-zero-{stage}{'-as-is' if as_is else ''}"
        self._stage, self._as_is = stage, as_is
        self.options = options_for(stage)
        # scenarios/upstream/deepspeed-adagrad.
        left_out = () if as_is else ("adagrad",)
        self.capabilities = Capabilities(
            dtypes=("fp32", "bf16", "fp16"),
            stages=(stage,),  # pyrefly: ignore
            # DeepSpeed steps flat partitions, but muon and lamb need whole params.
            optimizers=tuple(
                name for name in OPTIMIZERS if name not in (*left_out, *WHOLE_PARAM_OPTIMIZERS)
            ),
            only=(
                ("system.sum_by", ("reduce-scatter", "all-reduce")),
                ("reload.form", ("sharded",)),
            ),
            # scenarios/upstream/deepspeed-empty-group and deepspeed-scalar.
            empty_params=as_is,
            scalar_params=as_is,
            follows=(
                *OPTIMIZER_SETTINGS,
                "optimizer.loss_scale",
                "run.micro_batches",
                "reload",
                *_FOLLOWS[stage],
            ),
        )

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the arithmetic of a case."""
        options = chosen_options(self, scenario)
        return numerics_for(scenario, stage=self._stage, options=options)

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield fields of a case that have no rule or are known to go wrong."""
        universal = False
        # Unknown options and values are refused elsewhere.
        if not any(option_problems(self, scenario)):
            options = chosen_options(self, scenario)
            universal = bool(options.get("universal"))
            why = why_not_together(scenario, stage=self._stage, options=options)
            if why:
                yield Problem(
                    path="system.options",
                    message=f"expected options whose arithmetic can be declared, but {why}.",
                    suggestion="Remove one of them, or the dtype.",
                )
        yield from never(scenario, stage=self._stage, universal=universal)
        if universal:
            yield from why_not_universal(scenario)
        if universal and not self._as_is:
            yield from universal_goes_wrong(scenario, stage=self._stage)
        if not self._as_is:
            yield from known_to_go_wrong(scenario, stage=self._stage)

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> DeepSpeedEngine:
        """Wrap the module for training on this rank."""
        options = chosen_options(self, scenario)
        config = config_of(scenario, stage=self._stage, options=options)
        return DeepSpeedEngine(module, spec=scenario.optimizer, config=config)


ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (DeepSpeedZero(stage) for stage in (0, 1, 2, 3))
AS_IS = tuple(DeepSpeedZero(stage, as_is=True) for stage in (0, 1, 3))
TARGETS = (ZERO_0, ZERO_1, ZERO_2, ZERO_3, *AS_IS)
