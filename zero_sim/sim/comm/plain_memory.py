"""Tensors as plain memory, without autograd and wrappers, as a backend sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_sim.sim.call import Call
from zero_sim.sim.dispatch import has_own_dispatch
from zero_sim.sim.roles import written_tensors

_PLAIN = (Tensor, Parameter)


# [Note: memory alone] On a device, a collective writes memory and does not affect autograd. So it
# gets tensors on the same memory that are no views, require no gradient and have their own version
# counters. Inference tensors are written in inference mode.
def memory_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return dense tensors as plain memory, sparse tensors unchanged; see [Note: memory alone]."""
    return [tensor if tensor.is_sparse else tensor.data for tensor in tensors]


def storages_of(tensors: Sequence[Tensor]) -> set[int]:
    """Return the storages' identities."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if not tensor.is_sparse}


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Return True if no tensor wraps others."""
    return all(type(tensor) in _PLAIN or not has_own_dispatch(type(tensor)) for tensor in tensors)


# [Note: tensors of tensors] If an argument wraps tensors, torch passes the call to the wrapper's
# class instead of the backend. Such a class runs the collective once for each tensor inside.
def inner_calls(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Yield inputs and outputs for each call on inner tensors; see [Note: tensors of tensors].

    Raises:
        TypeError: The arguments wrap different numbers of tensors.
    """
    unwrapped = [inner_tensors(tensor) for tensor in [*inputs, *outputs]]
    counts = [len(each) for each in unwrapped]
    if len(set(counts)) > 1:
        names = ", ".join(
            f"{type(tensor).__name__} of {count}"
            for tensor, count in zip([*inputs, *outputs], counts, strict=True)
        )
        raise TypeError(
            "expected all tensors of a collective to wrap the same number of tensors, got "
            f"{names}. Pass the tensors inside."
        )
    for index in range(counts[0]):
        # The i-th inner tensors of all arguments belong to one call.
        inner = [each[index] for each in unwrapped]
        yield inner[: len(inputs)], inner[len(inputs) :]


def inner_tensors(tensor: Any) -> list[Tensor]:
    """Return the plain tensors inside a wrapper, outermost first. A plain tensor returns itself.

    Raises:
        TypeError: The wrapper's class has no `__tensor_flatten__`.
    """
    if is_plain([tensor]):
        return [tensor]
    if hasattr(tensor, "trigger_wait"):
        # A functional collective's result. Its first use waits for it.
        return inner_tensors(tensor.trigger_wait())
    if not hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(
            f"expected a tensor, or a wrapper with `__tensor_flatten__`, got "
            f"{type(tensor).__name__}. Pass the tensors inside."
        )
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in inner_tensors(getattr(tensor, name))]


def check_writable(call: Call, *, group_rank: int) -> None:
    """Raise RuntimeError, as torch does, if elements of a written tensor share memory."""
    # Here, because torch's copy would raise in the thread of the rank that moves the data.
    for tensor in written_tensors(call, group_rank=group_rank):
        # torch returns 1 if an overlap is certain, and 2 if it cannot decide.
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to "
                f"a single memory location, as in an expanded one; shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}. Please clone() the tensor before performing the "
                f"operation {call.kind}."
            )


def count_holders(tensor: Tensor) -> int:
    """Return the number of tensors on this tensor's storage, itself included."""
    storage = tensor.untyped_storage()
    # `storage` itself holds one reference.
    return torch._C._storage_Use_Count(storage._cdata) - 1  # pyrefly: ignore [missing-attribute]
