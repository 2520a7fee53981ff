"""Records of any length arrive intact, and an error on one rank is raised on all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zero_sim.checkpoint.all_or_none import Coordinator
from zero_sim.errors import CheckpointError

RANKS = 3
LENGTHS = (0, 1, 1000, 1012, 1013, 1016, 1024, 8177, 8182, 8184, 8192, 16_360, 16_375, 40_000)
"""Lengths around the frame sizes."""


@pytest.fixture
def teams(run_ranks):
    """Run `program(coordinator)` on simulated ranks."""

    def go(program, size=RANKS):
        def rank_program(rank):
            return program(Coordinator(dist.group.WORLD, device=torch.device("cpu")))

        return run_ranks(size, rank_program)

    return go


@pytest.fixture
def refusals(teams):
    """Run `program(coordinator)`, which must fail on every rank; returns the messages."""

    def go(program, size=RANKS):
        def failing(coordinator):
            with pytest.raises(CheckpointError) as caught:
                program(coordinator)
            return str(caught.value)

        return teams(failing, size)

    return go


def fail(message="it broke"):
    raise OSError(message)


@pytest.mark.parametrize("length", LENGTHS)
class TestLengths:
    """Data that does not fit into a frame follows it."""

    def test_share_reaches_all_ranks_intact(self, teams, length):
        def program(coordinator):
            return coordinator.share(
                lambda: "ab"[coordinator.rank % 2] * (length * coordinator.rank), what="W"
            )

        expected = ["", "b" * length, "a" * 2 * length]
        assert teams(program) == [expected] * RANKS

    def test_gather_and_decide_returns_all_records_intact(self, teams, length):
        def program(coordinator):
            return coordinator.gather_and_decide(
                lambda: ["x" * (length if coordinator.rank == 1 else 3)],
                lambda records: [[len(record[0]) for record in records], "y" * length],
                what="W",
            )

        assert teams(program) == [[[3, length, 3], "y" * length]] * RANKS

    def test_share_first_reaches_all_ranks_intact(self, teams, length):
        data = bytes(range(256)) * (length // 256 + 1)
        assert (
            teams(lambda coordinator: coordinator.share_first(lambda: data[:length], what="W"))
            == [data[:length]] * RANKS
        )


class TestErrors:
    """Messages name the failing rank, and no rank waits for it."""

    @pytest.mark.parametrize("rank", range(RANKS))
    @pytest.mark.parametrize("way", ["attempt", "share", "gather_and_decide"])
    def test_error_on_one_rank_is_raised_on_all(self, refusals, rank, way):
        def program(coordinator):
            def act():
                return fail() if coordinator.rank == rank else "x" * 20_000 * (way != "attempt")

            more = [lambda records: records] if way == "gather_and_decide" else []
            return getattr(coordinator, way)(act, *more, what="Not done")

        assert refusals(program) == [f"Not done: rank {rank}: OSError: it broke"] * RANKS

    @pytest.mark.parametrize(
        ("way", "arguments", "who"),
        [
            ("attempt", (fail,), ""),
            ("gather_and_decide", (lambda: "x" * 20_000, lambda records: fail()), "rank 0: "),
            ("share_first", (fail,), "rank 0: "),
        ],
        ids=["all ranks alike", "the rank that decides", "the rank that tells"],
    )
    def test_error_common_to_ranks_is_reported_once(self, refusals, way, arguments, who):
        def program(coordinator):
            getattr(coordinator, way)(*arguments, what="Not done")

        assert set(refusals(program)) == {f"Not done: {who}OSError: it broke"}

    def test_long_message_is_cut(self, refusals):
        messages = refusals(
            lambda coordinator: coordinator.attempt(lambda: fail("é" * 9000), what="W")
        )
        assert len(set(messages)) == 1
        assert messages[0].startswith("W: OSError: ééé")
        assert len(messages[0]) < 400

    def test_record_that_json_cannot_encode_is_an_error(self, refusals):
        assert "TypeError" in refusals(lambda coordinator: coordinator.share(object, what="W"))[0]

    def test_first_error_is_the_cause(self, teams):
        def program(coordinator):
            with pytest.raises(CheckpointError) as caught:
                coordinator.attempt(lambda: fail() if coordinator.rank else None, what="W")
            return type(caught.value.__cause__)

        assert teams(program) == [type(None), OSError, OSError]


@pytest.mark.parametrize(
    ("way", "count"), [("attempt", 1), ("share", 1), ("gather_and_decide", 2), ("share_first", 1)]
)
def test_number_of_collectives(world_of, way, count):
    world = world_of(RANKS)

    def program(rank):
        coordinator = Coordinator(dist.group.WORLD, device=torch.device("cpu"))
        more = [lambda records: records] if way == "gather_and_decide" else []
        getattr(coordinator, way)(lambda: b"" if way == "share_first" else "", *more, what="W")

    world.run(program)
    assert len(world.log.collectives) == RANKS * count
