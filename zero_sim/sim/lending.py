"""Which tensors of a call its rank lends until it waits: what a collective reads and writes.

In-place forms are those of NCCL: a rank's own chunk of a gathered output, where it is the input,
is only read; its own chunk of a scattered input, where it is the output, is written.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zero_sim.sim.collectives import Call
from zero_sim.sim.flight import Flight, Role


def flights_of(call: Call, *, group_rank: int, group_size: int, what: str) -> list[Flight]:
    """What one rank lends to an operation, outputs before inputs.

    Args:
        call: The rank's side of it; its file and line are known.
        group_rank: The rank inside the group.
        group_size: Members of the group.
        what: The operation in words.

    Returns:
        A flight for each tensor, or for each part that is lent, that has elements.
    """
    parts = [*_written(call, group_rank, group_size), *_read(call, group_rank)]
    return [
        Flight(role=role, tensor=tensor, what=what, file=call.file, line=call.line, whole=whole)
        for role, tensor, whole in parts
        if tensor.numel()
    ]


_Part = tuple[Role, Tensor, Tensor]
"""What is lent as what, and the tensor of the call that it is a part of."""


def _read(call: Call, group_rank: int) -> Iterator[_Part]:
    if call.kind != "broadcast" or group_rank == call.root:
        yield from (("input", tensor, tensor) for tensor in call.inputs)


def _written(call: Call, group_rank: int, group_size: int) -> Iterator[_Part]:
    at_root = group_rank == call.root
    in_place = call.kind == "all_reduce" or (call.kind == "reduce" and at_root)
    if in_place or (call.kind == "broadcast" and not at_root):
        yield from (("output", tensor, tensor) for tensor in call.inputs)
        return
    for i, output in enumerate(call.outputs):
        if call.kind == "all_gather":
            parts = _without_chunk(output, call.inputs[i], group_rank)
            yield from (("output", part, output) for part in parts)
        elif not _is_own_entry(call, i, group_rank, group_size):
            yield "output", output, output


def _is_own_entry(call: Call, i: int, group_rank: int, group_size: int) -> bool:
    """Whether output `i` of a list form is this rank's own input, which stays as it is."""
    output = call.outputs[i]
    match call.kind:
        case "all_gather_list":
            return i % group_size == group_rank and _is_same(output, call.inputs[i // group_size])
        case "gather":
            return i == group_rank and _is_same(output, call.inputs[0])
        case "scatter":
            return group_rank == call.root and _is_same(output, call.inputs[group_rank])
    return False


def _without_chunk(output: Tensor, chunk: Tensor, index: int) -> list[Tensor]:
    """The output without the chunk of this index, where that one is `chunk` itself."""
    if not output.is_contiguous() or not chunk.is_contiguous():
        return [output]
    start, stop = index * chunk.numel(), (index + 1) * chunk.numel()
    if chunk.data_ptr() != output.data_ptr() + start * output.element_size():
        return [output]
    flat = output.detach().view(-1)
    return [flat[:start], flat[stop:]]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
