"""Compatibility of a checkpoint with a run, as far as it shows without reading a tensor.

Params, spans and state first, then the settings of param groups: which a run takes, and which not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_sim.checkpoint.manifest import (
    MASTER,
    GroupRecord,
    Manifest,
    ModuleRecord,
    ParamRecord,
    name_state,
)
from zero_sim.checkpoint.pieces import find_cover_problems
from zero_sim.checkpoint.snapshot import (
    iterate_module_tensors,
    name_class,
    read_scaler,
    read_settings,
)
from zero_sim.checkpoint.values import decode_value, name_dtype
from zero_sim.layout import Span
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.refusals import ELEMENTWISE, Attached

KEPT_SETTINGS: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How a step is computed rather than what: a run keeps its own, whatever the checkpoint has."""

_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""What torch's schedulers leave in param groups; one may be made before the load or after it."""

_NUMBER_MAX: Final = torch.finfo(torch.float32).max
"""Masters are fp32: no step can use a greater one."""


def find_param_problems(
    manifest: Manifest, ddp: DistributedDataParallel, *, params: Sequence[ParamRecord]
) -> list[str]:
    """Return every difference between the tensors that a checkpoint and a run have.

    Args:
        manifest: What the checkpoint has.
        ddp: The run, for what is not trained.
        params: Its trained params, those of all ranks.
    """
    here = {param.name: (param.shape, param.dtype) for param in params}
    saved: Mapping[str, ParamRecord | ModuleRecord] = {p.name: p for p in manifest.params}
    problems = list(_compare_tensors(saved, here, kind="trained param"))
    module = [record for record, _ in iterate_module_tensors(ddp)]
    for kind in ("frozen", "buffer"):
        records = [record for record in module if record.kind == kind]
        problems += _compare_tensors(
            {record.name: record for record in manifest.module if record.kind == kind},
            {record.name: (record.shape, record.dtype) for record in records},
            kind="frozen param" if kind == "frozen" else "buffer",
        )
    return problems


def find_span_problems(
    manifest: Manifest, spans: Mapping[tuple[str, str], Sequence[Span]]
) -> list[str]:
    """Return what keeps a checkpoint from holding every element of every tensor exactly once.

    Args:
        manifest: What there should be.
        spans: What there is, by param and tensor.
    """
    expected: dict[str, dict[str, int]] = {}
    for param in manifest.params:
        names = [MASTER, *(name_state(s.key) for s in param.state if s.dtype is not None)]
        for name in names:
            expected.setdefault(name, {})[param.name] = torch.Size(param.shape).numel()
    for record in manifest.module:
        expected.setdefault(record.kind, {})[record.name] = torch.Size(record.shape).numel()
    problems: list[str] = []
    for tensor in {*expected, *(tensor for _, tensor in spans)}:
        held = {param: each for (param, name), each in spans.items() if name == tensor}
        found = find_cover_problems(expected.get(tensor, {}), held)
        problems += [f"{tensor} of {problem}" for problem in found]
    return sorted(problems)


def find_optimizer_problems(manifest: Manifest, optimizer: DistributedOptimizer) -> list[str]:
    """Return how the optimizer, its groups, its state and the loss scaler differ in kind."""
    inner = optimizer.inner
    problems: list[str] = []
    has, wants = manifest.loss_scaler is not None, read_scaler(optimizer) is not None
    if has != wants:
        words = {True: "a loss scaler", False: "no loss scaler"}
        problems.append(f"the checkpoint has {words[has]}, this run has {words[wants]}")
    if manifest.optimizer != name_class(inner):
        problems.append(
            f"the checkpoint is of {manifest.optimizer}, this run steps with {name_class(inner)}"
        )
        # Its settings and state are another class's: comparing them would only add noise.
        return problems
    problems += find_setting_problems(manifest, optimizer)
    problems += _find_state_problems(manifest, inner)
    return problems


