"""Manifests, read with distrust: whoever wrote one may have written its checksums as well.

Every value must be there, of its type and in its range, and agree with all others; nothing else may
be there. What cannot be told from the manifest alone, whether it fits a run, is `fit.py`'s.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import lru_cache
from typing import Any, Final, TypeVar, get_args

from zero_sim.checkpoint.files import check_layout
from zero_sim.checkpoint.invalid_field import InvalidField
from zero_sim.checkpoint.manifest import (
    FORMAT,
    NO_SETTINGS,
    VERSION,
    FileRecord,
    Form,
    Manifest,
    ModuleRecord,
    ParamRecord,
    PieceRecord,
    ScalerRecord,
    StateRecord,
    WorldRecord,
    digest_content,
)
from zero_sim.checkpoint.values import SAFETENSORS_DTYPES, decode_value, find_dtype
from zero_sim.errors import CheckpointError, UsageError
from zero_sim.zero.scaler import LossScaler

T = TypeVar("T")

_TEXT_CHARS_MAX: Final = 1 << 12
_DEPTH_MAX: Final = 8
"""Of lists in lists in the settings of an optimizer."""
_DIMS_MAX: Final = 64
_INTEGER_STOP: Final = 1 << 63
_SHA256: Final = re.compile("[0-9a-f]{64}")
_RELEASE: Final = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}[a-z0-9.]{0,40}", re.ASCII)
_HEX: Final = re.compile("(?:[0-9a-f]{2})+")


# Simulated ranks share a process: a thousand of them would each parse the same megabytes.
@lru_cache(maxsize=1)
def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the record that a manifest file holds.

    Args:
        data: Content of the file.
        where: Path of the file, for messages.

    Raises:
        CheckpointError: If it is no manifest, of another version, was changed since, or holds
            something that no save writes; then the message names the field.
    """
    try:
        whole = _parse(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"expected JSON in {where}, got {len(data)} bytes that are none ({error})."
        ) from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(
            f"expected a manifest with format={FORMAT!r} in {where}, got something else."
        )
    if type(whole.get("version")) is not int or whole["version"] != VERSION:
        raise CheckpointError(
            f"expected version {VERSION} in {where}, got {_show(whole.get('version'))}. "
            f"Try the release that wrote it."
        )
    try:
        table = _table(whole, ("format", "version", "sha256", "content"), "the manifest")
        digest = digest_content(table["content"])
        if table["sha256"] != digest:
            raise CheckpointError(
                f"expected sha256 {_show(table['sha256'])} of the content of {where}, got "
                f"{digest}: the file was changed after it was written."
            )
        manifest = _read_manifest(table["content"], "content")
        check_layout(manifest, "content")
    except RecursionError as error:
        raise CheckpointError(f"expected a manifest in {where}, got lists too deep.") from error
    except InvalidField as unfit:
        raise CheckpointError(
            f"expected {unfit.path} in {where} to be {unfit.expected}, got {unfit.got}."
        ) from unfit
    return manifest


def _parse(data: bytes) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError(f"a name twice among {_show(sorted(name for name, _ in pairs))}")
        return table

    def refuse(word: str) -> Any:
        raise ValueError(f"{word}, which JSON does not have")

    return json.loads(data, object_pairs_hook=build, parse_constant=refuse)


def _read_manifest(value: Any, path: str) -> Manifest:
    table = _table(value, Manifest.__dataclass_fields__, path)
    groups = _list(table["groups"], _read_group, f"{path}.groups")
    scaler = table["loss_scaler"]
    manifest = Manifest(
        form=_one_of(table["form"], get_args(Form), f"{path}.form"),
        world=_read_world(table["world"], f"{path}.world"),
        params=_list(table["params"], _read_param, f"{path}.params"),
        module=_list(table["module"], _read_module, f"{path}.module"),
        optimizer=_text(table["optimizer"], f"{path}.optimizer"),
        groups=groups,
        loss_scaler=None if scaler is None else _read_scaler(scaler, f"{path}.loss_scaler"),
        files=_list(table["files"], _read_file, f"{path}.files"),
    )
    _check_params(manifest, path)
    _check_unlike(((record.kind, record.name) for record in manifest.module), f"{path}.module")
    _check_unlike((json.dumps(group, sort_keys=True) for group in groups), f"{path}.groups")
    return manifest


