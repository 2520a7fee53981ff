"""Compatibility of a checkpoint with a run, as far as it shows without reading a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_sim.checkpoint.manifest import (
    MASTER,
    Manifest,
    ModuleRecord,
    ParamRecord,
    name_state,
)
from zero_sim.checkpoint.pieces import find_cover_problems
from zero_sim.checkpoint.settings import (
    find_setting_problems,
    probe_state,
    read_new_settings,
)
from zero_sim.checkpoint.snapshot import (
    iterate_module_tensors,
    name_class,
    read_scaler,
)
from zero_sim.checkpoint.values import decode_value, name_dtype
from zero_sim.layout import Span
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.refusals import ELEMENTWISE, Attached


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
    problems = list(_compare(saved, here, kind="trained param"))
    module = [record for record, _ in iterate_module_tensors(ddp)]
    for kind in ("frozen", "buffer"):
        records = [record for record in module if record.kind == kind]
        problems += _compare(
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


def _compare(
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
        expected = [_describe(state) for state in probe]
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


def _describe(state: Mapping[str, Any]) -> dict[str, str]:
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
