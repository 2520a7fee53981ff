"""Megatron-FSDP (the package megatron-fsdp) with a plain torch optimizer.

`system.stage` sets `zero_dp_strategy`, from `no_shard` to `optim_grads_params`. `system.redundancy`
sets HSDP's outer dimension, which replicates.

[Note: Megatron-FSDP's dtypes]
Gradients are summed in `grad_comm_dtype` and accumulated in `main_grads_dtype`; both default to the
params' dtype. If gradients are not sharded, or a shard group has a single rank, they accumulate
before the sum, else after the sum of each micro-batch. If the added gradient is wider than the
accumulated gradient, it is not rounded first.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, UPSTREAM, Capabilities
from zero_sim.targets.megatron.fsdp_engine import MegatronFSDPEngine
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.rank_local import Library, RankLocal
from zero_sim.targets.torch.optim import OPTIMIZERS, decays_weights
from zero_sim.targets.torch.wrapping import stale_after_evaluation


def numerics_for(scenario: Scenario, chosen: Any) -> Numerics:
    """Return the arithmetic of a case.

    Args:
        scenario: The target's case.
        chosen: Values of all options.
    """
    accumulated, summed = _dtypes(scenario, chosen)
    is_scattered, in_blocks = scenario.system.stage > 1, scenario.system.redundancy > 1
    return Numerics(
        # With `average_in_collective`, AVG. Otherwise gradients are multiplied by the fp32
        # reciprocal of the number of ranks and then summed.
        divide="avg" if chosen["average"] else "premul-fp32",
        divide_by="ranks",
        divide_each="round" if chosen["average"] and is_scattered else "step",
        # Stages 2 and 3 sum every micro-batch. With HSDP they sum within shard groups, and over the
        # replicas at the end.
        sync=("every-in-block" if in_blocks else "every") if is_scattered else "last",
        grad_dtype="param",
        accumulate_dtype=_of_params(accumulated, scenario),
        reduce_dtype=_of_params(summed, scenario),
        reported_grads="after-division",
        # Masters are fp32 copies of the params, and the optimizer gets fp32 gradients.
        reported_dtype="fp32",
    )


def _dtypes(scenario: Scenario, chosen: Any) -> tuple[Any, Any]:
    own, main, wire = scenario.model.dtype, chosen["main_grads"], chosen["communication"]
    accumulated = own if main == "param" else main
    return accumulated, accumulated if wire == "param" else wire


def _of_params(dtype: str, scenario: Scenario) -> Any:
    """Return a dtype's name in a declaration: `param` for the params' dtype."""
    return "param" if dtype == scenario.model.dtype else dtype


def _is_wider(one: str, other: str) -> bool:
    return one != other and one == "fp32"


def without_rule(scenario: Scenario, chosen: Any) -> Iterator[Problem]:
    """Yield fields for which no rule can be declared; arguments as for `numerics_for`."""
    accumulated, summed = _dtypes(scenario, chosen)
    # Sharded systems accumulate sums over ranks, others accumulate local gradients.
    added = summed if _is_scattered(scenario) else scenario.model.dtype
    if _is_wider(added, accumulated) and scenario.run.micro_batches > 1:
        yield Problem(
            path="run.micro_batches",
            message=f"Megatron-FSDP adds {added} gradients, not rounded to {accumulated}, to "
            f"gradients accumulated in {accumulated}, for which no rule can be declared.",
            suggestion="Try one micro-batch, or remove option main_grads.",
        )
    if _is_wider(summed, accumulated):
        yield Problem(
            path="system.options",
            message=f"Megatron-FSDP rounds a sum in {summed} to {accumulated}, for which no rule "
            "can be declared.",
            suggestion="Remove option communication.",
        )
    if scenario.system.redundancy > 1 and summed != accumulated:
        yield Problem(
            path="system.redundancy",
            message=f"Megatron-FSDP adds the {summed} sums of shard groups in {accumulated}, then "
            "sums over the replicas, for which no rule can be declared.",
            suggestion="Remove option communication.",
        )
    if chosen["main_params"] == "param" and (scenario.model.dtype, accumulated) != ("fp32", "fp32"):
        yield Problem(
            path="system.options",
            message="expected fp32 params and gradients with option main_params = param, because "
            "masters would not be fp32.",
            suggestion="Remove it.",
        )


def known_to_go_wrong(scenario: Scenario, chosen: Any) -> Iterator[Problem]:
    """Yield fields that are known to go wrong; arguments as for `numerics_for`."""
    system, spec = scenario.system, scenario.optimizer
    # scenarios/upstream/megatron-fsdp-reduced-twice.
    if system.stage < 2 and not chosen["overlap_grads"]:
        yield Problem(
            path="system.options",
            message="megatron-fsdp 0.6.1 reduces gradients twice at stages 0 and 1 if "
            f"overlap_grad_reduce is off. {UPSTREAM}",
            suggestion="Remove option overlap_grads.",
        )
    # scenarios/upstream/megatron-fsdp-initial-step. In plain SGD, a step with zero gradients
    # changes nothing.
    if chosen["shard_optimizer"] and (spec.name != "sgd" or decays_weights(spec)):
        yield Problem(
            path="system.options",
            message="expected sgd without weight decay, because megatron-fsdp 0.6.1 steps once "
            "with zero gradients in fully_shard_optimizer, which counts as a step and decays "
            f"weights, got {spec.name}. {UPSTREAM}",
            suggestion="Remove option shard_optimizer.",
        )
    # scenarios/upstream/megatron-fsdp-rows: row lengths of all params. Rows of one element fit
    # beside all others.
    rows = {prod(shape[1:]) for shape in scenario.model.shapes or ()} - {1}
    if system.stage and len(rows) > 1:
        yield Problem(
            path="model.shapes",
            message="expected equal row lengths, because megatron-fsdp 0.6.1 cuts a row in two and "
            f"raises if row lengths in a bucket differ, got {', '.join(map(str, sorted(rows)))}. "
            f"{UPSTREAM}",
            suggestion="Try one length, or stage 0.",
        )
    if system.stage > 1 and not _is_scattered(scenario):
        yield from _in_one_shard(scenario, chosen)


def _is_scattered(scenario: Scenario) -> bool:
    # Gradients stay whole in a shard group with a single rank.
    return scenario.system.stage > 1 and scenario.world.size > scenario.system.redundancy


def _in_one_shard(scenario: Scenario, chosen: Any) -> Iterator[Problem]:
    """Yield problems of stages 2 and 3 with a single rank in each shard group."""
    # scenarios/upstream/megatron-fsdp-doubled and megatron-fsdp-scaled-again.
    accumulated, summed = _dtypes(scenario, chosen)
    if accumulated != summed:
        yield Problem(
            path="system.options",
            message="megatron-fsdp 0.6.1 adds gradients to themselves if a shard group has one "
            f"rank and grad_comm_dtype differs from main_grads_dtype. {UPSTREAM}",
            suggestion="Try two ranks for each replica, or remove option communication.",
        )
    if scenario.world.size > 1 and scenario.run.micro_batches > 1:
        yield Problem(
            path="run.micro_batches",
            message="megatron-fsdp 0.6.1 divides accumulated gradients again at every micro-batch "
            f"if a shard group has one rank. {UPSTREAM}",
            suggestion="Try one micro-batch, or two ranks for each replica.",
        )


def _why_not_averaged(scenario: Scenario) -> str:
    if scenario.system.redundancy == 1:
        return ""
    return "replicas (system.redundancy), because means are rounded before they are added"


class MegatronFSDP:
    """Megatron-FSDP; the stage is its `zero_dp_strategy`.

    Args:
        as_is: True to also accept cases that are known to go wrong, as in scenarios/upstream.
    """

    library = Library(package="megatron_fsdp", extra="megatron-fsdp", judged="megatron-fsdp==0.6.1")
    # No names, because its modules keep no state of a rank. It calls `torch.cuda` on every machine.
    rank_local = RankLocal(cuda_is_cpu=True)
    options = {  # noqa: RUF012
        "main_params": Option(default="fp32", values=("param",)),
        "main_grads": Option(default="param", values=("fp32", "bf16")),
        "communication": Option(default="param", values=("fp32", "bf16")),
        "average": Option(default=False, values=(True,), fits=_why_not_averaged),
        "overlap_grads": Option(default=True, values=(False,)),
        "overlap_gathers": Option(default=True, values=(False,)),
        "synced_by_hand": Option(default=False, values=(True,)),
        "shard_optimizer": Option(default=False, values=(True,)),
    }
    capabilities = Capabilities(
        stages=(0, 1, 2, 3),
        # It cuts params by rows, but scalars and empty params have none.
        scalar_params=False,
        empty_params=False,
        dtypes=("fp32", "bf16"),
        optimizers=tuple(
            name for name in OPTIMIZERS if name not in ("rprop", *WHOLE_PARAM_OPTIMIZERS)
        ),
        follows=(*OPTIMIZER_SETTINGS, "run.micro_batches", "model.tied", "system.redundancy"),
    )

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"megatron-fsdp{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the arithmetic of a case."""
        return numerics_for(scenario, chosen_options(self, scenario))

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield fields of a case that have no rule or are known to go wrong."""
        chosen: Any = chosen_options(self, scenario)
        yield from without_rule(scenario, chosen)
        if not self._as_is:
            yield from known_to_go_wrong(scenario, chosen)
            if scenario.system.stage == 3:
                yield from stale_after_evaluation(scenario)

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> MegatronFSDPEngine:
        """Wrap the module for training on this rank."""
        options = chosen_options(self, scenario)
        return MegatronFSDPEngine(module, scenario=scenario, options=options, as_is=self._as_is)


TARGETS = (MegatronFSDP(), MegatronFSDP(as_is=True))
