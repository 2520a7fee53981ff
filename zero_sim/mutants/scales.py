"""Faults of params in fp8: their scales, and values that do not go with them."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import optimizer
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.fp8 import ScaleUpdate


@mutant("D07", "DTYPE", "", seen_in="class DTYPE")
def scale_never_updated(patch: Patches) -> None:
    """The scale of an fp8 param stays what it was at the start."""
    patch[ScaleUpdate.run, "if not self._scales:"] = "if True:"


@mutant("D08", "DTYPE", "K SP", seen_in="class DTYPE")
def greatest_over_the_copies(patch: Patches) -> None:
    """The greatest magnitude of an fp8 param is exchanged with the ranks that hold copies."""
    patch[optimizer._build_scale_updates, "ddp.owners_of(kind)"] = """
        ddp.groups_of(kind).replica_group or ..."""


@mutant("D09", "DTYPE", "K SP", seen_in="class DTYPE")
def greatest_of_the_own_block(patch: Patches) -> None:
    """With the state over all ranks the greatest magnitude is that of the own block's shards."""
    patch[optimizer._build_scale_updates, "ddp.owners_of(kind)"] = "ddp.groups_of(kind).shard_group"


@mutant("D10", "DTYPE", "", seen_in="class DTYPE")
def one_format_for_the_other(patch: Patches) -> None:
    """Scales are chosen for e4m3, also where values are e5m2."""
    patch[ScaleUpdate.run, "dtype=param.dtype"] = "dtype=torch.float8_e4m3fn"


@mutant("D11", "DTYPE", "", seen_in="class DTYPE", kill="values")
def stale_scale_on_odd_ranks(patch: Patches) -> None:
    """Odd ranks take part in the exchange of magnitudes, but keep their old scales."""
    patch[ScaleUpdate.run, "if param.requires_grad"] = "... and dist.get_rank() % 2 == 0"


@mutant("D12", "DTYPE", "", seen_in="class DTYPE")
def values_of_another_scale(patch: Patches) -> None:
    """Values of fp8 params are rounded for a scale twice as large as the one beside them."""
    patch[Buffer.write_param_shard, "quantize_(working, data"] = "... / 2"
