"""Timelines read from logs: ticks of calls, and which calls completed."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.report.timeline import read_timeline
from zero_sim.sim import ContractViolation, Deadlock, Moment


def logged(world, program, failure=None):
    if failure is None:
        world.run(program)
    else:
        with pytest.raises(failure):
            world.run(program)
    return world.log


def test_every_call_lies_within_a_turn_of_its_rank(world_of):
    def program(rank):
        for _ in range(3):
            work = dist.all_reduce(torch.ones(2), async_op=True)
            dist.all_reduce(torch.ones(2))
            work.wait()

    timeline = read_timeline(logged(world_of(3, schedule="random", seed=1), program))
    assert timeline.world_size == 3
    assert [turn.stop_tick for turn in timeline.turns[:-1]] == [
        turn.start_tick for turn in timeline.turns[1:]
    ]
    for call in timeline.calls:
        (turn,) = [t for t in timeline.turns if t.start_tick <= call.issue_tick < t.stop_tick]
        assert turn.rank == call.record.rank
    ticks = [call.issue_tick for call in timeline.calls]
    assert ticks == sorted(set(ticks))


def test_moments_are_the_clock_if_recorded(world_of):
    log = logged(world_of(2), lambda rank: dist.all_reduce(torch.ones(2)))
    log.moments = [
        Moment(10, 0, "issue", 0),
        Moment(20, 1, "issue", 1),
        Moment(30, 1, "land", 1),
        Moment(40, 0, "land", 0),
    ]
    timeline = read_timeline(log)
    assert [(call.issue_tick, call.land_tick) for call in timeline.calls] == [(10, 40), (20, 30)]
    assert timeline.stop_tick == 41
    spans = [(turn.rank, turn.start_tick, turn.stop_tick) for turn in timeline.turns]
    assert spans[:2] == [(0, 10, 20), (1, 20, 41)]


def test_collective_with_a_missing_rank_is_not_completed(world_of):
    def program(rank):
        dist.barrier()
        if rank != 2:
            dist.all_reduce(torch.ones(2))

    timeline = read_timeline(logged(world_of(3), program, Deadlock))
    done = {(call.record.kind, call.record.rank): call.completed for call in timeline.calls}
    assert done == {
        ("barrier", 0): True,
        ("barrier", 1): True,
        ("barrier", 2): True,
        ("all_reduce", 0): False,
        ("all_reduce", 1): False,
    }
    assert timeline.calls[-1].came == (0, 1)


def test_refused_collective_is_not_completed(world_of):
    program = lambda rank: dist.all_reduce(torch.ones(2 + rank))  # noqa: E731
    timeline = read_timeline(logged(world_of(2), program, ContractViolation))
    assert [(call.completed, call.refused) for call in timeline.calls] == [
        (False, False),
        (False, True),
    ]


def test_messages_are_paired_as_in_the_world(world_of):
    def program(rank):
        if rank == 0:
            dist.isend(torch.ones(1), 2, tag=5)
            dist.send(torch.ones(1), 2)
            dist.send(torch.ones(1), 2)
        if rank == 1:
            dist.send(torch.ones(1), 2)
        if rank == 2:
            dist.recv(torch.ones(1), 0)
            dist.recv(torch.ones(1))
            dist.recv(torch.ones(1))
            dist.recv(torch.ones(1), 1, tag=9)

    timeline = read_timeline(logged(world_of(3), program, Deadlock))
    said = [(c.record.kind, c.record.rank, c.peer, c.number, c.completed) for c in timeline.calls]
    assert ("send", 0, 2, 0, False) in said  # No rank receives its tag.
    received = [entry for entry in said if entry[:2] == ("recv", 2)]
    assert {entry[2] for entry in received[:3]} == {0, 1}
    assert received[3][4] is False
    for kind, rank, peer, number, completed in said:
        if kind == "recv" and completed:
            assert ("send", peer, rank, number, True) in said


def asking(world, *, ranks):
    """Return a program of three calls. On some ranks the harness issues the second one."""

    def program(rank):
        dist.all_reduce(torch.ones(2))
        if rank in ranks:
            with world.pause_clock(), world.pause_clock(False):
                dist.broadcast(torch.ones(3), 0)
        else:
            dist.broadcast(torch.ones(3), 0)
        dist.all_reduce(torch.ones(4))

    return program


def kinds_of(timeline):
    return [call.record.kind for call in timeline.calls if call.record.rank == 0]


def test_harness_calls_are_omitted(world_of):
    world = world_of(2)
    log = logged(world, asking(world, ranks=(0, 1)))
    assert kinds_of(read_timeline(log)) == ["all_reduce", "all_reduce"]
    whole = read_timeline(log, with_harness=True)
    assert kinds_of(whole) == ["all_reduce", "broadcast", "all_reduce"]
    assert [call.of_harness for call in whole.calls if call.record.rank == 1] == [
        False,
        True,
        False,
    ]
    marked = [log.collectives[index].kind for index in sorted(log.harness)]
    assert marked == ["broadcast", "broadcast"]


def test_harness_marks_do_not_change_the_digest(world_of):
    world = world_of(2)
    plain = logged(world, asking(world, ranks=()))
    marked = logged(world, asking(world, ranks=(0, 1)))
    assert (len(plain.harness), len(marked.harness)) == (0, 2)
    lines = {record.line for record in plain.collectives} ^ {r.line for r in marked.collectives}
    assert len(lines) == 2  # The broadcasts are at two lines of code.
    marked.collectives = plain.collectives
    assert plain.digest() == marked.digest()


def test_call_of_the_program_on_any_rank_is_shown(world_of):
    world = world_of(2)
    timeline = read_timeline(logged(world, asking(world, ranks=(0,))))
    assert kinds_of(timeline) == ["all_reduce", "broadcast", "all_reduce"]


def test_incomplete_harness_call_is_shown(world_of):
    world = world_of(2)

    def program(rank):
        if rank == 0:
            with world.pause_clock():
                dist.broadcast(torch.ones(3), 0)

    timeline = read_timeline(logged(world, program, Deadlock))
    assert [(call.record.kind, call.completed) for call in timeline.calls] == [("broadcast", False)]
