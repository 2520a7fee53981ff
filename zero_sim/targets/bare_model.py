"""The bare model of a rank, recorded before `build`: names, shapes and untrained params.

[Note: params behind a wrapper]
A wrapper adds components to param names, in front or in the middle: `module.up.weight` and
`up._fsdp_wrapped_module.weight` are both `up.weight` of the bare model.

[Note: params that are never trained]
Their values must not change. But a system may replace their memory, which may then contain anything
between two steps, such as a shard or the remains of a gather. So an untrained param is compared
only if `params` returns it, if it still has its first memory, or if the trained params from
`params` are the module's own tensors. In this last case, the system stores params nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import params_of

_WIDE = (torch.float32, torch.float64)
"""Dtypes that can represent every value of a model's dtypes."""


def shapes_of(scenario: Scenario) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a case's params by name, in module order.

    Use it in a target's `refuses`, which runs before any module is built: for example, to refuse
    params whose rows are not divisible by `scenario.world.size`.

    Args:
        scenario: The case. With `topology.tp`, `pp` or `ep`, each rank has only parts of them.
    """
    return dict(params_of(scenario.model))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Untrained:
    """An untrained param before the engine was built."""

    values: Tensor
    """Copy of the values, in the param's shape."""
    # This reference prevents the allocator from reusing the address for another tensor.
    place: Tensor
    """The param's own memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The bare model of a rank before the engine was built."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all params by name, including untrained params."""
    trained: frozenset[str]
    known: frozenset[str]
    """Param names on all ranks; with tp, pp or ep, a rank has some of them."""
    device: str
    """Device type of the params, such as `cpu`."""
    untrained: Mapping[str, Untrained] = field(default_factory=dict)
    """Untrained params by name."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """First name of each tied param, by its other names."""


def model_of(module: nn.Module, *, known: Iterable[str] = ()) -> Model:
    """Return this rank's model before it is wrapped; `known` are names on other ranks."""
    params = dict(module.named_parameters())
    first = {param: name for name, param in params.items()}
    names = module.named_parameters(remove_duplicate=False)
    return Model(
        shapes={name: tuple(param.shape) for name, param in params.items()},
        trained=frozenset(name for name, param in params.items() if param.requires_grad),
        known=frozenset({*params, *known}),
        device=next((param.device.type for param in params.values()), "cpu"),
        untrained=untrained_of(params),
        tied={name: first[param] for name, param in names if name not in params},
    )


def untrained_of(params: Mapping[str, nn.Parameter]) -> dict[str, Untrained]:
    """Return the untrained params of a bare model; most models have none."""
    return {
        name: Untrained(values=param.detach().clone(), place=param.detach())
        for name, param in params.items()
        if not param.requires_grad
    }


def names_like(held: Collection[str], name: str) -> list[str]:
    """Return the names in `held` that may belong to a param, or only its own name if present."""
    if name in held:
        return [name]
    # See [Note: params behind a wrapper].
    wanted = name.split(".")
    return [each for each in held if _contains(each.split("."), wanted)]


def _contains(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return True if `parts` contains `wanted` in order and ends with the same component."""
    # `in` consumes this shared iterator, so components are only found in order.
    rest = iter(parts)
    return parts[-1] == wanted[-1] and all(part in rest for part in wanted)


class UntrainedValue(NamedTuple):
    """An untrained param, with its values before and now."""

    name: str
    values: Tensor
    """Values before the engine was built, in the dtype of `now`."""
    now: Tensor | None
    """None if not observed."""


def look_at(
    known: Mapping[str, Untrained], *, reported: Mapping[str, Tensor], held: Mapping[str, Tensor]
) -> Iterator[UntrainedValue]:
    """Yield untrained params with their present values.

    Args:
        known: Their values before the engine was built.
        reported: Params that the engine returned, by their names in the bare model.
        held: Params in the engine's module, by the module's names.
    """
    # See [Note: params that are never trained].
    trained = {name: param for name, param in reported.items() if name not in known}
    in_place = bool(trained) and all(
        _lies_at(_named(held, name), param) for name, param in trained.items()
    )
    for name, before in known.items():
        now = reported.get(name)
        if now is None:
            here = _named(held, name)
            now = here if in_place or _lies_at(here, before.place) else None
        if now is not None and _is_whole(now, before.values):
            now = now.detach().reshape(before.values.shape)
            yield UntrainedValue(name, before.values.to(now.dtype), now)
        else:
            yield UntrainedValue(name, before.values, None)


def _named(held: Mapping[str, Tensor], name: str) -> Tensor | None:
    alike = names_like(held, name)
    # Ignore ambiguous names.
    return held[alike[0]] if len(alike) == 1 else None


def _lies_at(tensor: Tensor | None, place: Tensor) -> bool:
    return tensor is not None and is_plain(tensor) and tensor.data_ptr() == place.data_ptr()


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor has memory for all its elements: no DTensor, no freed storage."""
    # `detach` turns a Parameter into a Tensor, but keeps subclasses such as DTensor.
    if type(tensor.detach()) is not Tensor or tensor.layout != torch.strided:
        return False
    if tensor.device.type == "meta":
        return False
    if not tensor.numel():
        return True
    # A system may resize a param's storage to 0 bytes, so check that it covers the last element.
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = tensor.storage_offset() + reach + 1
    return last * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _is_whole(now: Tensor, values: Tensor) -> bool:
    """Return True if a tensor has all elements, unrounded and on the same device."""
    return (
        is_plain(now)
        and now.numel() == values.numel()
        and now.device == values.device
        and (now.dtype == values.dtype or now.dtype in _WIDE)
    )
