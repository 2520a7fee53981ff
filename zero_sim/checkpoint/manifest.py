"""The manifest of a checkpoint: one JSON file that is written last and checked first."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from zero_sim.checkpoint.values import SAFETENSORS_DTYPES, Text, check_encoded
from zero_sim.untrusted_json import matching, unfit
from zero_sim.zero.variants.scaler import LossScaler

Form = Literal["sharded", "consolidated"]

MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "zero_sim checkpoint"
VERSION: Final = 3

MASTER: Final = "master"
"""Name of the fp32 master among a param's tensors."""

NO_SETTINGS: Final = frozenset({"params", "param_names", "group_index"})
"""What a param group of torch holds besides its settings."""


_ELEMS_STOP: Final = 1 << 63
_DIMS_MAX: Final = 64


def _check_dtype(name: str) -> str:
    if name not in SAFETENSORS_DTYPES:
        raise unfit(f"one of {', '.join(SAFETENSORS_DTYPES)}")
    return name


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > _DIMS_MAX:
        raise unfit(f"at most {_DIMS_MAX} sizes, as torch allows")
    # A size of 0 does not take back what the others come to.
    if math.prod(size for size in shape if size) >= _ELEMS_STOP:
        raise unfit("sizes of fewer than 2^63 elements")
    return shape


def _check_setting(name: str) -> str:
    if name in NO_SETTINGS:
        raise unfit("a setting, not what torch keeps beside them")
    return name


Count = Annotated[int, Field(ge=0, lt=_ELEMS_STOP)]
DtypeName = Annotated[str, AfterValidator(_check_dtype)]
Shape = Annotated[tuple[Count, ...], AfterValidator(_check_shape)]
Setting = Annotated[Text, AfterValidator(_check_setting)]
Encoded = Annotated[Any, AfterValidator(check_encoded)]


def name_state(key: str) -> str:
    """Return the name of an elementwise state among a param's tensors."""
    return f"state.{key}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord:
    """One entry of the optimizer's state of one param."""

    key: Text
    """Its name in `torch.optim`, such as `exp_avg`."""
    dtype: DtypeName | None
    """Dtype of a tensor with one element for each of the param, which lies in files; None for
    everything else."""
    value: Encoded
    """What is not elementwise, such as a 0D `step`: encoded, once a param however many ranks own a
    part of it."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.value is not None:
            raise unfit("a value of null beside a dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamRecord:
    """One trained param."""

    name: Text
    shape: Shape
    dtype: DtypeName
    """Of the working param; its master is fp32."""
    group: Count | None
    """Index into `Manifest.groups`; None where no optimizer holds it, as for an empty param."""
    state: tuple[StateRecord, ...]
    """In the order in which the optimizer created it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRecord:
    """One tensor of the module that is not trained."""

    name: Text
    kind: Literal["frozen", "buffer"]
    shape: Shape
    dtype: DtypeName


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """Where a file holds a span of a tensor of a param."""

    key: Text
    """Name of the tensor inside its file."""
    param: Text
    tensor: Text
    """`master`, `state.` and the key of a state, or the kind of a `ModuleRecord`."""
    start: Count
    """First element of the flattened param, in logical order."""
    stop: Count
    """First element after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file beside the manifest."""

    name: Text
    """Relative to the checkpoint."""
    size_bytes: Count
    sha256: Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits")]
    pieces: tuple[PieceRecord, ...]
    """In the order in which they lie there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerRecord:
    """The loss scaler, which checks its ranges."""

    scale: float
    good_steps: Count
    """Finite steps since the scale last changed."""
    growth_interval: Count

    def __post_init__(self) -> None:
        LossScaler(
            scale=self.scale, good_steps=self.good_steps, growth_interval=self.growth_interval
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldRecord:
    """Who wrote a checkpoint: for people, and for the names of its files."""

    world_size: Annotated[Count, Field(ge=1)]
    torch: Annotated[
        str, matching(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}[a-z0-9.]{0,40}", "the version of a release")
    ]
    """Version of torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """One param group."""

    settings: dict[Setting, Encoded]
    base_lr: Encoded
    """Learning rate that factors are applied to."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manifest:
    """The whole record."""

    form: Form
    world: WorldRecord
    params: tuple[ParamRecord, ...]
    """In registration order."""
    module: tuple[ModuleRecord, ...]
    optimizer: Text
    """Class of the optimizer."""
    groups: tuple[GroupRecord, ...]
    """Equal ones only once. Params name theirs."""
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
