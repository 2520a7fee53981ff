"""Join the files of a campaign's shards into a corpus that can be resumed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero_sim.errors import UsageError
from zero_sim.fuzz.corpus import Kept, find_shards, open_corpus, read_corpus
from zero_sim.fuzz.records import to_json
from zero_sim.host.files import unwritten
from zero_sim.untrusted import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Joined shards of a campaign."""

    kept: Kept
    shards_missing: tuple[int, ...]
    """Numbers, from 1, of shards without a file."""
    shard_count: int


def join_corpora(places: Sequence[Path], *, into: Path) -> Joined:
    """Join the corpora of shards, including bundles.

    Args:
        places: Shard files, and folders with shard files.
        into: Folder for the new corpus; it must not contain a corpus.

    Raises:
        UsageError: The files belong to different campaigns, a shard occurs twice, or `into`
            contains a corpus.
        EnvironmentProblem: The disk is full.
    """
    parts = {path: read_corpus(path) for place in places for path in _files_in(place)}
    first, (where, *_) = next(iter(parts.values())).head, parts
    count = first.shard[1]
    by_number: dict[int, list[str]] = {}
    for path, part in parts.items():
        # Heads must be equal except for the shard number.
        if replace(part.head, shard=(1, part.head.shard[1])) != replace(first, shard=(1, count)):
            raise UsageError(
                f"expected shards of one campaign, got {printable(to_json(first))} in {where} and "
                f"{printable(to_json(part.head))} in {path}. Try the files of one campaign."
            )
        by_number.setdefault(part.head.shard[0], []).append(str(path))
    for number, paths in by_number.items():
        if len(paths) > 1:
            raise UsageError(
                f"expected each shard once, got {number}/{count} in {' and '.join(paths)}. "
                "Remove one of them."
            )
    if find_shards(into):
        raise UsageError(
            f"expected a folder without a corpus for --corpus, got {into}. Choose a new one."
        )
    # Bundles first, so that a full disk leaves no corpus without its bundles.
    for path in parts:
        _copy_bundles(path.parent / "bundles", into / "bundles")
    # The result is shard 1/1, so the campaign can be resumed.
    head = replace(first, shard=(1, 1))
    with open_corpus(into, head=head, parts=[*parts.values()]) as corpus:
        kept = corpus.kept
    missing = tuple(number for number in range(1, count + 1) if number not in by_number)
    return Joined(kept=kept, shards_missing=missing, shard_count=count)


def _files_in(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    found = find_shards(place)
    if not found:
        raise UsageError(
            f"expected a corpus in {place}, got a folder without one. Choose the folder of "
            "`zero-sim fuzz --corpus`."
        )
    return found


def _copy_bundles(bundles: Path, into: Path) -> None:
    try:
        for bundle in sorted(bundles.glob("*")):
            # A symlink in a stranger's corpus must not copy files from elsewhere.
            if bundle.is_dir() and not bundle.is_symlink():
                shutil.copytree(bundle, into / bundle.name, symlinks=True, dirs_exist_ok=True)
    except OSError as error:
        raise unwritten("a corpus", into, error) from None
