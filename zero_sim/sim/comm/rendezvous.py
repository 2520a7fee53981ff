"""Rendezvous of ranks: groups, collectives that fill up call by call, and messages of two ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zero_sim.sim.call import Call
from zero_sim.sim.contract import fitting
from zero_sim.sim.contract.single_call import FREE_SIZES, Signature, check_call
from zero_sim.sim.contract.swaps import SwapWatch
from zero_sim.sim.failures import TimedOut
from zero_sim.sim.faults import DueFault

DEFAULT_GROUP = "0"
"""Name of the group of all ranks."""

_NO_FAULTS: Mapping[int, Sequence[DueFault]] = MappingProxyType({})


class Collective:
    """One collective of one group: open until every member has called it, then performed."""

    __slots__ = (
        "calls",
        "done",
        "due_faults",
        "given_up",
        "group",
        "kind",
        "missing_count",
        "sequence",
        "shifted",
        "signatures",
        "waiters",
    )

    joins = None
    """Its members all have the same one."""

    def __init__(self, group: Group, sequence: int, *, kind: str) -> None:
        self.group = group
        self.kind = kind
        self.sequence = sequence
        self.calls: list[Call | None] = [None] * len(group.ranks)
        self.signatures: list[Signature | None] = [None] * len(group.ranks)
        self.due_faults = _NO_FAULTS
        """Planned faults that act on its data, by the group rank of the member."""
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
        return f"waits in {self.what}"

    @property
    def what(self) -> str:
        """The operation in words."""
        return f"{self.kind} #{self.sequence} of group {self.group.label}"

    @property
    def key(self) -> str:
        """Names it among the operations of a run, whatever the schedule."""
        return f"{self.group.name}|{self.sequence}"

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.group.ranks)

    @property
    def strict(self) -> bool:
        """As of its group."""
        return self.group.strict

    @property
    def full(self) -> bool:
        """Whether all members are there."""
        return not self.missing_count

    @property
    def members(self) -> Sequence[Call]:
        """The members' calls in group-rank order, of those that are there."""
        return [call for call in self.calls if call is not None]

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
        signature = check_call(call, group_rank=group_rank, ranks=ranks, strict=group.strict)
        for other, first in enumerate(self.calls):
            earlier = self.signatures[other]
            if first is not None and earlier is not None:
                if earlier.alike != signature.alike:
                    fitting.check_pair(
                        first,
                        call,
                        ranks=(ranks[other], ranks[group_rank]),
                        what=self.name,
                        strict=group.strict,
                    )
                self.shifted |= earlier.offsets != signature.offsets
                break
        self.calls[group_rank] = call
        self.signatures[group_rank] = signature
        self.missing_count -= 1
        if self.missing_count:
            return False
        calls = self.members
        if call.kind in FREE_SIZES:
            fitting.check_all(calls, ranks=ranks, what=self.name, strict=group.strict)
        if self.shifted and group.strict:
            group.swaps.check(calls, ranks=ranks, sequence=self.sequence, what=self.name)
        return True

    def add_faults(self, group_rank: int, due_faults: Sequence[DueFault]) -> None:
        """Note planned faults that act on what a member sends or receives."""
        self.due_faults = {**self.due_faults, group_rank: due_faults}

    def conclude(self) -> None:
        """Note that the data has moved; keeping the tensors would keep the ranks' memory alive."""
        self.done = True
        self.calls, self.signatures = [], []


class Message:
    """One send or receive until its other half comes."""

    __slots__ = (
        "call",
        "done",
        "group",
        "joins",
        "number",
        "peer",
        "rank",
        "source",
        "waiters",
    )

    given_up = None
    """Nobody gives up a message."""
    due_faults = _NO_FAULTS
    """Faults are planned for collectives."""
    size = 2

    def __init__(
        self, group: Group, *, rank: int, peer: int | None, call: Call, number: int
    ) -> None:
        self.group = group
        self.rank = rank
        self.peer = peer
        self.call = call
        self.number = number
        """How many sends and receives the rank had posted before."""
        self.joins: Message | None = None
        """Its other half, where that was there first."""
        self.done = False
        self.waiters: list[int] = []
        self.source = -1 if peer is None else peer

    @property
    def whom(self) -> str:
        """World rank of the peer, or `any`."""
        return "any" if self.peer is None else str(self.group.ranks[self.peer])

    @property
    def doing(self) -> str:
        """What the rank waits for, for the deadlock table."""
        whom = "any rank" if self.peer is None else f"rank {self.whom}"
        side = "to" if self.call.kind == "send" else "from"
        return f"waits in {self.call.kind} {side} {whom} in group {self.group.label}"

    @property
    def what(self) -> str:
        """The operation in words."""
        side = "to" if self.call.kind == "send" else "from"
        return f"{self.call.kind} {side} rank {self.whom} in group {self.group.label}"

    @property
    def key(self) -> str:
        """Names it among the operations of a run, whatever the schedule."""
        return f"{self.group.name}|{self.rank}|{self.number}"

    @property
    def strict(self) -> bool:
        """As of its group."""
        return self.group.strict

    @property
    def full(self) -> bool:
        """Whether it came after its other half."""
        return self.joins is not None

    @property
    def members(self) -> Sequence[Call]:
        """The send and its receive, where this one came after the other."""
        if self.joins is None:
            return [self.call]
        calls = [self.call, self.joins.call]
        return calls if self.call.kind == "send" else calls[::-1]

    @property
    def missing(self) -> tuple[int, ...]:
        """World rank of the peer."""
        return () if self.peer is None else (self.group.ranks[self.peer],)

    def conclude(self) -> None:
        """Note that the data has moved; keeping the peer's half would keep its memory alive."""
        self.done = True
        self.joins = None


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
            collective = self._open[sequence] = Collective(self, sequence, kind=call.kind)
        if collective.join(group_rank, call):
            del self._open[sequence]
        return collective, sequence

    def send(self, group_rank: int, peer: int, *, tag: int, call: Call) -> Message:
        """Post a send; it joins its receive, if that is already there."""
        message = self._message(group_rank, peer, call)
        waiting = self._receives.get((peer, tag), deque())
        for receive in waiting:
            if receive.peer in (None, group_rank):
                waiting.remove(receive)
                _match(message, receive)
                message.joins = receive
                return message
        self._sends.setdefault((peer, tag), deque()).append(message)
        return message

    def receive(self, group_rank: int, peer: int | None, *, tag: int, call: Call) -> Message:
        """Post a receive, from any member where `peer` is None; it joins its send, if there."""
        message = self._message(group_rank, peer, call)
        waiting = self._sends.get((group_rank, tag), deque())
        for send in waiting:
            if peer in (None, send.rank):
                waiting.remove(send)
                _match(send, message)
                message.joins = send
                return message
        self._receives.setdefault((group_rank, tag), deque()).append(message)
        return message

    def _message(self, group_rank: int, peer: int | None, call: Call) -> Message:
        number = self._messages[group_rank]
        self._messages[group_rank] = number + 1
        return Message(self, rank=group_rank, peer=peer, call=call, number=number)


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
