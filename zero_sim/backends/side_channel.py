"""Side channel of a real rank: messages and signs of life, in a shared store.

It uses no process group, so it does not interfere with the system's collectives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_sim.errors import ZeroSimError

# Smallest interval between two signs of life.
_SIGN_SECONDS = 0.25


class RankGone(ZeroSimError):
    """Another rank gave up on the program, so it sends no more messages."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} gave up")


class SideChannel:
    """A rank's side of the channel, for one program after another.

    All processes share the store.
    """

    def __init__(self, *, rank: int, store: dist.Store) -> None:
        self.rank = rank
        self.number = -1
        """Program number, the same on all ranks."""
        self.on_sign: Callable[[], None] = lambda: None
        """Called from time to time as a sign of life."""
        self.is_listening = False
        """True while waiting for messages. Then the other ranks decide how long it takes."""
        self._store = store
        self._last_sign = 0.0
        # Keys of this program and of the last.
        self._sent: set[str] = set()
        self._earlier: set[str] = set()

    def begin(self, number: int) -> None:
        """Start a program. A unique number, the same on all processes, keeps messages apart."""
        # A rank that starts this program has read all messages of the program before the last.
        for key in self._earlier:
            # A store never forgets by itself, and a campaign has thousands of programs.
            self._store.delete_key(key)
        self._earlier, self._sent = self._sent, set()
        self.number = number
        self._last_sign = 0.0

    def alive(self) -> None:
        """Give a sign of life, unless the last one is recent."""
        now = time.monotonic()
        if now - self._last_sign > _SIGN_SECONDS:
            self._last_sign = now
            self.on_sign()

    def exchange(self, what: Any, *, size: int, about: str = "") -> list[Any]:
        """Send a JSON value to all ranks, and receive theirs.

        Args:
            what: Value of this rank.
            size: Number of ranks taking part, including this rank.
            about: Name of the exchange, if a program has several.

        Returns:
            Values in rank order.

        Raises:
            RankGone: A rank withdrew.
        """
        key = self._send({"says": what}, about=about)
        self.is_listening = True
        try:
            # Blocks until all keys exist.
            received = self._store.multi_get([f"{key}/{rank}" for rank in range(size)])
        finally:
            self.is_listening = False
        self.alive()
        return [_content(each, rank=rank) for rank, each in enumerate(received)]

    def send(self, what: Any, *, about: str) -> None:
        """Send a JSON value to all ranks, under a name that is unique in the program.

        The ranks need not receive it.
        """
        self._send({"says": what}, about=about)

    def receive(self, rank: int, *, about: str, seconds: float) -> Any:
        """Receive the message that a rank sent under a name.

        Raises:
            RankGone: The rank withdrew.
            TimeoutError: No message came in time.
        """
        key = f"{self._key(about)}/{rank}"
        self.is_listening = True
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            raise TimeoutError(f"rank {rank} sent nothing about {about!r}") from None
        finally:
            self.is_listening = False
        received = self._store.get(key)
        self.alive()
        return _content(received, rank=rank)

    def has_sent(self, rank: int, *, about: str) -> bool:
        """Return True if a rank has sent or withdrawn a message."""
        return self._store.check([f"{self._key(about)}/{rank}"])

    def withdraw(self, abouts: Sequence[str]) -> bool:
        """Withdraw messages that this rank has not sent, so that no rank waits for them.

        Returns:
            True if there was any such message among the names.
        """
        left = [each for each in abouts if f"{self._key(each)}/{self.rank}" not in self._sent]
        for about in left:
            self._send({}, about=about)
        return bool(left)

    def _key(self, about: str) -> str:
        # The program's number keeps earlier programs' late messages apart.
        return f"told/{self.number}/{about}"

    def _send(self, what: Any, *, about: str) -> str:
        key = self._key(about)
        # Before the key is set, so that `withdraw` never sends a second message for it.
        self._sent.add(f"{key}/{self.rank}")
        self._store.set(f"{key}/{self.rank}", json.dumps(what))
        return key


def _content(received: bytes, *, rank: int) -> Any:
    """Return the value in a message.

    Raises:
        RankGone: The rank withdrew the message.
    """
    message = json.loads(received)
    if "says" not in message:
        raise RankGone(rank)
    return message["says"]
