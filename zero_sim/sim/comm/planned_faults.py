"""Planned faults in a collective's data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zero_sim.sim.call import Call
from zero_sim.sim.comm.collectives import PERFORM
from zero_sim.sim.faults import DueFault
from zero_sim.sim.order import Order

_INT_OF = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_WRITTEN_IN_PLACE = ("all_reduce", "reduce", "broadcast")
_GATHERS = ("all_gather", "all_gather_list", "gather")
# In these reductions, a duplicated contribution changes nothing.
_IDEMPOTENT = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR)


def perform_with_faults(
    calls: Sequence[Call], order: Order, *, due_faults: Mapping[int, Sequence[DueFault]]
) -> None:
    """Perform a collective with due faults, given by group rank."""
    faulty = _FaultyCalls(calls, due_faults)
    PERFORM[calls[0].kind](faulty.calls, order)
    faulty.deliver()


# [Note: the message, not the memory] A fault on the sending side changes a copy, which the
# collective reads. The rank's own memory keeps the program's values, and still receives the
# results. A rank's own part of a gather never travels, so it keeps the program's values too.
class _FaultyCalls:
    """A collective's calls with the data that the network carries."""

    def __init__(self, calls: Sequence[Call], due_faults: Mapping[int, Sequence[DueFault]]) -> None:
        self._given = calls
        self._due = due_faults
        self._kept: dict[int, list[Tensor]] = {}
        self.calls = list(calls)
        """The calls, with copies in place of faulty inputs."""
        for member, due in self._due_faults("send"):
            self._send(member, due)

    def deliver(self) -> None:
        """Restore the ranks' own parts and corrupt received data, after the collective."""
        for member in self._kept:
            self._give_back(member)
        for member, due in self._due_faults("receive"):
            call = self._given[member]
            _flip(due, call, _received(call, member), verb="receives")

    def _due_faults(self, side: str) -> list[tuple[int, DueFault]]:
        return [
            # In rank order, because the log must not depend on the schedule.
            (member, due)
            for member in sorted(self._due)
            for due in self._due[member]
            if due.fault.side == side
        ]

    def _send(self, member: int, due: DueFault) -> None:
        call = self._given[member]
        # In a broadcast, members other than the root pass tensors too, but send nothing.
        if call.kind in ("broadcast", "scatter") and member != call.root:
            due.missed(f"a rank that is not the root sends nothing in a {call.kind}")
        elif not sum(tensor.numel() for tensor in call.inputs):
            due.missed(f"the rank sends no element in this {call.kind}")
        elif due.fault.kind == "corrupt":
            _flip(due, call, self._copied_inputs(member), verb="sends")
        elif due.fault.kind == "drop":
            for tensor in self._copied_inputs(member):
                tensor.copy_(_nothing(call, tensor))
            due.fired("the data that the rank sends is lost")
        else:
            self._duplicate(member, due)

    def _duplicate(self, member: int, due: DueFault) -> None:
        call, op = self._given[member], self._given[member].reduce_op
        following = (member + 1) % len(self._given)
        if op is not None:
            for tensor in [] if op in _IDEMPOTENT else self._copied_inputs(member):
                _combine(op, tensor)
            nothing = ", which changes nothing" if op in _IDEMPOTENT else ""
            due.fired(f"the data that the rank sends counts twice in the {op.name}{nothing}")
        elif call.kind not in _GATHERS:
            due.missed(f"nothing can count twice in a {call.kind}")
        elif [t.shape for t in call.inputs] != [t.shape for t in self._given[following].inputs]:
            due.missed("the next rank sends data of another size")
        elif following == member:
            due.missed("a group with a single member has no next rank")
        else:
            # The next rank's message is replaced, so this rank's data arrives twice.
            mine = self.calls[member].inputs
            for tensor, other in zip(mine, self._copied_inputs(following), strict=True):
                other.copy_(tensor)
            due.fired("the data that the rank sends also replaces the next rank's")

    def _copied_inputs(self, member: int) -> Sequence[Tensor]:
        """Return the copies to send instead of the rank's tensors."""
        if member not in self._kept:
            call = self._given[member]
            # Two copies, because the collective may write into the copy that it sends.
            self._kept[member] = [tensor.clone() for tensor in call.inputs]
            inputs = [tensor.clone() for tensor in call.inputs]
            self.calls[member] = replace(call, inputs=inputs)
        return self.calls[member].inputs

    def _give_back(self, member: int) -> None:
        call, kept, count = self._given[member], self._kept[member], len(self._given)
        # See [Note: the message, not the memory]; `kept` has the program's values.
        if call.kind in _WRITTEN_IN_PLACE:
            # The collective wrote its results into the copies.
            if _received(call, member):
                for tensor, written in zip(call.inputs, self.calls[member].inputs, strict=True):
                    tensor.copy_(written)
        elif call.kind == "all_gather":
            for output, own in zip(call.outputs, kept, strict=True):
                _write_part(output, member * own.numel(), own)
        elif call.kind == "all_gather_list":
            for i, own in enumerate(kept):
                call.outputs[i * count + member].copy_(own)
        elif call.kind in ("gather", "scatter", "all_to_all_list"):
            own = kept[0] if call.kind == "gather" else kept[member]
            if call.kind != "gather" or member == call.root:
                call.outputs[0 if call.kind == "scatter" else member].copy_(own)
        elif call.kind == "all_to_all":
            own = kept[0].split(list(call.input_splits))[member]
            call.outputs[0].split(list(call.output_splits))[member].copy_(own)


