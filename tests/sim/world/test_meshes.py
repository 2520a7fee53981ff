"""Meshes of several ranks and of several programs stay apart in torch's caches."""

import copy
import io
import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._redistribute import _gen_transform_infos


@pytest.fixture(autouse=True)
def _no_advice():
    """torch advises every rank to flatten its mesh."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
@pytest.mark.parametrize("elems", [5, 3, 1, 0])
def test_uneven_shards_over_two_mesh_dims_come_back_whole(world_of, elems, timing):
    whole = torch.arange(float(elems))

    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        return distribute_tensor(whole.clone(), mesh, [Shard(0), Shard(0)]).full_tensor()

    for got in world_of(4, timing=timing).run(program):
        assert torch.equal(got, whole)


def test_a_program_uses_no_group_of_the_one_before(world_of):
    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        doubled = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)]) * 2
        whole = doubled.full_tensor()
        of_this_program = doubled.device_mesh is mesh
        dist.destroy_process_group()
        return whole.tolist(), of_this_program

    world = world_of(4)
    for _ in range(2):
        assert world.run(program) == [([2.0 * i for i in range(8)], True)] * 4


def kept():
    return _gen_transform_infos.cache_info().currsize


def redistribute(rank, shape):
    mesh = init_device_mesh("cpu", shape)
    sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)] * len(shape))
    whole = sharded.redistribute(placements=[Replicate()] * len(shape))
    seen = kept()
    dist.barrier()
    return whole.to_local().tolist(), seen > 0


def test_nothing_is_kept_for_a_program_that_ended(world_of):
    world = world_of(4)
    assert world.run(lambda rank: redistribute(rank, (2, 2))) == [([*range(8)], True)] * 4
    assert kept() == 0


def test_what_is_kept_for_the_default_group_is_the_same_in_every_program(world_of):
    world = world_of(4)
    counts = []
    for _ in range(3):
        assert world.run(lambda rank: redistribute(rank, (4,))) == [([*range(8)], True)] * 4
        counts.append(kept())
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
    world.close()
    assert kept() == 0


def test_what_is_kept_for_a_default_group_ends_with_it(world_of):
    def program(rank):
        found = redistribute(rank, (2,))
        dist.destroy_process_group()
        return found

    world = world_of(2)
    for _ in range(2):
        assert world.run(program) == [([*range(8)], True)] * 2
        assert kept() == 0


def test_a_second_world_has_answers_of_its_own(world_of):
    one, other = world_of(2), world_of(2, timing="hostile")
    for world in (one, other, one, other):
        assert world.run(lambda rank: redistribute(rank, (2,))) == [([*range(8)], True)] * 2


@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_a_mesh_that_was_saved_is_the_mesh_of_who_loads_it(world_of, timing):
    saved = {}

    def save(rank):
        mesh = init_device_mesh("cpu", (2,))
        buffer = io.BytesIO()
        torch.save(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), buffer)
        saved[rank] = buffer.getvalue()

    def load(rank):
        mesh = init_device_mesh("cpu", (2,))
        loaded = torch.load(io.BytesIO(saved[rank]), weights_only=False)
        mine = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        return (loaded.device_mesh == mesh, (loaded + mine).full_tensor().tolist())

    world = world_of(2, timing=timing)
    world.run(save)
    assert world.run(load) == [(True, [1.0, 2.0, 3.0, 4.0])] * 2


def test_meshes_of_one_rank_are_equal_as_torch_says(world_of):
    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        part = DTensor.from_local(torch.ones(1), mesh["b"], [Shard(0)]).full_tensor()
        return mesh == again, hash(mesh) == hash(again), copy.deepcopy(mesh) == mesh, len(part)

    assert world_of(4).run(program) == [(True, True, True, 2)] * 4
