"""torch's `fully_shard` (FSDP2) with what it can be set to: HSDP, dtypes, division, resharding.

[Note: what stands for what]
`system.redundancy` for a mesh of two dimensions, `system.reshard_after_forward` for
`reshard_after_forward`, which is a number of ranks with option `reshard_ranks`, `system.prefetch`
for how many modules are set to be prefetched forward and backward, `system.sync` for
`set_requires_gradient_sync`, and `model.dtype` for `param_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.fsdp2 import TorchFSDP2
from zero_sim.targets.torch.fsdp2_knobs_engine import FSDP2KnobsEngine
from zero_sim.targets.torch.fsdp2_rules import (
    divides_twice,
    numerics_with,
    reduced_in,
    without_rule,
)

_DTYPES = ("fp32", "bf16", "fp16")


def _why_not_all_reduced_last(scenario: Scenario) -> str:
    system = scenario.system
    if system.redundancy > 1 and system.sync == "every":
        return ""
    return "no copies (system.redundancy) that are summed at every micro-batch (system.sync)"


def _why_not_left_sharded(scenario: Scenario) -> str:
    if not scenario.system.reshard_after_forward:
        return ""
    return "params that are freed after forward, which backward needs"


def _why_not_kept_by_few(scenario: Scenario) -> str:
    if scenario.system.reshard_after_forward:
        return ""
    return "params that every rank keeps after forward"


class TorchFSDP2Knobs:
    """`fully_shard` under a plain optimizer, with options of its own.

    Args:
        as_is: Whether cases that are known to go wrong may be asked for, too.
    """

    capabilities = replace(
        TorchFSDP2.capabilities,
        stages=(3,),
        dtypes=("fp32", "bf16"),
        follows=(
            *TorchFSDP2.capabilities.follows,
            "system.redundancy",
            "system.reshard_after_forward",
            "system.prefetch",
            "system.sync",
        ),
    )
    options = {  # noqa: RUF012
        "reduce_dtype": Option(default="param", values=_DTYPES),
        "force_sum": Option(default=False, values=(True,)),
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
        self.name = f"torch-fsdp2-knobs{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """By which rules it computes a case."""
        return numerics_with(scenario, chosen_options(self, scenario))

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """What of a case is known to go wrong, or is by no rule that can be declared."""
        chosen: Any = chosen_options(self, scenario)
        yield from without_rule(scenario, chosen)
        is_large = scenario.model.name == "bit-hash"
        if reduced_in(scenario, chosen) == "fp16" and is_large:
            yield Problem(
                path="model.name",
                message="gradients of this model can be larger than what fp16 can be, got "
                "reduce_dtype = fp16.",
                suggestion="Try another model or reduce_dtype.",
            )
        few, shards = chosen["reshard_ranks"], scenario.world.size // scenario.system.redundancy
        if few and (few < 2 or few >= shards or shards % few):
            yield Problem(
                path="system.options",
                message=f"expected reshard_ranks to divide the {shards} ranks that shard params "
                f"together, and to be at least 2 and less than these, got {few}.",
                suggestion="Leave it out.",
            )
        if divides_twice(scenario, chosen) and not self._as_is:
            yield Problem(
                path="system.options",
                message="torch 2.13 divides twice by divide_factor where one rank has all of what "
                "is sharded: see scenarios/upstream.",
                suggestion="Leave out divide_factor, force_sum or fp16.",
            )

    def reduce_ops(self, scenario: Scenario) -> tuple[str, ...]:
        """What its collectives do besides SUM."""
        divides = self.numerics(scenario).divide
        return {"avg": ("AVG",), "premul": ("PREMUL_SUM",)}.get(divides or "", ())

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> FSDP2KnobsEngine:
        """Shard the module for training on this rank."""
        options = chosen_options(self, scenario)
        return FSDP2KnobsEngine(module, scenario=scenario, group=group, options=options)
