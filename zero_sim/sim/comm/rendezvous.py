"""Where ranks meet: groups, collectives that fill up call by call, and mail between two ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from zero_sim.sim.call import Call
from zero_sim.sim.comm.collectives import PERFORM
from zero_sim.sim.comm.planned_faults import Carriage
from zero_sim.sim.contract import fitting
from zero_sim.sim.contract.own_call import FREE_SIZES, check_call
from zero_sim.sim.contract.swaps import SwapWatch
from zero_sim.sim.failures import TimedOut
from zero_sim.sim.order import Order

DEFAULT_GROUP = "0"
"""Name of the group of all ranks."""


class Collective:
    """One collective of one group: open until every member has called it, then performed."""

    __slots__ = (
        "calls",
        "done",
        "given_up",
        "group",
        "missing_count",
        "sequence",
        "shifted",
        "waiters",
    )

    def __init__(self, group: Group, sequence: int) -> None:
        self.group = group
        self.sequence = sequence
        self.calls: list[Call | None] = [None] * len(group.ranks)
        self.missing_count = len(group.ranks)
        self.done = False
        self.given_up: TimedOut | None = None
        """What a member got that does not wait for it any more: it never comes to an end."""
        self.shifted = False
        self.waiters: list[int] = []

    @property
    def name(self) -> str:
        """Its number and group, for messages."""
        return f"collective #{self.sequence} of group {self.group.label}"

    @property
    def doing(self) -> str:
        """What a waiting rank waits for, for the deadlock table."""
        kind = next(call.kind for call in self.calls if call is not None)
        return f"waits in {kind} #{self.sequence} of group {self.group.label}"

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that have not called it."""
        pairs = zip(self.group.ranks, self.calls, strict=True)
        return tuple(rank for rank, call in pairs if call is None)

    def join(self, group_rank: int, call: Call) -> bool:
        """Add a member's call.

        Returns:
            Whether all members are there now.
        """
        group, ranks = self.group, self.group.ranks
        check_call(call, group_rank=group_rank, ranks=ranks, strict=group.strict)
        for other, first in enumerate(self.calls):
            if first is not None:
                if first.signature != call.signature:
                    fitting.check_pair(
                        first,
                        call,
                        ranks=(ranks[other], ranks[group_rank]),
                        what=self.name,
                        strict=group.strict,
                    )
                self.shifted |= first.offsets != call.offsets
                break
        self.calls[group_rank] = call
        self.missing_count -= 1
        if self.missing_count:
            return False
        calls = [call for call in self.calls if call is not None]
        if call.kind in FREE_SIZES:
            fitting.check_all(calls, ranks=ranks, what=self.name, strict=group.strict)
        if self.shifted and group.strict:
            group.swaps.check(calls, ranks=ranks, sequence=self.sequence, what=self.name)
        return True

    def perform(self, order: Order) -> None:
        """Move the data, all at once, after the last member has come."""
        calls = [call for call in self.calls if call is not None]
        carriage = Carriage(calls)
        PERFORM[calls[0].kind](carriage.calls, order)
        carriage.deliver()
        self.conclude()

    def conclude(self) -> None:
        """Note that the data has moved; keeping the tensors would keep the ranks' memory alive."""
        self.done = True
        self.calls = []


class Message:
    """One send or receive until its other half comes."""

    __slots__ = (
        "call",
        "done",
        "group",
        "missing_count",
        "peer",
        "rank",
        "source",
        "tensor",
        "waiters",
    )

    given_up = None
    """Nobody gives up a message."""

    def __init__(
        self, group: Group, *, rank: int, peer: int | None, tensor: Tensor, call: Call
    ) -> None:
        self.group = group
        self.rank = rank
        self.peer = peer
        self.tensor = tensor
        self.call = call
        self.done = False
        self.waiters: list[int] = []
        self.source = -1 if peer is None else peer

    @property
    def doing(self) -> str:
        """What the rank waits for, for the deadlock table."""
        whom = "any rank" if self.peer is None else f"rank {self.group.ranks[self.peer]}"
        side = "to" if self.call.kind == "send" else "from"
        return f"waits in {self.call.kind} {side} {whom} in group {self.group.label}"

    @property
    def missing(self) -> tuple[int, ...]:
        """World rank of the peer."""
        return () if self.peer is None else (self.group.ranks[self.peer],)

    def conclude(self) -> None:
        """Note that the data has moved."""
        self.done = True


