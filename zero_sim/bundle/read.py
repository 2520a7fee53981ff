"""Reader for bundles from untrusted sources: everything is checked, nothing is executed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

import zero_sim
from zero_sim.bundle.check import (
    check_buffer_map,
    check_case,
    check_evidence,
    check_finding,
    check_logs,
    check_moment,
    integers,
    world_sizes,
)
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
from zero_sim.findings.records import BufferMap, Evidence, Finding
from zero_sim.scenario.decode import decode
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import CollectiveRecord, EventLog, Moment
from zero_sim.targets import library_target_names, target_names
from zero_sim.untrusted import Unreadable, printable, read_regular
from zero_sim.untrusted_json import (
    InvalidField,
    build_record,
    check_integers,
    matching,
    parse,
    show,
)

# The head's limit is smaller, because it is parsed before any hash can be checked.
HEAD_BYTES_MAX = 1 << 26
FILE_BYTES_MAX = 1 << 30
"""Size limits in bytes. zero_sim writes no larger files, so they are refused unread."""

_IDS_SHOWN = 5
# A bundle's target is shown in commands, never imported. The pattern keeps commands harmless.
_TARGET = matching(
    r"(?!.{201})([^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*)?", "a name such as module:name"
)
_DEVICE = matching(r"[a-z][a-z0-9_]{0,30}(:\d{1,3})?", "a name such as cuda:1")
_DAY = matching(r"(\d{4}-\d\d-\d\d)?", "a day such as 2026-07-31")


def find_bundle(name: str, *, folder: Path) -> Path:
    """Return a bundle's folder.

    Args:
        name: A path, the bundle's id, or the beginning of the id.
        folder: Folder with all bundles.

    Raises:
        BundleError: No bundle matches, or several do.
    """
    # A path takes precedence over an equal id.
    if os.path.isdir(name):
        return Path(name)
    known = sorted(path.parent.name for path in folder.glob(f"*/{BUNDLE_FILE}"))
    # The writer's unfinished folders begin with a dot.
    known = [entry for entry in known if not entry.startswith(".")]
    # Every id starts with "", which would match a folder's only bundle.
    found = [entry for entry in known if name and entry.startswith(name)]
    if len(found) == 1:
        return folder / found[0]
    shown = ", ".join((found or known)[:_IDS_SHOWN])
    have = f"{len(found or known)} ({shown})" if known else "none"
    wanted = "a bundle's id" if not found else f"more of the id than {name!r}"
    raise BundleError(
        printable(
            f"{folder}: expected {wanted} or a bundle's path, got {name!r}; bundles there: {have}. "
            "Try --bundles with the folder that `zero-sim run` wrote to."
        )
    )


def find_bundles(names: Sequence[str], *, folder: Path) -> list[Path]:
    """Return the folders of several bundles, each once.

    Args:
        names: As for `find_bundle`, or folders with bundles; empty for all bundles in `folder`.
        folder: Folder with all bundles.

    Raises:
        BundleError: A bundle is missing, or there are none.
    """
    found: list[Path] = []
    for name in names or [str(folder)]:
        path = Path(name)
        is_folder = os.path.isdir(name)
        inside = sorted(file.parent for file in path.glob(f"*/{BUNDLE_FILE}")) if is_folder else []
        if inside and not os.path.lexists(path / BUNDLE_FILE):
            # A folder of bundles, not a bundle itself.
            found.extend(entry for entry in inside if not entry.name.startswith("."))
        elif names:
            found.append(find_bundle(name, folder=folder))
    if not found:
        raise BundleError(
            f"{folder}: expected bundles, got none. "
            "Try --bundles with the folder that `zero-sim run` wrote to."
        )
    # Remove duplicates, because a bundle may be named by path and by id.
    return list(dict.fromkeys(found))


def read_bundle(path: Path) -> Bundle:
    """Read a bundle and check all its parts.

    Raises:
        BundleError: It is incomplete, changed, from a newer version or no bundle, or its scenario
            is not valid here.
    """
    try:
        return _read(path)
    except InvalidField as unfit:
        raise BundleError(
            printable(f"{path}: {unfit}. Write the bundle again with `zero-sim run`.")
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _EvidenceStart:
    finding: int
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _World:
    digest: str
    calls: int
    moments: int
    turns: int
    refused: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """Content of `BUNDLE_FILE`, except format and version.

    Fields with a default are missing in older bundles.
    """

    id: str
    verdict: Literal["fail", "error", "inconclusive"]
    scenario: dict[str, Any]
    seed: int
    findings: tuple[Finding, ...]
    evidence: tuple[_EvidenceStart, ...]
    notes: tuple[str, ...]
    environment: Environment
    worlds: tuple[_World, ...]
    files: dict[str, _File]
    strip: BufferMap | None = None
    target: Annotated[str, _TARGET] = ""
    device: Annotated[str, _DEVICE] = "cpu"
    backend: Literal["sim", "gloo", "nccl"] = "sim"
    written: Annotated[str, _DAY] = ""


def _read(path: Path) -> Bundle:
    # Check each part against the parts before it: head, files, case, findings, logs.
    head = _read_head(path)
    files = _read_files(path, head.files)
    scenario = _scenario(path, head.scenario)
    ran = Ran(target=head.target, device=head.device, backend=head.backend)
    # Imported targets only run in the simulated world.
    if ran.target and ran.backend != "sim":
        raise InvalidField(f"target: expected none with backend {ran.backend}, got {ran.target!r}")
    findings = list(head.findings)
    if not findings:
        raise InvalidField("findings: expected at least one, got none")
    # Compute the id again, to detect a changed scenario or finding.
    if head.id != (own := bundle_id(scenario, findings[0], ran=ran)):
        raise InvalidField(
            f"id: expected {own}, the id of the scenario and the first finding, got {head.id!r}"
        )
    rank_stop = max(world_sizes(scenario))
    for index, finding in enumerate(findings):
        check_finding(finding, where=f"findings[{index}]", rank_stop=rank_stop)
    # The case file has no hash, because its comments may change, but not its case.
    case = _decoded(_read_file(path / CASE_FILE, bytes_max=FILE_BYTES_MAX), CASE_FILE)
    check_case(case, scenario, seed=head.seed)
    for index, evidence in _evidence(head.evidence, files, finding_count=len(findings)).items():
        findings[index] = dataclasses.replace(findings[index], evidence=evidence)
    if head.strip is not None:
        check_buffer_map(head.strip, rank_stop=rank_stop)
    # Only compare digests of the same version, because each version hashes other fields.
    is_hashed = head.environment.zero_sim == zero_sim.__version__
    return Bundle(
        id=head.id,
        scenario=scenario,
        verdict=head.verdict,
        findings=tuple(findings),
        notes=head.notes,
        environment=head.environment,
        logs=_logs(head.worlds, files, scenario, is_hashed=is_hashed),
        strip=head.strip,
        ran=ran,
        written=head.written,
    )


def _read_head(path: Path) -> _Head:
    table = parse(_read_file(path / BUNDLE_FILE, bytes_max=HEAD_BYTES_MAX), where=BUNDLE_FILE)
    # Check format and version first, because errors about fields would mislead for other files.
    if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
        raise InvalidField(
            f'{BUNDLE_FILE}: expected a bundle, with "format": "{FORMAT}", got something else'
        )
    version = build_record(int, table.pop("version", None), where="version")
    if version > VERSION:
        raise InvalidField(
            f"version: expected at most {VERSION}, got {version}: a newer zero_sim wrote it. "
            "Upgrade zero_sim to read it"
        )
    # Version 1 is the first, so there are no older bundles to read.
    if version != VERSION:
        raise InvalidField(f"version: expected {VERSION}, got {version}")
    # All integers outside the scenario are counts or indices, so they cannot be negative.
    counts = {name: value for name, value in table.items() if name != "scenario"}
    check_integers(counts, where=BUNDLE_FILE, least=0)
    return build_record(_Head, table, where=BUNDLE_FILE)


def _read_file(path: Path, *, bytes_max: int) -> bytes:
    try:
        # Do not follow links, which could expose other files on this machine.
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


def _read_files(path: Path, named: Mapping[str, _File]) -> dict[str, bytes]:
    # Allow only fixed names, so a head cannot name files elsewhere.
    needed, known = {TURNS_FILE, EVENTS_FILE}, {TURNS_FILE, EVENTS_FILE, TENSORS_FILE}
    # Tensors are optional, because a finding may have no evidence.
    if not needed <= named.keys() <= known:
        raise InvalidField(
            f"files: expected {', '.join(sorted(known))}, got {', '.join(sorted(named))}"
        )
    found: dict[str, bytes] = {}
    for file, facts in named.items():
        data = _read_file(path / file, bytes_max=FILE_BYTES_MAX)
        # Check the size first, to distinguish a truncated copy from an edited file.
        if len(data) != facts.bytes:
            raise InvalidField(f"expected {facts.bytes} bytes in {file}, got {len(data)}")
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            raise InvalidField(f"expected {file} as it was written, but it was changed later")
        found[file] = data
    return found


def _scenario(path: Path, raw: dict[str, object]) -> Scenario:
    scenario, problems = decode(raw)
    if scenario is None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        where = printable(f"{path}: expected a valid scenario in {BUNDLE_FILE}, got:")
        raise BundleError(f"{where}\n{lines}")
    names = (*target_names(), *library_target_names())
    # Only registered names, because any other target would have to be imported.
    if scenario.system.target not in names:
        raise InvalidField(
            f"scenario.system.target: expected a registered target ({', '.join(names)}), "
            f"got {scenario.system.target!r}"
        )
    return scenario


def _evidence(
    starts: Sequence[_EvidenceStart], files: Mapping[str, bytes], *, finding_count: int
) -> dict[int, Evidence]:
    tensors: dict[str, Tensor] = {}
    if TENSORS_FILE in files:
        try:
            # Unlike the pickles of torch.load, safetensors cannot contain code.
            tensors = load(files[TENSORS_FILE])
        except (SafetensorError, ValueError, KeyError) as error:
            raise InvalidField(
                f"{TENSORS_FILE}: expected safetensors, got an error: {error}"
            ) from None
    found: dict[int, Evidence] = {}
    for i, entry in enumerate(starts):
        where = f"evidence[{i}]"
        (index,) = integers([entry.finding], stop=finding_count, where=f"{where}.finding")
        sides = [tensors.get(f"{index}.{side}") for side in ("expected", "got")]
        if sides[0] is None or sides[1] is None:
            raise InvalidField(
                f"{where}: expected {index}.expected and {index}.got in {TENSORS_FILE}"
            )
        found[index] = Evidence(start=entry.start, expected=sides[0], got=sides[1])
        check_evidence(found[index], where=where)
    return found


def _logs(
    worlds: Sequence[_World], files: Mapping[str, bytes], scenario: Scenario, *, is_hashed: bool
) -> tuple[EventLog, ...]:
    turns = parse(files[TURNS_FILE], where=TURNS_FILE)
    if not isinstance(turns, list):
        raise InvalidField(f"{TURNS_FILE}: expected a list, got {show(turns)}")
    if len(turns) != len(worlds):
        raise InvalidField(f"{TURNS_FILE}: expected {len(worlds)} lists, got {len(turns)}")
    logs = tuple(EventLog() for _ in worlds)
    check_logs(logs, scenario)
    sizes = world_sizes(scenario)
    for i, log in enumerate(logs):
        # A turn is the rank that ran; a replay gives the turn to this rank.
        log.turns = integers(turns[i], stop=sizes[i], where=f"{TURNS_FILE}[{i}]")
    # Groups by index, separately for each world.
    groups: list[list[_Group]] = [[] for _ in worlds]
    for number, line in enumerate(files[EVENTS_FILE].splitlines(), 1):
        where = f"{EVENTS_FILE} line {number}"
        event = parse(line, where=where, least=0)
        if not isinstance(event, dict):
            raise InvalidField(f"{where}: expected an object, got {show(event)}")
        (world,) = integers([event.pop("world", None)], stop=len(logs), where=f"{where}.world")
        # Groups come before their calls, so an index can only refer to a known group.
        _add_event(logs[world], groups[world], event, where, rank_stop=sizes[world])
    for i, (world, log) in enumerate(zip(worlds, logs, strict=True)):
        counts = (len(log.collectives), len(log.moments), len(log.turns))
        # Otherwise a file cut after some line, with its hash adapted, would pass as a shorter run.
        if counts != (world.calls, world.moments, world.turns):
            raise InvalidField(
                f"worlds[{i}]: expected {world.calls} calls, {world.moments} moments and "
                f"{world.turns} turns, got {counts[0]}, {counts[1]} and {counts[2]}"
            )
        # The call at which the world ended.
        if world.refused is not None:
            integers([world.refused], stop=len(log.collectives), where=f"worlds[{i}].refused")
        log.refused = world.refused
        # Without faults, because bundles do not contain results of planned faults.
        if is_hashed and log.digest(with_faults=False) != world.digest:
            raise InvalidField(
                f"worlds[{i}].digest: expected the digest of the events, got "
                f"{world.digest[:80]!r}: the bundle was changed after it was written"
            )
    return logs


def _add_event(
    log: EventLog,
    groups: list[_Group],
    event: dict[str, object],
    where: str,
    *,
    rank_stop: int,
) -> None:
    kind = event.pop("event", None)
    if kind == "group":
        group = build_record(_Group, event, where=where)
        integers(list(group.ranks), stop=rank_stop, where=f"{where}.ranks")
        groups.append(group)
    elif kind == "call":
        (index,) = integers([event.pop("group", None)], stop=len(groups), where=f"{where}.group")
        group = groups[index]
        if build_record(bool, event.pop("harness", False), where=f"{where}.harness"):
            # The record's index, because it is appended below.
            log.harness.add(len(log.collectives))
        # Ranks are checked once per group and set afterwards, because 1,000 ranks make many calls.
        whole = event | {"group": group.name, "group_ranks": []}
        record = build_record(CollectiveRecord, whole, where=where)
        record = record._replace(group_ranks=group.ranks)
        if record.rank not in group.ranks:
            raise InvalidField(f"{where}.rank: expected a rank of the group, got {record.rank}")
        log.collectives.append(record)
    elif kind == "moment":
        moment = build_record(Moment, event, where=where)
        check_moment(moment, log, where=where)
        log.moments.append(moment)
    else:
        raise InvalidField(f"{where}.event: expected group, call or moment, got {kind!r}")