def _check_params(manifest: Manifest, path: str) -> None:
    """Check that params are told apart, and have the groups that there are."""
    _check_unlike((param.name for param in manifest.params), f"{path}.params")
    groups = range(len(manifest.groups))
    for index, param in enumerate(manifest.params):
        where = f"{path}.params[{index}]"
        has_elements = math.prod(param.shape) > 0
        # Without elements a param is in no optimizer.
        if has_elements and param.group not in groups:
            expected = f"an index into the {len(groups)} groups"
            raise InvalidField(f"{where}.group", expected, _show(param.group))
        if not has_elements and param.group is not None:
            raise InvalidField(
                f"{where}.group", "null for a param without elements", _show(param.group)
            )
        if not has_elements and param.state:
            raise InvalidField(f"{where}.state", "empty for a param without elements", "entries")
        _check_unlike((entry.key for entry in param.state), f"{where}.state")
    unused = set(groups) - {param.group for param in manifest.params}
    if unused:
        raise InvalidField(f"{path}.groups[{min(unused)}]", "the group of a param", "one of none")


def _read_world(value: Any, path: str) -> WorldRecord:
    table = _table(value, WorldRecord.__dataclass_fields__, path)
    return WorldRecord(
        world_size=_whole(table["world_size"], f"{path}.world_size", least=1),
        torch=_matching(table["torch"], _RELEASE, "the version of a release", f"{path}.torch"),
    )


def _read_param(value: Any, path: str) -> ParamRecord:
    table = _table(value, ParamRecord.__dataclass_fields__, path)
    group = table["group"]
    return ParamRecord(
        name=_text(table["name"], f"{path}.name"),
        shape=_shape(table["shape"], f"{path}.shape"),
        dtype=_one_of(table["dtype"], SAFETENSORS_DTYPES, f"{path}.dtype"),
        group=None if group is None else _whole(group, f"{path}.group"),
        state=_list(table["state"], _read_state, f"{path}.state"),
    )


def _read_state(value: Any, path: str) -> StateRecord:
    table = _table(value, StateRecord.__dataclass_fields__, path)
    dtype = table["dtype"]
    if dtype is not None:
        _one_of(dtype, SAFETENSORS_DTYPES, f"{path}.dtype")
        if table["value"] is not None:
            raise InvalidField(f"{path}.value", "null beside a dtype", _show(table["value"]))
    _check_encoded(table["value"], f"{path}.value")
    return StateRecord(key=_text(table["key"], f"{path}.key"), dtype=dtype, value=table["value"])


def _read_module(value: Any, path: str) -> ModuleRecord:
    table = _table(value, ModuleRecord.__dataclass_fields__, path)
    return ModuleRecord(
        name=_text(table["name"], f"{path}.name"),
        kind=_one_of(table["kind"], ("frozen", "buffer"), f"{path}.kind"),
        shape=_shape(table["shape"], f"{path}.shape"),
        dtype=_one_of(table["dtype"], SAFETENSORS_DTYPES, f"{path}.dtype"),
    )


def _read_group(value: Any, path: str) -> dict[str, Any]:
    table = _table(value, ("settings", "base_lr"), path)
    settings = _object(table["settings"], f"{path}.settings")
    for name, setting in settings.items():
        where = _name(name, f"{path}.settings")
        if name in NO_SETTINGS:
            raise InvalidField(where, "a setting", "what torch keeps beside them")
        _check_encoded(setting, where)
    _check_encoded(table["base_lr"], f"{path}.base_lr")
    return table


def _read_scaler(value: Any, path: str) -> ScalerRecord:
    table = _table(value, ScalerRecord.__dataclass_fields__, path)
    if type(table["scale"]) is not float:
        raise InvalidField(f"{path}.scale", "a number", _show(table["scale"]))
    counts = {
        name: _whole(table[name], f"{path}.{name}") for name in ("good_steps", "growth_interval")
    }
    try:
        LossScaler(scale=table["scale"], **counts)
    except UsageError as error:
        raise InvalidField(
            path, "the state of a loss scaler", f"what it refuses: {error}"
        ) from error
    return ScalerRecord(scale=table["scale"], **counts)


def _read_file(value: Any, path: str) -> FileRecord:
    table = _table(value, FileRecord.__dataclass_fields__, path)
    return FileRecord(
        name=_text(table["name"], f"{path}.name"),
        size_bytes=_whole(table["size_bytes"], f"{path}.size_bytes"),
        sha256=_matching(table["sha256"], _SHA256, "64 hexadecimal digits", f"{path}.sha256"),
        pieces=_list(table["pieces"], _read_piece, f"{path}.pieces"),
    )


def _read_piece(value: Any, path: str) -> PieceRecord:
    table = _table(value, PieceRecord.__dataclass_fields__, path)
    return PieceRecord(
        key=_text(table["key"], f"{path}.key"),
        param=_text(table["param"], f"{path}.param"),
        tensor=_text(table["tensor"], f"{path}.tensor"),
        start=_whole(table["start"], f"{path}.start"),
        stop=_whole(table["stop"], f"{path}.stop"),
    )


