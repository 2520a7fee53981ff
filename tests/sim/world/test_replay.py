"""Replay of recorded turns; a run that cannot follow them goes on and reports it."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import ContractViolation, Replay


def program(rank):
    for step in range(3):
        x = torch.tensor([float(rank + step)])
        dist.all_reduce(x)
        if rank % 2:
            dist.send(x, rank - 1)
        else:
            dist.recv(x, rank + 1)


def test_run_goes_on_after_the_recorded_turns_end(world_of):
    world = world_of(4, schedule="random", seed=3)
    world.run(program)
    turns = world.log.turns
    replay = Replay(turns[:5], strict=False)
    world.configure(schedule=replay)
    world.run(program)
    assert replay.diverged_at == 5
    assert world.log.turns[:5] == turns[:5]


def test_rank_that_is_not_ready_is_skipped():
    replay = Replay([1, 1, 0], strict=False)
    schedule = replay.fresh()
    for rank in range(3):
        schedule.add(rank)
    assert [schedule.pick() for _ in range(4)] == [1, 0, 2, None]
    assert replay.diverged_at == 1


class TestRefusedCalls:
    """The log contains the call that ended the run."""

    def test_refused_collective_is_logged(self, world_of):
        world = world_of(3)

        def mismatched(rank):
            dist.barrier()
            dist.all_reduce(torch.ones(4 + (rank == 1)))

        with pytest.raises(ContractViolation) as caught:
            world.run(mismatched)
        refused = world.log.collectives[world.log.refused]
        assert (refused.rank, refused.sequence, refused.elems) == (caught.value.rank, 1, 5)
        assert world.log.refused == len(world.log.collectives) - 1

    def test_refused_message_is_logged(self, world_of):
        world = world_of(2)

        def mismatched(rank):
            if rank == 0:
                dist.send(torch.ones(4), 1)
            else:
                dist.recv(torch.ones(5), 0)

        with pytest.raises(ContractViolation):
            world.run(mismatched)
        refused = world.log.collectives[world.log.refused]
        assert (refused.kind, refused.elems) == ("recv", 5)

    def test_successful_run_has_no_refused_call(self, world_of):
        world = world_of(2)
        world.run(lambda rank: dist.barrier())
        assert world.log.refused is None


def test_output_sizes_are_recorded(world_of):
    world = world_of(2)

    def all_kinds(rank):
        dist.all_gather_single(torch.zeros(6), torch.ones(3))
        dist.reduce_scatter_single(torch.zeros(3), torch.ones(6))
        dist.all_reduce(torch.ones(5))
        dist.barrier()
        dist.gather(torch.ones(2), [torch.ones(2), torch.ones(2)] if rank == 0 else None)

    world.run(all_kinds)
    found = [(record.elems, record.output_elems) for record in world.log.of_rank(0)]
    assert found == [(3, 6), (6, 3), (5, 5), (0, 0), (2, 4)]
    assert world.log.of_rank(1)[-1].output_elems == 0
