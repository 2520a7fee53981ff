"""Random alterations of bundles by a stranger who can write every file, including checksums."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from zero_sim.bundle.records import Ran, bundle_id
from zero_sim.findings.records import Finding
from zero_sim.scenario.decode import decode
from zero_sim.scenario.dump import to_toml

Files = dict[str, bytes]

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 4096, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400,
    0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "0", "x", "-1", "\n\x1b[31mPASS\x00\u202e\ud800", "../../../tmp/evil", "/etc/passwd",
    "peer 99999999", "peer \u00b2", "<script>alert(1)</script>", "os:system", "n" * 20_000,
    [], {}, [0], [[0]], [-1, -1], [[5, 1]], {"a": 1}, json.loads("[" * 60 + "]" * 60),
]  # fmt: skip
TENSORS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.zeros(()),
    lambda: torch.zeros(0),
    lambda: torch.zeros(3, dtype=torch.int64),
    lambda: torch.zeros(3, dtype=torch.uint8),
    lambda: torch.zeros(3, dtype=torch.bool),
    lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
    lambda: torch.zeros(3, dtype=torch.float16),
    lambda: torch.zeros(3, dtype=torch.float64),
    lambda: torch.zeros(3, dtype=torch.complex64),
    lambda: torch.zeros(2, 2, 2),
    lambda: torch.zeros(70_000),
    lambda: torch.full((5,), torch.nan),
    lambda: torch.full((5,), torch.inf, dtype=torch.bfloat16),
]
KEYS = ("bundle.json", "turns.json", "events.jsonl", "tensors.safetensors", "case.toml")


def files_of(path: Path) -> Files:
    """Return the files of a bundle."""
    return {name: (path / name).read_bytes() for name in KEYS}


def altered(files: Files, draw: random.Random) -> tuple[str, Files]:
    """Return a description of one to three random changes, and the changed files."""
    now, said = dict(files), []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice(CHANGES)
        # A second change may not find its object any more.
        with contextlib.suppress(IndexError, KeyError, ValueError, TypeError, SafetensorError):
            said.append(f"{change.__name__}: {change(now, draw)}")
    if draw.random() < 0.9:
        reseal(now)
        said.append("resealed")
    return "; ".join(said), now


def write(files: Files, path: Path, draw: random.Random) -> str:
    """Write a bundle, occasionally with an irregular file. Returns a description of it."""
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    if draw.random() < 0.95:
        return ""
    name = draw.choice(KEYS)
    odd = draw.choice(("fifo", "loop", "out", "folder", "gone", "more"))
    if odd != "more":
        (path / name).unlink()
    match odd:
        case "fifo":
            os.mkfifo(path / name)
        case "loop":
            (path / name).symlink_to(name)
        case "out":
            (path / name).symlink_to("/etc/passwd")
        case "folder":
            (path / name).mkdir()
        case "more":
            (path / "setup.py").write_text("raise SystemExit")
    return f"; {odd} for {name}"


def reseal(files: Files) -> None:
    """Make the head agree with the files, as far as they can still be read."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):
        head = json.loads(files["bundle.json"])
        # Another version may compute other ids.
        head["environment"]["zero_sim"] = "0.0.0"
        for name in ("turns.json", "events.jsonl", "tensors.safetensors"):
            if name in head["files"]:
                digest = hashlib.sha256(files[name]).hexdigest()
                head["files"][name] = {"bytes": len(files[name]), "sha256": digest}
        events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
        turns = json.loads(files["turns.json"])
        for index, world in enumerate(head["worlds"]):
            own = [event["event"] for event in events if event.get("world") == index]
            world["calls"], world["moments"] = own.count("call"), own.count("moment")
            world["turns"] = len(turns[index])
        files["bundle.json"] = json.dumps(head).encode()
        scenario, _ = decode(head["scenario"])
        if scenario is not None:
            head["seed"] = scenario.run.seed
            files["case.toml"] = to_toml(scenario).encode(errors="replace")
            first = head["findings"][0]
            found = {name: first[name] for name in ("step", "rank", "param")}
            finding = Finding(check=first["check"], message="", **found)
            how = {name: head[name] for name in ("target", "device", "backend") if name in head}
            head["id"] = bundle_id(scenario, finding, ran=Ran(**how))
            files["bundle.json"] = json.dumps(head).encode()


def change_head(files: Files, draw: random.Random) -> str:
    """Set, delete, repeat or add a value anywhere in the head."""
    head = json.loads(files["bundle.json"])
    said = _change_json(head, draw)
    files["bundle.json"] = json.dumps(head).encode()
    return said