def _check_encoded(value: Any, path: str, *, depth: int = 0) -> None:
    """Check that a value is what `encode_value` returns, for something of few bytes."""
    expected = "a number, text, true, false, null, or a list of those"
    match value:
        case None | bool():
            return
        case int():
            _whole(value, path, least=-_INTEGER_STOP)
        case float():
            if not math.isfinite(value):
                raise InvalidField(path, "a number that 64 bits hold", _show(value))
        case str():
            _text(value, path)
        case list() if depth < _DEPTH_MAX:
            for index, item in enumerate(value):
                _check_encoded(item, f"{path}[{index}]", depth=depth + 1)
        case {"float": text} if len(value) == 1:
            _one_of(text, ("inf", "-inf", "nan"), f"{path}.float")
        case {"tuple": list(items)} if len(value) == 1 and depth < _DEPTH_MAX:
            for index, item in enumerate(items):
                _check_encoded(item, f"{path}[{index}]", depth=depth + 1)
        case {"tensor": name, "bits": bits, "value": shown} if len(value) == 3:
            dtype = find_dtype(_one_of(name, SAFETENSORS_DTYPES, f"{path}.tensor"))
            digits = 2 * dtype.itemsize
            what = f"{digits} hexadecimal digits"
            if len(_matching(bits, _HEX, what, f"{path}.bits")) != digits:
                raise InvalidField(f"{path}.bits", what, _show(bits))
            if name == "bool" and bits not in ("00", "01"):
                raise InvalidField(f"{path}.bits", "00 or 01, as of a bool", _show(bits))
            meant = str(decode_value(value).item())
            if shown != meant:
                raise InvalidField(f"{path}.value", f"{meant!r}, as its bits say", _show(shown))
        case _:
            raise InvalidField(path, expected, _show(value))


def _table(value: Any, names: Collection[str], path: str) -> dict[str, Any]:
    """Return an object that has exactly these fields."""
    table = _object(value, path)
    for name in names:
        if name not in table:
            raise InvalidField(f"{path}.{name}", "there", "nothing")
    for name in table:
        if name not in names:
            raise InvalidField(path, f"made of {', '.join(names)}", f"{_show(name)} as well")
    return table


def _object(value: Any, path: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidField(path, "an object", _show(value))
    return value


def _list(value: Any, read: Callable[[Any, str], T], path: str) -> tuple[T, ...]:
    if type(value) is not list:
        raise InvalidField(path, "a list", _show(value))
    return tuple([read(item, f"{path}[{index}]") for index, item in enumerate(value)])


def _whole(value: Any, path: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _INTEGER_STOP:
        raise InvalidField(
            path, f"a whole number of at least {least} that 64 bits hold", _show(value)
        )
    return value


def _text(value: Any, path: str) -> str:
    # What is not printable would reach terminals through messages; so would a name of a megabyte.
    if type(value) is not str or not value.isprintable() or len(value) > _TEXT_CHARS_MAX:
        expected = f"at most {_TEXT_CHARS_MAX} printable characters"
        raise InvalidField(path, expected, _show(value))
    return value


def _name(name: str, path: str) -> str:
    """Return the path of a setting, whose name is in the file and may be anything."""
    return f"{path}.{_text(name, f'the name {_show(name)} in {path}')}"


def _matching(value: Any, pattern: re.Pattern[str], expected: str, path: str) -> str:
    if type(value) is not str or not pattern.fullmatch(value):
        raise InvalidField(path, expected, _show(value))
    return value


def _one_of(value: Any, choices: Collection[Any], path: str) -> Any:
    if type(value) is not str or value not in choices:
        raise InvalidField(path, f"one of {', '.join(choices)}", _show(value))
    return value


def _shape(value: Any, path: str) -> tuple[int, ...]:
    shape = _list(value, _whole, path)
    if len(shape) > _DIMS_MAX:
        raise InvalidField(path, f"at most {_DIMS_MAX} sizes, as torch allows", f"{len(shape)}")
    # A size of 0 does not take back what the others come to.
    if math.prod(size for size in shape if size) >= _INTEGER_STOP:
        raise InvalidField(path, "sizes of fewer than 2^63 elements", ascii(shape)[:80])
    return shape


def _check_unlike(items: Iterable[Hashable], path: str) -> None:
    seen: set[Hashable] = set()
    for index, item in enumerate(items):
        if item in seen:
            raise InvalidField(f"{path}[{index}]", "unlike those before", _show(item))
        seen.add(item)


def _show(value: Any) -> str:
    if type(value) is dict:
        return f"an object of {len(value)} fields"
    if type(value) is list:
        return f"a list of {len(value)} values"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
