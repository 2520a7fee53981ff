"""Arguments of a process group's methods: the forms that torch's bindings take, and gloo's checks.

torch's own calls hand over lists and an options object. A process group can be called directly as
well, and then a tensor may stand for a list of one, and a reduce operation or a root for options.
What gloo refuses of one rank's arguments by themselves is refused here, in that rank and in gloo's
words, so that a program that expects the refusal finds it.
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
    """The list that was meant: a tensor by itself is a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def as_rows(lists: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """The list of lists that was meant: a list of tensors is a list of one row."""
    if len(lists) and isinstance(lists[0], Tensor):
        return [lists]  # pyrefly: ignore [bad-return]
    return lists  # pyrefly: ignore [bad-return]


def reduce_op_of(opts: Any) -> ReduceOp.RedOpType:
    """The reduce operation of options, or of itself; SUM where there is none."""
    op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    return getattr(op, "op", op)


def factor_of(opts: Any) -> float | Tensor | None:
    """What a PREMUL_SUM carries; torch raises where another operation is asked for it."""
    if reduce_op_of(opts) != ReduceOp.PREMUL_SUM:
        return None
    return getattr(opts, "reduceOp", opts).factor


def root_of(kind: str, opts: Any, size: int, *, tensor_count: int = 1) -> int:
    """The root, a group rank, of options or of itself; 0 where there is none.

    Args:
        kind: The method, for the message.
        opts: The options, or the root itself.
        size: Members of the group.
        tensor_count: Tensors that each rank hands over.

    Raises:
        BadArgument: No member of the group has that rank, or that many tensors.
    """
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
            f"Expected the place of one of the {tensor_count} tensors that the rank hands over.",
        )
    return root


def root_tensor_of(opts: Any) -> int:
    """Which of the root's tensors is meant, by options; 0 where they do not say."""
    return int(getattr(opts, "rootTensor", 0))


def splits_of(splits: Sequence[int] | Tensor) -> list[int]:
    """Split sizes as integers; torch's bindings take a 1D tensor of them, too."""
    return splits.tolist() if isinstance(splits, Tensor) else list(splits)


def check_one(kind: str, tensors: Sequence[Tensor], *, side: str) -> None:
    """Check that a rank hands over one tensor, where gloo takes no more, either.

    Args:
        kind: The method, for the message.
        tensors: What was handed over.
        side: `input` or `output` where there are both; else empty.

    Raises:
        BadArgument: There are none, or several.
    """
    if len(tensors) == 1:
        return
    between = f"{side} " if side else ""
    raise BadArgument(
        kind,
        f"requires a single-element {between}tensor list",
        f"Got {len(tensors)}. Try a call for each, or the coalesced form.",
    )


def check_can_fold(kind: str, op: ReduceOp.RedOpType) -> None:
    """Check that several tensors of a rank can be reduced before those of the others.

    Raises:
        BadArgument: They cannot.
    """
    if not can_fold(op):
        raise BadArgument(
            kind,
            f"unsupported reduction operation {op.name} of several tensors a rank",
            "Try a call for each, or the coalesced form.",
        )


def check_some(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that a coalesced call has a tensor at all.

    Raises:
        BadArgument: There are none.
    """
    if not tensors:
        raise BadArgument(
            kind, "requires non-empty tensor list", "Expected one tensor or more, got none."
        )


def check_pairs(kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Check that a flat call, coalesced or not, has an output for every input, all of them dense.

    Raises:
        BadArgument: It has none, more of one than of the other, or a sparse one.
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
    """Check the lists of an all-gather: an output for each input of each member, once an input.

    Args:
        kind: The method, for the message.
        rows: The outputs.
        inputs: The inputs.
        size: Members of the group.
        even: Whether all tensors must have one size, as with gloo.

    Raises:
        BadArgument: Lists have other lengths, or tensors are sparse, of several dtypes or sizes.
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
    """Check the lists of a coalesced all-gather: a list for each member, like that of the inputs.

    Raises:
        BadArgument: A list has another length, or a tensor another size or dtype than its input.
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
            if output.shape != given.shape:
                raise BadArgument(
                    kind,
                    f"invalid size of output tensor at index {index} (expected "
                    f"{tuple(given.shape)}, got {tuple(output.shape)})",
                    "Expected the size of the input at that place.",
                )
            _check_dtype(kind, output, given.dtype, index)


def check_coalesced(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check the tensors of a coalesced reduction: some, of one layout and one dtype.

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
                "Expected tensors that are alike in one call.",
            )
    if any(tensor.dtype != first.dtype for tensor in tensors):
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise BadArgument(
            kind,
            "tensors must all have the same type",
            f"Got {dtypes}. Expected one dtype for all tensors of a call.",
        )


class NotContiguous(BadArgument, ValueError):
    """A tensor is not contiguous where gloo wants it to be."""


def check_contiguous(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors are contiguous, of a call in which gloo takes no others.

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
    """Check that the entries of a list are like the tensor that goes with it.

    Args:
        kind: The method, for the message.
        entries: The list.
        tensor: The other tensor of the rank.
        even: Whether all must have one size, as with gloo; else the contract compares sizes, with
            those of the other ranks.

    Raises:
        BadArgument: One has another dtype or size.
    """
    for index, entry in enumerate(entries):
        _check_dtype(kind, entry, tensor.dtype, index)
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
    """Check that a member which is not the root hands over no list.

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
    """Check that tensors of one list have one layout, dtype and shape.

    Raises:
        BadArgument: One differs from the first.
    """
    first = tensors[0]
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
                    "Expected tensors that are alike in one list.",
                )


def check_dense(kind: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors have memory of their own in strides.

    Raises:
        BadArgument: One is sparse or has another layout without strides.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise BadArgument(
                kind,
                f"unsupported layout {tensor.layout}: the tensor is sparse",
                f"Expected a dense tensor, got one of shape {tuple(tensor.shape)}. Of sparse ones "
                "all_reduce alone is simulated. Try tensor.to_dense().",
            )


def check_sparse_sum(kind: str, op: ReduceOp.RedOpType) -> None:
    """Check that a sparse all-reduce adds.

    Raises:
        BadArgument: It does something else.
    """
    if op != ReduceOp.SUM:
        raise BadArgument(
            kind,
            "unsupported reduction operation (allreduce of sparse tensors only works with "
            "ReduceOp.SUM)",
            f"Got {op.name}. Try tensor.to_dense().",
        )


def check_rows(kind: str, rows: Sequence[Sequence[Tensor]], *, side: str, size: int) -> None:
    """Check the lists of a call that hands one tensor for every member, in one row.

    Args:
        kind: The method, for the message.
        rows: The lists.
        side: `input` or `output`.
        size: Members of the group.

    Raises:
        BadArgument: There is not one list, or it has not one tensor a member.
    """
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
