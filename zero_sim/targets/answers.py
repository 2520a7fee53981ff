"""Answers of an engine, held to the protocol: a mistake in one is reported where it is made.

Whoever wraps a system makes mistakes of another kind than the system does: a number in place of a
record, a name with the wrapper's prefix. They are no findings, and no failures of the judge that
would stumble over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zero_sim.errors import ProtocolError
from zero_sim.targets.bare_model import Model
from zero_sim.targets.protocol import OwnedPart, Place, Saving, Settings, StepResult

_CALLS: dict[str, tuple[str, tuple[object, ...], dict[str, object]]] = {
    "zero_grad": ("zero_grad()", (), {}),
    "start_micro_batch": ("start_micro_batch(*, last)", (), {"last": True}),
    "join_micro_batch": ("join_micro_batch(*, last)", (), {"last": True}),
    "backward": (
        "backward(loss, *, last_micro, rows)",
        (None,),
        {"last_micro": True, "rows": 1},
    ),
    "step": ("step(*, lr_factor)", (), {"lr_factor": 1.0}),
    "settle": ("settle()", (), {}),
    "params": ("params()", (), {}),
    "parts": ("parts()", (), {}),
    "settings": ("settings()", (), {}),
    "stray_gradients": ("stray_gradients(*, padding_only)", (), {"padding_only": True}),
    "stray_padding": ("stray_padding()", (), {}),
    "notes": ("notes()", (), {}),
    "unwrap": ("unwrap()", (), {}),
    "save": ("save(path, *, form)", (None,), {"form": "sharded"}),
    "save_async": ("save_async(path, *, form)", (None,), {"form": "sharded"}),
    "load": ("load(path, *, weights_only)", (None,), {"weights_only": False}),
    "held_bytes": ("held_bytes()", (), {}),
}
"""How each method of an engine is called: in words, and by which arguments."""


def check_calls(engine: object) -> None:
    """Check that the methods that an engine has can be called as the harness does.

    Raises:
        ProtocolError: One is no method, or takes other arguments; or `module` is no module.
    """
    module = getattr(engine, "module", None)
    if not isinstance(module, nn.Module):
        raise ProtocolError(
            f"expected `module` of {_type(engine)} to be a torch.nn.Module, got {shown(module)}. "
            "Try the module that was wrapped, or what is wrapped around it."
        )
    for name, (words, args, named) in _CALLS.items():
        method = getattr(engine, name, None)
        if method is None:
            continue
        if not callable(method):
            raise ProtocolError(
                f"expected `{name}` of {_type(engine)} to be a method, {words}, got "
                f"{shown(method)}."
            )
        # Each engine of a class has the same functions, and a signature takes 20 us to read.
        if inspect.ismethod(method) and _takes(method.__func__, name):
            continue
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            continue  # Not written in Python: what it takes shows when it is called.
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            raise ProtocolError(
                f"expected {_type(engine)} to have {words}, got {name}{signature}: {error}."
            ) from None


@lru_cache(maxsize=512)
def _takes(function: Callable[..., object], name: str) -> bool:
    """Whether a function can be called as a method of an engine by that name is."""
    _, args, named = _CALLS[name]
    try:
        inspect.signature(function).bind(None, *args, **named)
    except (TypeError, ValueError):
        return False
    return True


def check_step(answer: object, *, engine: object, model: Model | None = None) -> StepResult:
    """Return what an engine says of a step; an empty record for None.

    A norm made of a number is on the CPU; it is given where the model is.

    Raises:
        ProtocolError: It is neither, or a field of it is of another type.
    """
    if answer is None:
        return StepResult()
    if not isinstance(answer, StepResult):
        raise _wrong(engine, "step", "zero_sim.targets.StepResult or None", answer)
    norm = answer.norm
    if norm is not None:
        if not isinstance(norm, Tensor) or norm.numel() != 1 or norm.dtype != torch.float32:
            wanted = "StepResult with a 0-D fp32 tensor for norm"
            raise _wrong(engine, "step", wanted, norm, hint="Try torch.tensor(norm).float().")
        _check_plain(norm, engine=engine, method="step", what="norm")
    for name, types, words in (
        ("zeros", int, "an integer"),
        ("skipped", bool, "True or False"),
        ("loss_scale", (int, float), "a number"),
    ):
        value = getattr(answer, name)
        is_bool = isinstance(value, bool)
        if value is not None and (not isinstance(value, types) or (is_bool and types is not bool)):
            raise _wrong(engine, "step", f"StepResult with {words} for {name}, or None", value)
    if norm is None:
        return answer
    placed = norm.reshape(()).to(norm.device if model is None else model.device)
    return replace(answer, norm=placed)


def check_params(answer: object, *, engine: object, model: Model | None) -> dict[str, Tensor]:
    """Return the params that an engine tells, in the shapes of the model as far as they fit.

    Args:
        answer: What came.
        engine: The engine that answered, for messages.
        model: The bare model; where left out, names and devices are not looked at.

    Raises:
        ProtocolError: It is no mapping of names of the model to plain tensors.
    """
    if not isinstance(answer, Mapping):
        hint = "Try dict(model.named_parameters()) of the bare model."
        raise _wrong(engine, "params", "a mapping of names to tensors", answer, hint=hint)
    reported: dict[str, Tensor] = {}
    for name, value in answer.items():
        if not isinstance(name, str):
            raise _wrong(engine, "params", "names of params as keys", name)
        if not isinstance(value, Tensor):
            raise _wrong(engine, "params", f"a tensor for param {name!r}", value)
        if model is not None:
            _check_name(name, engine=engine, method="params", model=model)
            if name in model.shapes and name not in model.trained:
                continue  # Nobody has to tell it; `told_untrained` has it of who does.
        _check_plain(value, engine=engine, method="params", what=f"param {name!r}", model=model)
        shape = None if model is None else model.shapes.get(name)
        if (
            shape is not None
            and value.shape != shape
            and value.numel() == torch.Size(shape).numel()
        ):
            value = _reshaped(value, shape)
        reported[name] = value
    return reported


def told_untrained(answer: Mapping[object, object], *, model: Model) -> dict[str, Tensor]:
    """Of the params that an engine tells those that are never trained, in whatever form.

    Args:
        answer: What `params` gave, by names of the bare model.
        model: The bare model.
    """
    told = {name: answer.get(name) for name in model.untrained}
    return {name: value for name, value in told.items() if isinstance(value, Tensor)}


def check_sizes(params: Mapping[str, Tensor], *, engine: object, model: Model) -> None:
    """Check that params have the sizes of the model's, before anything is trained.

    Raises:
        ProtocolError: One has another number of elements.
    """
    for name, value in params.items():
        shape = model.shapes.get(name)
        if shape is not None and value.numel() != torch.Size(shape).numel():
            raise ProtocolError(
                f"expected `params` of {_type(engine)} to give whole params, got param {name!r} "
                f"with {value.numel()} elements in place of {torch.Size(shape).numel()} before the "
                "first step. Try gathering what is sharded."
            )


def check_parts(answer: object, *, engine: object, model: Model | None) -> list[OwnedPart]:
    """Return the parts that an engine tells, flattened.

    Args:
        answer: What came.
        engine: The engine that answered, for messages.
        model: As for `check_params`.

    Raises:
        ProtocolError: They are no parts of params of the model.
    """
    if not isinstance(answer, Iterable):
        raise _wrong(engine, "parts", "an iterable of zero_sim.targets.OwnedPart", answer)
    return [_check_part(part, engine=engine, model=model) for part in answer]


def _check_part(part: object, *, engine: object, model: Model | None) -> OwnedPart:
    if not isinstance(part, OwnedPart):
        raise _wrong(engine, "parts", "zero_sim.targets.OwnedPart for each part", part)
    place = part.place
    if not isinstance(place, Place):
        raise _wrong(engine, "parts", "zero_sim.targets.Place for the place of a part", place)
    if not isinstance(place.param, str):
        raise _wrong(engine, "parts", "the name of a param for Place.param", place.param)
    if model is not None:
        _check_name(place.param, engine=engine, method="parts", model=model)
    of = f"of the part of param {place.param!r}"
    ends = (place.start, place.stop)
    if any(type(end) is not int for end in ends) or not 0 <= place.start <= place.stop:
        wanted = f"a half-open range of elements, start and stop, {of}"
        raise _wrong(engine, "parts", wanted, ends)
    if not isinstance(part.state, Mapping):
        wanted = f"a mapping of torch's keys to tensors as the state {of}"
        raise _wrong(engine, "parts", wanted, part.state)
    tensors: dict[str, object] = {"master": part.master}
    tensors |= {f"state {key!r}": value for key, value in part.state.items()}
    # Step counts and the like are where torch, or a system, puts them, mostly on the CPU.
    anywhere = {
        f"state {key!r}"
        for key, value in part.state.items()
        if isinstance(value, Tensor) and not value.dim()
    }
    if part.grad is not None:
        tensors["grad"] = part.grad
    for what, value in tensors.items():
        if not isinstance(value, Tensor):
            raise _wrong(engine, "parts", f"a tensor as the {what} {of}", value)
        beside = None if what in anywhere else model
        _check_plain(value, engine=engine, method="parts", what=f"the {what} {of}", model=beside)
    if all(value.dim() < 2 for value in tensors.values() if isinstance(value, Tensor)):
        return part
    return OwnedPart(
        place,
        part.grad if part.grad is None else part.grad.reshape(-1),
        part.master.reshape(-1),
        {key: value.reshape(-1) if value.dim() else value for key, value in part.state.items()},
    )


def check_names(answer: object, *, engine: object) -> Mapping[str, str]:
    """Return an engine's own names of params with those in the bare model; empty where it has none.

    Raises:
        ProtocolError: It is no mapping of names to names.
    """
    if answer is None:
        return {}
    got = shown(answer)
    if isinstance(answer, Mapping):
        others = [each for pair in answer.items() for each in pair if not isinstance(each, str)]
        if not others:
            return answer
        got = f"a {_type(answer)} with {shown(others[0])}, which is no string"
    raise ProtocolError(
        f"expected `names` of {_type(engine)} to be a mapping of its own names of params to those "
        f"of the bare model, got {got}. Rename the attribute if it is something else."
    )


def check_saving(answer: object, *, engine: object) -> Saving:
    """Return the save under way that an engine gives.

    Raises:
        ProtocolError: It cannot be waited for.
    """
    if not callable(getattr(answer, "wait", None)):
        hint = "Try an object of your own around what is under way, such as a future."
        raise _wrong(engine, "save_async", "an object with wait()", answer, hint=hint)
    return answer  # pyrefly: ignore


def check_settings(answer: object, *, engine: object) -> Settings:
    """Return what an engine says that it steps with.

    Raises:
        ProtocolError: It is no `Settings`, or a field of it is of another type.
    """
    if not isinstance(answer, Settings):
        raise _wrong(engine, "settings", "zero_sim.targets.Settings", answer)
    reported = answer.params
    if not isinstance(reported, Mapping) or not all(
        isinstance(v, Mapping) for v in reported.values()
    ):
        wanted = "Settings with a mapping from params to mappings of settings for params"
        raise _wrong(engine, "settings", wanted, reported)
    for name in ("loss_scale", "good_steps"):
        value = getattr(answer, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            wanted = f"Settings with a number for {name}, or None"
            raise _wrong(engine, "settings", wanted, value)
    return answer


def check_text(answer: object, *, engine: object, method: str) -> str:
    """Return where an engine says that something is stray.

    Raises:
        ProtocolError: It is no text.
    """
    if not isinstance(answer, str):
        wanted = "text that says where, '' for nowhere"
        raise _wrong(engine, method, wanted, answer)
    return answer


def check_notes(answer: object, *, engine: object) -> list[str]:
    """Return what an engine notes.

    Raises:
        ProtocolError: It is no iterable of text.
    """
    notes = None if isinstance(answer, str) or not isinstance(answer, Iterable) else list(answer)
    if notes is None or not all(isinstance(note, str) for note in notes):
        raise _wrong(engine, "notes", "an iterable of text", answer if notes is None else notes)
    return notes


def check_numbers(answer: object, *, engine: object, method: str) -> Mapping[str, Any]:
    """Return numbers by name.

    Raises:
        ProtocolError: It is no mapping of names to numbers.
    """
    if not isinstance(answer, Mapping):
        raise _wrong(engine, method, "a mapping of names to numbers", answer)
    for name, value in answer.items():
        if not isinstance(name, str):
            raise _wrong(engine, method, "strings as names", name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _wrong(engine, method, f"a number for {name!r}", value)
    return answer


def check_module(answer: object, *, engine: object) -> nn.Module:
    """Return the module that an engine gives back.

    Raises:
        ProtocolError: It is no module.
    """
    if not isinstance(answer, nn.Module):
        raise _wrong(engine, "unwrap", "the torch.nn.Module that was wrapped", answer)
    return answer


def check_output(output: object, *, engine: object) -> None:
    """Check what the forward of an engine's module gives.

    Raises:
        ProtocolError: It is no tensor, which every model of a scenario gives.
    """
    if not isinstance(output, Tensor):
        raise ProtocolError(
            f"expected `module` of {_type(engine)} to give in forward the tensor that the bare "
            f"model gives, got {shown(output)}. Try a wrapper that hands it on."
        )


def shown(value: object) -> str:
    """A value as a message shows it: its type, and itself where that is short."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        kind = type(value).__name__
        return f"{kind} of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    text = repr(value)
    is_plain = isinstance(value, str | int | float | bool | tuple | list)
    return f"{text} ({_type(value)})" if is_plain and len(text) <= 60 else f"a {_type(value)}"


