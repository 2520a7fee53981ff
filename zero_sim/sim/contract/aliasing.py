"""Tensors of one call that share memory where NCCL forbids it.

NCCL documents one in-place form of each collective: the smaller tensor lies in the larger one, at
the rank's own place. Everything else that overlaps is read while it is written, or written twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zero_sim.sim.call import Call

_IN_PLACE = ("all_reduce", "reduce", "broadcast")


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Bytes `[start, stop)` of memory that a call reads or writes."""

    name: str
    start: int
    stop: int
    written: bool


def find_overlap(call: Call, *, group_rank: int, world_size: int) -> str | None:
    """Say which two tensors of a call overlap where they must not.

    Args:
        call: The call; its tensors are dense.
        group_rank: Group rank of the caller, which decides where in-place is.
        world_size: Size of the group.

    Returns:
        The two tensors in words, or None where all is well.
    """
    if len(call.inputs) == len(call.outputs) == 1 and _apart(call.inputs[0], call.outputs[0]):
        return None
    written = call.kind in _IN_PLACE
    inputs = [_stretch(f"input {i}", t, written=written) for i, t in enumerate(call.inputs)]
    outputs = [_stretch(f"output {i}", t, written=True) for i, t in enumerate(call.outputs)]
    for whole, part, start in _allowed(call, inputs, outputs, group_rank, world_size):
        if part.start == start and part.stop <= whole.stop:
            whole.written = True
            part.stop = part.start
    # What is empty overlaps nothing; that goes for the parts just found to be in place as well.
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
    """The documented in-place pairs: the whole, the part, and where the part may start."""
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
    """Find two stretches that overlap, one of which at least is written; by one sorted pass."""
    farthest: _Stretch | None = None
    farthest_written: _Stretch | None = None
    for each in sorted(stretches, key=lambda each: each.start):
        other = farthest if each.written else farthest_written
        if other is not None and each.start < other.stop:
            shared = min(each.stop, other.stop) - each.start
            return (
                f"{each.name} shares {shared} bytes with {other.name}, "
                f"{each.start - other.start} bytes after its start"
            )
        if farthest is None or each.stop > farthest.stop:
            farthest = each
        if each.written and (farthest_written is None or each.stop > farthest_written.stop):
            farthest_written = each
    return None