class Group:
    """What the members of one process group share."""

    def __init__(self, name: str, ranks: Sequence[int], *, label: str, strict: bool = True) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.label = label
        self.reset(strict=strict)

    def reset(self, *, strict: bool) -> None:
        """Forget what an earlier program left open and start counting anew."""
        self.strict = strict
        self.swaps = SwapWatch()
        self._issued: list[int] = [0] * len(self.ranks)
        self._open: dict[int, Collective] = {}
        self._sends: dict[tuple[int, int], deque[Message]] = {}
        self._receives: dict[tuple[int, int], deque[Message]] = {}
        self._messages: list[int] = [0] * len(self.ranks)

    def issued_by(self, group_rank: int) -> int:
        """How many collectives a member has issued; the number of its next one."""
        return self._issued[group_rank]

    def issue(self, group_rank: int, call: Call) -> tuple[Collective, int]:
        """Take a member's next collective; its number on this group pairs it with the others'.

        Returns:
            The collective and its sequence number.
        """
        sequence = self._issued[group_rank]
        self._issued[group_rank] = sequence + 1
        collective = self._open.get(sequence)
        if collective is None:
            collective = self._open[sequence] = Collective(self, sequence)
        if collective.join(group_rank, call):
            del self._open[sequence]
        return collective, sequence

    def count_message(self, group_rank: int) -> int:
        """Count one more send or receive of a member; how many it had posted before."""
        posted = self._messages[group_rank]
        self._messages[group_rank] = posted + 1
        return posted

    def send(
        self, group_rank: int, peer: int, *, tag: int, call: Call
    ) -> tuple[Message, Message | None]:
        """Post a send.

        Returns:
            The send, and the receive that it meets, if that is already there.
        """
        message = Message(self, rank=group_rank, peer=peer, tensor=call.inputs[0], call=call)
        waiting = self._receives.get((peer, tag), deque())
        for receive in waiting:
            if receive.peer in (None, group_rank):
                waiting.remove(receive)
                _match(message, receive)
                return message, receive
        self._sends.setdefault((peer, tag), deque()).append(message)
        return message, None

    def receive(
        self, group_rank: int, peer: int | None, *, tag: int, call: Call
    ) -> tuple[Message, Message | None]:
        """Post a receive, from any member where `peer` is None.

        Returns:
            The receive, and the send that it meets, if that is already there.
        """
        message = Message(self, rank=group_rank, peer=peer, tensor=call.outputs[0], call=call)
        waiting = self._sends.get((group_rank, tag), deque())
        for send in waiting:
            if peer in (None, send.rank):
                waiting.remove(send)
                _match(send, message)
                return message, send
        self._receives.setdefault((group_rank, tag), deque()).append(message)
        return message, None


def _match(send: Message, receive: Message) -> None:
    ranks = send.group.ranks
    fitting.check_message(
        send.call,
        receive.call,
        ranks=(ranks[send.rank], ranks[receive.rank]),
        label=send.group.label,
        strict=send.group.strict,
    )
    receive.source = send.rank


def deliver(one: Message, other: Message) -> None:
    """Move the data of a send and the receive that it met, given in either order."""
    send, receive = (one, other) if one.call.kind == "send" else (other, one)
    receive.tensor.copy_(send.tensor.reshape(receive.tensor.shape))
    send.conclude()
    receive.conclude()
