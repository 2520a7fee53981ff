"""Fit of a checkpoint and a run, checked from the manifest without reading a tensor.

Params, spans and optimizer state come first, then param-group settings.
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
"""Settings that select an implementation, not a result. A run keeps its own on load."""

_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Settings that torch's schedulers add to param groups, before or after a load."""

_NUMBER_MAX: Final = torch.finfo(torch.float32).max
"""Masters are fp32, so no step can use a larger number."""


def find_param_problems(
    manifest: Manifest, ddp: DistributedDataParallel, *, params: Sequence[ParamRecord]
) -> list[str]:
    """Return all differences between a checkpoint's tensors and a run's.

    `params` are the run's trained params on all ranks. `ddp` has the frozen params and buffers.
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
    """Return the elements that files with these spans do not contain exactly once."""
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
    """Return differences in optimizer class, groups, state and loss scaler."""
    inner = optimizer.inner
    problems: list[str] = []
    has, wants = manifest.loss_scaler is not None, read_scaler(optimizer) is not None
    if has != wants:
        words = {True: "a loss scaler", False: "no loss scaler"}
        problems.append(f"the checkpoint has {words[has]}, this run has {words[wants]}")
    # By name, because the checkpoint has no other identity of a class.
    if manifest.optimizer != name_class(inner):
        problems.append(
            f"the checkpoint is of {manifest.optimizer}, this run steps with {name_class(inner)}"
        )
        # Settings and state belong to the other class, so comparing them would only add noise.
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
    """Return names in order of their first occurrence in `like`."""
    wanted = set(names)
    return [name for name in dict.fromkeys(like) if name in wanted]


def _find_state_problems(manifest: Manifest, inner: Optimizer) -> Iterator[str]:
    probes: dict[int, tuple[dict[str, Any], dict[str, Any]] | None] = {}
    for param in manifest.params:
        if param.group is None:
            continue
        # One probe per group, because state can depend on settings such as amsgrad.
        if param.group not in probes:
            saved = manifest.groups[param.group]
            settings = read_new_settings(saved, inner.param_groups[0])
            probes[param.group] = probe_state(inner, settings=settings)
        values = {e.key: decode_value(e.value) for e in param.state if e.dtype is None}
        # Users' classes may keep any values.
        if type(inner) in ELEMENTWISE or isinstance(inner, Attached):
            yield from _find_count_problems(param.name, values)
        probe = probes[param.group]
        if probe is None:
            continue
        # A param that was never stepped has the constructor's state, which may be empty.
        expected = [_describe_state(state) for state in probe]
        got = {
            entry.key: entry.dtype or _describe_value(values[entry.key]) for entry in param.state
        }
        if got not in expected:
            yield (
                f"state of {param.name!r} is {got}, but {name_class(inner)} keeps {expected[-1]}"
            )


def _find_count_problems(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield state values that torch's own optimizers cannot have, because they count steps."""
    # They derive factors such as bias corrections from the count, so it must be a whole number.
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
    """Yield reasons why an optimizer of the saved class cannot step with the saved param groups."""
    inner = optimizer.inner
    own = inner.defaults | {k: v for g in inner.param_groups for k, v in read_settings(g).items()}
    names = set().union(*(read_settings(group) for group in inner.param_groups))
    # The class fixes defaults that its constructor does not accept, such as AdamW's
    # decoupled_weight_decay.
    fixed = inner.defaults.keys() - _list_accepted(inner)
    for index, saved in enumerate(manifest.groups):
        what = f"param group {index} of the checkpoint"
        missing = names - saved.settings.keys() - KEPT_SETTINGS - _OF_SCHEDULERS
        if missing:
            yield f"{what} lacks {sorted(missing)}"
        unknown = saved.settings.keys() - own.keys() - KEPT_SETTINGS - _OF_SCHEDULERS
        if unknown:
            yield f"{what} has {sorted(unknown)}, unknown to this run's groups"
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
        # Only if names and kinds are right, or the class would repeat the same problems.
        if not found:
            yield from _find_refusals(inner, saved, base_lr=base_lr, what=what)


def probe_state(
    inner: Optimizer, *, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return a new optimizer's state for a param, before and after its first step.

    Returns:
        State for a param of two elements; None if the class cannot be constructed this way.
    """
    # torch creates state lazily, so only a step shows its names, dtypes and devices.
    try:
        return _step_once(inner, settings=settings)
    except Exception:  # noqa: BLE001  (unknown user class, anything may be raised)
        return None


def read_new_settings(saved: GroupRecord, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group's new settings, decoded from the checkpoint's group."""
    settings = {name: decode_value(value) for name, value in saved.settings.items()}
    own = read_settings(group)
    for name, value in settings.items():
        mine = own.get(name)
        # Tensor settings, such as a capturable lr, stay on the run's device.
        if isinstance(value, Tensor) and isinstance(mine, Tensor):
            settings[name] = value.to(mine.device)
    return settings | {name: own[name] for name in KEPT_SETTINGS & own.keys()}


def _step_once(
    inner: Optimizer, *, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    # On the masters' device, because torch creates some state there and some on the CPU.
    device = next((p.device for group in inner.param_groups for p in group["params"]), None)
    leaf = nn.Parameter(torch.zeros(2, device=device))
    options = {**inner.defaults, **settings}
    accepted = _list_accepted(inner)
    probe = type(inner)([leaf], **{k: v for k, v in options.items() if k in accepted})
    before = dict(probe.state[leaf])
    # Any gradient creates the state, so zeros are enough.
    leaf.grad = torch.zeros_like(leaf)
    probe.step()
    return before, dict(probe.state[leaf])


def _list_accepted(inner: Optimizer) -> set[str]:
    """Return the argument names of the optimizer's constructor."""
    return set(inspect.signature(type(inner).__init__).parameters)


def _find_refusals(
    inner: Optimizer, saved: GroupRecord, *, base_lr: object, what: str
) -> Iterator[str]:
    """Yield the errors of the optimizer's class about settings, because it knows their ranges."""
    group = inner.param_groups[0]
    settings = read_new_settings(saved, group)
    # With a factor applied, base_lr becomes a group's `lr`, so it must be valid there too.
    rates = {} if base_lr is None or "lr" not in settings else {"base_lr": {"lr": base_lr}}
    for name, change in {"settings": {}, **rates}.items():
        try:
            _step_once(inner, settings=settings | change)
        except Exception as error:  # noqa: BLE001  (any error of a user's class)
            # If even the run's own settings fail, the class cannot be probed and proves nothing.
            if probe_state(inner, settings=read_settings(group)) is not None:
                yield f"{what}: {name_class(inner)} refuses its {name}: {error}"
                return


def _compare(name: str, value: object, *, own: Mapping[str, Any], fixed: set[str]) -> Iterator[str]:
    if name in KEPT_SETTINGS:
        if value is not None and not isinstance(value, bool):
            yield f"{name!r} is {value!r}, not true, false or null"
        return
    # This run may lack scheduler settings, so compare their kind with a number's.
    mine = own.get(name, 0.0 if name in _OF_SCHEDULERS else None)
    if mine is not None and _describe(value) != _describe(mine):
        yield f"{name!r} is {value!r}, in this run {mine!r}"
    elif not all(map(_is_usable, _numbers(value))) and all(map(_is_usable, _numbers(mine))):
        yield f"{name!r} is {value!r}, too large for fp32"
    elif name in fixed and value != mine:
        yield f"{name!r} is {value!r}, but this class always has {mine!r}"


def _describe(value: object) -> Any:
    """Return a setting's kind. All numbers are one kind; lists differ by length."""
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
