"""Rendezvous of ranks: groups, their collectives, and point-to-point messages."""

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
"""Name of the default group, which contains all ranks."""

_NO_FAULTS: Mapping[int, Sequence[DueFault]] = MappingProxyType({})


class Collective:
    """A group's collective. It is open until all members have called, then performed."""

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
    """None, because all members share this object."""

    def __init__(self, group: Group, sequence: int, *, kind: str) -> None:
        self.group = group
        self.kind = kind
        self.sequence = sequence
        # Indexed by group rank; None for members that have not called.
        self.calls: list[Call | None] = [None] * len(group.ranks)
        self.signatures: list[Signature | None] = [None] * len(group.ranks)
        self.due_faults = _NO_FAULTS
        """Planned faults in the data, by group rank."""
        self.missing_count = len(group.ranks)
        self.done = False
        self.given_up: TimedOut | None = None
        """Time-out of a member that gave up. Then the collective never completes."""
        # True if two members passed different offsets; see `SwapWatch`.
        self.shifted = False
        self.waiters: list[int] = []

    @property
    def name(self) -> str:
        """Name for messages, such as `collective #3 of group world`."""
        return f"collective #{self.sequence} of group {self.group.label}"

    @property
    def doing(self) -> str:
        """See `Awaited.doing`."""
        return f"waits in {self.what}"

    @property
    def what(self) -> str:
        """See `Pending.what`."""
        return f"{self.kind} #{self.sequence} of group {self.group.label}"

    @property
    def key(self) -> str:
        """See `Pending.key`."""
        return f"{self.group.name}|{self.sequence}"

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.group.ranks)

    @property
    def strict(self) -> bool:
        """True if the group is strict."""
        return self.group.strict

    @property
    def full(self) -> bool:
        """True once all members have called."""
        return not self.missing_count

    @property
    def members(self) -> Sequence[Call]:
        """Calls so far, in group-rank order."""
        return [call for call in self.calls if call is not None]

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that have not called."""
        pairs = zip(self.group.ranks, self.calls, strict=True)
        return tuple(rank for rank, call in pairs if call is None)

    def join(self, group_rank: int, call: Call) -> bool:
        """Add a member's call. Return True if all members have called now.

        Raises:
            ContractViolation: The call is wrong by itself, or conflicts with another member's call.
        """
        group, ranks = self.group, self.group.ranks
        signature = check_call(call, group_rank=group_rank, ranks=ranks, strict=group.strict)
        # Compare with the first call only, because all earlier calls agree with each other.
        for other, first in enumerate(self.calls):
            earlier = self.signatures[other]
            if first is not None and earlier is not None:
                # Equal signatures are the common case; see [Note: one comparison] in `fitting`.
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
        # Sizes that may differ by rank can only be compared once all members have called.
        if call.kind in FREE_SIZES:
            fitting.check_all(calls, ranks=ranks, what=self.name, strict=group.strict)
        if self.shifted and group.strict:
            group.swaps.check(calls, ranks=ranks, sequence=self.sequence, what=self.name)
        return True

    def add_faults(self, group_rank: int, due_faults: Sequence[DueFault]) -> None:
        """Note planned faults in a member's data."""
        self.due_faults = {**self.due_faults, group_rank: due_faults}

    def conclude(self) -> None:
        """Note that the data has moved."""
        self.done = True
        # References to tensors would keep the ranks' memory alive.
        self.calls, self.signatures = [], []


