"""Comparison of a tensor's copies on several ranks, which must have equal bits.

With an unknown order of addition, no reference knows these bits. But in every reduction algorithm,
one rank completes each sum and sends copies. Judges in separate processes exchange hashes, which
are compared at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.compare import same_bits
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check

What = Literal["grad", "norm", "params"]

_PHASES: dict[What, tuple[Phase, str]] = {
    "grad": (Phase.REDUCE, "the reduced gradient"),
    "norm": (Phase.NORM, "the norm of the gradient"),
    "params": (Phase.GATHER, "the working param"),
}
"""Phase and name of each kind of tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Hash of a rank's tensor after a step."""

    step: int
    what: What
    param: str
    """Param name; empty for a norm."""
    start: int
    """Offset in the flattened param."""
    rank: int
    """World rank."""
    digest: str

    @property
    def key(self) -> tuple[int, What, str, int]:
        """Key that all copies of a tensor share."""
        return self.step, self.what, self.param, self.start


def digest_of(tensor: Tensor) -> str:
    """Hash a tensor, so that equal tensors by [Note: the rule for equality] have equal hashes."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point():
        # +0 equals -0, and all NaNs are equal.
        flat = torch.where(flat == 0, torch.zeros_like(flat), flat)
        flat = torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat)
    data = flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    # 8 bytes per tensor keep the messages between judges short.
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Ledger:
    """Keeps the first observed rank's tensors after each step, to compare other ranks with.

    Args:
        world_ranks: The group's world ranks, for messages.
    """

    def __init__(self, world_ranks: Sequence[int]) -> None:
        self._world_ranks = world_ranks
        self._first: dict[tuple[int, What, str, int], tuple[int, Tensor]] = {}

    def compare(
        self, what: What, tensor: Tensor, *, step: int, rank: int, param: str = "", start: int = 0
    ) -> Iterator[Finding]:
        """Yield a finding if a rank's tensor differs from the first observed rank's.

        Args:
            what: Kind of tensor.
            tensor: The rank's tensor.
            step: The step after which it was observed.
            rank: Group rank.
            param: Param name; empty for a norm.
            start: Offset of the tensor in the flattened param.
        """
        kept = self._first.setdefault((step, what, param, start), (rank, tensor))
        if kept[1] is tensor:
            # Clone: the next step overwrites live state.
            self._first[step, what, param, start] = (rank, tensor.detach().clone())
        elif kept[1].shape != tensor.shape or not same_bits(kept[1], tensor):
            other = self._world_ranks[kept[0]]
            at = _finding(what, step=step, rank=rank, other=other, param=param, start=start)
            yield findings.differing(at, kept[1], tensor)

    def params_of(self, step: int) -> dict[str, Tensor]:
        """Return the observed working params after a step."""
        return {
            param: tensor
            for (when, what, param, _), (_, tensor) in self._first.items()
            if when == step and what == "params"
        }

    def forget(self, *, before: int) -> None:
        """Drop all steps before `before`."""
        self._first = {key: kept for key, kept in self._first.items() if key[0] >= before}


def compare_copies(copies: Iterable[Copy]) -> Iterator[Finding]:
    """Yield a finding for each rank that differs from the largest group of equal ranks.

    Args:
        copies: Hashes from all judges.
    """
    held: dict[tuple[int, What, str, int], dict[str, list[int]]] = {}
    for copy in copies:
        held.setdefault(copy.key, {}).setdefault(copy.digest, []).append(copy.rank)
    # Sorted, so that the result does not depend on the order of reports.
    for (step, what, param, start), ranks_of in sorted(held.items()):
        if len(ranks_of) == 1:
            continue
        # In a tie, the group with the lowest rank counts as right.
        parties = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), min(ranks)))
        for rank in sorted(rank for ranks in parties[1:] for rank in ranks):
            other = min(parties[0])
            yield _finding(what, step=step, rank=rank, other=other, param=param, start=start)


def _finding(what: What, *, step: int, rank: int, other: int, param: str, start: int) -> Finding:
    phase, name = _PHASES[what]
    at = Finding(
        check=Check.INVARIANT_REPLICAS,
        message=f"{name} differs from that of rank {other}",
        step=step,
        phase=phase,
        rank=rank,
    )
    return replace(at, param=param, offset_in_param=start) if param else at
