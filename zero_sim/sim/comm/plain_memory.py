"""Tensors as plain memory: what a backend sees of what a program hands over.

[Note: memory alone]
A device's collective neither sees nor disturbs autograd: it writes memory, whoever looks at it. So
it is given tensors on the same memory that are no views, need no gradient and count versions of
their own. Those of inference mode are written in it.

[Note: tensors of tensors]
A class that wraps tensors runs each collective once for every tensor inside, since torch hands it
the call instead of the backend.
"""

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


def memory_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors as plain memory; see [Note: memory alone]. A sparse one is more than memory."""
    return [tensor if tensor.is_sparse else tensor.data for tensor in tensors]


def storages_of(tensors: Sequence[Tensor]) -> set[int]:
    """What tells the storages apart that they lie in."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if not tensor.is_sparse}


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether none of them wraps others."""
    return all(type(tensor) in _PLAIN or not has_own_dispatch(type(tensor)) for tensor in tensors)


def inner_calls(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """The inputs and outputs of each call that wrappers come to; see [Note: tensors of tensors].

    Raises:
        TypeError: The tensors do not wrap equally many.
    """
    unwrapped = [inner_tensors(tensor) for tensor in [*inputs, *outputs]]
    counts = [len(each) for each in unwrapped]
    if len(set(counts)) > 1:
        names = ", ".join(
            f"{type(tensor).__name__} of {count}"
            for tensor, count in zip([*inputs, *outputs], counts, strict=True)
        )
        raise TypeError(
            "expected the tensors of one collective to wrap equally many tensors each, got "
            f"{names}. Try to hand over the tensors inside."
        )
    for index in range(counts[0]):
        inner = [each[index] for each in unwrapped]
        yield inner[: len(inputs)], inner[len(inputs) :]


def inner_tensors(tensor: Any) -> list[Tensor]:
    """The plain tensors inside of a wrapper, from the outside in; of a plain one itself.

    Raises:
        TypeError: Its class does not say what it wraps.
    """
    if is_plain([tensor]):
        return [tensor]
    if hasattr(tensor, "trigger_wait"):
        # The result of a functional collective, which is waited for when it is used.
        return inner_tensors(tensor.trigger_wait())
    if not hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(
            f"expected tensors, or wrappers that name theirs by `__tensor_flatten__`, got "
            f"{type(tensor).__name__}. Try to hand over the tensors inside."
        )
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in inner_tensors(getattr(tensor, name))]


def check_writable(call: Call, *, group_rank: int) -> None:
    """Check that what a call writes has a place of its own for every element.

    Raises:
        RuntimeError: Several elements lie at one place; in the words of torch, whose copy into such
            a tensor would raise it in whichever rank's thread the data is moved.
    """
    for tensor in written_tensors(call, group_rank=group_rank):
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to "
                f"a single memory location, as in an expanded one; shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}. Please clone() the tensor before performing the "
                f"operation {call.kind}."
            )


def count_holders(tensor: Tensor) -> int:
    """How many tensors lie in the memory of this one, itself among them."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # pyrefly: ignore [missing-attribute]
