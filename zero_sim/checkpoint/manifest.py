"""The manifest of a checkpoint: one JSON file that is written last and checked first."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

Form = Literal["sharded", "consolidated"]

MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "zero_sim checkpoint"
VERSION: Final = 3

MASTER: Final = "master"
"""Name of the fp32 master among a param's tensors."""

NO_SETTINGS: Final = frozenset({"params", "param_names", "group_index"})
"""What a param group of torch holds besides its settings."""


def name_state(key: str) -> str:
    """Return the name of an elementwise state among a param's tensors."""
    return f"state.{key}"


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
    pieces: tuple[PieceRecord, ...]
    """In the order in which they lie there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerRecord:
    """The loss scaler."""

    scale: float
    good_steps: int
    """Finite steps since the scale last changed."""
    growth_interval: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldRecord:
    """Who wrote a checkpoint: for people, and for the names of its files."""

    world_size: int
    torch: str
    """Version of torch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manifest:
    """The whole record."""

    form: Form
    world: WorldRecord
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

    def describe_tensors(self) -> dict[tuple[str, str], tuple[tuple[int, ...], str]]:
        """Return shape and dtype of everything that lies in files, by param and tensor."""
        tensors: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
        for param in self.params:
            tensors[param.name, MASTER] = (param.shape, "float32")
            for entry in param.state:
                if entry.dtype is not None:
                    tensors[param.name, name_state(entry.key)] = (param.shape, entry.dtype)
        for record in self.module:
            tensors[record.name, record.kind] = (record.shape, record.dtype)
        return tensors


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the manifest file."""
    content = take_apart(manifest)
    whole = {"format": FORMAT, "version": VERSION, "sha256": digest_content(content)}
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
        raise TypeError(f"expected what JSON can hold, or a record, got {record!r}.")
    return {name: getattr(record, name) for name in names}


def digest_content(content: Any) -> str:
    """Return the checksum of a manifest's content, however it is laid out in its file."""
    # Through JSON first: tuples become lists, as they will when the file is read.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=take_apart)
    return hashlib.sha256(canonical.encode()).hexdigest()


def build_param(record: dict[str, Any]) -> ParamRecord:
    """Return the record of which this is the JSON, as another rank told it."""
    state = tuple(StateRecord(**entry) for entry in record["state"])
    return ParamRecord(**(record | {"shape": tuple(record["shape"]), "state": state}))


def build_file(record: dict[str, Any]) -> FileRecord:
    """Return the record of which this is the JSON, as another rank told it."""
    pieces = tuple(PieceRecord(**piece) for piece in record["pieces"])
    return FileRecord(**(record | {"pieces": pieces}))
