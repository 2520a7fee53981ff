"""Faults in optimizers that need unsharded params, such as Muon and LAMB."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.variants import whole_params


@mutant("U01", "LAYOUT", "SP", seen_in="class LAYOUT", core=True)
def own_part_from_the_start(patch: Patches) -> None:
    """Each owner takes the first elements of an unsharded update instead of its own elements."""
    patch[whole_params._of_param, "slice(own.start, own.stop)"] = "slice(0, own.numel)"


@mutant("U02", "OPTST", "SP", seen_in="class OPTST", kill="volume")
def part_taken_for_the_whole(patch: Patches) -> None:
    """Owners orthogonalize a shard, or take its norm, as if it were the unsharded param."""
    # The default `whole_of` treats each leaf as an unsharded param.
    patch[whole_params._attach, "inner.whole_of ="] = "_ ="


@mutant("U03", "EMPTY", "NP", seen_in="class EMPTY", kill="contract")
def gathers_only_with_a_part(patch: Patches) -> None:
    """A rank without elements in a bucket skips its gather."""
    # Only this rank skips the gather, so the calls mismatch.
    patch[whole_params.whole_of_unit, "if unit.plan.partition"] = """
        if not shard.any():
            return shard.new_zeros(unit.plan.span.numel)
        ..."""


@mutant("U05", "OPTST", seen_in="class OPTST")
def one_iteration_less(patch: Patches) -> None:
    """Matrices are orthogonalized in four steps instead of five."""
    patch[whole_params.orthogonalized, "range(_NEWTON_SCHULZ_STEPS)"] = "range(4)"


@mutant("U06", "SCALE", seen_in="class SCALE")
def scaled_by_the_other_side(patch: Patches) -> None:
    """A matrix is scaled by columns over rows instead of rows over columns."""
    patch[whole_params.orthogonalized, "rows / columns"] = "columns / rows"


@mutant("U07", "LAYOUT", seen_in="class LAYOUT")
def transposed_for_good(patch: Patches) -> None:
    """A tall matrix is not transposed back."""
    back = "near = near.mT.contiguous() if rows > columns else near\nreturn"
    patch[whole_params.orthogonalized, back] = "return"


@mutant("U08", "DTYPE", "SP", seen_in="class DTYPE")
def gathered_in_16_bits(patch: Patches) -> None:
    """Tensors that are gathered for unsharded updates travel in bf16."""
    patch[whole_params._whole_of, "whole_of_unit(unit, shard)"] = (
        "whole_of_unit(unit, shard.bfloat16()).float()"
    )


@mutant("U09", "LAYOUT", seen_in="class LAYOUT", core=True)
def whole_of_the_first_param(patch: Patches) -> None:
    """Every param of a bucket is read from the bucket's start."""
    patch[whole_params._of_param, "narrow(0, at.start, at.numel)"] = "narrow(0, 0, at.numel)"


@mutant("U10", "OPTST", "PG", seen_in="class OPTST")
def first_group_for_all(patch: Patches) -> None:
    """All params use the first param group's settings."""
    patch[whole_params._groups_of, "leaf: group"] = "leaf: optimizer.param_groups[0]"


@mutant("U11", "NORM", seen_in="class NORM")
def ratio_of_squares(patch: Patches) -> None:
    """The trust ratio is squared."""
    patch[whole_params.trust_ratio, "norms[0] / norms[1]"] = "(...) ** 2"
