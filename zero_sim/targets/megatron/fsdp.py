"""Megatron-FSDP (the package megatron-fsdp) under a plain optimizer of torch.

[Note: what stands for what]
`system.stage` for `zero_dp_strategy`, from `no_shard` to `optim_grads_params`; `system.redundancy`
for HSDP, whose outer dimension replicates. Units are the classes of the model's children with
params, or of the model where these are its own. Gradients accumulate as its documentation says:
with `set_model_auto_sync` at the last micro-batch, or, `synced_by_hand`, with `is_last_microbatch`
and `finish_grad_sync`. The optimizer is stepped and `install_optimized_model_weights` called, or
with `shard_optimizer` left to `fully_shard_optimizer`. It calls `torch.cuda` wherever it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities
from zero_sim.targets.megatron.fsdp_engine import MegatronFSDPEngine
from zero_sim.targets.megatron.fsdp_rules import (
    known_to_go_wrong,
    numerics_for,
    without_rule,
)
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.rank_local import Library, RankLocal
from zero_sim.targets.torch.optim import OPTIMIZERS


def _why_not_averaged(scenario: Scenario) -> str:
    if scenario.system.redundancy == 1:
        return ""
    return "blocks (system.redundancy), the mean of each of which is rounded before they are added"


class MegatronFSDP:
    """Megatron-FSDP; the stage is its `zero_dp_strategy`.

    Args:
        as_is: Whether cases that are known to go wrong may be asked for, too: scenarios/upstream
            has them.
    """

    library = Library(package="megatron_fsdp", extra="megatron-fsdp", judged="megatron-fsdp==0.6.1")
    # Its modules keep nothing for one rank: none is declared, and ranks do not disturb each other.
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
        # A scalar has no rows to deal out, and a param without elements no row to count in.
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
        """By which rules it computes a case."""
        return numerics_for(scenario, chosen_options(self, scenario))

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """What of a case is by no rule that can be declared, or is known to go wrong."""
        chosen: Any = chosen_options(self, scenario)
        yield from without_rule(scenario, chosen)
        if not self._as_is:
            yield from known_to_go_wrong(scenario, chosen)

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> MegatronFSDPEngine:
        """Wrap the module for training on this rank."""
        options = chosen_options(self, scenario)
        return MegatronFSDPEngine(module, scenario=scenario, options=options, as_is=self._as_is)


MEGATRON_FSDP = (MegatronFSDP(), MegatronFSDP(as_is=True))