def _compare_tensors(
    saved: Mapping[str, ParamRecord | ModuleRecord],
    here: Mapping[str, tuple[tuple[int, ...], str]],
    *,
    kind: str,
) -> Iterator[str]:
    for name in _first(saved.keys() | here.keys(), like=[*saved, *here]):
        if name not in here:
            yield f"{kind} {name!r} is in the checkpoint but not in the module"
        elif name not in saved:
            yield f"{kind} {name!r} is in the module but not in the checkpoint"
        else:
            shape, dtype = here[name]
            if saved[name].shape != shape:
                yield f"{kind} {name!r} has shape {saved[name].shape}, in the module {shape}"
            if saved[name].dtype != dtype:
                yield f"{kind} {name!r} has dtype {saved[name].dtype}, in the module {dtype}"


def _first(names: Iterable[str], *, like: Sequence[str]) -> list[str]:
    """Return names in the order in which they first come in `like`."""
    wanted = set(names)
    return [name for name in dict.fromkeys(like) if name in wanted]


def _find_state_problems(manifest: Manifest, inner: Optimizer) -> Iterator[str]:
    probes: dict[int, tuple[dict[str, Any], dict[str, Any]] | None] = {}
    for param in manifest.params:
        if param.group is None:
            continue
        if param.group not in probes:
            saved = manifest.groups[param.group]
            settings = read_new_settings(saved, inner.param_groups[0])
            probes[param.group] = probe_state(inner, settings=settings)
        values = {e.key: decode_value(e.value) for e in param.state if e.dtype is None}
        if type(inner) in ELEMENTWISE or isinstance(inner, Attached):
            yield from _find_count_problems(param.name, values)
        probe = probes[param.group]
        if probe is None:
            continue
        # A param that was never stepped has what the constructor gave it, which may be nothing.
        expected = [_describe_state(state) for state in probe]
        got = {
            entry.key: entry.dtype or _describe_value(values[entry.key]) for entry in param.state
        }
        if got not in expected:
            yield (
                f"state of {param.name!r} is {got}, but {name_class(inner)} keeps {expected[-1]}"
            )


