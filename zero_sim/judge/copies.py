"""Ranks that hold the same thing must hold the same bits, whatever these are.

Where the order of addition is not known, no reference can say which bits those are; but one rank
finishes each sum and copies of it travel, in every algorithm there is. Where each rank is judged in
a process of its own, judges tell hashes of what their rank holds, which are compared at the end.
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

_SAID: dict[What, tuple[Phase, str]] = {
    "grad": (Phase.REDUCE, "the reduced gradient"),
    "norm": (Phase.NORM, "the norm of the gradient"),
    "params": (Phase.GATHER, "the working param"),
}
"""Phase and name of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """What one rank holds after a step, as a hash."""

    step: int
    what: What
    param: str
    """Empty for a norm."""
    start: int
    """First of the flattened param's elements that it is about."""
    rank: int
    """Rank in the world."""
    digest: str

    @property
    def key(self) -> tuple[int, What, str, int]:
        """What it is a copy of."""
        return self.step, self.what, self.param, self.start


def digest_of(tensor: Tensor) -> str:
    """Hash a tensor so that equal ones, as `verify.compare` has it, have one hash."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point():
        flat = torch.where(flat == 0, torch.zeros_like(flat), flat)
        flat = torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat)
    data = flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Ledger:
    """What the first rank to be seen holds after a step, for the others to be compared with.

    Args:
        world_ranks: The ranks of the group, as messages name them.
    """

    def __init__(self, world_ranks: Sequence[int]) -> None:
        self._world_ranks = world_ranks
        self._first: dict[tuple[int, What, str, int], tuple[int, Tensor]] = {}

    def compare(
        self, what: What, tensor: Tensor, *, step: int, rank: int, param: str = "", start: int = 0
    ) -> Iterator[Finding]:
        """Give a finding where a rank holds something else than the first one that was seen.

        Args:
            what: What is held.
            tensor: It; copied where this rank is the first.
            step: After which step.
            rank: The rank that holds it.
            param: Of which param it is, if of one.
            start: First element of it that it is about.
        """
        kept = self._first.setdefault((step, what, param, start), (rank, tensor))
        if kept[1] is tensor:
            self._first[step, what, param, start] = (rank, tensor.detach().clone())
        elif kept[1].shape != tensor.shape or not same_bits(kept[1], tensor):
            other = self._world_ranks[kept[0]]
            at = _finding(what, step=step, rank=rank, other=other, param=param, start=start)
            yield findings.differing(at, kept[1], tensor)

    def params_of(self, step: int) -> dict[str, Tensor]:
        """The working params after a step, as far as any rank was seen with them."""
        return {
            param: tensor
            for (when, what, param, _), (_, tensor) in self._first.items()
            if when == step and what == "params"
        }

    def forget(self, *, before: int) -> None:
        """Forget the steps before one."""
        self._first = {key: kept for key, kept in self._first.items() if key[0] >= before}


def compare_copies(copies: Iterable[Copy]) -> Iterator[Finding]:
    """Give a finding for each rank that holds something else than most of the others do.

    Args:
        copies: What judges told of their ranks.
    """
    held: dict[tuple[int, What, str, int], dict[str, list[int]]] = {}
    for copy in copies:
        held.setdefault(copy.key, {}).setdefault(copy.digest, []).append(copy.rank)
    for (step, what, param, start), ranks_of in sorted(held.items()):
        if len(ranks_of) == 1:
            continue
        # Of equally many, those with the lowest rank are taken at their word.
        parties = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), min(ranks)))
        for rank in sorted(rank for ranks in parties[1:] for rank in ranks):
            other = min(parties[0])
            yield _finding(what, step=step, rank=rank, other=other, param=param, start=start)


def _finding(what: What, *, step: int, rank: int, other: int, param: str, start: int) -> Finding:
    phase, name = _SAID[what]
    at = Finding(
        check=Check.INVARIANT_REPLICAS,
        message=f"{name} is not what rank {other} holds",
        step=step,
        phase=phase,
        rank=rank,
    )
    return replace(at, param=param, offset_in_param=start) if param else at
