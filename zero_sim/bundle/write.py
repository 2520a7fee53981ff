"""Writer for bundles: a bundle is written completely or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from zero_sim.bundle.records import (
    BUNDLE_FILE,
    CASE_FILE,
    EVENTS_FILE,
    FORMAT,
    TENSORS_FILE,
    TURNS_FILE,
    VERSION,
    Ran,
    bundle_id,
    current_environment,
)
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.scenario.dump import to_data, to_toml
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import EventLog

_REPLACE_TRIES = 5


def write_bundle(
    scenario: Scenario, result: CaseResult, *, folder: Path, ran: Ran | None = None
) -> Path:
    """Write a failed case as a bundle, which replaces an earlier bundle of the same failure.

    Args:
        scenario: The failed case.
        result: Its result, with at least one finding, and with event logs if available.
        folder: Folder with all bundles, created if missing.
        ran: Settings of the run; None for the simulated world on the CPU.

    Returns:
        The bundle's folder, named by its id.

    Raises:
        OSError: It cannot be written. An earlier bundle stays unchanged.
    """
    ran = ran or Ran()
    name = bundle_id(scenario, result.findings[0], ran=ran)
    files = {
        TURNS_FILE: json.dumps([log.turns for log in result.logs]).encode(),
        EVENTS_FILE: "".join(f"{line}\n" for line in _events(result.logs)).encode(),
    }
    tensors = _tensors(result.findings)
    if tensors:
        files[TENSORS_FILE] = save(tensors)
    # The head comes last, because it contains sizes and hashes of the other files.
    head = _head(scenario, result, name=name, files=files, ran=ran)
    files[BUNDLE_FILE] = (json.dumps(head, indent=2) + "\n").encode()
    comment = f"# The case of bundle {name}, with every default written out.\n"
    # Names may come from file names, which need not be valid Unicode.
    files[CASE_FILE] = (comment + to_toml(scenario)).encode(errors="replace")
    folder.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the rename is atomic. Hidden, so that readers skip it.
    unfinished = folder / f".{name}-{os.getpid()}-{secrets.token_hex(4)}"
    unfinished.mkdir()
    try:
        for file, data in files.items():
            (unfinished / file).write_bytes(data)
        _move(unfinished, folder / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder / name


def _move(source: Path, target: Path) -> None:
    # rename() cannot replace a folder with files, so rename the old folder first. Between both
    # renames, another process may write its bundle. After the last try, that process's bundle
    # stays, because the same id means the same failure.
    for _ in range(_REPLACE_TRIES):
        # Also hidden, because the source's name begins with a dot.
        old = source.with_name(f"{source.name}-old")
        with contextlib.suppress(FileNotFoundError):
            target.rename(old)
        try:
            source.rename(target)
        except OSError:
            # Another process wrote the same failure first, or the folder is not writable.
            if not target.exists():
                # The folder is not writable, so restore the earlier bundle.
                if old.exists():
                    old.rename(target)
                raise
        else:
            return
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _head(
    scenario: Scenario,
    result: CaseResult,
    *,
    name: str,
    files: Mapping[str, bytes],
    ran: Ran,
) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": name,
        "verdict": result.verdict,
        "scenario": to_data(scenario),
        # The scenario contains it too. The reader refuses bundles in which the two differ.
        "seed": scenario.run.seed,
        "findings": [finding.as_dict() for finding in result.findings],
        "evidence": [
            {"finding": index, "start": finding.evidence.start}
            for index, finding in enumerate(result.findings)
            if finding.evidence is not None
        ],
        "notes": list(result.notes),
        "strip": None if result.strip is None else result.strip.as_dict(),
        **dataclasses.asdict(ran),
        "written": datetime.now(UTC).date().isoformat(),
        "environment": dataclasses.asdict(current_environment(ran.device)),
        "worlds": [
            {
                "digest": log.digest(with_faults=False),
                "calls": len(log.collectives),
                "moments": len(log.moments),
                "turns": len(log.turns),
                "refused": log.refused,
            }
            for log in result.logs
        ],
        "files": {
            file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for file, data in files.items()
        },
    }


def _tensors(findings: Sequence[Finding]) -> dict[str, Tensor]:
    return {
        # safetensors refuses strided views.
        f"{index}.{side}": getattr(finding.evidence, side).contiguous()
        for index, finding in enumerate(findings)
        if finding.evidence is not None
        for side in ("expected", "got")
    }


def _events(logs: Sequence[EventLog]) -> Iterator[str]:
    """Yield a line of JSON for each event."""
    for world, log in enumerate(logs):
        # Write ranks once per group, because ranks in each call of a large world fill the disk.
        groups: dict[tuple[str, tuple[int, ...]], int] = {}
        for index, record in enumerate(log.collectives):
            key = (record.group, record.group_ranks)
            if key not in groups:
                groups[key] = len(groups)
                ranks = list(record.group_ranks)
                yield _line(world, "group", {"name": record.group, "ranks": ranks})
            # A call refers to its group by index.
            fields = record._asdict() | {"group": groups[key]}
            del fields["group_ranks"]
            # Omitted if False, the reader's default.
            if index in log.harness:
                fields["harness"] = True
            yield _line(world, "call", fields)
        for moment in log.moments:
            yield _line(world, "moment", moment._asdict())


def _line(world: int, event: str, fields: Mapping[str, object]) -> str:
    # Without blanks, because a run has a line for each call on each rank.
    return json.dumps({"world": world, "event": event, **fields}, separators=(",", ":"))
