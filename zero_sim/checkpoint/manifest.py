"""A checkpoint's manifest: a JSON file that is written last and checked first."""

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
"""Name of a param's fp32 master among its tensors."""

NO_SETTINGS: Final = frozenset({"params", "param_names", "group_index"})
"""Entries of torch's param groups that are not settings."""

# Offsets and sizes are int64 in torch.
_ELEMS_STOP: Final = 1 << 63
_DIMS_MAX: Final = 64


def _check_dtype(name: str) -> str:
    if name not in SAFETENSORS_DTYPES:
        raise unfit(f"one of {', '.join(SAFETENSORS_DTYPES)}")
    return name


# torch's limits, so that later code can use any accepted value without overflow.
def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > _DIMS_MAX:
        raise unfit(f"at most {_DIMS_MAX} sizes, as torch allows")
    # Without zeros, because a size of 0 would hide overflow by the other sizes.
    if math.prod(size for size in shape if size) >= _ELEMS_STOP:
        raise unfit("sizes of fewer than 2^63 elements")
    return shape


def _check_setting(name: str) -> str:
    if name in NO_SETTINGS:
        raise unfit("a setting, not another entry of torch's param groups")
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
    """Entry of a param's optimizer state."""

    key: Text
    """Name in `torch.optim`, such as `exp_avg`."""
    dtype: DtypeName | None
    """Dtype of a tensor with the param's element count, stored in files; None for other values."""
    value: Encoded
    """Encoded value if not elementwise, such as a 0D `step`. Stored once per param, for any number
    of owners."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.value is not None:
            raise unfit("a value of null beside a dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamRecord:
    """A trained param."""

    name: Text
    shape: Shape
    dtype: DtypeName
    """Dtype of the working param; its master is fp32."""
    group: Count | None
    """Index into `Manifest.groups`; None if no optimizer has the param, because it is empty."""
    state: tuple[StateRecord, ...]
    """Ordered as the optimizer created it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRecord:
    """An untrained tensor of the module."""

    name: Text
    kind: Literal["frozen", "buffer"]
    shape: Shape
    dtype: DtypeName


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """A tensor's span in a file."""

    key: Text
    """Tensor name in its file."""
    param: Text
    tensor: Text
    """`master`, `state.` with a state's key, or a `ModuleRecord`'s kind."""
    start: Count
    """First element of the flattened param, in logical order."""
    stop: Count
    """First element after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file beside the manifest."""

    name: Text
    """Relative to the checkpoint."""
    size_bytes: Count
    sha256: Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits")]
    pieces: tuple[PieceRecord, ...]
    """Pieces in file order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerRecord:
    """Loss scaler. `LossScaler` checks the ranges."""

    scale: float
    good_steps: Count
    """Consecutive steps without overflow since the scale last changed."""
    growth_interval: Count

    def __post_init__(self) -> None:
        # Constructed for its checks only.
        LossScaler(
            scale=self.scale, good_steps=self.good_steps, growth_interval=self.growth_interval
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldRecord:
    """World that wrote a checkpoint, for people and for file names."""

    world_size: Annotated[Count, Field(ge=1)]
    torch: Annotated[
        str, matching(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}[a-z0-9.]{0,40}", "the version of a release")
    ]
    """torch version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A param group."""

    settings: dict[Setting, Encoded]
    base_lr: Encoded
    """Learning rate before any factor."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manifest:
    """Content of a manifest file."""

    form: Form
    world: WorldRecord
    params: tuple[ParamRecord, ...]
    """Params in registration order."""
    module: tuple[ModuleRecord, ...]
    optimizer: Text
    """Optimizer class."""
    groups: tuple[GroupRecord, ...]
    """Distinct groups, to which params refer by index."""
    loss_scaler: ScalerRecord | None
    files: tuple[FileRecord, ...]

    def describe_tensors(self) -> dict[tuple[str, str], tuple[tuple[int, ...], str]]:
        """Return shape and dtype of all tensors in files, by param and tensor."""
        tensors: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
        for param in self.params:
            # Masters are fp32, whatever the dtype of the working param.
            tensors[param.name, MASTER] = (param.shape, "float32")
            for entry in param.state:
                if entry.dtype is not None:
                    tensors[param.name, name_state(entry.key)] = (param.shape, entry.dtype)
        for record in self.module:
            tensors[record.name, record.kind] = (record.shape, record.dtype)
        return tensors


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest file."""
    content = take_apart(manifest)
    whole = {"format": FORMAT, "version": VERSION, "sha256": digest_content(content)}
    # One record per line. Formatted here, because json's indentation is ten times slower.
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
    """Return a record's fields by name. Used as `default` of `json.dumps`."""
    # One level only, because json.dumps calls this again for records inside. dataclasses.asdict
    # would copy everything.
    names = getattr(type(record), "__dataclass_fields__", None)
    if names is None:
        raise TypeError(f"expected a JSON value or a record, got {record!r}.")
    return {name: getattr(record, name) for name in names}


def digest_content(content: Any) -> str:
    """Return the checksum of a manifest's content, whatever the file's formatting."""
    # Via JSON, so that tuples count as lists, as they do when the file is read. Sorted keys and
    # fixed separators give equal contents equal bytes.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=take_apart)
    return hashlib.sha256(canonical.encode()).hexdigest()
