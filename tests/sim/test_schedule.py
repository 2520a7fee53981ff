"""Preferences of schedules, and replay of recorded ones."""

import itertools

import pytest
import torch
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.sim import Choices, Replay, ScheduleDiverged, WorldFailure
from zero_sim.sim.schedule import Choosing, Pct, RoundRobin


def exchange(rank):
    """Take several turns per rank, with results that do not depend on their order."""
    total = torch.zeros(1)
    for step in range(3):
        x = torch.tensor([float(rank + step)])
        dist.all_reduce(x)
        total += x
    return total.item()


def drain(schedule, ready):
    for rank in ready:
        schedule.add(rank)
    return [schedule.pick() for _ in ready]


class TestPct:
    """PCT keeps priorities except for a few changes."""

    def pct(self, seed, *, depth=1, picks=100):
        return Pct(seed, world_size=4, depth=depth, picks=picks)

    def test_depth_one_keeps_one_order_throughout(self):
        schedule = self.pct(1)
        first = drain(schedule, range(4))
        assert [drain(schedule, range(4)) for _ in range(20)] == [first] * 20
        assert schedule.pick() is None

    def test_every_order_is_drawn(self):
        assert len({tuple(drain(self.pct(seed), range(4))) for seed in range(300)}) == 24

    @pytest.mark.parametrize("depth", [2, 3])
    def test_number_of_changes_is_bounded_by_the_depth(self, depth):
        def changes(seed):
            schedule = self.pct(seed, depth=depth, picks=40)
            orders = [tuple(drain(schedule, range(4))) for _ in range(20)]
            return sum(a != b for a, b in itertools.pairwise(orders))

        # A change of the rank that is last anyway does not show.
        assert {changes(seed) for seed in range(60)} == set(range(depth))

    def test_deferred_rank_comes_after_all_others(self):
        schedule = self.pct(0)
        favourite = drain(schedule, range(4))[0]
        schedule.defer(favourite)
        others = [rank for rank in range(4) if rank != favourite]
        assert drain(schedule, others)[-1] != favourite
        assert schedule.pick() == favourite

    def test_turns_depend_on_seed_and_depth(self, world_of):
        def turns(**settings):
            world = world_of(4, schedule="pct", **settings)
            assert world.run(exchange) == [30.0] * 4
            return tuple(world.log.turns)

        assert turns(seed=1) == turns(seed=1)
        assert len({turns(seed=seed) for seed in range(6)}) > 3
        assert len({turns(seed=1, depth=depth) for depth in (1, 30)}) == 2


class TestReplay:
    """Recorded turns reproduce the events, or are refused with the turn."""

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
    def test_replay_reproduces_the_recorded_run(self, world_of, timing, strict):
        world = world_of(3, schedule="random", timing=timing, seed=5)
        world.run(exchange)
        replay, digest = Replay(tuple(world.log.turns), strict=strict), world.log.digest()
        again = world_of(3, schedule=replay, timing=timing, seed=5)
        again.run(exchange)
        assert again.log.digest() == digest
        assert replay.diverged_at is None
        world_of(3, timing=timing, seed=5).run(exchange)
        assert world.log.digest() != digest

    def test_replay_reproduces_a_failure(self, world_of):
        def program(rank):
            exchange(rank)
            if rank == 2:
                raise ValueError("mine")
            exchange(rank)

        def failure(schedule):
            world = world_of(4, schedule=schedule, seed=3)
            with pytest.raises(WorldFailure) as caught:
                world.run(program)
            return str(caught.value), tuple(world.log.turns)

        text, turns = failure("random")
        assert failure(Replay(turns)) == (text, turns)

    @pytest.mark.parametrize(
        ("change", "position", "expected"),
        [
            (lambda turns: (*turns[:4], 7, *turns[5:]), 4, "rank 7 to run at turn 4"),
            (lambda turns: turns[:6], 6, "to end after 6 turns"),
            (lambda turns: (), 0, "to end after 0 turns"),
        ],
    )
    def test_diverging_replay_names_the_turn(self, world_of, change, position, expected):
        world = world_of(3)
        world.run(exchange)
        recipe = Replay(change(tuple(world.log.turns)))
        with pytest.raises(ScheduleDiverged, match=expected) as caught:
            world_of(3, schedule=recipe).run(exchange)
        assert caught.value.position == position
        assert isinstance(caught.value, UsageError)
        assert world_of(3).run(exchange) == [18.0] * 3


class TestChoices:
    """Schedules given as a list of numbers."""

    def test_no_choices_are_round_robin(self):
        assert drain(Choosing(()), range(5)) == drain(RoundRobin(), range(5)) == [0, 1, 2, 3, 4]

    def test_a_choice_is_an_index_modulo_the_ready_ranks(self):
        assert drain(Choosing((2, 5, 1)), range(4)) == [2, 3, 1, 0]

    def test_choices_determine_the_turns_of_a_world(self, world_of):
        world = world_of(3, schedule=Choices((2, 1)))
        assert world.run(exchange) == [18.0] * 3
        assert world.log.turns[:3] == [2, 1, 0]
