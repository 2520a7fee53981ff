"""Requests to begin no further case."""

import signal
import threading
import time

import pytest

from zero_sim.backends.stop import Stop, interrupts_ask
from zero_sim.host import signals


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Separate the signals of one test from those of another."""
    monkeypatch.setattr(signals, "_last_heard", -signals.SAME_SECONDS)


@pytest.fixture(autouse=True)
def _heard():
    """Restore default handlers, because `nohup` and background shells ignore these signals."""
    before = {number: signal.getsignal(number) for number in signals.ENDING}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", signals.ENDING)
def test_first_interrupt_only_requests_a_stop(number):
    stop = Stop()
    with interrupts_ask(stop):
        signal.raise_signal(number)
        assert (stop.requested, stop.now) == (True, True)


def test_two_simultaneous_signals_count_as_one(monkeypatch):
    monkeypatch.setattr(signals, "SAME_SECONDS", 1000.0)
    monkeypatch.setattr(signals, "_last_heard", -1e9)
    with interrupts_ask(Stop()):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_ignored_signal_stays_ignored():
    """This happens under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with interrupts_ask(stop):
            signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_interrupt_raises():
    with interrupts_ask(Stop(requested=True)), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_previous_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_ask(Stop()):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_non_main_thread_changes_no_handler():
    seen = []

    def listen():
        with interrupts_ask(Stop()):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_passed_deadline_requests_a_stop():
    assert Stop(deadline=time.monotonic()).now
    assert not Stop(deadline=time.monotonic() + 1000).now
