"""What NCCL would refuse or silently misread: calls that do not fit themselves or each other.

Every check names both ranks' call sites; none of them looks at values. What only NCCL minds, while
gloo accepts it, is checked where `strict` says so.

[Note: one comparison]
Each call gets a signature, the tuple of all that must agree. Where two are equal, as they are in a
right program, nothing else is looked at; only where they differ is it worth finding out in what.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_sim.sim.aliasing import find_overlap
from zero_sim.sim.collectives import FOLDS, Call
from zero_sim.sim.failures import ContractViolation
from zero_sim.sim.shapes import is_contiguous, is_dense, misread, shape_of

_ROOTED = ("broadcast", "reduce", "scatter", "gather")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
_FLAT = ("all_gather", "reduce_scatter")
_SYMMETRIC = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
"""Kinds with tensors that hold the same elements on all ranks, at the same place of a buffer."""
FREE_SIZES = ("all_to_all", "all_to_all_list", "all_gather_list")
"""Kinds whose sizes may differ from rank to rank; they are checked when all have come."""
_CUT = (*_FLAT, "all_to_all")
"""Kinds that cut memory into pieces by rank, so that only the plain format keeps its meaning."""

_WORDS = {
    "numel": "element count",
    "reduce-op": "reduce operation",
    "memory-format": "memory format",
}


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


def check_call(call: Call, *, group_rank: int, ranks: Sequence[int], strict: bool) -> None:
    """Check what one rank's call says by itself, and sign it.

    Args:
        call: The call.
        group_rank: Group rank that made it.
        ranks: World ranks of the group.
        strict: Whether to check what NCCL refuses and gloo accepts, too.

    Raises:
        ContractViolation: The sizes, dtypes, memory or reduce operation cannot be right on any
            rank.
    """
    rank, world_size = ranks[group_rank], len(ranks)
    if call.kind in _REDUCING and call.reduce_op not in FOLDS:
        supported = ", ".join(op.name for op in FOLDS)
        _refuse(call, rank, "reduce-op", f"expected one of the reduce operations {supported}")
    tensors = [*call.inputs, *call.outputs] if call.outputs else call.inputs
    if len(tensors) > 1:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            _refuse(call, rank, "dtype", f"expected one dtype for all its tensors, got {names}")
        _check_sizes(call, group_rank=group_rank, rank=rank, world_size=world_size)
    if strict:
        _check_memory(call, tensors, group_rank=group_rank, rank=rank, world_size=world_size)
    _sign(call)


def _sign(call: Call) -> None:
    """Set what is compared with the other ranks' calls."""
    if call.kind in _SYMMETRIC:
        symmetric = call.outputs if call.kind == "all_gather" else call.inputs
        call.offsets = tuple([int(tensor.storage_offset()) for tensor in symmetric])
    if call.kind in FREE_SIZES:
        compared = [(tensor.dtype,) for tensor in call.inputs]
    else:
        compared = [shape_of(tensor) for tensor in _compared(call)]
    call.signature = (call.kind, call.root, call.reduce_op, *compared)


def _refuse(call: Call, rank: int, aspect: str, message: str) -> None:
    raise ContractViolation(
        f"rank {rank}: {describe(call)}: {message}", aspect=aspect, rank=rank, other_rank=rank
    )


def _check_sizes(call: Call, *, group_rank: int, rank: int, world_size: int) -> None:
    inputs, outputs = call.inputs, call.outputs
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
            own = i * world_size + group_rank
            _check_entries(call, [outputs[own]], tensor, start=own, rank=rank)
    elif call.kind == "all_to_all":
        _check_splits(call, rank=rank, world_size=world_size)
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
                f"expected the larger tensor to be {world_size} x the smaller one "
                f"({world_size} x {part.numel()} elements), got {whole.numel()}",
            )


def _check_count(call: Call, tensors: Sequence[Tensor], *, rank: int, expected: int) -> None:
    if len(tensors) != expected:
        message = f"expected {expected} tensors, one a rank, got {len(tensors)}"
        _refuse(call, rank, "entry-count", message)


