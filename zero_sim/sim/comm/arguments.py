"""Arguments of a process group's methods, in all forms of torch's bindings, with gloo's checks.

torch.distributed passes lists and an options object. If a program calls a process group directly, a
tensor may replace a list of one, and a reduce operation or a root may replace the options. If gloo
refuses arguments without looking at other ranks, they are refused here in gloo's words. So a
program that expects the refusal finds it.
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
    """Return a list of tensors; a single tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def as_rows(lists: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Return a list of lists; a list of tensors becomes one row."""
    # An empty list has no rows either way.
    if len(lists) and isinstance(lists[0], Tensor):
        return [lists]  # pyrefly: ignore [bad-return]
    return lists  # pyrefly: ignore [bad-return]


def reduce_op_of(opts: Any) -> ReduceOp.RedOpType:
    """Return the reduce operation of options, or the operation itself; SUM by default."""
    op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    # A PREMUL_SUM is an object with a factor, other operations are enum values.
    return getattr(op, "op", op)


def factor_of(opts: Any) -> float | Tensor | None:
    """Return the factor of a PREMUL_SUM; None for other operations, whose `factor` raises."""
    # torch's bindings give PREMUL_SUM as an object that carries its factor.
    if reduce_op_of(opts) != ReduceOp.PREMUL_SUM:
        return None
    return getattr(opts, "reduceOp", opts).factor


def root_of(kind: str, opts: Any, size: int, *, tensor_count: int = 1) -> int:
    """Return the root's group rank from options, or the root itself; 0 by default.

    Args:
        kind: The method, for the message.
        opts: The options, or the root.
        size: Number of members.
        tensor_count: Number of tensors per rank.

    Raises:
        BadArgument: Root rank or root tensor is out of range.
    """
    # Both forms: `opts` is the root in direct calls, and an options object in torch's.
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
    """Return the index of the root's tensor from options; 0 by default."""
    return int(getattr(opts, "rootTensor", 0))


def splits_of(splits: Sequence[int] | Tensor) -> list[int]:
    """Return split sizes as integers. torch's bindings also take a 1D tensor."""
    return splits.tolist() if isinstance(splits, Tensor) else list(splits)


def check_one(kind: str, tensors: Sequence[Tensor], *, side: str) -> None:
    """Check that a rank passes exactly one tensor, as gloo requires here.

    Args:
        kind: The method, for the message.
        tensors: The tensors passed.
        side: `input` or `output` if the method has both, otherwise empty.

    Raises:
        BadArgument: There are none, or several.
    """
    if len(tensors) == 1:
        return
    # gloo's messages name the side only if the method has two.
    between = f"{side} " if side else ""
    raise BadArgument(
        kind,
        f"requires a single-element {between}tensor list",
        f"Got {len(tensors)}. Issue one call for each, or use the coalesced form.",
    )


def check_can_fold(kind: str, op: ReduceOp.RedOpType) -> None:
    """Check that a rank's own tensors can be reduced before those of other ranks.

    Raises:
        BadArgument: The operation does not allow it.
    """
    if not can_fold(op):
        raise BadArgument(
            kind,
            f"unsupported reduction operation {op.name} of several tensors a rank",
            "Issue one call for each, or use the coalesced form.",
        )


def check_some(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that a coalesced call has at least one tensor.

    Raises:
        BadArgument: It has none.
    """
    if not tensors:
        raise BadArgument(
            kind, "requires non-empty tensor list", "Expected one tensor or more, got none."
        )


def check_pairs(kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Check that a flat call has one dense output for each dense input, coalesced or not.

    Raises:
        BadArgument: There are no inputs, the numbers differ, or a tensor is sparse.
    """
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
    """Check the lists of an all-gather: per input, one output for each input of each member.

    Args:
        kind: The method, for the message.
        rows: The outputs, one list per input.
        inputs: The inputs.
        size: Number of members.
        even: True if all tensors must have one size, as with gloo.

    Raises:
        BadArgument: A list has a wrong length, a tensor is sparse, or dtypes or sizes differ.
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
        # Each input has its own row, with the outputs of all inputs of all members.
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
    """Check the lists of a coalesced all-gather: one list per member, like the list of inputs.

    Raises:
        BadArgument: A list has a wrong length, or an output differs from its input in size or
            dtype.
    """
    check_some(kind, inputs)
    if len(rows) != size:
        raise BadArgument(
            kind,
            "output lists should be equal to world size",
            f"Got {len(rows)} lists, expected one for each of {size} members.",
        )
    for row in rows:
        if len(row) != len(inputs):
            raise BadArgument(
                kind,
                f"invalid output size: (expected length {len(inputs)}, got {len(row)})",
                "Expected one tensor for each input.",
            )
        for index, (output, given) in enumerate(zip(row, inputs, strict=True)):
            # Unlike in the plain form, outputs correspond to inputs by index.
            if output.shape != given.shape:
                raise BadArgument(
                    kind,
                    f"invalid size of output tensor at index {index} (expected "
                    f"{tuple(given.shape)}, got {tuple(output.shape)})",
                    "Expected the size of the input with the same index.",
                )
            _check_dtype(kind, output, given.dtype, index)


def check_coalesced(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that a coalesced reduction has tensors, all with one layout and dtype.

    Raises:
        BadArgument: There are none, or one differs from the first.
    """
    check_some(kind, tensors)
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout != first.layout:
            raise BadArgument(
                kind,
                f"invalid tensor layout at index {index} (expected {first.layout}, got "
                f"{tensor.layout})",
                "Expected one layout for all tensors of a call.",
            )
    # After the layouts, the order in which gloo checks.
    if any(tensor.dtype != first.dtype for tensor in tensors):
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise BadArgument(
            kind,
            "tensors must all have the same type",
            f"Got {dtypes}. Expected one dtype for all tensors of a call.",
        )


class NotContiguous(BadArgument, ValueError):
    """A tensor that is not contiguous, in a call for which gloo requires it.

    A ValueError too, as gloo raises.
    """


def check_contiguous(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors are contiguous, for calls in which gloo accepts no others.

    Raises:
        NotContiguous: One is not.
    """
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise NotContiguous(
                kind,
                "Tensors must be contiguous",
                f"Got one of shape {tuple(tensor.shape)} and strides {tensor.stride()}. Pass "
                "tensor.contiguous(), and copy the result back.",
            )


def check_like(kind: str, entries: Sequence[Tensor], tensor: Tensor, *, even: bool) -> None:
    """Check the entries of a list against the tensor that belongs to it.

    Args:
        kind: The method, for the message.
        entries: The list.
        tensor: The rank's other tensor.
        even: True if all must have one size, as with gloo. Otherwise the contract compares the
            sizes with those of other ranks.

    Raises:
        BadArgument: A dtype or size differs.
    """
    for index, entry in enumerate(entries):
        _check_dtype(kind, entry, tensor.dtype, index)
        # NCCL accepts different sizes per rank.
        if even and entry.shape != tensor.shape:
            raise BadArgument(
                kind,
                f"invalid tensor size at index {index} (expected {tuple(tensor.shape)}, got "
                f"{tuple(entry.shape)})",
                "Expected one size for all tensors of a call with gloo.",
            )


def _check_dtype(kind: str, tensor: Tensor, expected: torch.dtype, index: int) -> None:
    if tensor.dtype != expected:
        raise BadArgument(
            kind,
            f"invalid tensor type at index {index} (expected {expected}, got {tensor.dtype})",
            "Expected one dtype for all tensors of a call.",
        )


def check_no_rows(kind: str, rows: Sequence[Sequence[Tensor]], *, side: str) -> None:
    """Check that a member other than the root passes no list.

    Raises:
        BadArgument: It does.
    """
    if any(len(row) for row in rows):
        raise BadArgument(
            kind,
            f"requires empty {side} on non-root",
            "Only the root has a tensor for each member.",
        )


def check_alike(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that the tensors of one list have one layout, dtype and shape.

    Raises:
        BadArgument: One differs from the first.
    """
    first = tensors[0]
    # As in gloo, entries are compared with the first one.
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
                    "Expected tensors of one layout, dtype and size in a list.",
                )


def check_dense(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors are dense, with memory and strides.

    Raises:
        BadArgument: One is sparse, or has another layout without strides.
    """
    for tensor in tensors:
        # The simulator lends and compares memory by address, which needs strides.
        if tensor.layout != torch.strided:
            raise BadArgument(
                kind,
                f"unsupported layout {tensor.layout}: the tensor is sparse",
                f"Expected a dense tensor, got one of shape {tuple(tensor.shape)}. Only all_reduce "
                "takes sparse tensors here. Pass tensor.to_dense().",
            )


def check_sparse_sum(kind: str, op: ReduceOp.RedOpType) -> None:
    """Check that a sparse all-reduce adds.

    Raises:
        BadArgument: It uses another operation.
    """
    if op != ReduceOp.SUM:
        raise BadArgument(
            kind,
            "unsupported reduction operation (allreduce of sparse tensors only works with "
            "ReduceOp.SUM)",
            f"Got {op.name}. Pass tensor.to_dense().",
        )


def check_rows(kind: str, rows: Sequence[Sequence[Tensor]], *, side: str, size: int) -> None:
    """Check that a call has one list with one tensor for each member.

    Args:
        kind: The method, for the message.
        rows: The lists.
        side: `input` or `output`.
        size: Number of members.

    Raises:
        BadArgument: There is no list or several, or its length is wrong.
    """
    if len(rows) != 1:
        raise BadArgument(
            kind,
            f"requires a single-element {side} list containing a list with {size} tensors",
            f"Got {len(rows)} lists.",
        )
    # One tensor for each member, the own rank included.
    if len(rows[0]) != size:
        raise BadArgument(
            kind,
            f"Incorrect {side} list size {len(rows[0])}. {side.capitalize()} list size should be "
            f"{size}, same as size of the process group",
            "Expected one tensor for each member.",
        )
