"""When no further case is begun."""

import signal
import threading
import time

import pytest

from zero_sim.launch import Stop, interrupts_ask


def test_the_first_interrupt_only_asks():
    stop = Stop()
    with interrupts_ask(stop):
        signal.raise_signal(signal.SIGINT)
        assert (stop.asked, stop.now) == (True, True)


def test_the_second_one_is_an_interrupt():
    with interrupts_ask(Stop(asked=True)), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_listened_before_listens_again():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_ask(Stop()):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_changes_nothing():
    seen = []

    def listen():
        with interrupts_ask(Stop()):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_deadline_is_a_wish_too():
    assert Stop(deadline=time.monotonic()).now
    assert not Stop(deadline=time.monotonic() + 1000).now