def _check_entries(
    call: Call, entries: Sequence[Tensor], tensor: Tensor, *, start: int, rank: int
) -> None:
    """Check entries of a list, numbered from `start`, against the tensor that each must fit."""
    for i, entry in enumerate(entries, start):
        if entry.numel() != tensor.numel():
            _refuse(
                call,
                rank,
                "entry-size",
                f"expected entry {i} of rank {rank}'s list to hold {tensor.numel()} elements, as "
                f"its other tensor does, got {entry.numel()}",
            )


def _check_splits(call: Call, *, rank: int, world_size: int) -> None:
    for tensor, splits in (
        (call.inputs[0], call.input_splits),
        (call.outputs[0], call.output_splits),
    ):
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
            why = "in channels-last order, of which NCCL gives each rank a stretch of memory"
        else:
            continue
        _refuse(
            call,
            rank,
            "non-contiguous",
            f"expected contiguous tensors, got one of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}, {why}. Pass tensor.contiguous(), and copy the result back.",
        )
    if len(tensors) > 1:
        overlap = find_overlap(call, group_rank=group_rank, world_size=world_size)
        if overlap is not None:
            _refuse(
                call,
                rank,
                "aliasing",
                f"expected tensors that share no memory, except in place at rank x count; {overlap}"
                ". NCCL would read what it has overwritten. Pass a copy.",
            )


def check_pair(first: Call, call: Call, *, ranks: tuple[int, int], what: str, strict: bool) -> None:
    """Check that two ranks' calls are the same collective.

    Args:
        first: The call of the rank that came first.
        call: The call of the rank that came now.
        ranks: World ranks of the two, in that order.
        what: The collective's group and number, for the message.
        strict: Whether shape and memory format count.

    Raises:
        ContractViolation: They differ in operation, root, reduce operation, dtype, element count,
            shape or memory format.
    """
    aspect = _mismatch(first, call, strict=strict)
    if aspect is not None:
        raise _misfit(first, call, aspect=aspect, ranks=ranks, what=what)


def _misfit(
    first: Call, call: Call, *, aspect: str, ranks: tuple[int, int], what: str, why: str = ""
) -> ContractViolation:
    shapes = ["", ""]
    if aspect in ("shape", "memory-format"):
        shapes = [f", {_layouts(each)}" for each in (first, call)]
    return ContractViolation(
        f"{_WORDS.get(aspect, aspect)} mismatch in {what}:{why}\n"
        f"  rank {ranks[0]}: {describe(first)}{shapes[0]}\n"
        f"  rank {ranks[1]}: {describe(call)}{shapes[1]}\n"
        "NCCL would hang or misread the data. Make every rank of the group issue the same calls "
        "in the same order.",
        aspect=aspect,
        rank=ranks[1],
        other_rank=ranks[0],
    )


def _layouts(call: Call) -> str:
    layouts = [(tuple(t.shape), t.stride()) for t in [*call.inputs, *call.outputs]]
    return "; ".join(f"shape {shape} strides {strides}" for shape, strides in layouts[:4])


def _compared(call: Call) -> Sequence[Tensor]:
    """The tensors that must be alike on all ranks."""
    # The root of a scatter or gather holds lists that the others do not have.
    if call.kind == "scatter":
        return call.outputs
    return [*call.inputs, *call.outputs] if call.kind in _FLAT else call.inputs


def _mismatch(first: Call, call: Call, *, strict: bool) -> str | None:
    if first.kind != call.kind:
        return "operation"
    if call.kind in _ROOTED and first.root != call.root:
        return "root"
    if first.reduce_op != call.reduce_op:
        return "reduce-op"
    mine, theirs = _compared(call), _compared(first)
    if [t.dtype for t in mine[:1]] != [t.dtype for t in theirs[:1]]:
        return "dtype"
    if call.kind in FREE_SIZES:
        return None if len(mine) == len(theirs) else "entry-count"
    if [t.numel() for t in mine] != [t.numel() for t in theirs]:
        return "numel"
    if not strict:
        return None
    differing = (misread(a, b) for a, b in zip(mine, theirs, strict=True))
    return next((aspect for aspect in differing if aspect is not None), None)


