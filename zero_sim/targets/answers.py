"""Validation of an engine's return values. Errors name the engine's method.

Typical mistakes are a number in place of a record, or a param name with a wrapper's prefix. They
are neither findings about the system nor failures of the judge.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zero_sim.errors import ProtocolError
from zero_sim.targets.bare_model import Model
from zero_sim.targets.protocol import (
    CostedEngine,
    Engine,
    FullEngine,
    OwnedPart,
    Place,
    Saving,
    Settings,
    StepResult,
)


def _call_of(name: str, method: Callable[..., object]) -> tuple[str, list[None], dict[str, None]]:
    """Return a protocol method's call as text, with its positional and keyword arguments."""
    _, *params = inspect.signature(method).parameters.values()
    bare = [each.replace(annotation=each.empty, default=each.empty) for each in params]
    named = {each.name: None for each in bare if each.kind is each.KEYWORD_ONLY}
    return f"{name}{inspect.Signature(bare)}", [None] * (len(bare) - len(named)), named


# Read from the protocols, so methods added there are checked too.
_METHODS = {**vars(Engine), **vars(FullEngine), "held_bytes": CostedEngine.held_bytes}
CALLS = {
    name: _call_of(name, method)
    for name, method in _METHODS.items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""Expected calls, by method."""


def check_calls(engine: object) -> None:
    """Check that an engine's methods take the arguments that the harness passes.

    Raises:
        ProtocolError: A member is no method, a method takes other arguments, or `module` is no
            module.
    """
    # Checked once after `build`, because a wrong signature must not become a finding in step 0.
    module = getattr(engine, "module", None)
    if not isinstance(module, nn.Module):
        raise ProtocolError(
            f"expected `module` of {_type(engine)} to be a torch.nn.Module, got {shown(module)}. "
            "Assign the module that `build` got, or a wrapper around it."
        )
    for name, (words, args, named) in CALLS.items():
        method = getattr(engine, name, None)
        if method is None:
            continue
        if not callable(method):
            raise ProtocolError(
                f"expected `{name}` of {_type(engine)} to be a method, {words}, got "
                f"{shown(method)}."
            )
        # Cached by function: reading a signature takes 20 us, and a case has many engines.
        if inspect.ismethod(method) and _takes(method.__func__, name):
            continue
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            continue  # Not written in Python. A wrong call raises later.
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            raise ProtocolError(
                f"expected {_type(engine)} to have {words}, got {name}{signature}: {error}."
            ) from None


@lru_cache(maxsize=512)
def _takes(function: Callable[..., object], name: str) -> bool:
    _, args, named = CALLS[name]
    try:
        # The first None stands for `self`.
        inspect.signature(function).bind(None, *args, **named)
    except (TypeError, ValueError):
        return False
    return True


class Answers:
    """Checks of an engine's return values. Mistakes raise a ProtocolError that names the method.

    Args:
        engine: The engine. Messages contain its type.
        model: The bare model; None to check types only, without names, sizes and devices.
    """

    def __init__(self, engine: object, *, model: Model | None = None) -> None:
        self._engine, self.model = engine, model

    def step(self, answer: object) -> StepResult:
        """Return the record of a step with its norm on the model's device; empty for None."""
        if answer is None:
            return StepResult()
        if not isinstance(answer, StepResult):
            raise self._wrong("step", "zero_sim.targets.StepResult or None", answer)
        norm = answer.norm
        if norm is not None:
            if not isinstance(norm, Tensor) or norm.numel() != 1 or norm.dtype not in _NORM_DTYPES:
                wanted = "StepResult with a 0-D tensor, fp32 or fp64, for norm"
                raise self._wrong("step", wanted, norm, hint="Try torch.tensor(norm).float().")
            _check_plain(norm, engine=self._engine, method="step", what="norm")
        self._check_numbers("step", answer, ("zeros", "skipped", "loss_scale"))
        if norm is None:
            return answer
        # torch.tensor(number) is on the CPU, but the reference's norm is on the model's device.
        device = norm.device if self.model is None else self.model.device
        return replace(answer, norm=norm.reshape(()).to(device))

    def params(self, answer: object) -> dict[str, Tensor]:
        """Return trained params, reshaped to the model's shapes if their lengths fit."""
        if not isinstance(answer, Mapping):
            hint = "Try dict(model.named_parameters()) of the bare model."
            raise self._wrong("params", "a mapping of names to tensors", answer, hint=hint)
        model = self.model
        checked: dict[str, Tensor] = {}
        for name, value in answer.items():
            if not isinstance(name, str):
                raise self._wrong("params", "names of params as keys", name)
            if not isinstance(value, Tensor):
                raise self._wrong("params", f"a tensor for param {name!r}", value)
            shape = None
            if model is not None:
                self._check_name("params", name, model=model)
                shape = model.shapes.get(name)
                # Untrained params are optional; `look_at` compares them.
                if shape is not None and name not in model.trained:
                    continue
            what = f"param {name!r}"
            _check_plain(value, engine=self._engine, method="params", what=what, model=model)
            # Flat tensors of the right length are accepted. Another length becomes a finding.
            fits = shape is not None and value.numel() == math.prod(shape)
            checked[name] = _reshaped(value, shape) if fits and value.shape != shape else value
        return checked

    def sizes(self, params: Mapping[str, Tensor]) -> None:
        """Check, before the first step, that params have as many elements as the model's."""
        shapes = {} if self.model is None else self.model.shapes
        for name, value in params.items():
            elems = math.prod(shapes.get(name, value.shape))
            if value.numel() != elems:
                raise ProtocolError(
                    f"expected `params` of {_type(self._engine)} to return whole params, got param "
                    f"{name!r} with {value.numel()} elements instead of {elems} before the first "
                    "step. Gather sharded params."
                )

    def parts(self, answer: object) -> list[OwnedPart]:
        """Return owned parts, flattened."""
        if not isinstance(answer, Iterable):
            raise self._wrong("parts", "an iterable of zero_sim.targets.OwnedPart", answer)
        return [self._part(part) for part in answer]

    def _part(self, part: object) -> OwnedPart:
        if not isinstance(part, OwnedPart):
            raise self._wrong("parts", "zero_sim.targets.OwnedPart for each part", part)
        self._check_place(part.place)
        of = f"of the part of param {part.place.param!r}"
        if not isinstance(part.state, Mapping):
            wanted = f"a mapping of torch's keys to tensors as the state {of}"
            raise self._wrong("parts", wanted, part.state)
        # Keys appear in messages.
        tensors: dict[str, object] = {"master": part.master}
        tensors |= {f"state {key!r}": value for key, value in part.state.items()}
        if part.grad is not None:
            tensors["grad"] = part.grad
        for what, value in tensors.items():
            if not isinstance(value, Tensor):
                raise self._wrong("parts", f"a tensor as the {what} {of}", value)
            # torch keeps 0-D counters such as `step` on the CPU, even for params on a GPU.
            is_counter = what.startswith("state ") and not value.dim()
            _check_plain(
                value,
                engine=self._engine,
                method="parts",
                what=f"the {what} {of}",
                model=None if is_counter else self.model,
            )
        # The common case: a new record for each part in each step would cost time.
        if all(value.dim() < 2 for value in tensors.values() if isinstance(value, Tensor)):
            return part
        return OwnedPart(
            part.place,
            part.grad if part.grad is None else part.grad.reshape(-1),
            part.master.reshape(-1),
            {key: value.reshape(-1) if value.dim() else value for key, value in part.state.items()},
        )

    def _check_place(self, place: object) -> None:
        if not isinstance(place, Place):
            raise self._wrong("parts", "zero_sim.targets.Place for the place of a part", place)
        if not isinstance(place.param, str):
            raise self._wrong("parts", "the name of a param for Place.param", place.param)
        if self.model is not None:
            self._check_name("parts", place.param, model=self.model)
        ends = (place.start, place.stop)
        # `type` and not isinstance, because True is an int to Python.
        if any(type(end) is not int for end in ends) or not 0 <= place.start <= place.stop:
            wanted = "a half-open range of elements, start and stop, of the part of param "
            raise self._wrong("parts", f"{wanted}{place.param!r}", ends)

    def names(self, answer: object) -> Mapping[str, str]:
        """Return the engine's own names of params with those in the bare model; empty for None."""
        if answer is None:
            return {}
        got = shown(answer)
        if isinstance(answer, Mapping):
            others = [each for pair in answer.items() for each in pair if not isinstance(each, str)]
            if not others:
                return answer
            got = f"a {_type(answer)} with {shown(others[0])}, which is no string"
        raise ProtocolError(
            f"expected `names` of {_type(self._engine)} to be a mapping of its own names of params "
            f"to those of the bare model, got {got}. Rename the attribute if it is something else."
        )

    def settings(self, answer: object) -> Settings:
        """Return the optimizer settings."""
        if not isinstance(answer, Settings):
            raise self._wrong("settings", "zero_sim.targets.Settings", answer)
        params = answer.params
        if not isinstance(params, Mapping) or not all(
            isinstance(each, Mapping) for each in params.values()
        ):
            wanted = "Settings with a mapping from params to mappings of settings for params"
            raise self._wrong("settings", wanted, params)
        self._check_numbers("settings", answer, ("loss_scale", "good_steps"))
        return answer

    def _check_numbers(self, method: str, record: object, names: Sequence[str]) -> None:
        for name in names:
            value, (types, words) = getattr(record, name), _NUMBERS[name]
            # bool is a subclass of int, so bool fields take bools only, and other fields no bool.
            is_bool = isinstance(value, bool)
            if value is None or (isinstance(value, types) and is_bool == (types is bool)):
                continue
            raise self._wrong(method, f"{_type(record)} with {words} for {name}, or None", value)

    def notes(self, answer: object) -> list[str]:
        """Return the engine's notes."""
        # Iterating a string would yield a note for each letter.
        notes = list(answer) if isinstance(answer, Iterable) else None
        if isinstance(answer, str) or notes is None or not all(isinstance(n, str) for n in notes):
            got = answer if isinstance(answer, str) or notes is None else notes
            raise self._wrong("notes", "an iterable of text", got)
        return notes

    def bytes_by_name(self, answer: object) -> Mapping[str, Any]:
        """Return the engine's resident bytes."""
        if not isinstance(answer, Mapping):
            raise self._wrong("held_bytes", "a mapping of names to numbers", answer)
        for name, value in answer.items():
            if not isinstance(name, str):
                raise self._wrong("held_bytes", "strings as names", name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise self._wrong("held_bytes", f"a number for {name!r}", value)
        return answer

    def text(self, method: str, answer: object) -> str:
        """Return the description of a stray element; "" if there is none."""
        if not isinstance(answer, str):
            raise self._wrong(method, "text with the stray element's place, or ''", answer)
        return answer

    def saving(self, answer: object) -> Saving:
        """Return an asynchronous save."""
        if not callable(getattr(answer, "wait", None)):
            hint = "Wrap the save, for example a future, in an object of your own."
            raise self._wrong("save_async", "an object with wait()", answer, hint=hint)
        return answer  # pyrefly: ignore

    def module(self, answer: object) -> nn.Module:
        """Return the unwrapped module."""
        if not isinstance(answer, nn.Module):
            raise self._wrong("unwrap", "the torch.nn.Module that was wrapped", answer)
        return answer

    def output(self, output: object) -> Tensor:
        """Return the output of a forward, which is a single tensor in all models."""
        if not isinstance(output, Tensor):
            raise ProtocolError(
                f"expected `module` of {_type(self._engine)} to return the bare model's output, a "
                f"tensor, got {shown(output)}. Return it unchanged from the wrapper."
            )
        return output

    def _check_name(self, method: str, name: str, *, model: Model) -> None:
        if name in model.known:
            return
        # A wrapper adds a prefix, so the longest known name that ends this name is likely meant.
        own = [each for each in sorted(model.known) if name.endswith(f".{each}")]
        hint = f"Try {max(own, key=len)!r}, without the wrapper's prefix." if own else ""
        names = ", ".join(repr(each) for each in sorted(model.known)[:6])
        more = ", ..." if len(model.known) > 6 else ""
        raise ProtocolError(
            f"expected `{method}` of {_type(self._engine)} to name params of the bare model, "
            f"{names}{more}, got {name!r}. {hint}".rstrip()
        )

    def _wrong(self, method: str, wanted: str, got: object, *, hint: str = "") -> ProtocolError:
        return _wrong(self._engine, method, wanted, got, hint=hint)


_NORM_DTYPES = (torch.float32, torch.float64)
_NUMBERS: dict[str, tuple[Any, str]] = {
    "zeros": (int, "an integer"),
    "skipped": (bool, "True or False"),
    "loss_scale": ((int, float), "a number"),
    "good_steps": ((int, float), "a number"),
}
"""Field types of `StepResult` and `Settings`, and their names in messages."""


def shown(value: object) -> str:
    """Return a value's type for a message, with the value itself if it is short."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        kind = type(value).__name__
        return f"{kind} of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    # Long values and memory addresses do not help in a message.
    text = repr(value)
    is_plain = isinstance(value, str | int | float | bool | tuple | list)
    return f"{text} ({_type(value)})" if is_plain and len(text) <= 60 else f"a {_type(value)}"


def _type(value: object) -> str:
    return type(value).__name__


def _wrong(
    engine: object, method: str, wanted: str, got: object, *, hint: str = ""
) -> ProtocolError:
    text = f"expected `{method}` of {_type(engine)} to return {wanted}, got {shown(got)}."
    return ProtocolError(f"{text} {hint}".rstrip())


def _check_plain(
    value: Tensor, *, engine: object, method: str, what: str, model: Model | None = None
) -> None:
    """Check that a tensor's elements can be compared on the reference's device."""
    hint = ""
    # Recognize a DTensor by its method, so the class need not be imported.
    if hasattr(value, "full_tensor"):
        wanted = f"a plain tensor for {what}"
        hint = "Try full_tensor() for the whole tensor, or to_local() for this rank's shard."
    elif value.layout != torch.strided:
        wanted, hint = f"a dense tensor for {what}", "Try to_dense()."
    elif value.device.type == "meta" or (model and value.device.type != model.device):
        device = "the model's device" if model is None else model.device
        wanted = f"{what} on {device}"
    else:
        return
    raise _wrong(engine, method, wanted, value, hint=hint)


def _reshaped(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    # `detach` drops the gradient, which is compared with `grads_in_params`. Reading `.grad` of a
    # non-leaf tensor makes torch warn.
    grad = value.grad if value.is_leaf else None
    shaped = value.detach().reshape(shape)
    if grad is not None:
        shaped.grad = grad.reshape(shape)
    return shaped
