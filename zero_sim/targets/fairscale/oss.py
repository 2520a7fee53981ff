"""fairscale's OSS under torch's DDP, and under its own ShardedDDP.

[Note: what fairscale computes]
OSS deals whole params to ranks, which broadcast what they stepped. ShardedDDP multiplies a gradient
with 1 / ranks when it is there and reduces it to the rank that steps its param, small ones together
in a buffer of `reduce_buffer_size` elements a rank; within `no_sync` gradients accumulate locally.
The other ranks have no gradient after it.

As it is built ShardedDDP broadcasts all that `state_dict` names and waits then, so that a tied
param is broadcast twice into one memory at once. The second broadcast writes the bits of the first:
on gloo processes both were in flight and params came out right, so this is no divergence; but
nothing promises it, and where collectives may write late it is told as a race.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities
from zero_sim.targets.fairscale.engine import OSSEngine, ShardedDDPEngine
from zero_sim.targets.rank_local import Library
from zero_sim.targets.torch.ddp import TorchDDP
from zero_sim.targets.torch.optim import OPTIMIZERS

LIBRARY = Library(package="fairscale", extra="fairscale", judged="fairscale==0.4.13")
_FOLLOWS = (
    *OPTIMIZER_SETTINGS,
    "run.micro_batches",
    "model.tied",
    "model.distinct_start",
    "optimizer.clip_norm",
    "reload",
)
_ONLY = (("reload.form", ("consolidated",)),)
_NUMERICS = replace(TorchDDP.numerics, norm="told", clip="fp32-division")


class FairscaleOSS:
    """DDP and OSS on fp32 params: stage 1, whole params a rank."""

    name = "fairscale-oss"
    library: ClassVar[Library] = LIBRARY
    capabilities = Capabilities(
        stages=(1,),
        optimizers=OPTIMIZERS,
        follows=_FOLLOWS,
        only=_ONLY,
    )
    numerics = _NUMERICS

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> OSSEngine:
        """Wrap the module for training on this rank."""
        return OSSEngine(module, scenario=scenario, group=group)


class FairscaleShardedDDP:
    """ShardedDDP and OSS on fp32 params: stage 2, whole params a rank.

    Args:
        name: Of the target.
        buffer_elems: `reduce_buffer_size`, 0 for one reduction a param; None for the library's.
        as_is: Whether what is known to go wrong is done: scenarios/upstream has it.
    """

    library: ClassVar[Library] = LIBRARY
    numerics = _NUMERICS

    def __init__(self, *, name: str, buffer_elems: int | None, as_is: bool = False) -> None:
        self.name = name
        self._buffer_elems, self._as_is = buffer_elems, as_is
        self.capabilities = Capabilities(
            stages=(2,),
            empty_params=as_is,
            optimizers=OPTIMIZERS,
            follows=_FOLLOWS,
            only=_ONLY,
        )

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """What of a case is told as a race, though what it computes is right."""
        timing = scenario.world.timing
        if not self._as_is and scenario.model.tied and timing != "eager":
            yield Problem(
                path="model.tied",
                message="fairscale 0.4.13 broadcasts a tied param once for each name, into one "
                "memory at once and with equal values: a race that changes no bit, but that "
                f"timing {timing!r} stops at, got "
                f"{', '.join(map(repr, scenario.model.tied))}.",
                suggestion="Try timing = 'eager', or target fairscale-oss.",
            )

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> ShardedDDPEngine:
        """Wrap the module for training on this rank."""
        return ShardedDDPEngine(
            module,
            scenario=scenario,
            group=group,
            buffer_elems=self._buffer_elems,
            by_optimizer=self._as_is,
        )


OSS = FairscaleOSS()
SHARDED_DDP = FairscaleShardedDDP(name="fairscale-sharded-ddp", buffer_elems=None)
SHARDED_DDP_UNBUFFERED = FairscaleShardedDDP(
    name="fairscale-sharded-ddp-unbuffered", buffer_elems=0
)
SHARDED_DDP_AS_IS = FairscaleShardedDDP(
    name="fairscale-sharded-ddp-as-is", buffer_elems=None, as_is=True
)
FAIRSCALE = (OSS, SHARDED_DDP, SHARDED_DDP_UNBUFFERED, SHARDED_DDP_AS_IS)
