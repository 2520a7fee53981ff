"""Mismatched calls are refused with both call sites and the last calls of both ranks."""

import time

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import ContractViolation, Deadlock


def both(first, second):
    """Program with one common call, after which rank 0 calls `first` and rank 1 `second`."""

    def program(rank):
        dist.barrier()
        return second() if rank else first()

    return program


def exchanged(rank):
    """Sum both halves of a buffer; rank 1 in the other order."""
    dist.barrier()
    halves = torch.ones(8).split(4)
    for half in reversed(halves) if rank else halves:
        dist.all_reduce(half)


EIGHT = {
    "operation": both(
        lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), src=0)
    ),
    "dtype": both(
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bfloat16)),
    ),
    "numel": both(lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(3))),
    "shape": both(
        lambda: dist.all_reduce(torch.ones(2, 3)), lambda: dist.all_reduce(torch.ones(3, 2))
    ),
    "missing-rank": both(lambda: dist.all_reduce(torch.ones(2)), lambda: None),
    "reduce-op": both(
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX),
    ),
    "root": both(
        lambda: dist.broadcast(torch.ones(2), src=0), lambda: dist.broadcast(torch.ones(2), src=1)
    ),
    "swapped-buffers": exchanged,
}
"""Eight kinds of mismatch that hang in other tools or give wrong sums."""


@pytest.mark.parametrize("kind", EIGHT)
def test_every_mismatch_is_reported_with_sites_and_history(world_of, violation_of, kind):
    world = world_of(2)
    if kind == "missing-rank":
        with pytest.raises(Deadlock, match="ranks that never came: 1") as caught:
            world.run(EIGHT[kind])
        assert str(caught.value).count("after barrier #0 of group world") == 2
        return
    violation = violation_of(world, EIGHT[kind], kind)
    text = str(violation)
    assert {violation.rank, violation.other_rank} == {0, 1}
    message = text.partition("last calls of")[0]
    assert message.count("rank 0: ") >= 1
    assert message.count("rank 1: ") >= 1
    assert message.count("test_contract.py:") >= 2
    for rank in (0, 1):
        assert f"last calls of rank {rank}:\n  barrier #0 of group world" in text


def test_violation_is_found_within_milliseconds_of_cpu_time(world_of):
    world, times = world_of(2), []
    for numel in range(1, 6):
        called = []

        def program(rank, numel=numel, called=called):
            x = torch.ones(numel + rank)
            called.append(time.process_time())
            dist.all_reduce(x)

        with pytest.raises(ContractViolation):
            world.run(program)
        times.append(time.process_time() - called[-1])
    assert min(times) < 0.01


def test_only_the_last_three_calls_are_shown(world_of, violation_of):
    def program(rank):
        for _ in range(5):
            dist.barrier()
        dist.all_reduce(torch.ones(1 + rank))

    text = str(violation_of(world_of(2), program, "numel"))
    # The first rank to call made this call last; the other rank's call was refused.
    assert [text.count(f"barrier #{number} ") for number in range(5)] == [0, 0, 1, 2, 2]
    assert text.count("all_reduce #5 ") == 1


@pytest.mark.parametrize(
    ("aspect", "words", "program"),
    [
        (
            "numel",
            "2 x 2 elements",
            lambda rank: dist.reduce_scatter_single(torch.empty(2), torch.ones(5)),
        ),
        (
            "dtype",
            "expected one dtype",
            lambda rank: dist.distributed_c10d._get_default_group().all_gather_single(
                torch.empty(4), torch.ones(2, dtype=torch.float64)
            ),
        ),
        (
            "split-sizes",
            "add up to 3 rows",
            lambda rank: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
        ),
    ],
)
def test_call_that_is_wrong_on_every_rank_names_one_rank(
    world_of, violation_of, aspect, words, program
):
    violation = violation_of(world_of(2), program, aspect)
    assert words in str(violation)
    assert violation.rank == violation.other_rank


class TestEntries:
    """Entries of lists are measured before data moves; an error names the rank of a misfit."""

    def test_all_gather_refuses_larger_input_of_one_rank(self, world_of, violation_of):
        def program(rank):
            dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(3 if rank == 1 else 2))

        text = str(violation_of(world_of(3), program, "entry-size"))
        assert "entry 1 of rank 1's list to have 3 elements" in text

    def test_all_gather_refuses_entry_of_wrong_size(self, world_of, violation_of):
        def program(rank):
            sizes = [2, 2, 3 if rank == 0 else 2]
            dist.all_gather([torch.empty(size) for size in sizes], torch.ones(2))

        violation = violation_of(world_of(3), program, "entry-size")
        assert "entry 2 of rank 0's list is (3,)" in str(violation)
        assert (violation.rank, violation.other_rank) == (0, 2)

    def test_all_gather_accepts_agreed_uneven_sizes(self, world_of):
        def program(rank):
            out = [torch.empty(size + 1) for size in range(3)]
            dist.all_gather(out, torch.full((rank + 1,), float(rank)))
            return [entry.tolist() for entry in out]

        assert world_of(3).run(program) == [[[0.0], [1.0] * 2, [2.0] * 3]] * 3

    @pytest.mark.parametrize(
        ("call", "owner"),
        [
            (lambda rank, entries: dist.reduce_scatter(torch.empty(2), entries), 1),
            (lambda rank, entries: dist.scatter(torch.empty(2), None if rank else entries), 0),
            (lambda rank, entries: dist.gather(torch.ones(2), None if rank else entries), 0),
        ],
        ids=["reduced and scattered", "scattered by the root", "gathered by the root"],
    )
    def test_entry_of_another_size_is_refused(self, world_of, violation_of, call, owner):
        def program(rank):
            call(rank, [torch.ones(2), torch.ones(3)])

        text = str(violation_of(world_of(2), program, "entry-size"))
        assert f"entry 1 of rank {owner}'s list" in text

    def test_all_to_all_refuses_mismatched_sizes(self, world_of, violation_of):
        def program(rank):
            out = [torch.empty(1), torch.empty(2 if rank == 0 else 1)]
            dist.all_to_all(out, [torch.ones(1), torch.ones(1)])

        text = str(violation_of(world_of(2), program, "split-sizes"))
        assert "rank 1 sends 1 elements to rank 0, which expects 2" in text


@pytest.mark.parametrize(
    ("aspect", "sent", "received"),
    [
        ("numel", lambda: torch.ones(2), lambda: torch.empty(3)),
        ("dtype", lambda: torch.ones(2), lambda: torch.empty(2, dtype=torch.float64)),
        ("shape", lambda: torch.ones(2, 3), lambda: torch.empty(3, 2)),
        ("memory-format", lambda: torch.ones(3, 2).t(), lambda: torch.empty(2, 3)),
        ("non-contiguous", lambda: torch.ones(4)[::2], lambda: torch.empty(4)[::2]),
    ],
)
def test_receive_that_mismatches_its_send_is_refused(
    world_of, violation_of, aspect, sent, received
):
    def program(rank):
        dist.recv(received(), src=0) if rank else dist.send(sent(), dst=1)

    text = str(violation_of(world_of(2), program, aspect))
    assert "send and receive do not fit" in text
    assert text.count("test_contract.py:") >= 2


def test_collectives_treat_params_as_plain_memory(world_of):
    def program(rank):
        param = torch.nn.Parameter(torch.full((2,), float(rank)))
        dist.broadcast(param, src=1)
        dist.all_reduce(param)
        return param.tolist(), param.requires_grad, param.grad_fn

    assert world_of(2).run(program) == [([2.0, 2.0], True, None)] * 2
