"""Faults of params in fp8: their scales, and values that do not go with them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.buffered_module import BufferedModule
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.variants import fp8
from zero_sim.zero.variants.fp8 import ScaleUpdate


@mutant("D07", "DTYPE", "", seen_in="class DTYPE")
def scale_never_updated(patch: Patches) -> None:
    """The scale of an fp8 param stays what it was at the start."""

    @patch(ScaleUpdate, "run")
    def wrong(right, self, masters):
        return None


@mutant("D08", "DTYPE", "K SP", seen_in="class DTYPE")
def greatest_over_the_copies(patch: Patches) -> None:
    """The greatest magnitude of an fp8 param is exchanged with the ranks that hold copies."""

    @patch(DistributedDataParallel, "__init__")
    def noted(right, self, module, **named):
        right(self, module, **named)
        self.__dict__["_noted"] = True

    @patch(BufferedModule, "owners_of")
    def wrong(right, self, kind):
        # While buffers are planned it says how many shards there are; later only scales ask.
        is_planned = "_noted" in self.__dict__
        copies = self.groups_of(kind).replica_group if is_planned else None
        return right(self, kind) if copies is None else copies


@mutant("D10", "DTYPE", "", seen_in="class DTYPE")
def one_format_for_the_other(patch: Patches) -> None:
    """Scales are chosen for e4m3, also where values are e5m2."""

    @patch(fp8, "choose_scale")
    def wrong(right, amax, *, dtype):
        return right(amax, dtype=torch.float8_e4m3fn)


@mutant("D11", "DTYPE", "", seen_in="class DTYPE", kill="values")
def stale_scale_on_odd_ranks(patch: Patches) -> None:
    """Odd ranks take part in the exchange of magnitudes, but keep their old scales."""

    @patch(ScaleUpdate, "run")
    def wrong(right, self, masters):
        before = {param: scale.clone() for param, scale in self._scales.items()}
        right(self, masters)
        for param, scale in self._scales.items() if dist.get_rank() % 2 else ():
            scale.copy_(before[param])


@mutant("D12", "DTYPE", "", seen_in="class DTYPE")
def values_of_another_scale(patch: Patches) -> None:
    """Values of fp8 params are rounded for a scale twice as large as the one beside them."""

    @patch(Buffer, "write_param_shard")
    def wrong(right, self, param, data):
        right(self, param, data if self.memory[param].scale is None else data / 2)
