"""Interrupts of a world while one of its ranks sleeps."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.sim import EventLog, World
from zero_sim.sim.world.run import Run


class Interrupted(threading.Event):
    """Event for the end of all ranks; the waiting thread is interrupted a number of times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.asleep = threading.Event()
        """Set by a rank once it has reached the point of the interrupt."""

    def wait(self, timeout: float | None = None) -> bool:
        if self.times:
            self.times -= 1
            self.asleep.wait()
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_second_interrupt_does_not_wait_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleeping rank, and ranks that wait for it, unwind whenever it wakes up."""
    ended, wake = Interrupted(times=2), threading.Event()
    raised: list[object] = []
    new_run = World._new_run

    def watched_run(world: World, log: EventLog) -> Run:
        run = new_run(world, log)
        run.baton.all_ended = ended
        return run

    def note(what: threading.ExceptHookArgs) -> None:
        raised.append(what.exc_value)
        ended.set()

    monkeypatch.setattr(threading, "excepthook", note)
    world = World(3)
    monkeypatch.setattr(World, "_new_run", watched_run)

    def program(rank: int) -> None:
        if rank == 2:
            ended.asleep.set()
            wake.wait()
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        world.run(program)
    world.close()
    wake.set()
    ended.wait()
    assert raised == []
    with pytest.raises(UsageError, match="expected an open world"):
        world.run(program)


def test_wait_for_ranks_is_split_into_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal just before a wait is handled only after it, so no wait may be long."""
    waits: list[float] = []

    def wait(event: threading.Event, seconds: float) -> bool:
        waits.append(seconds)
        return event.is_set()

    with World(1) as world:
        ended = world._run.baton.all_ended
    monkeypatch.setattr(threading.Event, "wait", wait)
    assert not ended.wait(2.5)
    assert waits == [1.0, 1.0, 0.5]
