"""Batch reports without cases, and corpora that contain them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from zero_sim.fuzz.corpus import open_corpus
from zero_sim.fuzz.records import BATCH_CASES, BatchReport, Counts, Found, Head, batch_seed
from zero_sim.shrink import Key

HEAD = Head(seed=7, target="zero_sim", cases=BATCH_CASES, shard=(1, 1))


def report_of(index: int, *, seed: int = HEAD.seed, **changes: object) -> BatchReport:
    """Return a batch whose cases all pass, except for changes to its counts and other fields."""
    cases = changes.pop("cases", BATCH_CASES)
    of_counts = {"cases": cases, "seconds": 1.0, "verdicts": {"pass": cases}}
    of_counts |= {name: changes.pop(name) for name in Counts.__slots__ if name in changes}
    counts = {
        name: Counter(value) if isinstance(value, dict) else value
        for name, value in of_counts.items()
    }
    usual = {"index": index, "seed": batch_seed(seed, index), "counts": Counts(**counts)}
    return BatchReport(**(usual | changes))


def found(check: str, **changes: object) -> Found:
    """Return a finding of a check, without a case."""
    one = Found(
        key=Key(check), message="m", seed=1, case=0, scenario="", bundle="", text="", size=""
    )
    return replace(one, **changes)


def make_shard(
    folder: Path, number: int, *, of: int = 2, batches: Iterable[int] = (), head: Head = HEAD
) -> Path:
    """Write the file of a shard with some whole batches."""
    head = replace(head, shard=(number, of))
    with open_corpus(folder, head=head) as corpus:
        for index in batches:
            corpus.append(report_of(index, seed=head.seed))
    return corpus.path
