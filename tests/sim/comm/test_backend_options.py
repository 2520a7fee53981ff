"""A group's backend: its name, devices, options and sequence numbers."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero_sim.sim import RankFailed, World


def test_group_reports_requested_backend(world_of):
    def program(rank):
        before = dist.get_backend()
        dist.init_process_group("gloo", timeout=timedelta(seconds=9))
        inherited, other = (
            dist.new_group([0, 1]),
            dist.new_group([0, 1], backend="nccl", timeout=timedelta(seconds=5)),
        )
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        names = [dist.get_backend(group) for group in (None, inherited, other)]
        return before, *names, options._timeout, options.global_ranks_in_group

    world = world_of(2)
    expected = ("sim", "gloo", "gloo", "nccl", timedelta(seconds=9), [0, 1])
    assert world.run(program) == [expected] * 2
    assert world.run(lambda rank: dist.get_backend()) == ["sim", "sim"]


def test_unknown_backend_is_refused(world_of):
    def program(rank):
        with pytest.raises(ValueError, match="Invalid backend: 'glooo'"):
            dist.init_process_group("glooo")

    world_of(1).run(program)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without accelerator")
def test_devices_are_those_of_the_machine(world_of):
    def program(rank):
        group = dist.group.WORLD
        with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
            group._get_backend(torch.device("cuda"))
        return group._device_types, c10d._device_capability(), c10d._get_object_coll_device()

    assert world_of(1).run(program) == [([torch.device("cpu")], ["cpu"], "cpu")]


def test_backend_object_runs_collectives(world_of):
    def program(rank):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        total = torch.ones(2)
        backend.allreduce([total]).wait()
        return backend.name(), backend.rank(), backend.size(), total.tolist()

    assert world_of(2).run(program)[1] == ("sim", 1, 2, [2.0, 2.0])


def test_calls_are_counted(world_of):
    def program(rank):
        counts = [dist.group.WORLD._get_sequence_number_for_group()]
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        return [*counts, dist.group.WORLD._get_sequence_number_for_group()]

    assert world_of(2).run(program) == [[0, 2]] * 2


def test_members_share_the_store_of_their_group(world_of):
    def program(rank):
        group = dist.new_group([0, 1])
        if rank == 0:
            group.get_group_store().set("word", "here")
        return group.get_group_store().get("word")

    assert world_of(2).run(program) == [b"here"] * 2


def test_gloo_has_monitored_barrier(world_of):
    def program(rank):
        dist.init_process_group("gloo")
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)

    world_of(2).run(program)


def test_the_fake_backend_is_torchs_own(world_of):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def program(rank):
        dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())
        total = torch.ones(2)
        dist.all_reduce(total)
        return dist.get_world_size(), dist.get_backend(), total.tolist()

    world = world_of(2)
    assert world.run(program) == [(64, "fake", [1.0, 1.0])] * 2
    assert world.run(lambda rank: dist.get_world_size()) == [2, 2]


def test_group_name_matches_torch(world_of):
    def program(rank):
        before = dist.group.WORLD.name()
        dist.init_process_group("gloo")
        return before, dist.group.WORLD.name()

    assert world_of(2).run(program) == [("custom", "gloo")] * 2


def test_default_timeout_of_a_group_can_be_set(world_of):
    def program(rank):
        dist.group.WORLD._set_default_timeout(timedelta(seconds=23))
        return dist.group.WORLD.options._timeout

    assert world_of(1).run(program) == [timedelta(seconds=23)]


def test_backend_object_creates_devices(world_of):
    def program(rank):
        dist.init_process_group("gloo")
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.create_device(hostname="localhost") is not None

    world_of(1).run(program)


def test_cpu_as_device_id_is_refused():
    def program(rank):
        dist.init_process_group(device_id=torch.device("cpu"))

    with World(2, initialized=False) as world, pytest.raises(RankFailed, match="an accelerator"):
        world.run(program)
