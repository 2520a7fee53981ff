"""Where ranks meet: groups, collectives that fill up call by call, and mail between two ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from zero_sim.sim import contract
from zero_sim.sim.carriage import Carriage
from zero_sim.sim.collectives import PERFORM, Call
from zero_sim.sim.failures import ContractViolation
from zero_sim.sim.order import Order


class Collective:
    """One collective of one group: open until every member has called it, then done at once."""

    __slots__ = ("calls", "done", "group", "missing_count", "sequence", "waiters")

    def __init__(self, group: Group, sequence: int) -> None:
        self.group = group
        self.sequence = sequence
        self.calls: list[Call | None] = [None] * len(group.ranks)
        self.missing_count = len(group.ranks)
        self.done = False
        self.waiters: list[int] = []

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

    def join(self, group_rank: int, call: Call, order: Order) -> bool:
        """Add a member's call; the last one to come performs the collective.

        Returns:
            Whether the collective is done now.
        """
        ranks = self.group.ranks
        contract.check_call(call, rank=ranks[group_rank], world_size=len(ranks))
        for other, first in enumerate(self.calls):
            if first is not None:
                contract.check_pair(
                    first,
                    call,
                    ranks=(ranks[other], ranks[group_rank]),
                    what=f"collective #{self.sequence} of group {self.group.label}",
                )
                break
        self.calls[group_rank] = call
        self.missing_count -= 1
        if self.missing_count:
            return False
        calls = [call for call in self.calls if call is not None]
        if call.kind.startswith("all_to_all"):
            contract.check_all_to_all(calls, ranks=ranks)
        carriage = Carriage(calls)
        PERFORM[call.kind](carriage.calls, order)
        carriage.deliver()
        self.done = True
        # The data has moved; keeping the tensors would keep the ranks' memory alive.
        self.calls = []
        return True


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


class Group:
    """What the members of one process group share."""

    def __init__(self, name: str, ranks: Sequence[int], *, label: str) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.label = label
        self.reset()

    def reset(self) -> None:
        """Forget what an earlier program left open and start counting anew."""
        self._issued: list[int] = [0] * len(self.ranks)
        self._open: dict[int, Collective] = {}
        self._sends: dict[tuple[int, int], deque[Message]] = {}
        self._receives: dict[tuple[int, int], deque[Message]] = {}

    def issued_by(self, group_rank: int) -> int:
        """How many collectives a member has issued; the number of its next one."""
        return self._issued[group_rank]

    def issue(self, group_rank: int, call: Call, order: Order) -> tuple[Collective, int]:
        """Take a member's next collective; its number on this group pairs it with the others'.

        Returns:
            The collective and its sequence number.
        """
        sequence = self._issued[group_rank]
        self._issued[group_rank] = sequence + 1
        collective = self._open.get(sequence)
        if collective is None:
            collective = self._open[sequence] = Collective(self, sequence)
        if collective.join(group_rank, call, order):
            del self._open[sequence]
        return collective, sequence

    def send(
        self, group_rank: int, peer: int, *, tag: int, call: Call
    ) -> tuple[Message, Message | None]:
        """Post a send; delivers at once where the receive is already there.

        Returns:
            The send, and the receive that it completed, if any.
        """
        message = Message(self, rank=group_rank, peer=peer, tensor=call.inputs[0], call=call)
        waiting = self._receives.get((peer, tag), deque())
        for receive in waiting:
            if receive.peer in (None, group_rank):
                waiting.remove(receive)
                _deliver(message, receive)
                return message, receive
        self._sends.setdefault((peer, tag), deque()).append(message)
        return message, None

    def receive(
        self, group_rank: int, peer: int | None, *, tag: int, call: Call
    ) -> tuple[Message, Message | None]:
        """Post a receive, from any member where `peer` is None.

        Returns:
            The receive, and the send that completed it, if any.
        """
        message = Message(self, rank=group_rank, peer=peer, tensor=call.outputs[0], call=call)
        waiting = self._sends.get((group_rank, tag), deque())
        for send in waiting:
            if peer in (None, send.rank):
                waiting.remove(send)
                _deliver(send, message)
                return message, send
        self._receives.setdefault((group_rank, tag), deque()).append(message)
        return message, None


def _deliver(send: Message, receive: Message) -> None:
    if send.tensor.dtype != receive.tensor.dtype or send.tensor.numel() != receive.tensor.numel():
        ranks = send.group.ranks
        raise ContractViolation(
            "send and receive do not fit:\n"
            f"  rank {ranks[send.rank]}: {contract.describe(send.call)}\n"
            f"  rank {ranks[receive.rank]}: {contract.describe(receive.call)}",
            rank=ranks[send.rank],
            other_rank=ranks[receive.rank],
        )
    receive.tensor.copy_(send.tensor.reshape(receive.tensor.shape))
    send.done = receive.done = True
    receive.source = send.rank
