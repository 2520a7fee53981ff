"""What becomes of the data of one collective on its way, where faults are due.

[Note: the message, not the memory]
A fault of what a rank sends acts on a copy: the collective reads the copy, and the rank's own
memory keeps what the program wrote. What the collective writes to that rank is still written, but
for the rank's own part of what it gathers: that never travels, so it stays what the program wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zero_sim.sim.call import Call
from zero_sim.sim.comm.collectives import PERFORM
from zero_sim.sim.faults import Strike
from zero_sim.sim.order import Order

_INT_OF = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_WRITTEN_IN_PLACE = ("all_reduce", "reduce", "broadcast")
_GATHERS = ("all_gather", "all_gather_list", "gather")
_IDEMPOTENT = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR)


def perform_struck(
    calls: Sequence[Call], order: Order, *, strikes: Mapping[int, Sequence[Strike]]
) -> None:
    """Perform a collective at which faults are due.

    Args:
        calls: The members' calls in group-rank order.
        order: Order model of the reductions.
        strikes: The faults, by the member's group rank.
    """
    carriage = _Carriage(calls, strikes)
    PERFORM[calls[0].kind](carriage.calls, order)
    carriage.deliver()


class _Carriage:
    """The calls of one collective as the network carries them.

    Args:
        calls: The members' calls in group-rank order.
        strikes: The faults that are due, by the member's group rank.
    """

    def __init__(self, calls: Sequence[Call], strikes: Mapping[int, Sequence[Strike]]) -> None:
        self._given = calls
        self._due = strikes
        self._kept: dict[int, list[Tensor]] = {}
        self.calls = list(calls)
        """What the collective is to be performed on."""
        for place, strike in self._strikes("send"):
            self._send(place, strike)

    def deliver(self) -> None:
        """After the collective was performed: give ranks what is theirs, and corrupt the rest."""
        for place in self._kept:
            self._give_back(place)
        for place, strike in self._strikes("receive"):
            call = self._given[place]
            _flip(strike, call, _received(call, place), verb="receives")

    def _strikes(self, side: str) -> list[tuple[int, Strike]]:
        return [
            (place, strike)
            for place in sorted(self._due)
            for strike in self._due[place]
            if strike.fault.side == side
        ]

    def _send(self, place: int, strike: Strike) -> None:
        call = self._given[place]
        if call.kind in ("broadcast", "scatter") and place != call.root:
            strike.missed(f"a rank that is not the root sends nothing in a {call.kind}")
        elif not sum(tensor.numel() for tensor in call.inputs):
            strike.missed(f"the rank sends no element in this {call.kind}")
        elif strike.fault.kind == "corrupt":
            _flip(strike, call, self._stand_in(place), verb="sends")
        elif strike.fault.kind == "drop":
            for tensor in self._stand_in(place):
                tensor.copy_(_nothing(call, tensor))
            strike.fired("what the rank sends is lost")
        else:
            self._duplicate(place, strike)

    def _duplicate(self, place: int, strike: Strike) -> None:
        call, op = self._given[place], self._given[place].reduce_op
        following = (place + 1) % len(self._given)
        if op is not None:
            for tensor in [] if op in _IDEMPOTENT else self._stand_in(place):
                _combine(op, tensor)
            nothing = ", which changes nothing" if op in _IDEMPOTENT else ""
            strike.fired(f"what the rank sends counts twice in the {op.name}{nothing}")
        elif call.kind not in _GATHERS:
            strike.missed(f"nothing can count twice in a {call.kind}")
        elif [t.shape for t in call.inputs] != [t.shape for t in self._given[following].inputs]:
            strike.missed("what the next rank sends is of another size")
        elif following == place:
            strike.missed("there is no next rank in a group of one")
        else:
            mine = self.calls[place].inputs
            for tensor, other in zip(mine, self._stand_in(following), strict=True):
                other.copy_(tensor)
            strike.fired("what the rank sends arrives in the next rank's place too")

    def _stand_in(self, place: int) -> Sequence[Tensor]:
        """Copies that are read in the place of what a rank sends."""
        if place not in self._kept:
            call = self._given[place]
            self._kept[place] = [tensor.clone() for tensor in call.inputs]
            inputs = [tensor.clone() for tensor in call.inputs]
            self.calls[place] = replace(call, inputs=inputs)
        return self.calls[place].inputs

    def _give_back(self, place: int) -> None:
        call, kept, count = self._given[place], self._kept[place], len(self._given)
        if call.kind in _WRITTEN_IN_PLACE:
            # Its inputs are its outputs, and the copies were written in their stead.
            if _received(call, place):
                for tensor, written in zip(call.inputs, self.calls[place].inputs, strict=True):
                    tensor.copy_(written)
        elif call.kind == "all_gather":
            for output, own in zip(call.outputs, kept, strict=True):
                _write_part(output, place * own.numel(), own)
        elif call.kind == "all_gather_list":
            for i, own in enumerate(kept):
                call.outputs[i * count + place].copy_(own)
        elif call.kind in ("gather", "scatter", "all_to_all_list"):
            own = kept[0] if call.kind == "gather" else kept[place]
            if call.kind != "gather" or place == call.root:
                call.outputs[0 if call.kind == "scatter" else place].copy_(own)
        elif call.kind == "all_to_all":
            own = kept[0].split(list(call.input_splits))[place]
            call.outputs[0].split(list(call.output_splits))[place].copy_(own)


def _received(call: Call, place: int) -> Sequence[Tensor]:
    """The tensors into which a member receives; none where it only sends."""
    if call.kind == "broadcast":
        return () if place == call.root else call.inputs
    if call.kind == "reduce":
        return call.inputs if place == call.root else ()
    return call.inputs if call.kind == "all_reduce" else call.outputs


def _nothing(call: Call, tensor: Tensor) -> Tensor:
    """What leaves a reduction as it is without this rank; zeros elsewhere."""
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


def _flip(strike: Strike, call: Call, tensors: Sequence[Tensor], *, verb: str) -> None:
    """Flip one bit of one element, stated or drawn."""
    fault, drawn = strike.fault, strike.random
    stops = list(itertools.accumulate(tensor.numel() for tensor in tensors))
    count = stops[-1] if stops else 0
    if count == 0:
        strike.missed(f"the rank {verb} no element in this {call.kind}")
        return
    element = drawn.randrange(count) if fault.element is None else fault.element
    if element >= count:
        strike.missed(
            f"the rank {verb} only {count} elements, so there is none with index {element}"
        )
        return
    which = next(i for i, stop in enumerate(stops) if element < stop)
    tensor, offset = tensors[which], element - (stops[which - 1] if which else 0)
    bits = 1 if tensor.dtype == torch.bool else 8 * tensor.element_size()
    bit = drawn.randrange(bits) if fault.bit is None else fault.bit
    if bit >= bits or tensor.element_size() not in _INT_OF:
        strike.missed(f"bit {bit} is not one of the {bits} bits of a {tensor.dtype}")
        return
    value = tensor.detach().reshape(-1)[offset : offset + 1].clone()
    before = value.item()
    mask = -(1 << bit) if bit == bits - 1 > 0 else 1 << bit
    value.view(_INT_OF[tensor.element_size()]).bitwise_xor_(mask)
    _write_part(tensor.detach(), offset, value)
    strike.fired(f"bit {bit} of element {element} that it {verb}: {before!r} -> {value.item()!r}")


def _write_part(tensor: Tensor, start: int, part: Tensor) -> None:
    """Write consecutive elements, counted in the tensor's logical order."""
    flat = tensor.reshape(-1)
    flat[start : start + part.numel()] = part.reshape(-1)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
