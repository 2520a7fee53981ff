"""Data movement of collectives, once all members have called.

Each function takes the members' calls in group-rank order. In-place forms, where an output is a
view of an input, give the same results as on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zero_sim.errors import UsageError
from zero_sim.sim.call import SPARSE, Call
from zero_sim.sim.order import Fold, Order, Stretch

_SMALL_BYTES = 1 << 16
"""Buffers up to this size move whole, in few operations. Larger buffers move by chunk."""


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL_BYTES


def _add(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b)


FOLDS: dict[ReduceOp.RedOpType, Fold] = {
    ReduceOp.SUM: _add,
    ReduceOp.AVG: _add,
    ReduceOp.PREMUL_SUM: _add,
    ReduceOp.PRODUCT: lambda a, b: a.mul_(b),
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""Combine two contributions elementwise. `_reduced` scales for AVG and PREMUL_SUM."""


def _reduced(
    calls: Sequence[Call], parts: Sequence[Tensor], order: Order, *, at: Stretch
) -> Tensor:
    """Reduce all ranks' contributions to a stretch, each 1D, into new memory of their dtype."""
    # The contract has checked that all calls agree in these.
    op, dtype, rank_count = calls[0].reduce_op, parts[0].dtype, len(calls)
    assert op is not None
    # Scale before the sum: PREMUL_SUM by each rank's factor, AVG if the order is NCCL's ring.
    factors: Sequence[float | Tensor] = ()
    if op == ReduceOp.PREMUL_SUM:
        factors = _premul_factors(calls, order)
    elif op == ReduceOp.AVG and order.averaging == "premultiply":
        factors = [_reciprocal(rank_count, dtype)] * rank_count
    if factors:
        parts = [
            part * torch.as_tensor(factor, dtype=dtype, device=part.device)
            for part, factor in zip(parts, factors, strict=True)
        ]
    # [elems] for each rank. A sum in a wider accumulator is rounded once, below.
    accumulator = order.accumulator(dtype)
    total = order.reduce([part.to(accumulator) for part in parts], FOLDS[op], at=at)
    if op == ReduceOp.AVG and order.averaging == "postmultiply":
        total.mul_(_reciprocal(rank_count, accumulator))
    total = total.to(dtype)
    if _divides(op, order):
        return _quotient(total, rank_count)
    return total


def _quotient(total: Tensor, count: int) -> Tensor:
    """Divide by `count` with a true division, in fp32 for 16-bit data."""
    # By a 0D tensor, because CUDA turns a division by a number into a multiplication.
    wide = total.to(torch.float32) if total.element_size() == 2 else total
    return wide.div_(torch.full((), count, dtype=wide.dtype, device=wide.device)).to(total.dtype)


def _divides(op: ReduceOp.RedOpType, order: Order) -> bool:
    return op == ReduceOp.AVG and order.averaging == "divide"


def _reciprocal(count: int, dtype: torch.dtype) -> Tensor:
    """Return 1 / `count` as a 0D tensor, for a narrow dtype rounded to fp32 first."""
    if dtype == torch.float64:
        return torch.tensor(1.0 / count, dtype=dtype)
    return torch.tensor(1.0 / count, dtype=torch.float32).to(dtype)


def _premul_factors(calls: Sequence[Call], order: Order) -> list[float | Tensor]:
    if not order.has_premul:
        raise UsageError(
            f"expected a reduce operation of order {order.name!r}, got PREMUL_SUM, which its "
            "backend does not have. Try SUM of scaled tensors, or order 'nccl-ring'."
        )
    factors = [call.factor for call in calls if call.factor is not None]
    if len(factors) != len(calls):
        raise UsageError("expected a factor with PREMUL_SUM on every rank, got none on some")
    return factors


def _entries(calls: Sequence[Call]) -> Iterator[tuple[int, Stretch]]:
    """Yield each tensor's index and position in a call that may be coalesced."""
    first = calls[0]
    sizes = [tensor.numel() for tensor in first.inputs]
    for i, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        yield (
            i,
            Stretch(
                kind=first.kind, buffer_elems=size, call_elems=sum(sizes), call_start=end - size
            ),
        )


