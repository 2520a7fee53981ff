"""Memory roles: the tensors that an operation reads and writes on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from zero_sim.sim.call import Call


class Part(NamedTuple):
    """A written part of a tensor."""

    tensor: int
    """Index in `written_tensors`."""
    start: int
    stop: int
    """Half-open range of elements, in row-major order. Only contiguous tensors are cut."""

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the part as a view."""
        tensor = tensors[self.tensor]
        if (self.start, self.stop) == (0, tensor.numel()):
            return tensor
        return tensor.view(-1)[self.start : self.stop]


def read_tensors(call: Call, *, group_rank: int) -> Sequence[Tensor]:
    """Return the tensors read on this rank."""
    if call.kind == "broadcast" and group_rank != call.root:
        return ()
    return call.inputs


def written_tensors(call: Call, *, group_rank: int) -> Sequence[Tensor]:
    """Return the tensors written on this rank, at least in part."""
    if call.kind == "all_reduce":
        return call.inputs
    if call.kind == "reduce":
        return call.inputs if group_rank == call.root else ()
    if call.kind == "broadcast":
        return call.inputs if group_rank != call.root else ()
    return call.outputs


def written_parts(call: Call, *, group_rank: int, group_size: int) -> list[Part]:
    """Return the written parts without repeats; see [Note: own parts]."""
    tensors = written_tensors(call, group_rank=group_rank)
    own = _own_parts(call, group_rank=group_rank, group_size=group_size)
    repeated = repeated_outputs(call)
    parts: list[Part] = []
    seen: set[int] = set()
    for index, tensor in enumerate(tensors):
        # If several outputs are the same memory, it makes a single part.
        if index not in own:
            first = repeated.get(index, index)
            if first in seen:
                continue
            seen.add(first)
        # An own part splits its tensor into the elements before and after.
        start, stop = own.get(index, (0, 0))
        bounds = ((0, start), (stop, tensor.numel())) if stop > start else ((0, tensor.numel()),)
        parts += [Part(index, low, high) for low, high in bounds if low < high]
    return parts


def repeated_outputs(call: Call) -> dict[int, int]:
    """Find outputs that repeat an earlier output: same start, shape and strides, and not empty.

    Returns:
        For each repeating output, the index of the first output with the same memory.
    """
    # Fast path for almost every call.
    if len(call.outputs) < 2:
        return {}
    first: dict[object, int] = {}
    # Partial overlaps are not repeats; the contract refuses them.
    keys = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in call.outputs]
    return {
        index: first[key]
        for index, (key, tensor) in enumerate(zip(keys, call.outputs, strict=True))
        if tensor.numel() and first.setdefault(key, index) != index
    }


def undefined_outputs(call: Call) -> set[int]:
    """Return the indices of outputs that are undefined because they share memory."""
    repeated = repeated_outputs(call)
    return {*repeated, *repeated.values()}


def overwritten_inputs(call: Call, *, group_rank: int, group_size: int) -> list[Tensor]:
    """Return inputs of an `all_gather_list` that an output may overwrite before they are sent."""
    # If all outputs have the same shape, NCCL gathers into its own memory first. If not, it
    # broadcasts the outputs in place, one after another.
    if len({tensor.shape for tensor in call.outputs}) < 2:
        return []
    undefined = undefined_outputs(call)
    own = _own_parts(call, group_rank=group_rank, group_size=group_size) if undefined else {}
    return [call.outputs[index] for index in own if index in undefined]


# [Note: own parts] If a rank's own part of an output is the memory of its input, as in an in-place
# all-gather, no data moves there. NCCL leaves that part untouched, so it counts as input only.
def _own_parts(call: Call, *, group_rank: int, group_size: int) -> dict[int, tuple[int, int]]:
    """Return the elements that are already the rank's input, by index of the written tensor."""
    # In the flat form, the own part is a chunk of the output; in other forms, a whole tensor.
    if call.kind == "all_gather":
        pairs = zip(call.inputs, call.outputs, strict=True)
        return {
            i: (group_rank * part.numel(), (group_rank + 1) * part.numel())
            for i, (part, whole) in enumerate(pairs)
            if is_chunk(part, whole, chunk=group_rank)
        }
    if call.kind == "all_gather_list":
        outputs = [i * group_size + group_rank for i in range(len(call.inputs))]
        sources = call.inputs
    elif call.kind == "gather" and group_rank == call.root:
        outputs, sources = [group_rank], call.inputs
    elif call.kind == "scatter" and group_rank == call.root:
        outputs, sources = [0], [call.inputs[group_rank]]
    else:
        return {}
    return {
        index: (0, source.numel())
        for index, source in zip(outputs, sources, strict=True)
        if _same_memory(call.outputs[index], source)
    }


def is_chunk(part: Tensor, whole: Tensor, *, chunk: int) -> bool:
    """Return True if `part` and this chunk of `whole` are the same memory, both contiguous."""
    return (
        same_storage(part, whole)
        and part.is_contiguous()
        and whole.is_contiguous()
        and part.data_ptr() == whole.data_ptr() + chunk * part.numel() * part.element_size()
    )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are views of the same storage."""
    # All storages without memory have address 0.
    address = a.untyped_storage().data_ptr()
    return address != 0 and address == b.untyped_storage().data_ptr()


def span_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's span in its storage, as a half-open range of bytes."""
    if not tensor.numel():
        return 0, 0
    strides = map(int, tensor.stride())
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + reach + 1) * tensor.element_size()
