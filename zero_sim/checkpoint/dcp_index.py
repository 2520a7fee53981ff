"""The index of torch's distributed checkpoint (DCP), compared with the manifest.

The index is a pickle, which torch's own reader runs. We need nothing of it: it is read operation by
operation, as a list of what it would build, with names of classes left as names, and refused if it
builds anything but DCP's records of exactly the pieces that the manifest lists.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from zero_sim.checkpoint.entries import name_whole
from zero_sim.checkpoint.folder import open_regular
from zero_sim.checkpoint.manifest import Manifest
from zero_sim.checkpoint.values import SAFETENSORS_DTYPES
from zero_sim.errors import CheckpointError

_RECORDS: Final = "torch.distributed.checkpoint.metadata"
_STORED: Final = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_PATHS: Final = ("pathlib", "pathlib._local")
_GETATTR: Final = ("builtins", "getattr")
_FORMATS: Final = (_RECORDS, "_MEM_FORMAT_ENCODING")
_FORMAT_NAMES: Final = frozenset(
    {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"}
)
_NAMES: Final = frozenset(
    {
        *((_RECORDS, name) for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta",
        )),
        _FORMATS,
        # Python up to 3.11.3 has members of an enumeration looked up by their names.
        _GETATTR,
        _STORED,
        *((module, name) for module in _PATHS for name in ("PosixPath", "WindowsPath")),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name in SAFETENSORS_DTYPES),
    }
)  # fmt: skip
"""What the index may name; nothing of it is ever imported for that, or called."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that the pickle names."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class _Call:
    """What the pickle would make by calling something."""

    of: _Name
    args: tuple[Any, ...]
    state: Any = None


@dataclass(slots=True, eq=False)
class _Table:
    """A dict of the pickle; keys may be calls."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


class _Unexpected(Exception):
    """The pickle holds something else than an index does."""


def check_index(path: Path, *, manifest: Manifest) -> None:
    """Check that DCP's index says of all pieces of DCP's what the manifest says, and no more.

    Args:
        path: The index, of a size that was checked.
        manifest: The manifest beside it.

    Raises:
        CheckpointError: If it says or does anything else, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            content = file.read()
        found = _list_found(_read(content))
        expected = _list_expected(manifest)
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise _Unexpected(f"{found.get(name)} of {ascii(name)[:80]}")
    except (
        _Unexpected, OSError, ValueError, EOFError, OverflowError, LookupError, TypeError,
        AttributeError,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"expected in {path} an index of the pieces that the manifest lists, and nothing that "
            f"runs, got {error}. Do not let torch.distributed.checkpoint read it: that runs "
            f"what it says."
        ) from error


def _list_expected(manifest: Manifest) -> dict[str, Any]:
    """Return dtype, number of elements and places of every tensor, by name."""
    tensors = manifest.describe_tensors()
    places: dict[tuple[str, str], list[tuple[int, int, str, int, int]]] = {}
    for file in manifest.files:
        for piece, (start, stop) in zip(file.pieces, file.containers, strict=False):
            where = (piece.param, piece.tensor)
            place = (piece.start, piece.stop - piece.start, file.name, start, stop - start)
            places.setdefault(where, []).append(place)
    expected = {}
    for (param, tensor), held in places.items():
        shape, dtype = tensors[param, tensor]
        expected[name_whole(tensor, param)] = (dtype, math.prod(shape), sorted(held))
    return expected


