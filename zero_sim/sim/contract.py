"""What NCCL would refuse or silently misread: calls that do not fit themselves or each other.

Every check names both ranks' call sites; none of them looks at values.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_sim.sim.collectives import FOLDS, Call
from zero_sim.sim.failures import ContractViolation

_ROOTED = ("broadcast", "reduce", "scatter", "gather")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")


def describe(call: Call) -> str:
    """The call as a person would write it, with its site."""
    tensor = next(iter([*call.inputs, *call.outputs]), None)
    parts = [] if tensor is None else [str(tensor.dtype).removeprefix("torch."), _elems(call)]
    if call.reduce_op is not None:
        parts.append(call.reduce_op.name)
    if call.kind in _ROOTED:
        parts.append(f"root {call.root}")
    return f"{call.kind}({', '.join(parts)}) at {call.file}:{call.line}"


def _elems(call: Call) -> str:
    counts = [tensor.numel() for tensor in call.inputs] or [t.numel() for t in call.outputs]
    return f"{counts[0]} elements" if len(counts) == 1 else f"{counts} elements"


def check_call(call: Call, *, rank: int, world_size: int) -> None:
    """Check what one rank's call says by itself.

    Args:
        call: The call.
        rank: World rank that made it, for the message.
        world_size: Size of the group.

    Raises:
        ContractViolation: The sizes, dtypes or reduce operation cannot be right on any rank.
    """
    if call.kind in _REDUCING and call.reduce_op not in FOLDS:
        supported = ", ".join(op.name for op in FOLDS)
        _refuse(call, rank, f"expected one of the reduce operations {supported}")
    dtypes = {tensor.dtype for tensor in [*call.inputs, *call.outputs]}
    if len(dtypes) > 1 and call.kind != "all_gather_list":
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        _refuse(call, rank, f"expected one dtype for all its tensors, got {names}")
    if call.kind == "reduce_scatter":
        _check_flat(call, call.inputs, call.outputs, rank=rank, world_size=world_size)
    elif call.kind == "all_gather":
        _check_flat(call, call.outputs, call.inputs, rank=rank, world_size=world_size)
    elif call.kind in ("all_to_all_list", "reduce_scatter_list"):
        _check_count(call, call.inputs, rank=rank, expected=world_size)
    elif call.kind == "all_gather_list":
        _check_count(call, call.outputs, rank=rank, expected=world_size * len(call.inputs))
    elif call.kind == "all_to_all":
        _check_splits(call, rank=rank, world_size=world_size)


def _refuse(call: Call, rank: int, message: str) -> None:
    raise ContractViolation(f"rank {rank}: {describe(call)}: {message}", rank=rank, other_rank=rank)


def _check_flat(
    call: Call, large: Sequence[Tensor], small: Sequence[Tensor], *, rank: int, world_size: int
) -> None:
    for whole, part in zip(large, small, strict=True):
        if whole.numel() != part.numel() * world_size:
            _refuse(
                call,
                rank,
                f"expected the larger tensor to be {world_size} x the smaller one "
                f"({world_size} x {part.numel()} elements), got {whole.numel()}",
            )


def _check_count(call: Call, tensors: Sequence[Tensor], *, rank: int, expected: int) -> None:
    if len(tensors) != expected:
        _refuse(call, rank, f"expected {expected} tensors, one a rank, got {len(tensors)}")


def _check_splits(call: Call, *, rank: int, world_size: int) -> None:
    for tensor, splits in (
        (call.inputs[0], call.input_splits),
        (call.outputs[0], call.output_splits),
    ):
        rows = tensor.shape[0] if tensor.dim() else 0
        if len(splits) != world_size or sum(splits) != rows:
            _refuse(
                call,
                rank,
                f"expected {world_size} split sizes that add up to {rows} rows, got {list(splits)}",
            )


def check_pair(first: Call, call: Call, *, ranks: tuple[int, int], what: str) -> None:
    """Check that two ranks' calls are the same collective.

    Args:
        first: The call of the rank that came first.
        call: The call of the rank that came now.
        ranks: World ranks of the two, in that order.
        what: The collective's group and number, for the message.

    Raises:
        ContractViolation: They differ in operation, dtype, element count, reduce operation or root.
    """
    aspect = _mismatch(first, call)
    if aspect is None:
        return
    raise ContractViolation(
        f"{aspect} mismatch in {what}:\n"
        f"  rank {ranks[0]}: {describe(first)}\n"
        f"  rank {ranks[1]}: {describe(call)}\n"
        "NCCL would hang or misread the data. Make every rank of the group issue the same calls "
        "in the same order.",
        rank=ranks[1],
        other_rank=ranks[0],
    )


def _mismatch(first: Call, call: Call) -> str | None:
    if first.kind != call.kind:
        return "operation"
    if call.kind in _ROOTED and first.root != call.root:
        return "root"
    if first.reduce_op != call.reduce_op:
        return "reduce operation"
    # The root of a scatter or gather holds lists that the others do not have.
    mine, theirs = (
        (call.outputs, first.outputs) if call.kind == "scatter" else (call.inputs, first.inputs)
    )
    if [t.dtype for t in mine[:1]] != [t.dtype for t in theirs[:1]]:
        return "dtype"
    if call.kind in ("all_to_all", "all_to_all_list"):
        return None
    if [t.numel() for t in mine] != [t.numel() for t in theirs]:
        return "element count"
    return None


def check_all_to_all(calls: Sequence[Call], *, ranks: Sequence[int]) -> None:
    """Check that what each rank sends to each other is as large as what that one expects.

    Raises:
        ContractViolation: Naming the first pair of ranks that disagree.
    """
    sent = [_row_elems(call, call.inputs, call.input_splits) for call in calls]
    expected = [_row_elems(call, call.outputs, call.output_splits) for call in calls]
    for source in range(len(calls)):
        for target in range(len(calls)):
            if sent[source][target] != expected[target][source]:
                raise ContractViolation(
                    f"all-to-all sizes differ: rank {ranks[source]} sends "
                    f"{sent[source][target]} elements to rank {ranks[target]}, which expects "
                    f"{expected[target][source]}\n"
                    f"  rank {ranks[source]}: {describe(calls[source])}\n"
                    f"  rank {ranks[target]}: {describe(calls[target])}",
                    rank=ranks[source],
                    other_rank=ranks[target],
                )


def _row_elems(call: Call, tensors: Sequence[Tensor], splits: Sequence[int]) -> list[int]:
    if call.kind == "all_to_all_list":
        return [tensor.numel() for tensor in tensors]
    rows = tensors[0].shape[0] if tensors[0].dim() else 0
    row_elems = tensors[0].numel() // rows if rows else 0
    return [split * row_elems for split in splits]
