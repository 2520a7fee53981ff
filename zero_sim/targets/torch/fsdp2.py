"""torch's `fully_shard` (FSDP2) with a plain torch optimizer, on a mesh of the params' device.

Params are cut along their first dimension into chunks with equally many rows; the last chunks may
be shorter or empty.

[Note: params that some rank does not use]
A rank's reduce-scatter omits params that its own losses do not reach. If these params differ
between ranks, a call gets tensors of different params. If their sizes differ, the call fails; if
not, it silently adds gradients of different params (torch 2.13, without
`reduce_scatter_unused_params`). So the target only declares models that use all params in every
micro-batch. A test shows the results for other models.

[Note: settings of a scenario in FSDP2]
At stage 1, `reshard_after_forward` has torch's default, which keeps the root's params unsharded. At
stage 3 it is `system.reshard_after_forward`, or option `reshard_ranks`: the number of neighbouring
ranks that keep params until backward. `system.prefetch` sets how many modules are prefetched in
forward and in backward. With `system.redundancy` the mesh has two dimensions. `system.sync` sets
`set_requires_gradient_sync`, and `model.dtype` sets `param_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import ReloadSpec, Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, UPSTREAM, Capabilities, Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.fsdp1 import predivide_factor
from zero_sim.targets.torch.fsdp2_engine import FSDP2Engine
from zero_sim.targets.torch.optim import OPTIMIZERS
from zero_sim.targets.torch.wrapping import stale_after_evaluation

_ROWS_ALONE = "its step needs whole params, and fully_shard passes it the rows of one rank"
_DTYPES = ("fp32", "bf16", "fp16")
NUMERICS = Numerics(
    # Each module reduces all its gradients in an fp32 reduce-scatter with AVG. On NCCL, AVG
    # multiplies by the reciprocal and then sums; elsewhere it sums and then divides.
    divide="avg",
    divide_by="ranks",
    # Between micro-batches, unsharded gradients accumulate locally.
    sync="last",
    grad_dtype="param",
    # `.grad` of sharded params contains means.
    reported_grads="after-division",
    # torch takes the norm of each rank's rows, and an all-reduce adds the squared norms.
    norm="of-rows",
    clip="fp32-reciprocal",
)
"""Arithmetic of `fully_shard` on fp32 params with default options."""
_AFTER = ("avg", "post-rounded")


def numerics_with(scenario: Scenario, chosen: Any) -> Numerics:
    """Return the arithmetic of a case.

    Args:
        scenario: The target's case.
        chosen: Values of all options.
    """
    in_block, reduce = chosen["all_reduce_last"], chosen["reduce_dtype"]
    # With `all_reduce_last`, a shard group keeps its sum over micro-batches in `reduce_dtype` until
    # the all-reduce over replicas. Otherwise each sum is cast to fp32 before it is added.
    in_rounds = scenario.system.sync == "every" and not in_block
    division = _division(scenario, chosen)
    # Gradients are accumulated and reduced in `reduce_dtype`. The result is cast to fp32, the
    # sharded params' dtype.
    return replace(
        NUMERICS,
        **division,
        sync="every-in-block" if in_block else None,
        divide_each="round" if in_rounds and division["divide"] in _AFTER else "step",
        accumulate_dtype="fp32" if in_rounds else reduce,
        reduce_dtype=reduce,
        reported_dtype="fp32",
    )


def reduced_in(scenario: Scenario, chosen: Any) -> str:
    """Return the dtype in which ranks are summed; arguments as for `numerics_with`."""
    reduce = chosen["reduce_dtype"]
    return scenario.model.dtype if reduce == "param" else reduce


def _division(scenario: Scenario, chosen: Any) -> dict[str, Any]:
    """Return the division rules, which follow FSDP2's choice of reduce operations."""
    # A factor of 0 stands for no factor. The order of conditions is FSDP2's.
    factor, ranks = chosen["divide_factor"], scenario.world.size
    together = ranks // scenario.system.redundancy
    by = {"divide_by": factor or "ranks"}
    # Divide by a power of two before the sum and by the rest after it, so that fp16 does not
    # overflow.
    if reduced_in(scenario, chosen) == "fp16":
        first = predivide_factor(factor or ranks)
        return {"divide": "post-rounded", "predivide_by": first, **by}
    # `set_force_sum_reduction_for_comms`: sum, then divide.
    if chosen["force_sum"]:
        return {"divide": "post-rounded", **by}
    # AVG, also if the factor equals the shard group's size. With HSDP, another AVG all-reduces the
    # means of shard groups.
    if factor in (0.0, together):
        return {"divide": "avg", **by}
    # With `set_gradient_divide_factor` alone, PREMUL_SUM multiplies before the sum. A single rank
    # has no collective, so it divides.
    return {"divide": "pre" if together == 1 else "premul", **by}