def _list_found(root: Any) -> dict[str, Any]:
    """Return the same of what an index holds."""
    fields = _fields(root, "Metadata")
    tensors: dict[str, Any] = {}
    sizes: dict[tuple[str, int], int] = {}
    for name, value in _pairs(fields["state_dict_metadata"]):
        stored = _fields(value, "TensorStorageMetadata")
        dtype = stored["properties"].state[0]
        if name in tensors or dtype.module != "torch":
            raise _Unexpected(f"{ascii(name)[:80]} twice, or of no dtype")
        tensors[name] = (dtype.name, _size(stored["size"]), [])
        for chunk in stored["chunks"]:
            span = _fields(chunk, "ChunkStorageMetadata")
            sizes[name, _size(span["offsets"])] = _size(span["sizes"])
    for key, value in _pairs(fields["storage_data"]):
        index, place = _fields(key, "MetadataIndex"), _fields(value, _STORED[1])
        if place.get("transform_descriptors"):
            raise _Unexpected("pieces that are transformed")
        name, start = index["fqn"], _size(index["offset"])
        info = (place["relative_path"], place["offset"], place["length"])
        tensors[name][2].append((start, sizes.pop((name, start)), *info))
    if sizes:
        raise _Unexpected(f"{len(sizes)} chunks that lie nowhere")
    for _, _, held in tensors.values():
        held.sort()
    return tensors


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, _Call) or value.of.name != name:
        raise _Unexpected(f"something else than {name}")
    fields = dict(_pairs(value.state))
    if len(fields) != len(value.state.items):
        raise _Unexpected(f"a field of {name} twice")
    return fields


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, _Table):
        raise _Unexpected("no dict")
    return value.items


def _size(value: Any) -> int:
    """Return what a `torch.Size` of one dimension holds."""
    if not isinstance(value, _Call) or value.of != _Name("torch", "Size"):
        raise _Unexpected("no torch.Size")
    ((size,),) = value.args
    if type(size) is not int:
        raise _Unexpected("a size that is no integer")
    return size


_MARK: Final = object()
_CONSTANTS: Final[dict[str, Any]] = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK,
}  # fmt: skip
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _read(content: bytes) -> Any:
    """Return what a pickle would build, with calls left as records of them."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for operation, arg, place in pickletools.genops(content):
        name = operation.name
        match name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                if len(stack) != 1 or place != len(content) - 1:
                    raise _Unexpected("more than one value")
                return stack.pop()
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(arg)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE" | "MARK":
                stack.append(_CONSTANTS[name])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append(_Table())
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case _:
                _combine(name, stack)
    raise _Unexpected("no end")


def _combine(name: str, stack: list[Any]) -> None:
    """Do an operation that makes one value of several."""
    match name:
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        case "TUPLE":
            items = _pop_to_mark(stack)
            stack.append(tuple(items))
        case "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        case "APPENDS":
            items = _pop_to_mark(stack)
            stack[-1].extend(items)
        case "SETITEM":
            key, value = stack[-2:]
            del stack[-2:]
            stack[-1].items.append((key, value))
        case "SETITEMS":
            items = _pop_to_mark(stack)
            stack[-1].items.extend(zip(items[::2], items[1::2], strict=True))
        case "STACK_GLOBAL":
            module, attribute = stack[-2:]
            if (module, attribute) not in _NAMES:
                raise _Unexpected(f"{ascii(module)[:80]}, {ascii(attribute)[:80]}")
            stack[-2:] = [_Name(module, attribute)]
        case "REDUCE" | "NEWOBJ":
            of, args = stack[-2:]
            if not isinstance(of, _Name) or type(args) is not tuple:
                raise _Unexpected("a call of something else than a name")
            if of == _Name(*_GETATTR):
                of, args = _looked_up(args)
            stack[-2:] = [_Call(of, args)]
        case "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], _Call) or stack[-1].state is not None:
                raise _Unexpected("a state of something else than a record")
            stack[-1].state = state
        case _:
            raise _Unexpected(f"the operation {name}")


def _looked_up(args: tuple[Any, ...]) -> tuple[_Name, tuple[Any, ...]]:
    """The one enumeration of an index, and the name of its member that is looked up there."""
    formats = _Name(*_FORMATS)
    match args:
        case (of, str(name)) if of == formats and name in _FORMAT_NAMES:
            return formats, (name,)
    raise _Unexpected("an attribute of something else than its enumeration")


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    for at in range(len(stack) - 1, -1, -1):
        if stack[at] is _MARK:
            items = stack[at + 1 :]
            del stack[at:]
            return items
    raise _Unexpected("an end without a beginning")
