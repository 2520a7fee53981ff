"""Judgement on the rows that ranks read, in a single run or compared with another run.

In a single run the full set of rows is unknown, so rows read by several ranks are only a note. The
full set is known if another run on one rank reads each row once. Then it is a finding if ranks read
equally many rows in total, but some rows several times and others never. If ranks read rows beyond
the other run's, there is nothing to compare, and no finding.

[Note: the time within which a row is read once]
An epoch, which is a pass over a DataLoader, or a step without a DataLoader. Tensor-parallel ranks
read the same rows, and a sampler repeats a few rows to fill the last batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zero_sim.replicas.rows import RowLog, Slot

Rows = Counter[str]
"""Number of reads by a rank, for each row."""


class _Time(NamedTuple):
    is_epoch: bool
    number: int
    slot: Slot

    def __str__(self) -> str:
        return f"pass {self.number} over the data" if self.is_epoch else f"step {self.number}"


def _rows_of(logs: Sequence[RowLog], *, by_epoch: bool) -> dict[_Time, list[Rows]]:
    found: dict[_Time, list[Rows]] = defaultdict(lambda: [Counter() for _ in logs])
    for index, log in enumerate(logs):
        for (step, slot), digests in log.digests.items():
            epoch = log.epochs.get(step, 0) if by_epoch else 0
            # Messages count steps from 1. Epoch 0 stands for no epoch.
            found[_Time(epoch > 0, epoch or step + 1, slot)][index].update(digests)
    return found


def _read_by_several(ranks: Iterable[Iterable[str]]) -> set[str]:
    readers = Counter(row for rows in ranks for row in rows)
    return {row for row, count in readers.items() if count > 1}


def _are_distinct(ranks: Sequence[Rows]) -> bool:
    """Return True if each rank read several rows, but none twice."""
    return all(len(rows) > 1 and max(rows.values()) == 1 for rows in ranks)


def shared_rows_note(logs: Sequence[RowLog]) -> str:
    """Describe the first epoch or step in which ranks share some rows; "" if there is none."""
    for time, ranks in sorted(_rows_of(logs, by_epoch=True).items()):
        # Count equal sets once, because ranks may share the work on the same rows.
        count = len(_read_by_several({frozenset(rows) for rows in ranks}))
        # A sampler may repeat fewer rows than there are ranks, to fill the last batch.
        if _are_distinct(ranks) and count >= len(logs):
            return (
                f"in {time} {count} of {len(set().union(*ranks))} rows of {time.slot} were read by "
                "several ranks, whose other rows differ. Use the same seed in all ranks' samplers."
            )
    return ""


def wrongly_dealt(expected: Sequence[RowLog], got: Sequence[RowLog]) -> str:
    """Describe how ranks wrongly share out another run's rows; "" if they do not."""
    known = _rows_of(expected, by_epoch=True)
    for time, ranks in sorted(_rows_of(got, by_epoch=True).items()):
        once, read = sum(known[time], Counter()), sum(ranks, Counter())
        missed, shared = once.keys() - read.keys(), _read_by_several(ranks)
        # A share can only be called wrong if each row is due once and there are no other rows.
        is_known = max(once.values(), default=0) == 1 and read.keys() <= once.keys()
        if is_known and once.total() == read.total() and _are_distinct(ranks) and missed and shared:
            return (
                f"Rows are dealt wrongly: in {time} {len(shared)} of {once.total()} rows of "
                f"{time.slot} are read by several ranks and {len(missed)} by none, but by the run "
                "to compare with once each."
            )
    return ""


def other_rows(
    expected: Sequence[RowLog], got: Sequence[RowLog], *, all_read_all: bool, steps: int | None
) -> tuple[str, str] | None:
    """Return reason and remedy if ranks together read other rows than another run, or some twice.

    Args:
        expected: The ranks' logs in the expected run.
        got: The ranks' logs in the judged run.
        all_read_all: True if each rank should read all rows, as with tensor parallelism.
        steps: Number of steps to compare; None for all.
    """
    wanted, came = _rows_of(expected, by_epoch=False), _rows_of(got, by_epoch=False)
    differing: dict[_Time, tuple[Rows, list[Rows]]] = {}
    dealt: set[tuple[int, str]] = set()
    for time in sorted({*wanted, *came}):
        if steps is not None and time.number > steps:
            break
        # Counters, because a row may be due twice.
        once = sum(_of_forwards(expected, wanted[time]), Counter())
        each = _of_forwards(got, came[time])
        if once == sum(each, Counter()) or (all_read_all and all(rows == once for rows in each)):
            dealt.add((time.number, time.slot.module))
        else:
            differing[time] = once, each
    for time, (once, each) in differing.items():
        # If each rank read the full set, there is no sampler, or ranks share the work on each row.
        is_repeated = all(rows.keys() == once.keys() for rows in each)
        # Ignore masks and position tables, which all ranks read because they are equal in each
        # forward.
        if not (is_repeated and (time.number, time.slot.module) in dealt):
            return _other_rows_at(time, once, each, is_repeated=is_repeated)
    return None


def _of_forwards(logs: Sequence[RowLog], ranks: Sequence[Rows]) -> list[Rows]:
    """Return each rank's rows, but only once for ranks with the same forwards and rows."""
    kept: list[tuple[RowLog, Rows]] = []
    for log, rows in zip(logs, ranks, strict=True):
        if not any(log.rank in other.sharers and rows == known for other, known in kept):
            kept.append((log, rows))
    return [rows for _, rows in kept]


def _other_rows_at(
    time: _Time, once: Rows, ranks: Sequence[Rows], *, is_repeated: bool
) -> tuple[str, str]:
    read, several = sum(ranks, Counter()), len(_read_by_several(ranks))
    more = ""
    if is_repeated:
        more = "; every rank read every row"
        remedy = (
            "Give each rank its own rows, for example with DistributedSampler and the same seed on "
            "all ranks, or pass --all-read-all if ranks share the work on each row, as with tensor "
            "parallelism."
        )
    elif several:
        more = f"; several ranks read {several}"
        remedy = (
            "Share out each step's rows, for example with DistributedSampler and the same seed on "
            "all ranks."
        )
    elif once.total() != read.total():
        remedy = "Give the other run as many rows with --arguments-of-one."
    else:
        remedy = (
            "In each step, draw the same rows for any number of ranks, and share them out. Or deal "
            "one rank's rows to all ranks with --feed."
        )
    reason = (
        f"The data differ: in {time} all ranks together read {read.total()} rows of {time.slot}, "
        f"and the other run read {once.total()}; {(once & read).total()} are equal{more}."
    )
    return reason, remedy