def without_rule(scenario: Scenario, chosen: Any) -> Iterator[Problem]:
    """Yield fields for which no rule can be declared; arguments as for `numerics_with`."""
    ranks, blocks = scenario.world.size, scenario.system.redundancy
    together = ranks // blocks
    reduce, factor = chosen["reduce_dtype"], chosen["divide_factor"]
    divides_in_block = not sums_plainly(scenario, chosen) and factor in (0.0, together)
    # Division by a power of two is exact, so the result equals a single mean over all ranks.
    if blocks > 1 and divides_in_block and together & (together - 1):
        yield Problem(
            path="system.redundancy",
            message="FSDP2 rounds the mean of each shard group before it adds these means, for "
            f"which no rule can be declared, got shard groups of {together} ranks.",
            suggestion="Try shard groups of 1, 2, 4 or 8 ranks, or option force_sum.",
        )
    is_narrower = reduce not in ("param", "fp32") and scenario.model.dtype == "fp32"
    if is_narrower and scenario.system.sync == "last" and scenario.run.micro_batches > 1:
        yield Problem(
            path="run.micro_batches",
            message=f"FSDP2 adds fp32 gradients, not rounded to {reduce}, to gradients accumulated "
            f"in {reduce}, for which no rule can be declared.",
            suggestion="Try system.sync = 'every', or one micro-batch.",
        )


def divides_twice(scenario: Scenario, chosen: Any) -> bool:
    """Return True if torch 2.13 divides by the factor twice; arguments as for `numerics_with`."""
    # scenarios/upstream/torch-fsdp2-divides-twice: shard groups with a single rank have no
    # reduce-scatter.
    has_all = scenario.world.size == scenario.system.redundancy
    return bool(chosen["divide_factor"]) and has_all and sums_plainly(scenario, chosen)


def sums_plainly(scenario: Scenario, chosen: Any) -> bool:
    """Return True if collectives neither divide nor multiply; arguments as for `numerics_with`."""
    return chosen["force_sum"] or reduced_in(scenario, chosen) == "fp16"


def _why_not_all_reduced_last(scenario: Scenario) -> str:
    system = scenario.system
    if system.redundancy > 1 and system.sync == "every":
        return ""
    return "no replicas (system.redundancy) that are summed in every micro-batch (system.sync)"


def _why_not_left_sharded(scenario: Scenario) -> str:
    if not scenario.system.reshard_after_forward:
        return ""
    return "params that are resharded after forward, which backward needs"


def _why_not_kept_by_few(scenario: Scenario) -> str:
    if scenario.system.stage == 3 and scenario.system.reshard_after_forward:
        return ""
    return "params that are resharded after forward at stage 3"


def _ill_saved(reload: ReloadSpec) -> Iterator[Problem]:
    """Yield settings with which torch's state-dict functions change or lose optimizer state."""
    # scenarios/upstream/torch-save-steps: there is no state before the first step.
    if reload.early_save:
        yield Problem(
            path="reload.early_save",
            message="to make state, get_state_dict takes a step of its own, and counts it. "
            + UPSTREAM,
            suggestion="Remove it.",
        )
    # scenarios/upstream/torch-load-drops-state.
    if reload.lost_micro_batches and not reload.lost_steps:
        yield Problem(
            path="reload.lost_micro_batches",
            message="if params have gradients, get_state_dict makes no state to load into, so "
            "set_state_dict loads none. " + UPSTREAM,
            suggestion="Try lost_steps = 1, or remove it.",
        )


