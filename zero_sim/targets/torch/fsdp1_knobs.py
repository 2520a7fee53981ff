"""torch's FullyShardedDataParallel (FSDP1) with what it can be set to: HSDP, dtypes, prefetch.

[Note: what FSDP1 computes by what it is set to]
Micro-batches accumulate under `no_sync` in the dtype of the params that forward has; what came of
that is cast to `reduce_dtype`, divided, summed and divided there, and cast to fp32, in which rounds
that are each reduced are added. With HSDP both parts of the division are of all ranks, and stand
before the first sum and behind the last one.

[Note: what stands for what]
`system.redundancy` for `HYBRID_SHARD`, at stage 2 `_HYBRID_SHARD_ZERO2`; `system.sync` for whether
there is a `no_sync`; `model.dtype` for `param_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import UPSTREAM
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.fsdp1 import TorchFSDP1
from zero_sim.targets.torch.fsdp1_knobs_engine import FSDP1KnobsEngine


class TorchFSDP1Knobs:
    """FullyShardedDataParallel under a plain optimizer, with options of its own.

    Args:
        as_is: Whether cases that are known to go wrong may be asked for, too.
    """

    capabilities = replace(
        TorchFSDP1.capabilities,
        dtypes=("fp32", "bf16"),
        follows=(*TorchFSDP1.capabilities.follows, "system.redundancy", "system.sync"),
    )
    options = {  # noqa: RUF012
        "reduce_dtype": Option(default="param", values=("fp32", "bf16")),
        "backward_prefetch": Option(default="pre", values=("post", "none")),
        "forward_prefetch": Option(default=False, values=(True,)),
        "limit_all_gathers": Option(default=True, values=(False,)),
    }

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"torch-fsdp1-knobs{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """By which rules it computes a case."""
        reduce: Any = chosen_options(self, scenario)["reduce_dtype"]
        every = scenario.system.sync == "every"
        return replace(
            TorchFSDP1().numerics(scenario),
            sync=None,
            divide_each="round" if every else "step",
            accumulate_dtype="fp32" if every else "param",
            reduce_dtype=reduce,
            told_dtype="fp32",
        )

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """What of a case is known to go wrong, or is by no rule that can be declared."""
        system = scenario.system
        is_whole = system.stage == 0 or scenario.world.size == 1
        if is_whole and system.sync == "every" and scenario.run.micro_batches > 1:
            yield Problem(
                path="system.sync",
                message="where nothing is sharded FSDP1 sums again over the ranks what it has "
                "summed of earlier micro-batches, which is by no rule that can be declared.",
                suggestion="Try sync = 'last', or one micro-batch.",
            )
        if not self._as_is:
            yield from _known_to_go_wrong(scenario, is_whole=is_whole)

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> FSDP1KnobsEngine:
        """Shard the module for training on this rank."""
        options = chosen_options(self, scenario)
        return FSDP1KnobsEngine(module, scenario=scenario, group=group, options=options)


def _known_to_go_wrong(scenario: Scenario, *, is_whole: bool) -> Iterator[Problem]:
    """Cases that go wrong in torch 2.13.

    Args:
        scenario: As the target is given it.
        is_whole: Whether nothing is sharded.
    """
    narrow = scenario.model.dtype != "fp32"
    if is_whole and narrow and scenario.model.tied and scenario.run.micro_batches > 1:
        yield Problem(
            path="model.tied",
            message="where nothing is sharded FSDP1 of torch 2.13 raises as it gives the other "
            "name of a tied fp32 param the 16-bit gradient of an earlier micro-batch, got "
            f"{', '.join(map(repr, scenario.model.tied))}. {UPSTREAM}",
            suggestion="Try fp32, or one micro-batch.",
        )
    copies = scenario.system.redundancy
    if 1 < copies == scenario.world.size:
        yield Problem(
            path="system.redundancy",
            message="torch 2.13 reduces nothing with HYBRID_SHARD where a block has one rank, got "
            f"{copies} blocks. {UPSTREAM}",
            suggestion="Try stage 0, or fewer copies than ranks.",
        )