def _write(output: Tensor, value: Tensor) -> None:
    output.copy_(value.reshape(output.shape))


def all_reduce(calls: Sequence[Call], order: Order) -> None:
    """Replace every rank's tensors by their reductions over all ranks."""
    for i, at in _entries(calls):
        total = _reduced(calls, [call.inputs[i].reshape(-1) for call in calls], order, at=at)
        for call in calls:
            _write(call.inputs[i], total)


def all_reduce_sparse(calls: Sequence[Call], order: Order) -> None:
    """Replace every rank's sparse tensor by the coalesced sum over all ranks, in rank order."""
    # In gloo, each rank gathers indices and values and adds them in rank order. So `order` does not
    # apply.
    total = calls[0].inputs[0].clone()
    for call in calls[1:]:
        total = total + call.inputs[0]
    total = total.coalesce()
    for call in calls:
        call.inputs[0].copy_(total)


def reduce(calls: Sequence[Call], order: Order) -> None:
    """Reduce like `all_reduce`, but only write the root's tensor."""
    parts, root = [call.inputs[0].reshape(-1) for call in calls], calls[0].root
    elems = parts[0].numel()
    at = Stretch(kind="reduce", buffer_elems=elems, call_elems=elems, destination=root)
    _write(calls[root].inputs[0], _reduced(calls, parts, order, at=at))


def reduce_scatter(calls: Sequence[Call], order: Order) -> None:
    """Flat forms: reduce chunk `r` of all inputs into rank `r`'s output, for each entry."""
    first = calls[0]
    for i, at in _entries(calls):
        # If the order is the same for all chunks, reduce the whole buffer once.
        if _is_small(first.inputs[i]) and not order.positional:
            total = _reduced(calls, [call.inputs[i].reshape(-1) for call in calls], order, at=at)
            rows = total.view(len(calls), first.outputs[i].numel())
            for call, row in zip(calls, rows, strict=True):
                _write(call.outputs[i], row)
        else:
            _reduce_scatter_by_chunk(calls, i, order, at=at)


def _reduce_scatter_by_chunk(calls: Sequence[Call], i: int, order: Order, *, at: Stretch) -> None:
    # For each rank: [ranks, output elems].
    world_size = len(calls)
    chunked = [call.inputs[i].reshape(world_size, call.outputs[i].numel()) for call in calls]
    in_place = all(_in_place(call.inputs[i], call.outputs[i], r) for r, call in enumerate(calls))
    late: list[tuple[Tensor, Tensor]] = []
    for r, call in enumerate(calls):
        start = r * call.outputs[i].numel()
        here = replace(at, start=start, call_start=at.call_start + start, destination=r)
        total = _reduced(calls, [rows[r] for rows in chunked], order, at=here)
        if in_place:
            _write(call.outputs[i], total)
        else:
            # This memory may hold inputs for other chunks, so write after all reductions.
            late.append((call.outputs[i], total))
    for output, total in late:
        _write(output, total)


def _in_place(whole: Tensor, part: Tensor, chunk: int) -> bool:
    """Return True if `part` is this chunk of `whole`, or has another storage, as NCCL allows.

    Then chunks can be written one after another, without a copy of the whole buffer.
    """
    if whole.untyped_storage().data_ptr() != part.untyped_storage().data_ptr():
        return True
    part_bytes = part.numel() * part.element_size()
    return (
        whole.is_contiguous()
        and part.is_contiguous()
        and part.data_ptr() == whole.data_ptr() + chunk * part_bytes
    )


def reduce_scatter_list(calls: Sequence[Call], order: Order) -> None:
    """List form: reduce all ranks' `inputs[r]` into rank `r`'s output. Sizes may differ."""
    totals = [
        _reduced(
            calls,
            [call.inputs[r].reshape(-1) for call in calls],
            order,
            # Each entry is reduced like a separate call; see `order_backends`, [Note: gloo].
            at=replace(at, call_elems=at.buffer_elems, call_start=0, destination=r),
        )
        for r, at in _entries(calls)
    ]
    for call, total in zip(calls, totals, strict=True):
        _write(call.outputs[0], total)


