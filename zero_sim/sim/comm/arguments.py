"""Arguments of a process group's methods, in all forms that torch's bindings accept.

torch.distributed passes lists and an options object. If a program calls a process group directly, a
tensor may replace a list, and a reduce operation or a root may replace the options.

The checks are gloo's checks on a single rank. They raise `BadArgument` with gloo's message, because
programs may expect it. `kind` is the called method, for the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zero_sim.sim.comm.tensor_lists import can_fold
from zero_sim.sim.failures import BadArgument


def as_list(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a list of tensors. A single tensor becomes a list."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def as_rows(lists: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Return a list of rows. A list of tensors becomes a single row."""
    # An empty list has no rows in either form.
    if len(lists) and isinstance(lists[0], Tensor):
        return [lists]  # pyrefly: ignore [bad-return]
    return lists  # pyrefly: ignore [bad-return]


def reduce_op_of(opts: Any) -> ReduceOp.RedOpType:
    """Return the reduce operation, given directly or in options; SUM by default."""
    op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    # PREMUL_SUM is an object with a factor, other operations are enum values.
    return getattr(op, "op", op)


def factor_of(opts: Any) -> float | Tensor | None:
    """Return PREMUL_SUM's factor; None for other operations."""
    # Check first, because `factor` raises for other operations.
    if reduce_op_of(opts) != ReduceOp.PREMUL_SUM:
        return None
    return getattr(opts, "reduceOp", opts).factor


def root_of(kind: str, opts: Any, size: int, *, tensor_count: int = 1) -> int:
    """Return the root's group rank, given directly or in options; 0 by default.

    Raises:
        BadArgument: Root rank or root tensor is out of range.
    """
    # `opts` is the root in direct calls, and an options object in torch's calls.
    root = 0 if opts is None else opts if isinstance(opts, int) else opts.rootRank
    if not 0 <= root < size:
        raise BadArgument(
            kind,
            f"invalid root rank: {root}",
            f"Expected a group rank from 0 to {size - 1}; torch's functions take a world rank as "
            "src or dst, and a group rank as group_src or group_dst.",
        )
    if not 0 <= root_tensor_of(opts) < tensor_count:
        raise BadArgument(
            kind,
            f"invalid root tensor: {root_tensor_of(opts)}",
            f"Expected an index into the {tensor_count} tensors of the call.",
        )
    return root


def root_tensor_of(opts: Any) -> int:
    """Return the root tensor's index from options; 0 by default."""
    return int(getattr(opts, "rootTensor", 0))


def splits_of(splits: Sequence[int] | Tensor) -> list[int]:
    """Return split sizes as integers. torch's bindings also accept a 1D tensor."""
    return splits.tolist() if isinstance(splits, Tensor) else list(splits)


def check_one(kind: str, tensors: Sequence[Tensor], *, side: str) -> None:
    """Require exactly one tensor."""
    if len(tensors) == 1:
        return
    # `side` is `input` or `output`; empty if the method has only one list.
    between = f"{side} " if side else ""
    raise BadArgument(
        kind,
        f"requires a single-element {between}tensor list",
        f"Got {len(tensors)}. Call once for each tensor, or use the coalesced form.",
    )


def check_can_fold(kind: str, op: ReduceOp.RedOpType) -> None:
    """Require an operation that can reduce a rank's own tensors before the collective."""
    if not can_fold(op):
        raise BadArgument(
            kind,
            f"unsupported reduction operation {op.name} for several tensors per rank",
            "Call once for each tensor, or use the coalesced form.",
        )


def check_some(kind: str, tensors: Sequence[Tensor]) -> None:
    """Require at least one tensor."""
    if not tensors:
        raise BadArgument(
            kind, "requires non-empty tensor list", "Expected at least one tensor, got none."
        )


