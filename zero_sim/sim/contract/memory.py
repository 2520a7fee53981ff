"""Checks for the memory of a call's tensors: overlaps, and layouts that NCCL would misread."""

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
"""Kinds in which an in-place input is a whole output, and no other rank's data goes there."""


def shape_of(tensor: Tensor) -> tuple[object, ...]:
    """Return dtype and shape, plus strides if the tensor is not contiguous."""
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
    # From the innermost dim outwards, a dim's stride must equal the number of elements inside it.
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= extent
    return True


# [Note: no shapes] NCCL moves memory and knows no shapes. So if two ranks use shapes (2, 3) and
# (3, 2), they map the same bytes to different elements. A flat view, such as shape (6,), is fine.
def misread(a: Tensor, b: Tensor) -> Literal["shape", "memory-format"] | None:
    """Find out if two ranks, with tensors of equal size, would map memory to different elements.

    Returns:
        The difference, `shape` or `memory-format`; None if both ranks see the same elements.
    """
    if a.numel() == 0:
        return None
    if a.shape != b.shape:
        # See [Note: no shapes]. Flat views and dims of size 1 make no difference.
        squeezed = [[extent for extent in tensor.shape if extent != 1] for tensor in (a, b)]
        if min(map(len, squeezed)) >= 2 and squeezed[0] != squeezed[1]:
            return "shape"
        return None if _memory_order(a) == _memory_order(b) == [] else "memory-format"
    return None if _memory_order(a) == _memory_order(b) else "memory-format"


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the strides of dims longer than 1; empty for a contiguous tensor."""
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


# [Note: in place] For each collective, NCCL documents a single in-place form: the smaller tensor is
# the rank's own part of the larger tensor. With any other overlap, memory is read while it is
# written, or written twice. As an exception, the same tensor may be several outputs. Then its
# content is undefined afterwards (`zero_sim.sim.in_flight_buffers`).
def find_aliasing(call: Call, *, group_rank: int, world_size: int) -> str | None:
    """Find two tensors of a call with a forbidden overlap. All tensors are dense.

    Returns:
        A description of the two tensors and the consequence; None without such an overlap.
    """
    # Fast path for the common case.
    if len(call.inputs) == len(call.outputs) == 1 and _apart(call.inputs[0], call.outputs[0]):
        return None
    written = call.kind in _IN_PLACE
    inputs = [_stretch(f"input {i}", t, written=written) for i, t in enumerate(call.inputs)]
    outputs = [_stretch(f"output {i}", t, written=True) for i, t in enumerate(call.outputs)]
    # Empty the in-place parts, so that the sweep ignores them.
    in_place: set[str] = set()
    for whole, part, start in _allowed(call, inputs, outputs, group_rank, world_size):
        if part.start == start and part.stop <= whole.stop:
            whole.written = True
            part.stop = part.start
            in_place |= {whole.name, part.name}
    repeated = repeated_outputs(call) if len(call.outputs) > 1 else {}
    if repeated and call.kind not in _OWN_OUTPUT:
        # An input in a repeated output would be read while another output is written there.
        barred = {repeated.get(i, i) for i, each in enumerate(outputs) if each.name in in_place}
        repeated = {i: first for i, first in repeated.items() if first not in barred}
    # Of outputs with the same memory, keep only the first.
    for index in repeated:
        outputs[index].stop = outputs[index].start
    # Without empty stretches, which overlap nothing.
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
    """Return the documented in-place pairs as (whole, part, allowed start of the part)."""
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
    """Describe two overlapping stretches of which a call writes at least one; None without."""
    # In order of start, only the stretch that reaches farthest so far can overlap the next.
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
