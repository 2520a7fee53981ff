"""Optimizers from `torch.optim` with a scenario's settings."""

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

# Muon and LAMB read whole params, so use our variants, which gather them from shards.
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
"""Names that `class_of` accepts. `muon` and `lamb` need whole params."""


def class_of(spec: OptimizerSpec) -> type[Optimizer]:
    """Return the class of the scenario's optimizer, from torch or zero_sim.

    Args:
        spec: `scenario.optimizer`.

    Raises:
        ProtocolError: `spec` is no OptimizerSpec, or its optimizer is `own`.

    Example:
        >>> class_of(OptimizerSpec(name="sgd")).__name__
        'SGD'
    """
    _check_spec(spec, of="class_of")
    _check_named(spec)
    return _CLASSES[spec.name]


def settings_of(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the scenario's settings for the optimizer's class, under torch's names.

    Args:
        spec: `scenario.optimizer`.

    Raises:
        ProtocolError: `spec` is no OptimizerSpec, or its optimizer is `own`.

    Example:
        >>> settings_of(OptimizerSpec(name="adamw", lr=0.1))["lr"]
        0.1
    """
    _check_spec(spec, of="settings_of")
    _check_named(spec)
    known = _settings_known(spec.name)
    # Each class takes some of these settings: SGD, for example, has no betas.
    values = {
        "lr": spec.lr,
        "betas": spec.betas,
        "eps": spec.eps,
        "weight_decay": spec.weight_decay,
        "momentum": spec.momentum,
        "nesterov": spec.nesterov,
        "amsgrad": spec.amsgrad,
        "foreach": spec.foreach,
    }
    return {name: value for name, value in values.items() if name in known}


def _check_spec(spec: object, *, of: str) -> None:
    if not isinstance(spec, OptimizerSpec):
        raise ProtocolError(
            f"expected an OptimizerSpec for {of}, got a {type(spec).__name__}. "
            f"Pass scenario.optimizer."
        )


def _check_named(spec: OptimizerSpec) -> None:
    if spec.name not in _CLASSES:
        raise ProtocolError(
            f"expected an optimizer of torch, got {spec.name!r}, which is the target's own. "
            "Build it from the fields of scenario.optimizer."
        )


@cache
def _settings_known(name: OptimizerName) -> frozenset[str]:
    # Cached, because every rank in every case needs them, and reading a signature takes 100 us.
    return frozenset(inspect.signature(_CLASSES[name].__init__).parameters)


def decays_weights(spec: OptimizerSpec) -> bool:
    """Return True if the optimizer or any param group has weight decay."""
    return bool(spec.weight_decay) or any(group.weight_decay for group in spec.groups)


def reduced_grads(spec: OptimizerSpec, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients to report, copied if clipping or the update changes them."""
    # Clipping writes to gradients, and so does torch's foreach SGD with Nesterov momentum, which
    # adds the momentum in place (torch/optim/sgd.py, `_multi_tensor_sgd`).
    clips = spec.clip_norm is not None or spec.clip_value is not None
    if clips or (spec.foreach and spec.nesterov):
        return {name: grad.clone() for name, grad in grads.items()}
    return dict(grads)


def group_index(spec: OptimizerSpec, name: str) -> int:
    """Return the index of a param's group; `len(spec.groups)` if no group matches the param.

    Args:
        spec: `scenario.optimizer`.
        name: The param's name in the bare model.

    Raises:
        ProtocolError: `spec` is no OptimizerSpec.
    """
    _check_spec(spec, of="group_index")
    # The first match counts.
    matches = (i for i, group in enumerate(spec.groups) if name.endswith(group.match))
    return next(matches, len(spec.groups))


def own_settings(group: ParamGroupSpec) -> dict[str, float]:
    """Return a param group's own settings, under torch's names.

    Args:
        group: An entry of `scenario.optimizer.groups`.
    """
    # None stands for the optimizer's setting.
    values = {"lr": group.lr, "weight_decay": group.weight_decay}
    return {name: value for name, value in values.items() if value is not None}


def param_groups(spec: OptimizerSpec, params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return param groups for a torch optimizer, as the scenario defines them.

    Groups without params are omitted.

    Args:
        spec: `scenario.optimizer`.
        params: Params by their names in the bare model.

    Raises:
        ProtocolError: `spec` is no OptimizerSpec.
    """
    _check_spec(spec, of="param_groups")
    # Groups have the scenario's order, and params within a group have the model's order.
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
    """A schedule that multiplies each group's initial learning rate.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.5)
        >>> LearningRates(sgd).scale(0.5)
        >>> sgd.param_groups[0]["lr"]
        0.25

    Args:
        optimizer: A torch optimizer, or any object with `param_groups`.

    Raises:
        ProtocolError: The object has no `param_groups`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Check the attribute, not the type, because optimizer wrappers are no subclasses.
        if not hasattr(optimizer, "param_groups"):
            raise ProtocolError(
                f"expected an optimizer with param_groups for LearningRates, got a "
                f"{type(optimizer).__name__}. Pass the optimizer that the engine steps with, or "
                "write the engine without a ready class, as at the start of docs/targets.md."
            )
        self._optimizer = optimizer
        # By group, because groups may have their own learning rates.
        self._base = [group["lr"] for group in optimizer.param_groups]

    def scale(self, factor: float) -> None:
        """Set each learning rate to `factor` times its initial value."""
        # Start from the initial value, because a present value of 0 could not grow again.
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor


def plain_optimizer(spec: OptimizerSpec, params: Mapping[str, nn.Parameter]) -> Optimizer:
    """Build the scenario's optimizer over whole params.

    Args:
        spec: `scenario.optimizer`.
        params: Params by their names in the bare model.

    Raises:
        ProtocolError: `spec` is no OptimizerSpec.
    """
    _check_spec(spec, of="plain_optimizer")
    cls, settings = class_of(spec), settings_of(spec)
    return cls(param_groups(spec, params), **settings)  # pyrefly: ignore


def flat_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a param's optimizer state in the form of `OwnedPart.state`.

    Args:
        state: `optimizer.state[param]`, with tensors of any shape and other values.

    Returns:
        1D views by torch's keys, and 0D counters unchanged. Other values are omitted.

    Example:
        >>> flat_state({"exp_avg": torch.zeros(2, 3), "name": "up"})["exp_avg"].shape
        torch.Size([6])
    """
    return {
        # A 0D tensor belongs to the whole param, so report it for every fragment.
        key: value.detach().reshape(-1) if value.dim() else value
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