def _find_count_problems(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what torch's own optimizers never come to: they count steps, and weigh by the count."""
    for key, value in values.items():
        number = value.item() if isinstance(value, Tensor) else value
        if not isinstance(number, int | float) or not math.isfinite(number):
            yield f"state {key!r} of {name!r} is {number!r}, not a finite number"
        elif key == "step" and (number < 0 or number != int(number)):
            yield f"state 'step' of {name!r} is {number!r}, not a number of steps"


def _describe_state(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: name_dtype(value.dtype)
        if isinstance(value, Tensor) and value.dim()
        else _describe_value(value)
        for key, value in state.items()
    }


def _describe_value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"0D {name_dtype(value.dtype)}"
    return type(value).__name__


def find_setting_problems(manifest: Manifest, optimizer: DistributedOptimizer) -> Iterator[str]:
    """Yield what keeps the optimizer from stepping with a checkpoint's param groups.

    Args:
        manifest: What the checkpoint has.
        optimizer: An optimizer of the class that it was saved with.
    """
    inner = optimizer.inner
    own = inner.defaults | {k: v for g in inner.param_groups for k, v in read_settings(g).items()}
    names = set().union(*(read_settings(group) for group in inner.param_groups))
    fixed = inner.defaults.keys() - _list_accepted(inner)
    for index, saved in enumerate(manifest.groups):
        what = f"param group {index} of the checkpoint"
        missing = names - saved.settings.keys() - KEPT_SETTINGS - _OF_SCHEDULERS
        if missing:
            yield f"{what} lacks {sorted(missing)}"
        unknown = saved.settings.keys() - own.keys() - KEPT_SETTINGS - _OF_SCHEDULERS
        if unknown:
            yield f"{what} has {sorted(unknown)}, which this run's groups have not"
        settings = {name: decode_value(value) for name, value in saved.settings.items()}
        found = bool(missing or unknown)
        for name, value in settings.items():
            for problem in _compare(name, value, own=own, fixed=fixed):
                found = True
                yield f"{what}: {problem}"
        base_lr = decode_value(saved.base_lr)
        if (base_lr is None) != (own.get("lr") is None):
            found = True
            yield f"{what}: 'base_lr' is {base_lr!r}, in this run {own.get('lr')!r}"
        for problem in _compare("base_lr", base_lr, own={"base_lr": own.get("lr")}, fixed=set()):
            found = True
            yield f"{what}: {problem}"
        if not found:
            yield from _find_refusals(inner, saved, base_lr=base_lr, what=what)


def probe_state(
    inner: Optimizer, *, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what a fresh optimizer keeps of a param, before and after its first step.

    torch creates state lazily, so that the only way to know its names, dtypes and devices is to see
    it created.

    Returns:
        State of a param of two elements; None if a class cannot be built like that.
    """
    try:
        return _step_once(inner, settings=settings)
    except Exception:  # noqa: BLE001  (a class of the user's, of which nothing is known)
        return None


def read_new_settings(saved: GroupRecord, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a param group's settings are to be, from a checkpoint's encoded group."""
    settings = {name: decode_value(value) for name, value in saved.settings.items()}
    own = read_settings(group)
    for name, value in settings.items():
        mine = own.get(name)
        if isinstance(value, Tensor) and isinstance(mine, Tensor):
            settings[name] = value.to(mine.device)
    return settings | {name: own[name] for name in KEPT_SETTINGS & own.keys()}


def _step_once(
    inner: Optimizer, *, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    device = next((p.device for group in inner.param_groups for p in group["params"]), None)
    leaf = nn.Parameter(torch.zeros(2, device=device))
    options = {**inner.defaults, **settings}
    accepted = _list_accepted(inner)
    probe = type(inner)([leaf], **{k: v for k, v in options.items() if k in accepted})
    before = dict(probe.state[leaf])
    leaf.grad = torch.zeros_like(leaf)
    probe.step()
    return before, dict(probe.state[leaf])


def _list_accepted(inner: Optimizer) -> set[str]:
    """Return the names of what the optimizer can be made with."""
    return set(inspect.signature(type(inner).__init__).parameters)


def _find_refusals(
    inner: Optimizer, saved: GroupRecord, *, base_lr: object, what: str
) -> Iterator[str]:
    """Yield why the optimizer's own class refuses settings: it knows their ranges."""
    group = inner.param_groups[0]
    settings = read_new_settings(saved, group)
    rates = {} if base_lr is None or "lr" not in settings else {"base_lr": {"lr": base_lr}}
    for name, change in {"settings": {}, **rates}.items():
        try:
            _step_once(inner, settings=settings | change)
        except Exception as error:  # noqa: BLE001  (whatever a class of the user's raises)
            if probe_state(inner, settings=read_settings(group)) is not None:
                yield f"{what}: {name_class(inner)} refuses its {name}: {error}"
                return


def _compare(name: str, value: object, *, own: Mapping[str, Any], fixed: set[str]) -> Iterator[str]:
    if name in KEPT_SETTINGS:
        if value is not None and not isinstance(value, bool):
            yield f"{name!r} is {value!r}, not true, false or null"
        return
    mine = own.get(name, 0.0 if name in _OF_SCHEDULERS else None)
    if mine is not None and _describe(value) != _describe(mine):
        yield f"{name!r} is {value!r}, in this run {mine!r}"
    elif not all(map(_is_usable, _numbers(value))) and all(map(_is_usable, _numbers(mine))):
        yield f"{name!r} is {value!r}, more than fp32 holds"
    elif name in fixed and value != mine:
        yield f"{name!r} is {value!r}, of this class always {mine!r}"


def _describe(value: object) -> Any:
    """Return of what kind a setting is; numbers are one, and lists of as many."""
    match value:
        case Tensor():
            return Tensor, value.dtype == torch.bool
        case bool() | None | str():
            return type(value)
        case int() | float():
            return float
        case list() | tuple():
            return list, [_describe(item) for item in value]
    return type(value)


def _numbers(value: object) -> Iterator[float]:
    match value:
        case Tensor() if not value.dim():
            yield float(value)
        case int() | float():
            yield value
        case list() | tuple():
            for item in value:
                yield from _numbers(item)


def _is_usable(number: float) -> bool:
    return math.isfinite(number) and abs(number) <= _NUMBER_MAX
