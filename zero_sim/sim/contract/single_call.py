"""Checks for a single call: sizes, dtypes and memory that no other rank's call could match.

Also builds the call's signature; see [Note: one comparison] in `zero_sim.sim.contract.fitting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from zero_sim.sim.call import REDUCE_OPS, SPARSE, Call
from zero_sim.sim.callsite import site_of
from zero_sim.sim.contract.memory import find_aliasing, is_contiguous, shape_of
from zero_sim.sim.failures import ContractViolation

ROOTED = ("broadcast", "reduce", "scatter", "gather")
FREE_SIZES = ("all_to_all", "all_to_all_list", "all_gather_list")
"""Kinds with sizes that may differ between ranks, checked once all members have called."""

_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
_FLAT = ("all_gather", "reduce_scatter")
_SYMMETRIC = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
"""Kinds with a tensor that has the same elements on all ranks, at the same buffer offset."""
_CUT = (*_FLAT, "all_to_all")
"""Kinds that cut memory into a piece per rank, so channels-last memory would be misread."""


class Signature(NamedTuple):
    """Properties of a call to compare between ranks."""

    alike: tuple[object, ...]
    """Must be equal on all ranks."""
    offsets: tuple[int, ...] = ()
    """Storage offsets of tensors with the same elements on all ranks. May differ."""


def describe(call: Call) -> str:
    """Return a description of the call, with its call site."""
    tensor = next(iter([*call.inputs, *call.outputs]), None)
    parts = [] if tensor is None else [str(tensor.dtype).removeprefix("torch."), _elems(call)]
    if call.reduce_op is not None:
        parts.append(call.reduce_op.name)
    if call.kind in ROOTED:
        parts.append(f"root {call.root}")
    return f"{call.kind}({', '.join(parts)}) at {site_of(call.file, call.line)}"


def _elems(call: Call) -> str:
    counts = [tensor.numel() for tensor in call.inputs] or [t.numel() for t in call.outputs]
    return f"{counts[0]} elements" if len(counts) == 1 else f"{counts} elements"


def check_call(call: Call, *, group_rank: int, ranks: Sequence[int], strict: bool) -> Signature:
    """Check a call by itself, and return its signature.

    If `strict`, also refuse calls that gloo accepts but NCCL does not.

    Raises:
        ContractViolation: Sizes, dtypes, memory or reduce operation are wrong.
    """
    rank, world_size = ranks[group_rank], len(ranks)
    if call.kind in _REDUCING and call.reduce_op not in REDUCE_OPS:
        supported = ", ".join(op.name for op in REDUCE_OPS)
        _refuse(call, rank, "reduce-op", f"expected one of the reduce operations {supported}")
    if call.kind == SPARSE:
        # Sparse tensors have neither fixed sizes nor memory to check.
        return Signature((call.kind, call.inputs[0].dtype, call.inputs[0].shape))
    tensors = [*call.inputs, *call.outputs] if call.outputs else call.inputs
    # A single tensor cannot disagree in dtype or size.
    if len(tensors) > 1:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            _refuse(call, rank, "dtype", f"expected one dtype for all its tensors, got {names}")
        _check_sizes(call, group_rank=group_rank, rank=rank, world_size=world_size)
    if strict:
        _check_memory(call, tensors, group_rank=group_rank, rank=rank, world_size=world_size)
    return _signature(call)


def _signature(call: Call) -> Signature:
    offsets: tuple[int, ...] = ()
    if call.kind in _SYMMETRIC:
        symmetric = call.outputs if call.kind == "all_gather" else call.inputs
        # Not in `alike`, because correct programs may pass different offsets; see `SwapWatch`.
        offsets = tuple([int(tensor.storage_offset()) for tensor in symmetric])
    if call.kind in FREE_SIZES:
        alike = [(tensor.dtype,) for tensor in call.inputs]
    else:
        alike = [shape_of(tensor) for tensor in compared(call)]
    return Signature((call.kind, call.root, call.reduce_op, *alike), offsets)


def _refuse(call: Call, rank: int, aspect: str, message: str) -> None:
    raise ContractViolation(
        f"rank {rank}: {describe(call)}: {message}", aspect=aspect, rank=rank, other_rank=rank
    )


def _check_sizes(call: Call, *, group_rank: int, rank: int, world_size: int) -> None:
    inputs, outputs = call.inputs, call.outputs
    # Check only sizes independent of other ranks' calls.
    if call.kind == "reduce_scatter":
        _check_flat(call, inputs, outputs, rank=rank, world_size=world_size)
    elif call.kind == "all_gather":
        _check_flat(call, outputs, inputs, rank=rank, world_size=world_size)
    elif call.kind == "all_to_all_list":
        _check_count(call, inputs, rank=rank, expected=world_size)
        _check_count(call, outputs, rank=rank, expected=world_size)
    elif call.kind == "reduce_scatter_list":
        _check_count(call, inputs, rank=rank, expected=world_size)
        _check_entries(call, [inputs[group_rank]], outputs[0], start=group_rank, rank=rank)
    elif call.kind == "all_gather_list":
        _check_count(call, outputs, rank=rank, expected=world_size * len(inputs))
        for i, tensor in enumerate(inputs):
            # Only the rank's own entry; `check_all` compares the others.
            own = i * world_size + group_rank
            _check_entries(call, [outputs[own]], tensor, start=own, rank=rank)
    elif call.kind == "all_to_all":
        _check_splits(call, rank=rank, world_size=world_size)
    # Only the root of a gather has outputs, and only the root of a scatter has inputs.
    elif call.kind == "gather" and outputs:
        _check_count(call, outputs, rank=rank, expected=world_size)
        _check_entries(call, outputs, inputs[0], start=0, rank=rank)
    elif call.kind == "scatter" and inputs:
        _check_count(call, inputs, rank=rank, expected=world_size)
        _check_entries(call, inputs, outputs[0], start=0, rank=rank)


def _check_flat(
    call: Call, large: Sequence[Tensor], small: Sequence[Tensor], *, rank: int, world_size: int
) -> None:
    for whole, part in zip(large, small, strict=True):
        if whole.numel() != part.numel() * world_size:
            _refuse(
                call,
                rank,
                "numel",
                f"expected the larger tensor to be {world_size} x the smaller "
                f"({world_size} x {part.numel()} elements), got {whole.numel()}",
            )


def _check_count(call: Call, tensors: Sequence[Tensor], *, rank: int, expected: int) -> None:
    if len(tensors) != expected:
        message = f"expected {expected} tensors, one per rank, got {len(tensors)}"
        _refuse(call, rank, "entry-count", message)


def _check_entries(
    call: Call, entries: Sequence[Tensor], tensor: Tensor, *, start: int, rank: int
) -> None:
    """Check list entries, numbered from `start`, against the rank's other tensor."""
    for i, entry in enumerate(entries, start):
        if entry.numel() != tensor.numel():
            _refuse(
                call,
                rank,
                "entry-size",
                f"expected entry {i} of rank {rank}'s list to have {tensor.numel()} elements, like "
                f"its other tensor, got {entry.numel()}",
            )


