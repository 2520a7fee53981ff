"""The reader of bundles, which may come from anybody: all is checked and nothing is executed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

import zero_sim
from zero_sim.bundle.check import (
    check_buffer_map,
    check_call,
    check_case,
    check_evidence,
    check_finding,
    check_logs,
    check_moment,
    world_sizes,
)
from zero_sim.bundle.decode import InvalidField, fields_of, integers, record_of, typed
from zero_sim.bundle.records import (
    BUNDLE_FILE,
    CASE_FILE,
    EVENTS_FILE,
    FORMAT,
    TENSORS_FILE,
    TURNS_FILE,
    VERSION,
    Bundle,
    Environment,
    Ran,
    bundle_id,
)
from zero_sim.errors import BundleError
from zero_sim.findings.records import BufferMap, Evidence, Finding, Verdict
from zero_sim.scenario.decode import decode
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import CollectiveRecord, EventLog, Moment
from zero_sim.targets import library_target_names, target_names
from zero_sim.untrusted import NESTING_MAX, Unreadable, nests_too_deep, printable, read_regular

HEAD_BYTES_MAX = 1 << 26
FILE_BYTES_MAX = 1 << 30
"""What is larger was not written by us, and need not be read to know it."""

_FIELDS = (
    "format",
    "version",
    "id",
    "verdict",
    "scenario",
    "seed",
    "findings",
    "evidence",
    "notes",
    "environment",
    "worlds",
    "files",
)
_LATER_FIELDS = ("strip", "target", "device", "backend", "written")
"""Fields that a bundle may lack: the first ones were written before there were any."""
_IDS_SHOWN = 5
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_TARGET_CHARS_MAX = 200
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,30}(:\d{1,3})?")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


def find_bundle(name: str, *, folder: Path) -> Path:
    """The folder of a bundle.

    Args:
        name: A path to it, or its id or the beginning of it.
        folder: Where bundles are kept.

    Raises:
        BundleError: There is none, or several begin like this.
    """
    if os.path.isdir(name):
        return Path(name)
    known = sorted(path.parent.name for path in folder.glob(f"*/{BUNDLE_FILE}"))
    known = [entry for entry in known if not entry.startswith(".")]
    found = [entry for entry in known if name and entry.startswith(name)]
    if len(found) == 1:
        return folder / found[0]
    shown = ", ".join((found or known)[:_IDS_SHOWN])
    have = f"{len(found or known)} ({shown})" if known else "none"
    wanted = "the id of one bundle" if not found else f"more of the id than {name!r}"
    raise BundleError(
        printable(
            f"{folder}: expected {wanted} or a path to one, got {name!r}; bundles there: {have}. "
            "Try --bundles with the folder that `zero-sim run` wrote to."
        )
    )


def find_bundles(names: Sequence[str], *, folder: Path) -> list[Path]:
    """The folders of some bundles, each once.

    Args:
        names: As for `find_bundle`, or folders that hold bundles; none for all in `folder`.
        folder: Where bundles are kept.

    Raises:
        BundleError: One of them is not there, or there is none at all.
    """
    found: list[Path] = []
    for name in names or [str(folder)]:
        path = Path(name)
        is_folder = os.path.isdir(name)
        inside = sorted(file.parent for file in path.glob(f"*/{BUNDLE_FILE}")) if is_folder else []
        if inside and not os.path.lexists(path / BUNDLE_FILE):
            found.extend(entry for entry in inside if not entry.name.startswith("."))
        elif names:
            found.append(find_bundle(name, folder=folder))
    if not found:
        raise BundleError(
            f"{folder}: expected bundles, got none. "
            "Try --bundles with the folder that `zero-sim run` wrote to."
        )
    return list(dict.fromkeys(found))


def read_bundle(path: Path) -> Bundle:
    """Read a bundle and check all of it.

    Args:
        path: Its folder.

    Raises:
        BundleError: It is not whole, was changed, is of a newer version, or is no bundle; or its
            scenario is not valid here.
    """
    try:
        return _read(path)
    except InvalidField as unfit:
        raise BundleError(
            printable(f"{path}: {unfit}. Try to write the bundle anew with `zero-sim run`.")
        ) from None


class _World(NamedTuple):
    digest: str
    calls: int
    moments: int
    turns: int
    refused: int | None


def _read(path: Path) -> Bundle:
    head = _read_head(path)
    files = _read_files(path, head["files"])
    scenario = _scenario(path, head["scenario"])
    findings = [
        record_of(Finding, entry, where=f"findings[{i}]", besides=("evidence",))
        for i, entry in enumerate(typed(head["findings"], list, where="findings"))
    ]
    if not findings:
        raise InvalidField("findings: expected at least one, got none")
    name = typed(head["id"], str, where="id")
    ran = _ran(head)
    if name != (own := bundle_id(scenario, findings[0], ran=ran)):
        raise InvalidField(
            f"id: expected {own}, which goes with the scenario and the first finding, got {name!r}"
        )
    verdict = _verdict(head["verdict"])
    rank_stop = max(world_sizes(scenario))
    for index, finding in enumerate(findings):
        check_finding(finding, where=f"findings[{index}]", rank_stop=rank_stop)
    case = _decoded(_read_file(path / CASE_FILE, bytes_max=FILE_BYTES_MAX), CASE_FILE)
    check_case(case, scenario, seed=typed(head["seed"], int, where="seed"))
    for index, evidence in _evidence(head["evidence"], files, finding_count=len(findings)).items():
        findings[index] = dataclasses.replace(findings[index], evidence=evidence)
    strip = None
    if head.get("strip") is not None:
        strip = record_of(BufferMap, head["strip"], where="strip")
        check_buffer_map(strip, rank_stop=rank_stop)
    notes = typed(head["notes"], list, where="notes")
    environment = record_of(Environment, head["environment"], where="environment")
    # Another version hashes others.
    is_hashed = environment.zero_sim == zero_sim.__version__
    return Bundle(
        id=name,
        scenario=scenario,
        verdict=verdict,
        findings=tuple(findings),
        notes=tuple(typed(note, str, where="notes") for note in notes),
        environment=environment,
        logs=_logs(head["worlds"], files, scenario, is_hashed=is_hashed),
        strip=strip,
        ran=ran,
        written=_day(head.get("written", "")),
    )


def _verdict(value: object) -> Verdict:
    match value:
        case "fail" | "error" | "inconclusive":
            return value
    raise InvalidField(f"verdict: expected fail, error or inconclusive, got {value!r}")


def _ran(head: Mapping[str, object]) -> Ran:
    given = {name: head[name] for name in ("target", "device", "backend") if name in head}
    ran = record_of(Ran, given, where=BUNDLE_FILE)
    _target(ran.target)
    if not _DEVICE.fullmatch(ran.device):
        raise InvalidField(f"device: expected a name such as cuda:1, got {ran.device[:40]!r}")
    if ran.target and ran.backend != "sim":
        raise InvalidField(f"target: expected none with backend {ran.backend}, got {ran.target!r}")
    return ran


def _target(text: str) -> None:
    if text and (len(text) > _TARGET_CHARS_MAX or not _TARGET.fullmatch(text)):
        raise InvalidField(f"target: expected a name such as module:name, got {text[:20]!r}")


def _day(value: object) -> str:
    text = typed(value, str, where="written")
    if text and not _DAY.fullmatch(text):
        raise InvalidField(f"written: expected a day such as 2026-07-31, got {text[:20]!r}")
    return text


def _read_head(path: Path) -> Mapping[str, object]:
    table = _parse(_read_file(path / BUNDLE_FILE, bytes_max=HEAD_BYTES_MAX), BUNDLE_FILE)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise InvalidField(
            f'{BUNDLE_FILE}: expected a bundle, "format": "{FORMAT}", got something else'
        )
    version = typed(table.get("version"), int, where="version")
    if version > VERSION:
        raise InvalidField(
            f"version: expected at most {VERSION}, got {version}: a newer zero_sim wrote it. "
            "Upgrade zero_sim to read it"
        )
    if version != VERSION:
        raise InvalidField(f"version: expected {VERSION}, got {version}")
    later = [name for name in _LATER_FIELDS if name in table]
    return fields_of(table, (*_FIELDS, *later), where=BUNDLE_FILE)


def _read_file(path: Path, *, bytes_max: int) -> bytes:
    try:
        # A link could show a reader what lies elsewhere on the machine.
        return read_regular(path, bytes_max=bytes_max, follow=False)
    except Unreadable as reason:
        raise InvalidField(f"expected to read {path.name}, got: {reason}") from None


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidField(
            f"{where}: expected UTF-8 text, got byte {data[error.start]:#04x}"
        ) from None


def _read_files(path: Path, table: object) -> dict[str, bytes]:
    """The files that the head names, each as it was written."""
    named = typed(table, dict, where="files")
    needed, known = {TURNS_FILE, EVENTS_FILE}, {TURNS_FILE, EVENTS_FILE, TENSORS_FILE}
    if not needed <= named.keys() <= known:
        raise InvalidField(
            f"files: expected {', '.join(sorted(known))}, got {', '.join(sorted(named))}"
        )
    found: dict[str, bytes] = {}
    for file, facts in named.items():
        facts = fields_of(facts, ("bytes", "sha256"), where=f"files.{file}")
        size = typed(facts["bytes"], int, where=f"files.{file}.bytes")
        data = _read_file(path / file, bytes_max=FILE_BYTES_MAX)
        if len(data) != size:
            raise InvalidField(f"expected {size} bytes in {file}, got {len(data)}")
        if hashlib.sha256(data).hexdigest() != facts["sha256"]:
            raise InvalidField(f"expected {file} as it was written, got one that was changed since")
        found[file] = data
    return found


def _parse(data: bytes, where: str) -> object:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{where}: expected JSON, got an error: {error}") from None
    if nests_too_deep(value):
        raise InvalidField(f"{where}: expected JSON, got more than {NESTING_MAX} levels of it")
    return value


def _scenario(path: Path, raw: object) -> Scenario:
    scenario, problems = decode(typed(raw, dict, where="scenario"))
    if scenario is None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        where = printable(f"{path}: expected a valid scenario in {BUNDLE_FILE}, got:")
        raise BundleError(f"{where}\n{lines}")
    names = (*target_names(), *library_target_names())
    if scenario.system.target not in names:
        raise InvalidField(
            f"scenario.system.target: expected a registered target ({', '.join(names)}), "
            f"got {scenario.system.target!r}"
        )
    return scenario


def _evidence(
    table: object, files: Mapping[str, bytes], *, finding_count: int
) -> dict[int, Evidence]:
    tensors: dict[str, Tensor] = {}
    if TENSORS_FILE in files:
        try:
            tensors = load(files[TENSORS_FILE])
        except (SafetensorError, ValueError, KeyError) as error:
            raise InvalidField(
                f"{TENSORS_FILE}: expected safetensors, got an error: {error}"
            ) from None
    found: dict[int, Evidence] = {}
    for i, entry in enumerate(typed(table, list, where="evidence")):
        where = f"evidence[{i}]"
        facts = fields_of(entry, ("finding", "start"), where=where)
        (index,) = integers([facts["finding"]], stop=finding_count, where=f"{where}.finding")
        sides = [tensors.get(f"{index}.{side}") for side in ("expected", "got")]
        if sides[0] is None or sides[1] is None:
            raise InvalidField(
                f"{where}: expected {index}.expected and {index}.got in {TENSORS_FILE}"
            )
        start = typed(facts["start"], int, where=f"{where}.start")
        found[index] = Evidence(start=start, expected=sides[0], got=sides[1])
        check_evidence(found[index], where=where)
    return found


def _logs(
    table: object, files: Mapping[str, bytes], scenario: Scenario, *, is_hashed: bool
) -> tuple[EventLog, ...]:
    worlds = [
        record_of(_World, entry, where=f"worlds[{i}]")
        for i, entry in enumerate(typed(table, list, where="worlds"))
    ]
    turns = typed(_parse(files[TURNS_FILE], TURNS_FILE), list, where=TURNS_FILE)
    if len(turns) != len(worlds):
        raise InvalidField(f"{TURNS_FILE}: expected {len(worlds)} lists, got {len(turns)}")
    logs = tuple(EventLog() for _ in worlds)
    check_logs(logs, scenario)
    sizes = world_sizes(scenario)
    for i, log in enumerate(logs):
        log.turns = integers(turns[i], stop=sizes[i], where=f"{TURNS_FILE}[{i}]")
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in worlds]
    for number, line in enumerate(files[EVENTS_FILE].splitlines(), 1):
        where = f"{EVENTS_FILE} line {number}"
        event = dict(typed(_parse(line, where), dict, where=where))
        (world,) = integers([event.pop("world", None)], stop=len(logs), where=f"{where}.world")
        _add_event(logs[world], groups[world], event, where, rank_stop=sizes[world])
    for i, (world, log) in enumerate(zip(worlds, logs, strict=True)):
        counts = (len(log.collectives), len(log.moments), len(log.turns))
        if counts != (world.calls, world.moments, world.turns):
            raise InvalidField(
                f"worlds[{i}]: expected {world.calls} calls, {world.moments} moments and "
                f"{world.turns} turns, got {counts[0]}, {counts[1]} and {counts[2]}"
            )
        if world.refused is not None:
            integers([world.refused], stop=len(log.collectives), where=f"worlds[{i}].refused")
        log.refused = world.refused
        if is_hashed and log.digest(with_faults=False) != world.digest:
            raise InvalidField(
                f"worlds[{i}].digest: expected that of the events, got {world.digest[:80]!r}: this "
                "is not the bundle that was written"
            )
    return logs


def _add_event(
    log: EventLog,
    groups: list[tuple[str, tuple[int, ...]]],
    event: dict[str, object],
    where: str,
    *,
    rank_stop: int,
) -> None:
    kind = event.pop("event", None)
    if kind == "group":
        group = fields_of(event, ("name", "ranks"), where=where)
        ranks = integers(group["ranks"], stop=rank_stop, where=f"{where}.ranks")
        groups.append((typed(group["name"], str, where=f"{where}.name"), tuple(ranks)))
    elif kind == "call":
        (index,) = integers([event.pop("group", None)], stop=len(groups), where=f"{where}.group")
        name, ranks = groups[index]
        if typed(event.pop("harness", False), bool, where=f"{where}.harness"):
            log.harness.add(len(log.collectives))
        whole = event | {"group": name, "group_ranks": []}
        record = record_of(CollectiveRecord, whole, where=where)._replace(group_ranks=ranks)
        if record.rank not in ranks:
            raise InvalidField(f"{where}.rank: expected one of the group's, got {record.rank}")
        check_call(record, where=where)
        log.collectives.append(record)
    elif kind == "moment":
        moment = record_of(Moment, event, where=where)
        check_moment(moment, log, where=where)
        log.moments.append(moment)
    else:
        raise InvalidField(f"{where}.event: expected group, call or moment, got {kind!r}")