def _received(call: Call, member: int) -> Sequence[Tensor]:
    """Return the tensors into which a member receives; empty if it only sends."""
    if call.kind == "broadcast":
        return () if member == call.root else call.inputs
    if call.kind == "reduce":
        return call.inputs if member == call.root else ()
    return call.inputs if call.kind == "all_reduce" else call.outputs


def _nothing(call: Call, tensor: Tensor) -> Tensor:
    """Return the reduction's neutral element; zeros for other collectives."""
    op = call.reduce_op
    if op == ReduceOp.PRODUCT:
        return torch.ones_like(tensor)
    if op == ReduceOp.BAND:
        return ~torch.zeros_like(tensor)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if tensor.dtype == torch.bool:
            return torch.full_like(tensor, op == ReduceOp.MIN)
        if tensor.is_floating_point():
            return torch.full_like(tensor, torch.inf if op == ReduceOp.MIN else -torch.inf)
        ends = torch.iinfo(tensor.dtype)
        return torch.full_like(tensor, ends.max if op == ReduceOp.MIN else ends.min)
    return torch.zeros_like(tensor)


def _combine(op: ReduceOp.RedOpType, tensor: Tensor) -> None:
    """Reduce a contribution with itself."""
    if op == ReduceOp.PRODUCT:
        tensor.mul_(tensor.clone())
    elif op == ReduceOp.BXOR:
        tensor.zero_()
    else:
        tensor.add_(tensor.clone())


def _flip(due: DueFault, call: Call, tensors: Sequence[Tensor], *, verb: str) -> None:
    """Flip a bit of an element. Draw both unless the fault gives them."""
    fault, drawn = due.fault, due.random
    stops = list(itertools.accumulate(tensor.numel() for tensor in tensors))
    count = stops[-1] if stops else 0
    if count == 0:
        due.missed(f"the rank {verb} no element in this {call.kind}")
        return
    # Drawn over all elements of the call, one tensor after another.
    element = drawn.randrange(count) if fault.element is None else fault.element
    if element >= count:
        due.missed(f"the rank {verb} only {count} elements, so index {element} does not exist")
        return
    which = next(i for i, stop in enumerate(stops) if element < stop)
    tensor, offset = tensors[which], element - (stops[which - 1] if which else 0)
    # A bool has a single meaningful bit, because its byte must be 0 or 1.
    bits = 1 if tensor.dtype == torch.bool else 8 * tensor.element_size()
    bit = drawn.randrange(bits) if fault.bit is None else fault.bit
    if bit >= bits or tensor.element_size() not in _INT_OF:
        due.missed(f"bit {bit} of a {bits}-bit {tensor.dtype} cannot be flipped")
        return
    value = tensor.detach().reshape(-1)[offset : offset + 1].clone()
    before = value.item()
    # Negative for the sign bit, because 1 << 63 does not fit into int64.
    mask = -(1 << bit) if bit == bits - 1 > 0 else 1 << bit
    value.view(_INT_OF[tensor.element_size()]).bitwise_xor_(mask)
    _write_part(tensor.detach(), offset, value)
    due.fired(f"bit {bit} of element {element} that it {verb}: {before!r} -> {value.item()!r}")


def _write_part(tensor: Tensor, start: int, part: Tensor) -> None:
    """Write consecutive elements, in the tensor's logical order."""
    flat = tensor.reshape(-1)
    flat[start : start + part.numel()] = part.reshape(-1)
    # `reshape` copied a tensor that is not contiguous, so write the copy back.
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
