"""Rows that several ranks read although each is for one of them.

Without another run to compare with it is not known which rows there are, so this is a note. Next to
a run of one rank that reads each row once it is a finding: as many rows are read, some by several
ranks and others by none.

[Note: the time within which a row is read once]
An epoch, which is a pass over a DataLoader, or a step if no DataLoader gave the rows. Ranks of
tensor parallelism read the same rows, and a sampler repeats a few rows to fill the last batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.against.rows import RowLog, Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Rows that ranks read within one epoch or step."""

    when: str
    """The epoch or step in words."""
    slot: Slot
    ranks: tuple[Counter[str], ...]
    """How often each rank read each row."""

    @property
    def shared(self) -> set[str]:
        """Rows that more than one rank read."""
        counts = Counter(row for rank in self.ranks for row in rank)
        return {row for row, count in counts.items() if count > 1}

    @property
    def is_distinct(self) -> bool:
        """True if each rank read several rows, and none of them twice."""
        return all(len(rank) > 1 and max(rank.values()) == 1 for rank in self.ranks)

    @property
    def overlapping(self) -> set[str]:
        """Rows that ranks read who did not read the same rows altogether."""
        readers = Counter(row for rows in {frozenset(rank) for rank in self.ranks} for row in rows)
        return {row for row, count in readers.items() if count > 1}


def shares_of(logs: Sequence[RowLog]) -> list[Shares]:
    """The rows of each epoch or step, in order.

    Args:
        logs: One for each rank.
    """
    keys: dict[tuple[bool, int, Slot], list[Counter[str]]] = defaultdict(
        lambda: [Counter() for _ in logs]
    )
    for rank, log in enumerate(logs):
        for (step, slot), digests in log.digests.items():
            epoch = log.epochs.get(step, 0)
            keys[epoch > 0, epoch or step + 1, slot][rank].update(digests)
    return [
        Shares(
            when=f"pass {number} over the data" if is_epoch else f"step {number}",
            slot=slot,
            ranks=tuple(ranks),
        )
        for (is_epoch, number, slot), ranks in sorted(keys.items(), key=lambda item: item[0])
    ]


def shared_rows_note(logs: Sequence[RowLog]) -> str:
    """The first epoch or step in which several ranks read the same rows; empty for none."""
    for share in shares_of(logs) if len(logs) > 1 else ():
        count = len(share.overlapping)
        # A sampler fills the last batch of all ranks with fewer rows than there are ranks.
        if share.is_distinct and count >= len(logs):
            total = len({row for rank in share.ranks for row in rank})
            return (
                f"in {share.when} {count} of {total} rows of {share.slot} were read by several "
                "ranks, whose other rows differ. Check that samplers of all ranks have one seed."
            )
    return ""


def wrongly_dealt(expected: Sequence[RowLog], got: Sequence[RowLog]) -> str:
    """Why rows are dealt wrongly, in one sentence; empty if they are not or it is not known.

    Args:
        expected: Logs of the ranks to compare with.
        got: Logs of the ranks that are judged.
    """
    known = {(each.when, each.slot): each for each in shares_of(expected)}
    for share in shares_of(got):
        other = known.get((share.when, share.slot))
        if other is None or not share.is_distinct:
            continue
        once = sum(other.ranks, Counter())
        read = sum(share.ranks, Counter())
        missed = once.keys() - read.keys()
        if max(once.values()) > 1 or once.total() != read.total() or read.keys() - once.keys():
            continue
        if missed and share.shared:
            return (
                f"Rows are dealt wrongly: in {share.when} {len(share.shared)} of {once.total()} "
                f"rows of {share.slot} are read by several ranks and {len(missed)} by none; the "
                "run to compare with reads each once."
            )
    return ""
