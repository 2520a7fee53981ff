"""Checks for new_group and destroy_process_group: equal order on all ranks, no use after destroy.

If a rank destroys the default group and joins the world again, a new generation starts. torch then
numbers groups from 0 again, so the same name may mean other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.sim.failures import ContractViolation


@dataclass(frozen=True, slots=True)
class _Making:
    """A rank's call of `new_group`."""

    rank: int
    ranks: tuple[int, ...]
    site: str

    def __str__(self) -> str:
        return f"rank {self.rank}: new_group of ranks {list(self.ranks)} at {self.site}"


class GroupRegistry:
    """Groups that each rank made and destroyed in a run."""

    def __init__(self) -> None:
        # The first call, by (name, generation). Later calls must agree with it.
        self._made: dict[tuple[str, int], _Making] = {}
        self._generations: dict[int, int] = {}
        # Site of the destruction, by rank and then by group label, in order of time.
        self._destroyed: dict[int, dict[str, str]] = {}

    def generation(self, rank: int) -> int:
        """Return how many times the rank destroyed the default group."""
        return self._generations.get(rank, 0)

    def note_made(self, rank: int, name: str, ranks: Sequence[int], site: str) -> None:
        """Note that a rank makes a group, as a member or not.

        Raises:
            ContractViolation: Another rank made a group of this name with other ranks.
        """
        making = _Making(rank, tuple(ranks), site)
        first = self._made.setdefault((name, self.generation(rank)), making)
        if first.ranks != making.ranks:
            raise ContractViolation(
                f"groups created in different order: group {name} has different ranks\n"
                f"  {first}\n"
                f"  {making}\n"
                "Call new_group in the same order and with the same ranks on every rank, members "
                "or not.",
                aspect="group-order",
                rank=rank,
                other_rank=first.rank,
            )

    def note_destroyed(self, rank: int, label: str, site: str, *, world: bool) -> None:
        """Note a rank's destroy_process_group and its call site."""
        # Ordered by time, because `use_after_destroy` may need the last.
        self._destroyed.setdefault(rank, {})[label] = site
        if world:
            self._generations[rank] = self.generation(rank) + 1

    def use_after_destroy(
        self, rank: int, what: str, site: str, *, label: str | None = None
    ) -> ContractViolation | None:
        """Return the error for use of a destroyed group; None if the rank never destroyed a group.

        `what` is the use, such as `all_reduce`, at `site`. `label` is the group; None for the group
        that the rank destroyed last.
        """
        destroyed = self._destroyed.get(rank)
        if not destroyed:
            return None
        # torch's error for a missing group does not name the group.
        label = next(reversed(destroyed)) if label is None else label
        return ContractViolation(
            f"use after destroy_process_group: rank {rank} uses group {label}, which it destroyed\n"
            f"  destroyed at {destroyed[label]}\n"
            f"  {what} at {site}\n"
            "Destroy a group after its last use, or make it again.",
            aspect="use-after-destroy",
            rank=rank,
            other_rank=rank,
        )


def foreign_group(rank: int, owner: int, label: str, what: str) -> ContractViolation:
    """Return the error for a rank that uses another rank's (`owner`'s) group object.

    `what` is the use, with its call site.
    """
    return ContractViolation(
        f"rank {rank} uses the group {label} of rank {owner}: {what}\n"
        "Each rank has its own object for a group. Ranks are threads of one process and share its "
        "modules: a group in a module global or a class attribute belongs to the rank that stored "
        "it last. Keep it in an object of the rank's program or a threading.local(), or get it at "
        "each use: dist.group.WORLD, mesh.get_group(). For a library's global, let the target "
        "declare it in `rank_local`: `zero-sim doctor --target` names it.",
        aspect="foreign-group",
        rank=rank,
        other_rank=owner,
    )
