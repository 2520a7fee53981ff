"""A scenario's optimizer as one of `torch.optim`, for targets that step with torch's classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_sim.errors import ProtocolError
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec, ParamGroupSpec
from zero_sim.zero.variants.whole_params import Lamb, Muon

_CLASSES: dict[OptimizerName, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "muon": Muon,
    "lamb": Lamb,
}


OPTIMIZERS: tuple[OptimizerName, ...] = tuple(_CLASSES)
"""All that `class_of` knows; those of whole params for systems that hand them such."""


def class_of(spec: OptimizerSpec) -> type[Optimizer]:
    """The class of the scenario's optimizer: torch's, or where torch has none ours.

    Args:
        spec: `scenario.optimizer`.

    Raises:
        ProtocolError: It is something else, such as the scenario.
    """
    _check_spec(spec, of="class_of")
    _check_named(spec)
    return _CLASSES[spec.name]


def settings_of(spec: OptimizerSpec) -> dict[str, Any]:
    """The scenario's settings that the optimizer's class takes, under torch's names.

    Args:
        spec: `scenario.optimizer`.

    Raises:
        ProtocolError: It is something else, such as the scenario.
    """
    _check_spec(spec, of="settings_of")
    _check_named(spec)
    known = _settings_known(spec.name)
    said = {
        "lr": spec.lr,
        "betas": spec.betas,
        "eps": spec.eps,
        "weight_decay": spec.weight_decay,
        "momentum": spec.momentum,
        "nesterov": spec.nesterov,
        "amsgrad": spec.amsgrad,
        "foreach": spec.foreach,
    }
    return {name: value for name, value in said.items() if name in known}


def _check_spec(spec: object, *, of: str) -> None:
    if not isinstance(spec, OptimizerSpec):
        raise ProtocolError(
            f"expected an OptimizerSpec for {of}, got a {type(spec).__name__}. "
            f"Pass scenario.optimizer."
        )


def _check_named(spec: OptimizerSpec) -> None:
    if spec.name not in _CLASSES:
        raise ProtocolError(
            f"expected an optimizer of torch, got {spec.name!r}, which the target brings along. "
            "Build it from the fields of scenario.optimizer."
        )


@cache
def _settings_known(name: OptimizerName) -> frozenset[str]:
    """What an optimizer's class takes; every rank of every case asks, and looking takes 100 us."""
    return frozenset(inspect.signature(_CLASSES[name].__init__).parameters)


def decays_weights(spec: OptimizerSpec) -> bool:
    """Whether any param decays, by the optimizer's setting or by that of a group."""
    return bool(spec.weight_decay) or any(group.weight_decay for group in spec.groups)


def grads_to_tell(spec: OptimizerSpec, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients as they are before clipping and the update, to be told after them.

    They are copies where something is written into them: clipping does, and so does torch's
    foreach form of SGD with Nesterov's momentum, which adds the momentum where they lie
    (`torch/optim/sgd.py`, `_multi_tensor_sgd`).

    Args:
        spec: The optimizer.
        grads: What the update is about to be given, by param.
    """
    clips = spec.clip_norm is not None or spec.clip_value is not None
    if clips or (spec.foreach and spec.nesterov):
        return {name: grad.clone() for name, grad in grads.items()}
    return dict(grads)


def group_index(spec: OptimizerSpec, name: str) -> int:
    """Which param group a param belongs to; the last one is for all that no group names.

    Args:
        spec: `scenario.optimizer`.
        name: Of the param, in the bare model.

    Raises:
        ProtocolError: `spec` is something else, such as the scenario.
    """
    _check_spec(spec, of="group_index")
    matches = (i for i, group in enumerate(spec.groups) if name.endswith(group.match))
    return next(matches, len(spec.groups))


def own_settings(group: ParamGroupSpec) -> dict[str, float]:
    """What a param group sets for itself, under torch's names.

    Args:
        group: One of `scenario.optimizer.groups`.
    """
    said = {"lr": group.lr, "weight_decay": group.weight_decay}
    return {name: value for name, value in said.items() if value is not None}


def param_groups(spec: OptimizerSpec, params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Params as the groups that the scenario deals them into; groups without params are left out.

    Args:
        spec: `scenario.optimizer`.
        params: Params by name, as the scenario names them.

    Raises:
        ProtocolError: `spec` is something else, such as the scenario.
    """
    _check_spec(spec, of="param_groups")
    dealt: dict[int, list[Tensor]] = {}
    for name, param in params.items():
        dealt.setdefault(group_index(spec, name), []).append(param)
    return [
        {
            "params": members,
            **(own_settings(spec.groups[index]) if index < len(spec.groups) else {}),
        }
        for index, members in sorted(dealt.items())
    ]


class LearningRates:
    """Sets every group's learning rate to a multiple of what it started with.

    Args:
        optimizer: One of `torch.optim`, or anything with its `param_groups`.

    Raises:
        ProtocolError: It has none.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise ProtocolError(
                f"expected an optimizer with param_groups for LearningRates, got a "
                f"{type(optimizer).__name__}. Pass the optimizer that the engine steps with."
            )
        self._optimizer = optimizer
        self._base = [group["lr"] for group in optimizer.param_groups]

    def scale(self, factor: float) -> None:
        """Multiply all by `factor`, counted from the start."""
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor


def plain_optimizer(spec: OptimizerSpec, params: Mapping[str, nn.Parameter]) -> Optimizer:
    """The scenario's optimizer over whole params, in its groups and with its settings.

    Args:
        spec: `scenario.optimizer`.
        params: Params by name, as the scenario names them.

    Raises:
        ProtocolError: `spec` is something else, such as the scenario.
    """
    _check_spec(spec, of="plain_optimizer")
    cls, settings = class_of(spec), settings_of(spec)
    return cls(param_groups(spec, params), **settings)  # pyrefly: ignore


def flat_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a param's optimizer state as `OwnedPart.state` takes them.

    Args:
        state: `optimizer.state[param]`; the values are tensors of any shape, or no tensors.

    Returns:
        1D views by torch's keys; 0D counters as they are; what is no tensor is omitted.
    """
    return {
        key: value.detach().reshape(-1) if value.dim() else value
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
