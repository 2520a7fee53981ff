"""One rank of a real backend: its process groups, and a side channel that uses none of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_sim.backends.folding import folding_backend
from zero_sim.backends.transports import find_transport
from zero_sim.errors import ZeroSimError

_SIGN_SECONDS = 0.25
"""Least time between two signs of life."""
_SET_UP_SECONDS = 300.0
"""How long making connections, the first call of NCCL included, counts as a sign of life."""


class RankGone(ZeroSimError):
    """Another rank gave up on the program, so that there is nothing to hear from it any more."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} gave up")


class RealRank:
    """This process as a rank that runs one program after another.

    Args:
        backend: `gloo` or `nccl`.
        rank: Its place among all processes.
        store: Shared by all processes; the side channel, and how groups find their members.
        timeout_seconds: How long a collective may take before the backend gives up.

    Raises:
        EnvironmentProblem: This machine has no such backend.
    """

    def __init__(
        self, *, backend: str, rank: int, store: dist.Store, timeout_seconds: float = 600.0
    ) -> None:
        self.transport = find_transport(backend)
        self.transport.check()
        self.backend = backend
        self.rank = rank
        self.store = store
        self.timeout_seconds = timeout_seconds
        self._open: tuple[int, str] | None = None
        self.on_sign: Callable[[], None] = lambda: None
        """Called now and then while this rank gets on."""
        self.is_listening = False
        """Whether it waits for what others tell: then it is one of those that must get on."""
        self.last_words = ""
        """Why this rank gave up on the program; empty where it did not."""
        self._set_up_by = 0.0
        """When connections that it makes are to be there."""
        self.memory: dict[Any, Any] = {}
        """What programs learnt that others need not learn again, the same on all processes."""
        self.is_spoilt = False
        """Whether this process may be of no use for another program."""
        self._last_sign = 0.0
        self._number = -1
        self._told: set[str] = set()
        self._earlier: set[str] = set()

    @property
    def is_setting_up(self) -> bool:
        """Whether it makes connections, which take long the first time and give no sign of life."""
        return time.monotonic() < self._set_up_by

    def begin(self, number: int) -> None:
        """Start on a program that all processes call by the same number.

        Args:
            number: Different from all before. What ranks tell each other about one program cannot
                be taken for what they tell about another.
        """
        # Whoever is here has heard all of the program before the last one, as everybody else has.
        for key in self._earlier:
            self.store.delete_key(key)
        self._earlier, self._told = self._told, set()
        self._number = number
        self.last_words = ""
        self._last_sign = 0.0

    def alive(self) -> None:
        """Give a sign of life, if the last one is some time ago."""
        now = time.monotonic()
        if now - self._last_sign > _SIGN_SECONDS:
            self._last_sign = now
            self.on_sign()

    @contextmanager
    def world(
        self, size: int, *, about: str = "", order: str | None = None, order_seed: int = 0
    ) -> Iterator[None]:
        """A default group of the first `size` processes, for one program.

        It is kept for the next program of that size if this one ended well everywhere and made no
        further groups: connecting anew takes longer than a small case.

        Args:
            size: Number of ranks; this process has to be one of them. The others call `leave`.
            about: Which one it is, where a program has several.
            order: Order in which reductions add, see `zero_sim.backends.folding`; None for whatever
                the backend itself does.
            order_seed: What that order draws from, if it draws.
        """
        name = self.transport.torch_name
        if order is not None:
            name = folding_backend(self.backend, order, seed=order_seed)
        if self._open != (size, name):
            self._join(name, size=size, about=about)
            self._open = (size, name)
        try:
            yield
        except BaseException:
            # Others may sit in a collective for ever: nobody is waited for, and who comes reads it.
            self._tell({"says": False}, about=f"left {about}")
            self.leave(abort=True)
            raise
        clean = len(dist.distributed_c10d._world.pg_map) == 1
        heard = self.exchange(clean, size=size, about=f"left {about}")
        if not all(heard):
            self.leave()

    def _join(self, backend: str, *, size: int, about: str) -> None:
        """Connect to the other ranks; when it returns, each of them has done so.

        A rank that connected and left again at once would cut those that still connect off.
        """
        self.leave()
        self._set_up_by = time.monotonic() + _SET_UP_SECONDS
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"{self._number}/{about}/{size}", self.store),
                rank=self.rank,
                world_size=size,
                timeout=timedelta(seconds=self.timeout_seconds),
                device_id=self.transport.bound_device,
            )
            self.transport.warm_up()
        except BaseException:
            self.withdraw([f"joined {about}"])
            self.leave(abort=True)
            raise
        finally:
            self._set_up_by = 0.0
        try:
            self.exchange(True, size=size, about=f"joined {about}")
        except BaseException:
            self.leave(abort=True)
            raise

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
            heard = self.store.multi_get([f"{key}/{rank}" for rank in range(size)])
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
            self.store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            raise TimeoutError(f"rank {rank} told nothing about {about!r}") from None
        finally:
            self.is_listening = False
        heard = self.store.get(key)
        self.alive()
        return _said(heard, rank=rank)

    def has_told(self, rank: int, *, about: str) -> bool:
        """Whether a rank has told something, or that it will not.

        Args:
            rank: Who would tell it.
            about: What it is about.
        """
        return self.store.check([f"{self._key(about)}/{rank}"])

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

    def leave(self, *, abort: bool = False) -> None:
        """Destroy every group of this process.

        Args:
            abort: Whether something may be under way that never comes to an end.
        """
        if abort:
            self.is_spoilt = self.transport.renews
            self.transport.abort()
        elif dist.is_initialized():
            dist.destroy_process_group()
        self._open = None

    def _key(self, about: str) -> str:
        return f"told/{self._number}/{about}"

    def _tell(self, what: Any, *, about: str) -> str:
        key = self._key(about)
        self._told.add(f"{key}/{self.rank}")
        self.store.set(f"{key}/{self.rank}", json.dumps(what))
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