class TorchFSDP2:
    """`fully_shard`, with fp32 masters. Params, gradients and state are sharded.

    Args:
        as_is: True to also accept cases that are known to go wrong.
    """

    capabilities = Capabilities(
        stages=(1, 3),
        dtypes=("fp32", "bf16"),
        # A scalar has no rows to distribute, and backward fails if a param is empty.
        scalar_params=False,
        empty_params=False,
        optimizers=tuple(
            name for name in OPTIMIZERS if name not in ("rprop", *WHOLE_PARAM_OPTIMIZERS)
        ),
        why_no_optimizer=(
            ("rprop", "torch's in-place masks have no rule for sharded tensors, and raise"),
            *((name, _ROWS_ALONE) for name in WHOLE_PARAM_OPTIMIZERS),
        ),
        follows=(
            *OPTIMIZER_SETTINGS,
            "optimizer.clip_norm",
            "optimizer.clip_value",
            "model.tied",
            "model.recompute",
            "run.micro_batches",
            "system.redundancy",
            "system.reshard_after_forward",
            "system.prefetch",
            "system.sync",
            "reload",
        ),
        only=(("reload.form", ("sharded",)), ("reload.weights_only", (False,))),
    )
    options = {  # noqa: RUF012
        "reduce_dtype": Option(default="param", values=_DTYPES),
        "force_sum": Option(default=False, values=(True,)),
        # Division by 2 is exact, but by 3 and 0.7 it rounds, so its place matters.
        "divide_factor": Option(default=0.0, values=(2.0, 3.0, 0.7)),
        "fp32_output": Option(default=False, values=(True,)),
        "cpu_offload": Option(default=False, values=(True,)),
        "unshard_in_backward": Option(default=True, values=(False,), fits=_why_not_left_sharded),
        "reshard_ranks": Option(default=0, values=(2, 3), fits=_why_not_kept_by_few),
        "kept_after_backward": Option(default=False, values=(True,)),
        "waits_at_last": Option(default=False, values=(True,)),
        "all_reduce_last": Option(default=False, values=(True,), fits=_why_not_all_reduced_last),
    }

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"torch-fsdp2{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the arithmetic of a case."""
        chosen = chosen_options(self, scenario)
        rules = numerics_with(scenario, chosen)
        is_wide = scenario.model.dtype == "fp32" and chosen["reduce_dtype"] == "param"
        if is_wide and scenario.system.sync == "last":
            # Everything is fp32. Do not declare it, because declared dtypes have no bound for
            # unknown orders.
            return replace(rules, accumulate_dtype=None, reduce_dtype=None, reported_dtype="sum")
        return rules

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield fields of a case that have no rule or are known to go wrong."""
        chosen: Any = chosen_options(self, scenario)
        yield from without_rule(scenario, chosen)
        is_large = scenario.model.name == "bit-hash"
        if reduced_in(scenario, chosen) == "fp16" and is_large:
            yield Problem(
                path="model.name",
                message="gradients of this model can exceed the range of fp16, got "
                "reduce_dtype = fp16.",
                suggestion="Try another model or reduce_dtype.",
            )
        few, shards = chosen["reshard_ranks"], scenario.world.size // scenario.system.redundancy
        if few and (few < 2 or few >= shards or shards % few):
            yield Problem(
                path="system.options",
                message=f"expected reshard_ranks to be a divisor of {shards}, the size of a shard "
                f"group, at least 2 and less than this size, got {few}.",
                suggestion="Remove it.",
            )
        if divides_twice(scenario, chosen) and not self._as_is:
            yield Problem(
                path="system.options",
                message="torch 2.13 divides twice by divide_factor if a shard group has one rank: "
                "see scenarios/upstream.",
                suggestion="Remove divide_factor, force_sum or fp16.",
            )

        if scenario.reload is not None and not self._as_is:
            yield from _ill_saved(scenario.reload)
        # Params that stay unsharded after a forward.
        keeps = scenario.system.stage == 1 or not scenario.system.reshard_after_forward
        if keeps and not self._as_is:
            yield from stale_after_evaluation(scenario)

    def reduce_ops(self, scenario: Scenario) -> tuple[str, ...]:
        """Return reduce operations besides SUM."""
        divides = self.numerics(scenario).divide
        return {"avg": ("AVG",), "premul": ("PREMUL_SUM",)}.get(divides or "", ())

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP2Engine:
        """Shard the module for training on this rank."""
        options = chosen_options(self, scenario)
        return FSDP2Engine(module, scenario=scenario, group=group, options=options)


TARGETS = (TorchFSDP2(), TorchFSDP2(as_is=True))