def _check_splits(call: Call, *, rank: int, world_size: int) -> None:
    for tensor, splits in (
        (call.inputs[0], call.input_splits),
        (call.outputs[0], call.output_splits),
    ):
        # A 0D tensor has no rows.
        rows = tensor.shape[0] if tensor.dim() else 0
        if len(splits) != world_size or sum(splits) != rows:
            message = (
                f"expected {world_size} split sizes that add up to {rows} rows, got {list(splits)}"
            )
            _refuse(call, rank, "split-sizes", message)


def _check_memory(
    call: Call, tensors: Sequence[Tensor], *, group_rank: int, rank: int, world_size: int
) -> None:
    for tensor in tensors:
        if tensor.is_contiguous():
            continue
        if not is_contiguous(tensor):
            why = "which NCCL refuses"
        elif call.kind in _CUT:
            # Channels-last memory can move whole, but not in pieces.
            why = "in channels-last order, of which NCCL gives each rank a stretch of memory"
        else:
            continue
        _refuse(
            call,
            rank,
            "non-contiguous",
            f"expected contiguous tensors, got shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}, {why}. Pass tensor.contiguous(), and copy the result back.",
        )
    if len(tensors) > 1:
        aliased = find_aliasing(call, group_rank=group_rank, world_size=world_size)
        if aliased is not None:
            _refuse(
                call,
                rank,
                "aliasing",
                f"expected tensors that share no memory, except in place at rank x count; {aliased}"
                ". Pass a copy.",
            )


def compared(call: Call) -> Sequence[Tensor]:
    """Return the tensors that must agree on all ranks."""
    # Without lists that only the root of a scatter or gather has.
    if call.kind == "scatter":
        return call.outputs
    return [*call.inputs, *call.outputs] if call.kind in _FLAT else call.inputs