def _type(value: object) -> str:
    return type(value).__name__


def _wrong(
    engine: object, method: str, wanted: str, got: object, *, hint: str = ""
) -> ProtocolError:
    said = f"expected `{method}` of {_type(engine)} to give {wanted}, got {shown(got)}."
    return ProtocolError(f"{said} {hint}".rstrip())


def _check_name(name: str, *, engine: object, method: str, model: Model) -> None:
    if name in model.known:
        return
    own = [each for each in sorted(model.known) if name.endswith(f".{each}")]
    hint = f"Try {max(own, key=len)!r}, without the wrapper's prefix." if own else ""
    names = ", ".join(repr(each) for each in sorted(model.known)[:6])
    more = ", ..." if len(model.known) > 6 else ""
    raise ProtocolError(
        f"expected `{method}` of {_type(engine)} to name params of the bare model, {names}{more}, "
        f"got {name!r}. {hint}".rstrip()
    )


def _check_plain(
    value: Tensor, *, engine: object, method: str, what: str, model: Model | None = None
) -> None:
    """Check that elements of a tensor can be looked at where the reference has them."""
    hint = ""
    if hasattr(value, "full_tensor"):
        wanted = f"a plain tensor for {what}"
        hint = "Try full_tensor() for all of it, or to_local() for what this rank has."
    elif value.layout != torch.strided:
        wanted, hint = f"a dense tensor for {what}", "Try to_dense()."
    elif value.device.type == "meta" or (model and value.device.type != model.device):
        device = "the model's device" if model is None else model.device
        wanted = f"{what} on {device}"
    else:
        return
    raise _wrong(engine, method, wanted, value, hint=hint)


def _reshaped(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    grad = value.grad if value.is_leaf else None
    shaped = value.detach().reshape(shape)
    if grad is not None:
        shaped.grad = grad.reshape(shape)
    return shaped