class Message:
    """A send or a receive, which is matched with its other half."""

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
    """None, because messages have no time-out."""
    due_faults = _NO_FAULTS
    """Empty, because faults apply to collectives only."""
    size = 2

    def __init__(
        self, group: Group, *, rank: int, peer: int | None, call: Call, number: int
    ) -> None:
        self.group = group
        self.rank = rank
        self.peer = peer
        self.call = call
        self.number = number
        """Number of earlier sends and receives of this rank."""
        self.joins: Message | None = None
        """The other half, if it came first."""
        self.done = False
        self.waiters: list[int] = []
        # The sender's group rank. `_match` sets it for a receive from any rank.
        self.source = -1 if peer is None else peer

    @property
    def whom(self) -> str:
        """World rank of the peer, or `any`."""
        return "any" if self.peer is None else str(self.group.ranks[self.peer])

    @property
    def doing(self) -> str:
        """See `Awaited.doing`."""
        whom = "any rank" if self.peer is None else f"rank {self.whom}"
        side = "to" if self.call.kind == "send" else "from"
        return f"waits in {self.call.kind} {side} {whom} in group {self.group.label}"

    @property
    def what(self) -> str:
        """Name of the operation, such as `send to rank 3 in group world`."""
        side = "to" if self.call.kind == "send" else "from"
        return f"{self.call.kind} {side} rank {self.whom} in group {self.group.label}"

    @property
    def key(self) -> str:
        """See `Pending.key`."""
        return f"{self.group.name}|{self.rank}|{self.number}"

    @property
    def strict(self) -> bool:
        """True if the group is strict."""
        return self.group.strict

    @property
    def full(self) -> bool:
        """True if this half came after the other."""
        return self.joins is not None

    @property
    def members(self) -> Sequence[Call]:
        """The send and its receive if this half came second; otherwise this half only."""
        if self.joins is None:
            return [self.call]
        calls = [self.call, self.joins.call]
        return calls if self.call.kind == "send" else calls[::-1]

    @property
    def missing(self) -> tuple[int, ...]:
        """World rank of the peer; empty for a receive from any rank."""
        return () if self.peer is None else (self.group.ranks[self.peer],)

    def conclude(self) -> None:
        """Note that the data has moved."""
        self.done = True
        # A reference to the other half would keep its memory alive.
        self.joins = None


class Group:
    """State shared by the members of a process group."""

    def __init__(self, name: str, ranks: Sequence[int], *, label: str, strict: bool = True) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.label = label
        self.reset(strict=strict)

    def reset(self, *, strict: bool) -> None:
        """Forget an earlier program's operations, and count from 0 again."""
        self.strict = strict
        self.swaps = SwapWatch()
        self._issued: list[int] = [0] * len(self.ranks)
        self._open: dict[int, Collective] = {}
        # Unmatched halves, by (receiver's group rank, tag), in order of posting.
        self._sends: dict[tuple[int, int], deque[Message]] = {}
        self._receives: dict[tuple[int, int], deque[Message]] = {}
        self._messages: list[int] = [0] * len(self.ranks)

    def issued_by(self, group_rank: int) -> int:
        """Return the number of a member's collectives so far."""
        return self._issued[group_rank]

    def issue(self, group_rank: int, call: Call) -> tuple[Collective, int]:
        """Add a member's next call. Return the collective and its sequence number."""
        # Calls of the members with equal sequence numbers form a collective.
        sequence = self._issued[group_rank]
        self._issued[group_rank] = sequence + 1
        collective = self._open.get(sequence)
        if collective is None:
            collective = self._open[sequence] = Collective(self, sequence, kind=call.kind)
        if collective.join(group_rank, call):
            del self._open[sequence]
        return collective, sequence

    def send(self, group_rank: int, peer: int, *, tag: int, call: Call) -> Message:
        """Post a send. It joins its receive if that is already posted."""
        message = self._message(group_rank, peer, call)
        waiting = self._receives.get((peer, tag), deque())
        # In order of posting: messages with the same peer and tag do not overtake each other.
        for receive in waiting:
            if receive.peer in (None, group_rank):
                waiting.remove(receive)
                _match(message, receive)
                message.joins = receive
                return message
        self._sends.setdefault((peer, tag), deque()).append(message)
        return message

    def receive(self, group_rank: int, peer: int | None, *, tag: int, call: Call) -> Message:
        """Post a receive, from any member if `peer` is None. It joins its send like `send`."""
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