def all_gather(calls: Sequence[Call], order: Order) -> None:
    """Flat forms: fill every output with the ranks' inputs in rank order, for each entry."""
    for i in range(len(calls[0].inputs)):
        # [elems] for each rank.
        values = [call.inputs[i].reshape(-1) for call in calls]
        outputs = [call.outputs[i] for call in calls]
        if _is_small(outputs[0]) or not all(output.is_contiguous() for output in outputs):
            gathered = torch.cat(values)
            for output in outputs:
                _write(output, gathered)
        else:
            _all_gather_by_chunk(values, outputs)


def _all_gather_by_chunk(values: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    # An input may lie in an output, in another rank's chunk. Then copy it before any write.
    if not all(_in_place(outputs[r], value, r) for r, value in enumerate(values)):
        values = [value.clone() for value in values]
    for output in outputs:
        for row, value in zip(output.view(len(values), -1), values, strict=True):
            # Equal for a rank's own chunk in an in-place all-gather.
            if row.data_ptr() != value.data_ptr():
                row.copy_(value)


def all_gather_list(calls: Sequence[Call], order: Order) -> None:
    """List form: copy rank `r`'s `inputs[i]` into `outputs[i * world_size + r]`."""
    world_size = len(calls)
    for i in range(len(calls[0].inputs)):
        # Copies, because an output may share memory with an input.
        values = [call.inputs[i].clone() for call in calls]
        for call in calls:
            for r, value in enumerate(values):
                _write(call.outputs[i * world_size + r], value)


def broadcast(calls: Sequence[Call], order: Order) -> None:
    """Replace every rank's tensors by the root's."""
    root = calls[0].root
    for i, value in enumerate(calls[root].inputs):
        for r, call in enumerate(calls):
            # The root's own memory stays untouched.
            if r != root:
                _write(call.inputs[i], value)


def scatter(calls: Sequence[Call], order: Order) -> None:
    """Copy the root's `inputs[r]` into rank `r`'s output."""
    values = [value.clone() for value in calls[calls[0].root].inputs]
    for call, value in zip(calls, values, strict=True):
        _write(call.outputs[0], value)


def gather(calls: Sequence[Call], order: Order) -> None:
    """Copy rank `r`'s input into the root's `outputs[r]`."""
    values = [call.inputs[0].clone() for call in calls]
    for output, value in zip(calls[calls[0].root].outputs, values, strict=True):
        _write(output, value)


def all_to_all_list(calls: Sequence[Call], order: Order) -> None:
    """Copy rank `s`'s `inputs[r]` into rank `r`'s `outputs[s]`."""
    values = [[value.clone() for value in call.inputs] for call in calls]
    for r, call in enumerate(calls):
        for s, output in enumerate(call.outputs):
            _write(output, values[s][r])


def all_to_all_flat(calls: Sequence[Call], order: Order) -> None:
    """Exchange like the list form, but with lists cut from a tensor's dim 0."""
    # Splits count rows.
    rows = [
        [part.clone() for part in call.inputs[0].split(list(call.input_splits))] for call in calls
    ]
    for r, call in enumerate(calls):
        for s, output in enumerate(call.outputs[0].split(list(call.output_splits))):
            _write(output, rows[s][r])


def barrier(calls: Sequence[Call], order: Order) -> None:
    """Move no data, because a barrier only brings the ranks together."""


def message(calls: Sequence[Call], order: Order) -> None:
    """Copy a send's tensor into the receive's tensor."""
    send, receive = calls
    _write(receive.outputs[0], send.inputs[0])


PERFORM: dict[str, Callable[[Sequence[Call], Order], None]] = {
    "all_reduce": all_reduce,
    SPARSE: all_reduce_sparse,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_list": reduce_scatter_list,
    "all_gather": all_gather,
    "all_gather_list": all_gather_list,
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather,
    "all_to_all_list": all_to_all_list,
    "all_to_all": all_to_all_flat,
    "barrier": barrier,
    "send": message,
}
"""Functions that move the data, by the kind of the first call. In a message, that is `send`."""