def check_all(calls: Sequence[Call], *, ranks: Sequence[int], what: str, strict: bool) -> None:
    """Check, once all members came, that what each rank takes is what the others give it.

    Args:
        calls: The members' calls, in group-rank order.
        ranks: World ranks of the group.
        what: The collective's group and number, for the message.
        strict: Whether shape and memory format count.

    Raises:
        ContractViolation: Naming the first pair of ranks that disagree.
    """
    kind = calls[0].kind
    if kind == "all_gather_list":
        _check_gathered(calls, ranks=ranks, what=what, strict=strict)
    elif kind in ("all_to_all", "all_to_all_list"):
        _check_exchanged(calls, ranks=ranks, what=what, strict=strict)


def _check_gathered(
    calls: Sequence[Call], *, ranks: Sequence[int], what: str, strict: bool
) -> None:
    for i in range(len(calls[0].inputs)):
        for taker, call in enumerate(calls):
            for giver, other in enumerate(calls):
                entry = i * len(calls) + giver
                given, taken = other.inputs[i], call.outputs[entry]
                aspect = _entry_misfit(given, taken, strict=strict)
                if aspect is None:
                    continue
                raise _misfit(
                    other,
                    call,
                    aspect=aspect,
                    ranks=(ranks[giver], ranks[taker]),
                    what=what,
                    why=f" entry {entry} of rank {ranks[taker]}'s list is {tuple(taken.shape)} "
                    f"({taken.numel()} elements), but rank {ranks[giver]} gives "
                    f"{tuple(given.shape)} ({given.numel()} elements)",
                )


def _entry_misfit(given: Tensor, taken: Tensor, *, strict: bool) -> str | None:
    if given.shape == taken.shape and given.is_contiguous() and taken.is_contiguous():
        return None
    if given.numel() != taken.numel():
        return "entry-size"
    return misread(given, taken) if strict else None


def _check_exchanged(
    calls: Sequence[Call], *, ranks: Sequence[int], what: str, strict: bool
) -> None:
    sent = [_row_elems(call, call.inputs, call.input_splits) for call in calls]
    expected = [_row_elems(call, call.outputs, call.output_splits) for call in calls]
    for source, giver in enumerate(calls):
        for target, taker in enumerate(calls):
            pair = ranks[source], ranks[target]
            if sent[source][target] != expected[target][source]:
                raise ContractViolation(
                    f"all-to-all sizes differ in {what}: rank {pair[0]} sends "
                    f"{sent[source][target]} elements to rank {pair[1]}, which expects "
                    f"{expected[target][source]}\n"
                    f"  rank {pair[0]}: {describe(giver)}\n"
                    f"  rank {pair[1]}: {describe(taker)}",
                    aspect="split-sizes",
                    rank=pair[1],
                    other_rank=pair[0],
                )
            if strict and giver.kind == "all_to_all_list":
                aspect = _entry_misfit(giver.inputs[target], taker.outputs[source], strict=True)
                if aspect is not None:
                    raise _misfit(giver, taker, aspect=aspect, ranks=pair, what=what)


def _row_elems(call: Call, tensors: Sequence[Tensor], splits: Sequence[int]) -> list[int]:
    if call.kind == "all_to_all_list":
        return [tensor.numel() for tensor in tensors]
    rows = tensors[0].shape[0] if tensors[0].dim() else 0
    row_elems = tensors[0].numel() // rows if rows else 0
    return [split * row_elems for split in splits]


def check_message(
    send: Call, receive: Call, *, ranks: tuple[int, int], label: str, strict: bool
) -> None:
    """Check that a receive takes what its send gives.

    Args:
        send: The sender's call.
        receive: The receiver's.
        ranks: World ranks of sender and receiver.
        label: The group, for the message.
        strict: Whether shape and memory format count.

    Raises:
        ContractViolation: They differ in dtype, element count, shape or memory format.
    """
    given, taken = send.inputs[0], receive.outputs[0]
    if given.dtype != taken.dtype:
        aspect = "dtype"
    elif given.numel() != taken.numel():
        aspect = "numel"
    elif strict:
        aspect = misread(given, taken)
        if aspect is None and not (is_dense(given) and is_dense(taken)):
            aspect = "non-contiguous"
    else:
        aspect = None
    if aspect is not None:
        what = f"group {label}: send and receive do not fit"
        raise _misfit(send, receive, aspect=aspect, ranks=ranks, what=what)