def change_scenario(files: Files, draw: random.Random) -> str:
    """Change a value of the case."""
    head = json.loads(files["bundle.json"])
    said = _change_json(head["scenario"], draw)
    files["bundle.json"] = json.dumps(head).encode()
    return said


def change_finding(files: Files, draw: random.Random) -> str:
    """Change a value of the findings or their buffer map."""
    head = json.loads(files["bundle.json"])
    said = _change_json({key: head[key] for key in ("findings", "strip", "evidence")}, draw)
    files["bundle.json"] = json.dumps(head).encode()
    return said


def change_event(files: Files, draw: random.Random) -> str:
    """Change, delete, repeat, move or garble a line of the events."""
    lines = files["events.jsonl"].splitlines()
    place = draw.randrange(len(lines))
    how = draw.choice(("value", "value", "value", "gone", "twice", "moved", "garbage"))
    said = ""
    if how == "value":
        event = json.loads(lines[place])
        said = _change_json(event, draw)
        lines[place] = json.dumps(event).encode()
    elif how == "twice":
        lines.insert(draw.randrange(len(lines)), lines[place])
    else:
        line = lines.pop(place)
        if how == "moved":
            lines.insert(draw.randrange(len(lines)), line)
        elif how == "garbage":
            lines.insert(place, draw.randbytes(20).replace(b"\n", b""))
    files["events.jsonl"] = b"".join(line + b"\n" for line in lines)
    return f"{how} in line {place} {said}"


def change_moments(files: Files, draw: random.Random) -> str:
    """Set the ticks of all moments."""
    tick = draw.choice((-1, 0, 2**62, 2**63 - 1))
    lines = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    for line in lines:
        if line["event"] == "moment":
            line["tick"] = tick
    files["events.jsonl"] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return f"all at {tick}"


def change_turns(files: Files, draw: random.Random) -> str:
    """Change the turns, or clear those of a world."""
    turns = json.loads(files["turns.json"])
    if draw.random() < 0.3:
        turns[draw.randrange(len(turns))] = []
    said = _change_json(turns, draw)
    files["turns.json"] = json.dumps(turns).encode()
    return said


def change_tensor(files: Files, draw: random.Random) -> str:
    """Replace, rename or delete tensors."""
    tensors = load(files["tensors.safetensors"])
    name = draw.choice(sorted(tensors))
    number = draw.randrange(len(TENSORS))
    other = name.partition(".")[0]
    names = draw.choice(([name], [f"{other}.expected", f"{other}.got"], ["x"]))
    tensors.update({each: TENSORS[number]() for each in names})
    if draw.random() < 0.1:
        del tensors[name]
    files["tensors.safetensors"] = save(tensors)
    return f"{names} {number}"


def change_case(files: Files, draw: random.Random) -> str:
    """Change a line of the readable case."""
    lines = files["case.toml"].splitlines()
    place = draw.randrange(len(lines))
    lines[place] = draw.choice((b"", b"x = 1", b"seed = 99", b"\x00", b"\xff", lines[place] * 2))
    files["case.toml"] = b"\n".join(lines)
    return f"line {place}"


def change_bytes(files: Files, draw: random.Random) -> str:
    """Change bytes of a file."""
    name = draw.choice(KEYS)
    data = bytearray(files[name])
    place = draw.randrange(len(data))
    how = draw.choice(("flip", "cut", "empty", "garbage", "head"))
    if how == "flip":
        data[place] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del data[place:]
    elif how == "empty":
        data = bytearray()
    elif how == "garbage":
        data[place:] = draw.randbytes(50)
    else:
        data[:8] = draw.randbytes(8)
    files[name] = bytes(data)
    return f"{how} of {name} at {place}"


CHANGES = (
    change_head, change_scenario, change_finding, change_finding, change_event, change_event,
    change_moments, change_turns, change_tensor, change_case, change_bytes,
)  # fmt: skip


def _change_json(value: Any, draw: random.Random) -> str:
    """Change one place in parsed JSON, at any depth."""
    path = ""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        path += f".{key}"
        inner = value[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.85:
            value = inner
            continue
        how = draw.choice(("set", "set", "set", "set", "gone", "twice", "more"))
        if how == "gone":
            del value[key]
        elif how == "twice" and isinstance(value, list):
            value.insert(key, copy.deepcopy(inner))
        elif how == "more" and isinstance(value, dict):
            value["more"] = 1
        else:
            value[key] = copy.deepcopy(draw.choice(VALUES))
            how = f"= {str(value[key])[:30]!r}"
        return f"{path[:80]} {how}"
