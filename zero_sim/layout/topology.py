"""Ranks as coordinates (tp, cp, dp, pp), and the groups that follow from them. Integers only.

Tensor-parallel (tp) and pipeline-parallel (pp) ranks hold different params. Context-parallel (cp)
and data-parallel (dp) ranks hold the same params and see different data. So ranks with equal (tp,
pp) train the same params and shard their optimizer state together: they form a *dp-cp group*.

Experts are the exception: expert parallelism (ep) assigns experts round-robin to the ranks in a
dp-cp group. Group ranks e, e + ep, e + 2 ep, ... have expert-parallel index e. They hold the same
experts and train them together, as an *expert data-parallel group*.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from zero_sim.errors import UsageError

AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Number of ranks per axis, and the numbering of ranks.

    Raises:
        UsageError: If a size is below 1, `order` is no permutation of the axes, or `ep` does not
            divide the dp-cp group's size.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Number of expert-parallel indices per dp-cp group. Not an axis."""
    order: str = "tp-cp-dp-pp"
    """Axes from fastest to slowest: neighbouring ranks differ on the first axis."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            if getattr(self, axis) < 1:
                # Before the check below divides by it.
                raise UsageError(f"expected {axis} of at least 1, got {getattr(self, axis)}")
        if sorted(self.axes) != sorted(AXES):
            raise UsageError(
                f"expected an order of {', '.join(AXES)} joined by hyphens, got {self.order!r}. "
                "Try 'tp-cp-dp-pp'."
            )
        # Each expert-parallel index needs the same number of ranks.
        if self.dp * self.cp % self.ep:
            raise UsageError(
                f"expected ep to divide the {self.dp * self.cp} ranks of a dp-cp group, got "
                f"{self.ep}. Try 1."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes, fastest first."""
        return tuple(self.order.split("-"))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index on each axis.

        Raises:
            UsageError: If the rank is out of range.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"expected a rank of 0 to {self.world_size - 1}, got {rank}")
        place = {}
        # Mixed radix: the fastest axis is the least significant digit.
        for axis in self.axes:
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def rank_of(self, **place: int) -> int:
        """Return the rank at the given coordinates; omitted axes are 0.

        Raises:
            UsageError: If a coordinate is outside its axis.
        """
        # Inverse of `coordinates`.
        rank, stride = 0, 1
        for axis in self.axes:
            size, index = getattr(self, axis), place.get(axis, 0)
            if not 0 <= index < size:
                raise UsageError(f"expected {axis} of 0 to {size - 1}, got {index}")
            rank, stride = rank + index * stride, stride * size
        return rank

    def groups_over(self, *varying: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups whose ranks differ only on the given axes.

        Returns:
            Groups in order of their first rank, each with ascending ranks.
        """
        # A group for each combination of indices on the fixed axes.
        fixed = [axis for axis in AXES if axis not in varying]
        groups = []
        for place in product(*(range(getattr(self, axis)) for axis in fixed)):
            at = dict(zip(fixed, place, strict=True))
            members = (
                # Combine this place with all places on the varying axes.
                self.rank_of(**at, **dict(zip(varying, inner, strict=True)))
                for inner in product(*(range(getattr(self, axis)) for axis in varying))
            )
            # Ascending, because torch.distributed numbers group ranks by ascending world rank.
            groups.append(tuple(sorted(members)))
        return tuple(sorted(groups))

    def dp_cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the dp-cp groups, one for each (tp, pp)."""
        return self.groups_over("dp", "cp")
