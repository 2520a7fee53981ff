"""Side channel of a real rank: what ranks tell each other, and signs of life, in a shared store.

No process group takes part, so none of the system's collectives is in the way of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_sim.errors import ZeroSimError

_SIGN_SECONDS = 0.25
"""Least time between two signs of life."""


class RankGone(ZeroSimError):
    """Another rank gave up on the program, so that there is nothing to hear from it any more."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} gave up")


class SideChannel:
    """One rank's side of the channel, for one program after another.

    Args:
        rank: Rank among all processes.
        store: Shared by all processes.
    """

    def __init__(self, *, rank: int, store: dist.Store) -> None:
        self.rank = rank
        self.number = -1
        """Number of the program, the same for all ranks."""
        self.on_sign: Callable[[], None] = lambda: None
        """Called now and then as a sign of life."""
        self.is_listening = False
        """True while it waits for messages of others: then it must get on."""
        self._store = store
        self._last_sign = 0.0
        self._told: set[str] = set()
        self._earlier: set[str] = set()

    def begin(self, number: int) -> None:
        """Start on a program that all processes call by the same number.

        Args:
            number: Different from all before. What ranks tell each other about one program cannot
                be taken for what they tell about another.
        """
        # Whoever is here has heard all of the program before the last one, as everybody else has.
        for key in self._earlier:
            self._store.delete_key(key)
        self._earlier, self._told = self._told, set()
        self.number = number
        self._last_sign = 0.0

    def alive(self) -> None:
        """Give a sign of life, if the last one is some time ago."""
        now = time.monotonic()
        if now - self._last_sign > _SIGN_SECONDS:
            self._last_sign = now
            self.on_sign()

    def exchange(self, what: Any, *, size: int, about: str = "") -> list[Any]:
        """Tell all ranks something and hear the same from each; no process group takes part.

        Args:
            what: Anything that can be written as JSON.
            size: Number of ranks that take part, this one among them.
            about: Which exchange it is, where a program has several.

        Returns:
            What each rank told, in rank order.

        Raises:
            RankGone: A rank withdrew.
        """
        key = self._tell({"says": what}, about=about)
        self.is_listening = True
        try:
            heard = self._store.multi_get([f"{key}/{rank}" for rank in range(size)])
        finally:
            self.is_listening = False
        self.alive()
        return [_said(each, rank=rank) for rank, each in enumerate(heard)]

    def tell(self, what: Any, *, about: str) -> None:
        """Tell all ranks something; nobody need hear it.

        Args:
            what: Anything that can be written as JSON.
            about: What it is about, told once in a program.
        """
        self._tell({"says": what}, about=about)

    def hear(self, rank: int, *, about: str, seconds: float) -> Any:
        """What a rank tells; no process group takes part.

        Args:
            rank: Who tells it.
            about: What it is about.
            seconds: How long to wait for it.

        Raises:
            RankGone: The rank withdrew.
            TimeoutError: It has told nothing by then.
        """
        key = f"{self._key(about)}/{rank}"
        self.is_listening = True
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            raise TimeoutError(f"rank {rank} told nothing about {about!r}") from None
        finally:
            self.is_listening = False
        heard = self._store.get(key)
        self.alive()
        return _said(heard, rank=rank)

    def has_told(self, rank: int, *, about: str) -> bool:
        """Whether a rank has told something, or that it will not.

        Args:
            rank: Who would tell it.
            about: What it is about.
        """
        return self._store.check([f"{self._key(about)}/{rank}"])

    def withdraw(self, abouts: Sequence[str]) -> bool:
        """Let nobody wait for what this rank will not tell any more.

        Args:
            abouts: What others may wait for in this program; what was told is passed over.

        Returns:
            Whether any of it had not been told.
        """
        left = [each for each in abouts if f"{self._key(each)}/{self.rank}" not in self._told]
        for about in left:
            self._tell({}, about=about)
        return bool(left)

    def _key(self, about: str) -> str:
        return f"told/{self.number}/{about}"

    def _tell(self, what: Any, *, about: str) -> str:
        key = self._key(about)
        self._told.add(f"{key}/{self.rank}")
        self._store.set(f"{key}/{self.rank}", json.dumps(what))
        return key


def _said(heard: bytes, *, rank: int) -> Any:
    """What a rank told.

    Raises:
        RankGone: That it will not.
    """
    told = json.loads(heard)
    if "says" not in told:
        raise RankGone(rank)
    return told["says"]
