"""Collectives write plain memory under every timing: autograd does not see the writes."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

from zero_sim.sim import RankFailed

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")

TIMINGS = ["eager", "lazy", "hostile"]


def ones(*shape):
    return torch.ones(shape)


CALLS = {
    "all_reduce": lambda rank, x: dist.all_reduce(x[0], async_op=True),
    "broadcast": lambda rank, x: dist.broadcast(x[0], 0, async_op=True),
    "reduce": lambda rank, x: dist.reduce(x[0], 0, async_op=True),
    "all_gather": lambda rank, x: dist.all_gather(x[1:3], x[0], async_op=True),
    "all_gather_into_tensor": lambda rank, x: dist.all_gather_into_tensor(
        x[3], x[0], async_op=True
    ),
    "reduce_scatter": lambda rank, x: dist.reduce_scatter(x[0], x[1:3], async_op=True),
    "reduce_scatter_tensor": lambda rank, x: dist.reduce_scatter_tensor(x[0], x[3], async_op=True),
    "all_to_all_single": lambda rank, x: dist.all_to_all_single(x[3], x[4], async_op=True),
    "all_to_all": lambda rank, x: dist.all_to_all(x[:2], x[5:7], async_op=True),
    "gather": lambda rank, x: dist.gather(x[0], None if rank else x[1:3], async_op=True),
    "scatter": lambda rank, x: dist.scatter(x[0], None if rank else x[1:3], async_op=True),
    "send": lambda rank, x: dist.irecv(x[0], 0) if rank else dist.isend(x[0], 1),
}


def tensors():
    return [ones(4), ones(4), ones(4), ones(8), ones(8), ones(4), ones(4)]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("call", CALLS)
def test_collective_does_not_bump_tensor_versions(world_of, call, timing):
    def program(rank):
        given = tensors()
        CALLS[call](rank, given).wait()
        return {tensor._version for tensor in given}

    assert world_of(2, timing=timing).run(program) == [{0}] * 2


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("call", CALLS)
def test_inference_tensors_are_written_outside_inference_mode(world_of, call, timing):
    def program(rank):
        with torch.inference_mode():
            given = tensors()
        CALLS[call](rank, given).wait()
        return given[0][0].item()

    world_of(2, timing=timing).run(program)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("call", CALLS)
def test_tensors_requiring_grad_and_views_are_written(world_of, call, timing):
    def program(rank):
        given = [tensor.requires_grad_() for tensor in tensors()]
        CALLS[call](rank, given).wait()
        parts = [list((2 * tensor).chunk(2))[rank] for tensor in given]
        parts = [torch.cat([part, part]).split(len(part))[0] for part in parts]
        CALLS[call](rank, parts).wait()

    world_of(2, timing=timing).run(program)


@pytest.mark.parametrize("timing", TIMINGS)
def test_tensor_saved_by_autograd_can_be_reduced(world_of, timing):
    def program(rank):
        x = torch.tensor([1.0, -1.0], requires_grad=True)
        y = torch.relu(x)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        y.sum().backward()
        return y.tolist(), x.grad.tolist()

    assert world_of(2, timing=timing).run(program) == [([2.0, 0.0], [1.0, 0.0])] * 2


@pytest.mark.parametrize("timing", TIMINGS)
def test_tensors_inside_a_wrapper_are_communicated(world_of, timing):
    def program(rank):
        both = TwoTensor(ones(2) * rank, ones(2) * 10 * rank)
        dist.all_reduce(both)
        sent = TwoTensor(ones(1) * rank, ones(1) * 2 * rank)
        dist.broadcast(sent, 1)
        gathered = [TwoTensor(ones(1), ones(1)) for _ in range(2)]
        dist.all_gather(gathered, TwoTensor(ones(1) * rank, -ones(1) * rank))
        if rank:
            dist.send(sent, 0)
        else:
            dist.recv(sent, 1)
        inside = [*both.a, *both.b, sent.a, sent.b, gathered[1].a, gathered[1].b]
        return [each.item() for each in inside]

    expected = [1.0, 1.0, 10.0, 10.0, 1.0, 2.0, 1.0, -1.0]
    assert world_of(2, timing=timing).run(program) == [expected] * 2


@pytest.mark.parametrize("timing", TIMINGS)
def test_wrapper_may_contain_one_tensor_twice(world_of, timing):
    """FSDP2 gathers wrapped shards into slices of one plain tensor."""

    def program(rank):
        gathered = ones(2)
        part = TwoTensor(ones(1) * rank, ones(1) * rank)
        dist.all_gather_into_tensor(TwoTensor(gathered, gathered), part)
        return gathered.tolist()

    assert world_of(2, timing=timing).run(program) == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("timing", TIMINGS)
def test_functional_collective_result_is_waited_for(world_of, timing):
    from torch.distributed._functional_collectives import all_reduce

    def program(rank):
        total = all_reduce(ones(2), "sum", dist.group.WORLD)
        dist.all_reduce(total)
        return total.tolist()

    assert world_of(2, timing=timing).run(program) == [[4.0, 4.0]] * 2


def test_wrappers_of_unequal_count_are_refused(world_of):
    def program(rank):
        dist.all_gather_into_tensor(ones(4), TwoTensor(ones(2), ones(2)))

    with pytest.raises(RankFailed, match="TwoTensor of 2, Tensor of 1"):
        world_of(2).run(program)


@pytest.mark.parametrize("timing", TIMINGS)
def test_unwritable_memory_fails_the_rank_that_owns_it(world_of, timing):
    caught = []

    def program(rank):
        given = ones(1).expand(4) if rank == 0 else ones(4)
        try:
            dist.all_reduce(given)
        except RuntimeError as error:
            caught.append(rank)
            raise error

    with pytest.raises(RankFailed, match=r"rank 0 raised RuntimeError: .*expanded") as failure:
        world_of(2, timing=timing, strict=False).run(program)
    assert failure.value.rank == 0
    assert caught == [0]
