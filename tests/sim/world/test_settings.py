"""Settings of a world with a wrong type or value, and programs that would not run."""

import asyncio
import functools

import numpy as np
import pytest
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.sim import Deadlock, Fault, World
from zero_sim.testing import explore


def refusal_of(make):
    with pytest.raises(UsageError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("size", ["2", 2.0, True, None, [2]])
def test_non_integer_world_size_is_refused(size):
    expected = f"expected world_size to be an integer, got {size!r}"
    assert refusal_of(lambda: World(size)) == expected


WRONG = {
    "seed": ("a", 1.0, True, None),
    "depth": ("3", 3.0, True, None),
    "races": ("no", 1, None),
    "strict": ("yes", 0, None),
    "initialized": ("yes", 1, None),
    "stall_seconds": ("60", True, None),
    "order": (1, None, ["linear"]),
    "timing": (1, None, ["eager"]),
    "schedule": (None, 3, ["random"]),
    "faults": ("crash", 1, None),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_setting_of_wrong_type_is_refused(world_of, name, value):
    message = refusal_of(lambda: World(2, **{name: value}))
    assert message.startswith(f"expected {name} to be ")
    assert message.endswith(f", got {value!r}")
    if value is not None:  # In configure(), None keeps the current setting.
        assert refusal_of(lambda: world_of(2).configure(**{name: value})) == message


def test_unknown_setting_is_refused(world_of):
    message = refusal_of(lambda: world_of(2).configure(sed=1))
    assert message.startswith("expected a setting of a world (order, ")
    assert message.endswith("), got 'sed'")


@pytest.mark.parametrize("seed", [2**64, -(2**64), 2**64 - 1])
def test_seed_outside_torchs_range_is_refused(seed):
    assert refusal_of(lambda: World(2, seed=seed)).startswith("expected seed between ")


def test_numpy_numbers_are_accepted(world_of):
    world = World(np.int64(2), seed=np.int32(3), depth=np.int8(2), stall_seconds=np.float32(9))
    with world:
        settings = (
            world.world_size,
            world.settings.seed,
            world.settings.depth,
            world.settings.stall_seconds,
        )
        assert [type(each) for each in settings] == [int, int, int, float]
        assert world.run(lambda rank: rank) == [0, 1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": "1"}, "expected rank of fault 0 to be an integer, got '1'"),
        ({"rank": 0, "call": None}, "expected call of fault 0 to be an integer, got None"),
        ({"rank": 0, "bit": 1.0}, "expected bit of fault 0 to be an integer, got 1.0"),
        ({"rank": 0, "at": "once"}, "expected at of fault 0 to be one of call, random, got 'once'"),
        (
            {"rank": 0, "side": "left"},
            "expected side of fault 0 to be one of send, receive, got 'left'",
        ),
    ],
)
def test_fault_field_of_wrong_type_is_refused(fields, said):
    assert refusal_of(lambda: World(2, faults=[Fault(kind="corrupt", **fields)])) == said


async def coroutine(rank):
    raise AssertionError


def generator(rank):
    yield rank


ASYNC = "expected a program that runs when it is called, got an async def function"
YIELDS = "expected a program that runs when it is called, got a generator function"
UNRUN = [
    (coroutine, ASYNC),
    (generator, YIELDS),
    (lambda rank: coroutine(rank), f"{ASYNC} that rank 0 called and returned"),
    (lambda rank: generator(rank), f"{YIELDS} that rank 0 called and returned"),
    (functools.wraps(coroutine)(lambda rank: coroutine(rank)), ASYNC),
]


class TestPrograms:
    """A program that would run nothing is refused instead of passing."""

    @pytest.mark.parametrize(("program", "said"), UNRUN)
    def test_program_that_runs_nothing_is_refused(self, world_of, program, said):
        world = world_of(2)
        assert refusal_of(lambda: world.run(program)).startswith(said)
        assert world.run(lambda rank: rank) == [0, 1]

    def test_coroutine_of_one_rank_is_refused_before_the_deadlock(self, world_of):
        def program(rank):
            return dist.barrier() if rank else coroutine(rank)

        assert "that rank 0 called" in refusal_of(lambda: world_of(2).run(program))
        with pytest.raises(Deadlock):
            world_of(2).run(lambda rank: dist.barrier() if rank else None)

    def test_program_that_runs_its_own_event_loop_is_accepted(self, world_of):
        async def value_of(rank):
            return rank

        def program(rank):
            return asyncio.run(value_of(rank))

        assert world_of(2).run(functools.wraps(value_of)(program)) == [0, 1]

    def test_non_callable_program_is_refused(self, world_of):
        assert refusal_of(lambda: world_of(2).run(3)) == "expected a function of the rank, got 3"

    def test_explore_refuses_a_coroutine(self):
        assert refusal_of(lambda: explore(coroutine, 2, runs_max=2)).startswith(ASYNC)