def check_pairs(kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Require a dense output for each dense input of a flat call, coalesced or not."""
    check_some(kind, inputs)
    if len(outputs) != len(inputs):
        raise BadArgument(
            kind,
            "requires input/output tensor lists to have the same length",
            f"Got {len(inputs)} inputs and {len(outputs)} outputs.",
        )
    check_dense(kind, [*inputs, *outputs])


def check_gathered(
    kind: str, rows: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *, size: int, even: bool
) -> None:
    """Check lengths, layouts, dtypes, and with `even` also sizes, in an all-gather's lists.

    `rows` has a list per input, each with an output for each input of each member.
    """
    if not inputs:
        raise BadArgument(
            kind, "requires non-empty input tensor list", "Expected one tensor, got none."
        )
    if len(rows) != len(inputs):
        raise BadArgument(
            kind,
            "requires input/output tensor lists to have the same length",
            f"Got {len(inputs)} inputs and {len(rows)} lists of outputs.",
        )
    for index, row in enumerate(rows):
        # As if each input's device received everything, so each row has all outputs.
        if len(row) != size * len(inputs):
            raise BadArgument(
                kind,
                f"invalid output tensor list at index {index} (expected length "
                f"{size * len(inputs)}, got {len(row)})",
                "Expected one tensor for each member.",
            )
    check_alike(kind, inputs)
    for row in rows:
        check_dense(kind, [*inputs, *row])
        check_like(kind, row, inputs[0], even=even)


def check_gathered_coalesced(
    kind: str, rows: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *, size: int
) -> None:
    """Require a list like `inputs` for each member in a coalesced all-gather."""
    check_some(kind, inputs)
    if len(rows) != size:
        raise BadArgument(
            kind,
            "output lists should be equal to world size",
            f"Expected a list for each of {size} members, got {len(rows)} lists.",
        )
    for row in rows:
        if len(row) != len(inputs):
            raise BadArgument(
                kind,
                f"invalid output size: (expected length {len(inputs)}, got {len(row)})",
                "Expected one tensor for each input.",
            )
        for index, (output, given) in enumerate(zip(row, inputs, strict=True)):
            # Unlike in the plain form, the indices of outputs and inputs correspond.
            if output.shape != given.shape:
                raise BadArgument(
                    kind,
                    f"invalid size of output tensor at index {index} (expected "
                    f"{tuple(given.shape)}, got {tuple(output.shape)})",
                    "Expected the size of the input with the same index.",
                )
            _check_dtype(kind, output, given.dtype, index)


def check_coalesced(kind: str, tensors: Sequence[Tensor]) -> None:
    """Require tensors of the same layout and dtype in a coalesced reduction."""
    check_some(kind, tensors)
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout != first.layout:
            raise BadArgument(
                kind,
                f"invalid tensor layout at index {index} (expected {first.layout}, got "
                f"{tensor.layout})",
                "Expected all tensors of a call to have the same layout.",
            )
    # After the layouts, in gloo's order.
    if any(tensor.dtype != first.dtype for tensor in tensors):
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise BadArgument(
            kind,
            "tensors must all have the same type",
            f"Expected all tensors of a call to have the same dtype, got {dtypes}.",
        )


class NotContiguous(BadArgument, ValueError):
    """A tensor that must be contiguous and is not. Also a ValueError, which gloo raises."""


def check_contiguous(kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise NotContiguous if a tensor is not contiguous, where gloo requires it."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise NotContiguous(
                kind,
                "Tensors must be contiguous",
                f"Got a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}. Pass "
                "tensor.contiguous(), and copy the result back.",
            )


def check_like(kind: str, entries: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
    """Require the other tensor's dtype in all entries, and with `even` also its size."""
    for index, entry in enumerate(entries):
        _check_dtype(kind, entry, tensor.dtype, index)
        # NCCL accepts different sizes per rank, which the contract compares between ranks.
        if even and entry.shape != tensor.shape:
            raise BadArgument(
                kind,
                f"invalid tensor size at index {index} (expected {tuple(tensor.shape)}, got "
                f"{tuple(entry.shape)})",
                "With gloo, expected all tensors of a call to have the same size.",
            )


def _check_dtype(kind: str, tensor: Tensor, expected: torch.dtype, index: int) -> None:
    if tensor.dtype != expected:
        raise BadArgument(
            kind,
            f"invalid tensor type at index {index} (expected {expected}, got {tensor.dtype})",
            "Expected all tensors of a call to have the same dtype.",
        )


def check_no_rows(kind: str, rows: Sequence[Sequence[Tensor]], *, side: str) -> None:
    """Require no tensors from members other than the root."""
    if any(len(row) for row in rows):
        raise BadArgument(
            kind,
            f"requires empty {side} on non-root",
            "Only the root passes a tensor for each member.",
        )


def check_alike(kind: str, tensors: Sequence[Tensor]) -> None:
    """Require the same layout, dtype and shape in a list."""
    first = tensors[0]
    # Compare with the first tensor, as gloo does.
    for index, tensor in enumerate(tensors[1:], start=1):
        for aspect, expected, got in (
            ("layout", first.layout, tensor.layout),
            ("type", first.dtype, tensor.dtype),
            ("size", tuple(first.shape), tuple(tensor.shape)),
        ):
            if expected != got:
                raise BadArgument(
                    kind,
                    f"invalid tensor {aspect} at index {index} (expected {expected}, got {got})",
                    "Expected the same layout, dtype and size for all tensors in a list.",
                )


def check_dense(kind: str, tensors: Sequence[Tensor]) -> None:
    """Require dense tensors."""
    for tensor in tensors:
        # The simulator lends and compares memory by address, which needs strides.
        if tensor.layout != torch.strided:
            raise BadArgument(
                kind,
                f"unsupported layout {tensor.layout}: the tensor is sparse",
                f"Expected a dense tensor, got shape {tuple(tensor.shape)}. Only all_reduce "
                "accepts sparse tensors here. Pass tensor.to_dense().",
            )


def check_sparse_sum(kind: str, op: ReduceOp.RedOpType) -> None:
    """Require SUM in a sparse all-reduce."""
    if op != ReduceOp.SUM:
        raise BadArgument(
            kind,
            "unsupported reduction operation (allreduce of sparse tensors only works with "
            "ReduceOp.SUM)",
            f"Got {op.name}. Pass tensor.to_dense().",
        )


def check_rows(kind: str, rows: Sequence[Sequence[Tensor]], *, side: str, size: int) -> None:
    """Require a single list, with a tensor for each of `size` members."""
    if len(rows) != 1:
        raise BadArgument(
            kind,
            f"requires a single-element {side} list containing a list with {size} tensors",
            f"Got {len(rows)} lists.",
        )
    if len(rows[0]) != size:
        raise BadArgument(
            kind,
            f"Incorrect {side} list size {len(rows[0])}. {side.capitalize()} list size should be "
            f"{size}, same as size of the process group",
            "Expected one tensor for each member.",
        )
