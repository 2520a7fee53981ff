"""Types of arguments, and functions whose call does not run their body."""

import asyncio
import functools

import numpy as np
import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.host.arguments import check_kind, is_of_kind, unrun_function, unrun_result


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("a name", ["linear"], [None, 1, b"linear", ["linear"]]),
        ("an integer", [0, -3, np.int64(2)], [True, "2", 2.0, None, np.float32(2), torch.ones(2)]),
        ("a number", [1, 0.5, np.float32(0.5)], [True, "1", None, 1j]),
        ("True or False", [True, False], [0, 1, None, "no"]),
        ("a list", [[], ()], ["", None, {}]),
        ("a name or a recipe", ["random", object()], [None]),
    ],
)
def test_values_match_their_kind(kind, right, wrong):
    assert all(is_of_kind(value, kind) for value in right)
    assert not any(is_of_kind(value, kind) for value in wrong)


def test_wrong_kind_is_named_with_its_value():
    with pytest.raises(UsageError, match="expected seed to be an integer, got 'a'"):
        check_kind("seed", "a", "an integer")


async def coroutine(rank):
    return rank


async def async_generator(rank):
    yield rank


def generator(rank):
    yield rank


class Called:
    """Object whose call is a coroutine."""

    async def __call__(self, rank):
        return rank

    def plain(self, rank):
        return rank

    def yielding(self, rank):
        yield rank


class TestUnrun:
    """A wrapper counts as its wrapped function only if calling it calls that function."""

    @pytest.mark.parametrize(
        ("function", "kind"),
        [
            (coroutine, "an async def function"),
            (async_generator, "an async def function"),
            (functools.partial(functools.partial(coroutine)), "an async def function"),
            (Called(), "an async def function"),
            (functools.partial(Called()), "an async def function"),
            (generator, "a generator function"),
            (Called().yielding, "a generator function"),
            (functools.partial(generator), "a generator function"),
            (lambda rank: rank, None),
            (Called().plain, None),
            (Called, None),
            (print, None),
            (functools.wraps(coroutine)(lambda rank: asyncio.run(coroutine(rank))), None),
        ],
    )
    def test_unrun_function_is_recognized(self, function, kind):
        assert unrun_function(function) == kind

    @pytest.mark.parametrize(
        ("function", "kind"),
        [
            (coroutine, "an async def function"),
            (async_generator, "an async def function"),
            (generator, "a generator function"),
            (lambda rank: [rank], None),
            (lambda rank: iter([rank]), None),
        ],
    )
    def test_unrun_result_is_recognized(self, function, kind):
        assert unrun_result(function(0)) == kind
