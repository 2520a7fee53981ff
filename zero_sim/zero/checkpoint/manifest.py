"""What a checkpoint says about itself: one JSON file that is written last and checked first."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Final, Literal, get_args

from zero_sim.errors import CheckpointError

Form = Literal["sharded", "consolidated", "dcp"]

MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "zero_sim checkpoint"
VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord:
    """One entry of the optimizer's state of one param."""

    key: str
    """Its name in `torch.optim`, such as `exp_avg`."""
    dtype: str | None = None
    """Dtype of a tensor with one element for each of the param, which lies in files; None for
    everything else."""
    value: Any = None
    """What is not elementwise, such as a 0D `step`: encoded, once a param however many ranks own a
    part of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamRecord:
    """One trained param."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the working param; its master is fp32."""
    group: int | None
    """Index into `Manifest.groups`; None where no optimizer holds it, as for an empty param."""
    state: tuple[StateRecord, ...]
    """In the order in which the optimizer created it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRecord:
    """One tensor of the module that is not trained."""

    name: str
    kind: Literal["frozen", "buffer"]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """Where a file holds a span of a tensor of a param."""

    key: str
    """Name of the tensor inside its file."""
    param: str
    tensor: str
    """`master`, `state.` and the key of a state, or the kind of a `ModuleRecord`."""
    start: int
    """First element of the flattened param, in logical order."""
    stop: int
    """First element after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file beside the manifest."""

    name: str
    """Relative to the checkpoint."""
    size_bytes: int
    sha256: str
    pieces: tuple[PieceRecord, ...] = ()
    """Empty for files that torch's distributed checkpoint wrote, which has an index of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerRecord:
    """The loss scaler."""

    scale: float
    good_steps: int
    """Finite steps since the scale last changed."""
    growth_interval: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manifest:
    """The whole record."""

    form: Form
    world: dict[str, Any]
    """Who wrote it: world size, configuration, version of torch. Never needed to read it."""
    params: tuple[ParamRecord, ...]
    """In registration order."""
    module: tuple[ModuleRecord, ...]
    optimizer: str
    """Class of the optimizer."""
    groups: tuple[dict[str, Any], ...]
    """Param groups as `{"settings": {name: encoded}, "base_lr": encoded}`; equal ones only once.
    Params name theirs."""
    loss_scaler: ScalerRecord | None
    files: tuple[FileRecord, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the manifest file."""
    content = take_apart(manifest)
    whole = {"format": FORMAT, "version": VERSION, "sha256": _digest(content)}
    # One record a line, by hand: json's own indentation is ten times as slow.
    head = [f"{_encode(name)}: {_encode(value)}" for name, value in whole.items()]
    body = ",\n".join(_encode_part(name, value) for name, value in content.items())
    return ("{\n" + ",\n".join([*head, f'"content": {{\n{body}\n}}']) + "\n}\n").encode()


def _encode_part(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        records = ",\n  ".join(_encode(record) for record in value)
        return f" {_encode(name)}: [\n  {records}\n ]"
    return f" {_encode(name)}: {_encode(value)}"


def _encode(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=take_apart)


def take_apart(record: Any) -> dict[str, Any]:
    """Return what a record holds by name, for `json.dumps` to encode the records in it in turn."""
    names = getattr(type(record), "__dataclass_fields__", None)
    if names is None:
        raise TypeError(f"Expected what JSON can hold, or a record, but got {record!r}.")
    return {name: getattr(record, name) for name in names}


# Simulated ranks share a process: a thousand of them would each parse the same megabytes.
@lru_cache(maxsize=1)
def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the record that a manifest file holds.

    Args:
        data: Content of the file.
        where: Path of the file, for messages.

    Raises:
        CheckpointError: If it is no manifest, of another version, or was changed since.
    """
    try:
        whole = json.loads(data)
    except ValueError as error:
        raise CheckpointError(
            f"Expected JSON in {where} but got {len(data)} bytes that are none ({error})."
        ) from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(
            f"Expected a manifest with format={FORMAT!r} in {where} but got something else."
        )
    if whole.get("version") != VERSION:
        raise CheckpointError(
            f"Expected version {VERSION} in {where} but got {whole.get('version')!r}. "
            f"Try the release that wrote it."
        )
    content = whole.get("content")
    digest = _digest(content)
    if whole.get("sha256") != digest:
        raise CheckpointError(
            f"Expected sha256 {whole.get('sha256')} of the content of {where} but got {digest}: "
            f"the file was changed after it was written."
        )
    try:
        return build_manifest(content)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Expected the fields of version {VERSION} in {where} but got {error!r}."
        ) from error


def _digest(content: Any) -> str:
    # Through JSON first: tuples become lists, as they will when the file is read.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=take_apart)
    return hashlib.sha256(canonical.encode()).hexdigest()


def build_manifest(content: Any) -> Manifest:
    """Return the record of which this is the JSON.

    Raises:
        KeyError, TypeError, ValueError: If it is the JSON of something else.
    """
    if content["form"] not in get_args(Form):
        raise ValueError(f"form={content['form']!r}")
    scaler = content["loss_scaler"]
    return Manifest(
        form=content["form"],
        world=content["world"],
        params=tuple(build_param(param) for param in content["params"]),
        module=tuple(
            ModuleRecord(**(record | {"shape": tuple(record["shape"])}))
            for record in content["module"]
        ),
        optimizer=content["optimizer"],
        groups=tuple(content["groups"]),
        loss_scaler=None if scaler is None else ScalerRecord(**scaler),
        files=tuple(build_file(record) for record in content["files"]),
    )


def build_param(record: dict[str, Any]) -> ParamRecord:
    """Return the record of which this is the JSON."""
    state = tuple(StateRecord(**entry) for entry in record["state"])
    return ParamRecord(**(record | {"shape": tuple(record["shape"]), "state": state}))


def build_file(record: dict[str, Any]) -> FileRecord:
    """Return the record of which this is the JSON."""
    # A checkpoint is read from its own folder and nowhere else.
    if PurePath(record["name"]).name != record["name"]:
        raise ValueError(f"name={record['name']!r}")
    pieces = tuple(PieceRecord(**piece) for piece in record["pieces"])
    return FileRecord(**(record | {"pieces": pieces}))
