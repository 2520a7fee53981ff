"""Memory of a call's tensors: overlaps, and layouts that would be misread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zero_sim.sim.call import Call
from zero_sim.sim.roles import repeated_outputs

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_IN_PLACE = ("all_reduce", "reduce", "broadcast")
_OWN_OUTPUT = ("all_gather_list", "gather")
"""Kinds whose in-place input is a whole output that receives no other rank's data."""


def shape_of(tensor: Tensor) -> tuple[object, ...]:
    """Return dtype and shape, plus the strides of a tensor that is not contiguous."""
    if tensor.is_contiguous():
        return tensor.dtype, tensor.shape
    return tensor.dtype, tensor.shape, tensor.stride()


def is_contiguous(tensor: Tensor) -> bool:
    """Return True if NCCL accepts the layout: contiguous, plain or channels-last."""
    if tensor.is_contiguous():
        return True
    memory_format = _FORMATS.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill their memory without gap or overlap, in any order."""
    # From the innermost dim outwards, each stride must equal the elements inside of it.
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= extent
    return True


# [Note: no shapes] NCCL moves memory and knows no shapes. So if two ranks see the same bytes in
# shapes (2, 3) and (3, 2), they map them to different elements. A rank that sees shape (6,) only
# keeps them flat.
def misread(a: Tensor, b: Tensor) -> Literal["shape", "memory-format"] | None:
    """Return the difference that matters if two tensors' memory is read as each other's.

    Args:
        a: One rank's tensor.
        b: Another rank's, with as many elements.

    Returns:
        `shape` or `memory-format`; None if both see the same elements in memory.
    """
    if a.numel() == 0:
        return None
    if a.shape != b.shape:
        # See [Note: no shapes]. A flat view on one side, or dims of size 1, make no difference.
        squeezed = [[extent for extent in tensor.shape if extent != 1] for tensor in (a, b)]
        if min(map(len, squeezed)) >= 2 and squeezed[0] != squeezed[1]:
            return "shape"
        return None if _memory_order(a) == _memory_order(b) == [] else "memory-format"
    return None if _memory_order(a) == _memory_order(b) else "memory-format"


def _memory_order(tensor: Tensor) -> list[int]:
    """Return strides of dims longer than 1; empty if they are the contiguous ones."""
    if tensor.is_contiguous():
        return []
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for extent, stride in pairs if extent != 1]


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Bytes `[start, stop)` that a call reads or writes."""

    name: str
    start: int
    stop: int
    written: bool


# [Note: in place] NCCL documents one in-place form for each collective: the smaller tensor is the
# rank's own part of the larger one. Memory with any other overlap is read while it is written, or
# written twice. The exception is a tensor that is an output several times. It is accepted, but all
# of its content is undefined afterwards (`zero_sim.sim.in_flight_buffers`).
def find_aliasing(call: Call, *, group_rank: int, world_size: int) -> str | None:
    """Find two tensors of a call that overlap where they must not.

    Args:
        call: The call; its tensors are dense.
        group_rank: Group rank of the caller, which determines its in-place part.
        world_size: Size of the group.

    Returns:
        The two tensors in words, with the consequence; None if there is no such overlap.
    """
    # The common case without building stretches.
    if len(call.inputs) == len(call.outputs) == 1 and _apart(call.inputs[0], call.outputs[0]):
        return None
    written = call.kind in _IN_PLACE
    inputs = [_stretch(f"input {i}", t, written=written) for i, t in enumerate(call.inputs)]
    outputs = [_stretch(f"output {i}", t, written=True) for i, t in enumerate(call.outputs)]
    # In-place parts are emptied below, so that the sweep ignores them.
    in_place: set[str] = set()
    for whole, part, start in _allowed(call, inputs, outputs, group_rank, world_size):
        if part.start == start and part.stop <= whole.stop:
            whole.written = True
            part.stop = part.start
            in_place |= {whole.name, part.name}
    repeated = repeated_outputs(call) if len(call.outputs) > 1 else {}
    if repeated and call.kind not in _OWN_OUTPUT:
        # An input inside of a repeated output would be read while another output is written.
        barred = {repeated.get(i, i) for i, each in enumerate(outputs) if each.name in in_place}
        repeated = {i: first for i, first in repeated.items() if first not in barred}
    # All outputs with the same memory but the first are emptied.
    for index in repeated:
        outputs[index].stop = outputs[index].start
    # Empty stretches overlap nothing, including the in-place parts found above.
    return _sweep([each for each in (*inputs, *outputs) if each.start < each.stop])


def _apart(a: Tensor, b: Tensor) -> bool:
    start, other_start = a.data_ptr(), b.data_ptr()
    return (
        start + a.numel() * a.element_size() <= other_start
        or other_start + b.numel() * b.element_size() <= start
    )


def _stretch(name: str, tensor: Tensor, *, written: bool) -> _Stretch:
    start = tensor.data_ptr()
    return _Stretch(
        name=name,
        start=start,
        stop=start + tensor.numel() * tensor.element_size(),
        written=written,
    )


def _allowed(
    call: Call,
    inputs: list[_Stretch],
    outputs: list[_Stretch],
    group_rank: int,
    world_size: int,
) -> list[tuple[_Stretch, _Stretch, int]]:
    """Return the documented in-place pairs: whole, part, and the part's allowed start."""
    if call.kind == "all_gather":
        pairs = zip(outputs, inputs, strict=True)
        return [(a, b, a.start + group_rank * (b.stop - b.start)) for a, b in pairs]
    if call.kind == "reduce_scatter":
        pairs = zip(inputs, outputs, strict=True)
        return [(a, b, a.start + group_rank * (b.stop - b.start)) for a, b in pairs]
    if call.kind == "all_gather_list":
        own = outputs[group_rank::world_size]
        return [(a, b, a.start) for a, b in zip(own, inputs, strict=True)]
    if call.kind == "gather" and outputs:
        return [(outputs[group_rank], inputs[0], outputs[group_rank].start)]
    if call.kind in ("reduce_scatter_list", "scatter") and inputs:
        return [(inputs[group_rank], outputs[0], inputs[group_rank].start)]
    if world_size == 1 and len(inputs) == len(outputs):
        return [(a, b, a.start) for a, b in zip(inputs, outputs, strict=True)]
    return []


def _sweep(stretches: list[_Stretch]) -> str | None:
    """Find two overlapping stretches, at least one of them written, in one sorted pass."""
    # Sorted by start, only the stretch that reaches farthest so far can overlap the next one.
    farthest: _Stretch | None = None
    farthest_written: _Stretch | None = None
    for each in sorted(stretches, key=lambda each: each.start):
        # Two reads may overlap, so a read is only compared with writes.
        other = farthest if each.written else farthest_written
        if other is not None and each.start < other.stop:
            shared = min(each.stop, other.stop) - each.start
            consequence = (
                "write both, in any order"
                if each.written and other.written
                else "read what it has overwritten"
            )
            return (
                f"{each.name} shares {shared} bytes with {other.name}, "
                f"{each.start - other.start} bytes after its start. NCCL would {consequence}"
            )
        if farthest is None or each.stop > farthest.stop:
            farthest = each
        if each.written and (farthest_written is None or each.stop > farthest_written.stop):
            farthest_written = each
    return None
