"""Hooks and patches through which torch calls the running thread's capture.

Where torch has global module and optimizer hooks, these are used. Functions that start a backward,
or write and read checkpoints, are replaced during an observed run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict
from torch.nn import Module
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.data import DataLoader

from zero_sim.against import dropout
from zero_sim.against.capture import current
from zero_sim.sim.callsite import call_site


@contextlib.contextmanager
def hooks_installed(*, observes_all: bool = True) -> Iterator[None]:
    """Install hooks to call the running thread's capture.

    Args:
        observes_all: False to observe only forwards and optimizer steps. Then no function is
            replaced that a script may compile or compare.
    """

    def before_forward(module: Module, args: Any, kwargs: Any) -> Any:
        return current.capture and current.capture.begin_forward(module, args, kwargs)

    def after_forward(module: Module, *_: Any) -> None:
        # A compiler also traces this hook, and must find no state here.
        if not torch.compiler.is_compiling() and current.capture is not None:
            current.capture.end_forward(module)

    def before_step(optimizer: Any, *_: Any) -> None:
        if current.capture is not None:
            current.capture.begin_step(optimizer)

    def after_step(optimizer: Any, *_: Any) -> None:
        if current.capture is not None:
            current.capture.end_step(optimizer)

    iterate = DataLoader.__iter__

    def iterated(self: Any) -> Any:
        if current.capture is not None:
            current.capture.begin_pass()
        return iterate(self)

    with contextlib.ExitStack() as stack:
        # A pass over the data is an epoch, in which each row is due once.
        stack.enter_context(mock.patch.object(DataLoader, "__iter__", iterated))
        for handle in (
            # Also after a failed forward, so that the count of open forwards stays right.
            module_hooks.register_module_forward_hook(after_forward, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(before_step),
            optimizer_hooks.register_optimizer_step_post_hook(after_step),
        ):
            stack.callback(handle.remove)
        # After the forward hook, so that each begun forward also ends.
        stack.enter_context(mock.patch.object(Module, "_call_impl", _call(before_forward)))
        for place, name, value in _patches() if observes_all else ():
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def _call(before_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module call that can replace all arguments.

    torch's global hooks before forward only receive positional arguments.
    """
    original = Module._call_impl

    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or current.capture is None:
            return original(self, *args, **kwargs)
        replaced = before_forward(self, args, kwargs)
        if replaced is not None:
            args, kwargs = replaced
        return original(self, *args, **kwargs)

    return call


def _patches() -> Iterator[tuple[Any, str, Any]]:
    backward, save, load = torch.autograd.backward, torch.save, torch.load

    def backward_observed(*args: Any, **kwargs: Any) -> None:
        if current.capture is None:
            return backward(*args, **kwargs)
        with current.capture.in_backward():
            return backward(*args, **kwargs)

    def saved(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if current.capture is not None and _is_of_script():
            current.capture.observe_file("saved", obj, call_site())
        return save(obj, *args, **kwargs)

    def loaded(*args: Any, **kwargs: Any) -> Any:
        content = load(*args, **kwargs)
        if current.capture is not None and _is_of_script():
            current.capture.observe_file("loaded", content, call_site())
        return content

    def saved_by_parts(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if current.capture is not None:
            current.capture.observe_file("saved", state_dict, call_site())
        return save_parts(state_dict, *args, **kwargs)

    def loaded_by_parts(state_dict: Any, *args: Any, **kwargs: Any) -> None:
        load_parts(state_dict, *args, **kwargs)
        if current.capture is not None:
            current.capture.observe_file("loaded", state_dict, call_site())

    save_parts, load_parts = checkpoint.save, checkpoint.load
    yield checkpoint, "save", saved_by_parts
    yield checkpoint, "load", loaded_by_parts
    functional = torch.nn.functional
    yield from dropout.patches(lambda: current.capture.design if current.capture else None)
    for name in _LOSSES:
        yield functional, name, _loss(name, getattr(functional, name))
    # torch creates optimizer state by a step with zero gradients. It is not the script's step.
    yield state_dict, "_init_optim_state", _unobserved(state_dict._init_optim_state)
    yield torch.autograd, "backward", backward_observed
    yield torch, "save", saved
    yield torch, "load", loaded


# torch functions whose second argument contains the targets of rows.
_LOSSES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss",
    "kl_div", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss",
)  # fmt: skip


def _loss(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if current.capture is not None:
            target = current.capture.read_target(name, target)
        return original(input, target, *args, **kwargs)

    return loss


def _unobserved(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # Observation is off within the call.
        capture, current.capture = current.capture, None
        try:
            return original(*args, **kwargs)
        finally:
            current.capture = capture

    return call


def _is_of_script() -> bool:
    """Return True if the caller is outside torch. torch's checkpoints save parts in any order."""
    # Frame 0 is this function, 1 the patch, 2 its caller.
    name = sys._getframe(2).f_globals.get("__name__", "")
    return not name.startswith("torch.")
