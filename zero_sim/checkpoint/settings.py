"""Settings of param groups: what a run takes of a checkpoint's, and which it cannot take."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_sim.checkpoint.manifest import GroupRecord, Manifest
from zero_sim.checkpoint.snapshot import name_class, read_settings
from zero_sim.checkpoint.values import decode_value
from zero_sim.zero.optimizer import DistributedOptimizer

KEPT_SETTINGS: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How a step is computed rather than what: a run keeps its own, whatever the checkpoint has."""

_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""What torch's schedulers leave in param groups; one may be made before the load or after it."""

_NUMBER_MAX: Final = torch.finfo(torch.float32).max
"""Masters are fp32: no step can use a greater one."""


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
