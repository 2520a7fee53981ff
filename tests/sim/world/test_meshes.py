"""Meshes of several ranks and programs stay apart in torch's caches."""

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
    """Silence torch's advice to flatten the mesh, which it gives on every rank."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
@pytest.mark.parametrize("elems", [5, 3, 1, 0])
def test_uneven_shards_over_two_mesh_dims_are_gathered_in_full(world_of, elems, timing):
    whole = torch.arange(float(elems))

    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        return distribute_tensor(whole.clone(), mesh, [Shard(0), Shard(0)]).full_tensor()

    for got in world_of(4, timing=timing).run(program):
        assert torch.equal(got, whole)


def test_program_uses_no_group_of_an_earlier_program(world_of):
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


def test_ended_program_leaves_nothing_in_caches(world_of):
    world = world_of(4)
    assert world.run(lambda rank: redistribute(rank, (2, 2))) == [([*range(8)], True)] * 4
    assert kept() == 0


def test_cache_for_the_default_group_does_not_grow_by_program(world_of):
    world = world_of(4)
    counts = []
    for _ in range(3):
        assert world.run(lambda rank: redistribute(rank, (4,))) == [([*range(8)], True)] * 4
        counts.append(kept())
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
    world.close()
    assert kept() == 0


def test_destroying_a_default_group_clears_its_cache(world_of):
    def program(rank):
        found = redistribute(rank, (2,))
        dist.destroy_process_group()
        return found

    world = world_of(2)
    for _ in range(2):
        assert world.run(program) == [([*range(8)], True)] * 2
        assert kept() == 0


def test_second_world_has_its_own_cache_entries(world_of):
    one, other = world_of(2), world_of(2, timing="hostile")
    for world in (one, other, one, other):
        assert world.run(lambda rank: redistribute(rank, (2,))) == [([*range(8)], True)] * 2


@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_loaded_mesh_equals_the_loaders_own_mesh(world_of, timing):
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


def test_equal_meshes_of_one_rank_compare_equal(world_of):
    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        part = DTensor.from_local(torch.ones(1), mesh["b"], [Shard(0)]).full_tensor()
        return mesh == again, hash(mesh) == hash(again), copy.deepcopy(mesh) == mesh, len(part)

    assert world_of(4).run(program) == [(True, True, True, 2)] * 4
