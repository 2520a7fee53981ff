"""Merging: the corpora of a campaign's shards become one, with which the campaign can go on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.fuzz.corpus import Corpus, Head, open_corpus, read_corpus
from zero_sim.fuzz.records import BatchReport
from zero_sim.host.files import unwritten


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What the shards of a campaign have together."""

    head: Head
    """Of the campaign, as one shard."""
    reports: tuple[BatchReport, ...]
    """In the order of batches."""
    shards_missing: tuple[int, ...]
    """Those of which there is no corpus, counted from 1."""
    shard_count: int


def merge_corpora(folders: Sequence[Path], *, into: Path) -> Merged:
    """Make one corpus of those of shards, bundles included.

    Args:
        folders: Where they lie, one shard or several in each.
        into: Folder of the new one; it is not there yet, or has no corpus.

    Raises:
        UsageError: They are of different campaigns, or one shard is there twice; or there is a
            corpus in `into`.
    """
    parts = [part for folder in folders for part in _corpora_in(folder)]
    head, count = parts[0].head, parts[0].head.shard[1]
    for part in parts[1:]:
        if replace(part.head, shard=(1, part.head.shard[1])) != replace(head, shard=(1, count)):
            raise UsageError(
                f"expected shards of one campaign, got {json.dumps(head.as_dict())} in "
                f"{parts[0].path} and {json.dumps(part.head.as_dict())} in {part.path}. "
                "Try the folders of one campaign."
            )
    numbers = Counter(part.head.shard[0] for part in parts)
    twice = {number for number, times in numbers.items() if times > 1}
    if twice:
        raise UsageError(
            f"expected each shard once, got {min(twice)}/{count} in "
            + " and ".join(str(part.path) for part in parts if part.head.shard[0] in twice)
            + ". Try to leave one of them out."
        )
    whole = replace(head, shard=(1, 1))
    reports = sorted((each for part in parts for each in part.reports), key=lambda one: one.index)
    _write(whole, reports, parts=parts, into=into)
    return Merged(
        head=whole,
        reports=tuple(reports),
        shards_missing=tuple(number for number in range(1, count + 1) if number not in numbers),
        shard_count=count,
    )


def _corpora_in(folder: Path) -> list[Corpus]:
    found = [read_corpus(path) for path in sorted(folder.glob("batches-*-of-*.jsonl"))]
    if not found:
        raise UsageError(
            f"expected a corpus in {folder}, got a folder without one. Try the folder that "
            "`zero-sim fuzz --corpus` was given."
        )
    return found


def _write(
    head: Head, reports: Sequence[BatchReport], *, parts: Sequence[Corpus], into: Path
) -> None:
    if any(into.glob("batches-*.jsonl")):
        raise UsageError(
            f"expected a folder without a corpus for --into, got {into}. Try a new one."
        )
    try:
        with open_corpus(into, head=head) as corpus:
            for report in reports:
                corpus.append(report)
        for part in parts:
            for bundle in sorted((part.folder / "bundles").glob("*")):
                if bundle.is_dir() and not bundle.is_symlink():
                    target = into / "bundles" / bundle.name
                    shutil.copytree(bundle, target, symlinks=True, dirs_exist_ok=True)
    except OSError as error:
        raise unwritten("a corpus", into, error) from None
