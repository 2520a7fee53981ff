"""Checks for conflicting calls of several ranks: NCCL would refuse, hang on or misread them.

Every error names both ranks' call sites. No check reads values. `strict` adds checks for
differences that gloo accepts but NCCL does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_sim.sim.call import SPARSE, Call
from zero_sim.sim.contract.memory import is_dense, misread
from zero_sim.sim.contract.single_call import FREE_SIZES, ROOTED, compared, describe
from zero_sim.sim.failures import ContractViolation

_WORDS = {
    "numel": "element count",
    "reduce-op": "reduce operation",
    "memory-format": "memory format",
}


def check_pair(first: Call, call: Call, *, ranks: tuple[int, int], what: str, strict: bool) -> None:
    """Check that two ranks' calls are the same collective.

    Args:
        first: The earlier call.
        call: The later call.
        ranks: The two calls' world ranks.
        what: The collective's name, for the message.
        strict: True to also compare shape and memory format.

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
    if call.kind == SPARSE:
        # Sparse tensors have no strides.
        return f"shape {tuple(call.inputs[0].shape)}"
    layouts = [(tuple(t.shape), t.stride()) for t in [*call.inputs, *call.outputs]]
    return "; ".join(f"shape {shape} strides {strides}" for shape, strides in layouts[:4])


# [Note: one comparison] A call's signature is a tuple of all properties that must agree. In a
# correct program signatures are equal, so a single comparison per call is enough. If two signatures
# differ, this function finds the difference.
def _mismatch(first: Call, call: Call, *, strict: bool) -> str | None:
    # Most telling difference first: another operation usually differs in all other properties too.
    if first.kind != call.kind:
        return "operation"
    if call.kind in ROOTED and first.root != call.root:
        return "root"
    if first.reduce_op != call.reduce_op:
        return "reduce-op"
    mine, theirs = compared(call), compared(first)
    if [t.dtype for t in mine[:1]] != [t.dtype for t in theirs[:1]]:
        return "dtype"
    if call.kind in FREE_SIZES:
        # `check_all` compares sizes once all members have called.
        return None if len(mine) == len(theirs) else "entry-count"
    if [t.numel() for t in mine] != [t.numel() for t in theirs]:
        return "numel"
    if call.kind == SPARSE:
        # Besides kind and dtype, signatures of sparse calls only contain the shape.
        return "shape"
    if not strict:
        return None
    differing = (misread(a, b) for a, b in zip(mine, theirs, strict=True))
    return next((aspect for aspect in differing if aspect is not None), None)


def check_all(calls: Sequence[Call], *, ranks: Sequence[int], what: str, strict: bool) -> None:
    """Check that the sizes of each pair of ranks agree, once all members have called.

    `calls` and `ranks` are in group-rank order; `what` and `strict` are as in `check_pair`.

    Raises:
        ContractViolation: Two ranks disagree. Names the first such pair.
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
                # Input i of giver g goes into output i * size + g of every taker.
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
    # Fast path, because this runs for each pair of ranks.
    if given.shape == taken.shape and given.is_contiguous() and taken.is_contiguous():
        return None
    if given.numel() != taken.numel():
        return "entry-size"
    return misread(given, taken) if strict else None


def _check_exchanged(
    calls: Sequence[Call], *, ranks: Sequence[int], what: str, strict: bool
) -> None:
    # [rank][peer], in elements.
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
    # Splits count rows of dim 0.
    row_elems = tensors[0].numel() // rows if rows else 0
    return [split * row_elems for split in splits]


def check_message(
    send: Call, receive: Call, *, ranks: tuple[int, int], label: str, strict: bool
) -> None:
    """Check that a receive fits its send.

    Raises:
        ContractViolation: They differ in dtype or element count; if `strict`, also if they differ
            in shape or memory format, or a tensor is not dense.
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
