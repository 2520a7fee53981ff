"""Calls distributed over processes: each is reported, and none is lost because of another."""

import os
from concurrent.futures import BrokenExecutor

import pytest

from zero_sim.backends.pool import share_out


def divide(number, by):
    return os.getpid(), number / by


def end_unless(number):
    if number == 1:
        os._exit(3)
    return number


def test_every_call_is_reported_with_its_position():
    ended = dict(share_out(divide, [(number, 2) for number in range(6)], jobs=2))
    assert {place: done.result()[1] for place, done in ended.items()} == {
        number: number / 2 for number in range(6)
    }
    pids = {done.result()[0] for done in ended.values()}
    assert os.getpid() not in pids
    assert len(pids) == 2


def test_no_more_processes_than_calls():
    assert len(list(share_out(divide, [(1, 1)], jobs=8))) == 1
    assert list(share_out(divide, [], jobs=2)) == []


def test_error_of_a_call_is_in_its_future():
    ended = dict(share_out(divide, [(1, 0), (1, 1)], jobs=1))
    assert isinstance(ended[0].exception(), ZeroDivisionError)
    assert ended[1].result()[1] == 1


def test_dead_process_loses_only_its_call():
    ended = dict(share_out(end_unless, [(number,) for number in range(3)], jobs=1))
    assert isinstance(ended[1].exception(), BrokenExecutor)
    assert [ended[place].result() for place in (0, 2)] == [0, 2]


def test_closing_ends_the_processes():
    stream = share_out(divide, [(1, 1)] * 3, jobs=1)
    _, done = next(stream)
    pid = done.result()[0]
    stream.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
