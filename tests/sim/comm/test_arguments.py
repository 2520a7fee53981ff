"""Argument forms of a group's methods: those of torch's bindings, with gloo's refusals."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from zero_sim.sim import ContractViolation, Fault
from zero_sim.sim.failures import BadArgument

RANKS = 3


def ones(rank):
    return torch.ones(2) * (rank + 1)


def rows():
    return [torch.zeros(2) for _ in range(RANKS)]


def reduce_options(root):
    opts = dist.ReduceOptions()
    opts.rootRank = root
    return opts


FORMS = {
    "allreduce of a tensor": lambda pg, t: (pg.allreduce(t), t),
    "allreduce of a list": lambda pg, t: (pg.allreduce([t]), t),
    "allreduce with an operation": lambda pg, t: (pg.allreduce(t, ReduceOp.SUM), t),
    "allreduce with op=": lambda pg, t: (pg.allreduce([t], op=ReduceOp.SUM), t),
    "reduce with a root": lambda pg, t: (pg.reduce(t, 1, ReduceOp.SUM), t),
    "reduce with root=": lambda pg, t: (pg.reduce(t, root=1, op=ReduceOp.SUM), t),
    "reduce with options": lambda pg, t: (pg.reduce([t], reduce_options(1)), t),
}


@pytest.mark.parametrize("form", FORMS)
def test_allreduce_and_reduce_accept_every_form(world_of, form):
    def program(rank):
        work, tensor = FORMS[form](dist.group.WORLD, ones(rank))
        work.wait()
        return tensor.tolist()

    assert world_of(RANKS).run(program)[1] == [6.0, 6.0]


@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_root_and_list_forms_move_data(world_of, timing):
    def program(rank):
        group = dist.group.WORLD
        sent, gathered, scattered = ones(rank), rows(), torch.zeros(2)
        group.broadcast(sent, 2).wait()
        again = ones(rank)
        group.broadcast([again], root=1).wait()
        group.allgather(gathered, ones(rank)).wait()
        group.scatter(scattered, gathered if rank == 0 else [], 0).wait()
        collected = rows() if rank == 1 else []
        group.gather(collected, ones(rank), root=1).wait()
        reduced = torch.zeros(2)
        group.reduce_scatter(reduced, [ones(rank) for _ in range(RANKS)], ReduceOp.MAX).wait()
        tensors = [sent, again, *gathered, scattered, *collected, reduced]
        return [tensor[0].item() for tensor in tensors]

    results = world_of(RANKS, timing=timing).run(program)
    assert results[0] == [3, 2, 1, 2, 3, 1, 3]
    assert results[1] == [3, 2, 1, 2, 3, 2, 1, 2, 3, 3]


def test_splits_may_be_tensors(world_of):
    def program(rank):
        out, splits = torch.zeros(2), torch.tensor([1, 1])
        dist.group.WORLD.alltoall_base(
            out, torch.tensor([10.0, 20.0]) + rank, splits, splits
        ).wait()
        return out.tolist()

    assert world_of(2).run(program) == [[10.0, 11.0], [20.0, 21.0]]


REFUSED = {
    "requires non-empty tensor list": lambda pg: pg.allreduce([]),
    "allreduce_coalesced: requires non-empty": lambda pg: pg.allreduce_coalesced([]),
    "invalid root rank: -1": lambda pg: pg.broadcast(torch.ones(2), root=-1),
    "invalid root rank: 3": lambda pg: pg.reduce(torch.ones(2), 3),
    "invalid tensor size at index 1": lambda pg: pg.allreduce([torch.ones(2), torch.ones(3)]),
    "invalid tensor type at index 1": lambda pg: pg.broadcast(
        [torch.ones(2), torch.ones(2).double()], 0
    ),
    "requires a single-element tensor list": lambda pg: pg.reduce([torch.ones(2)] * 2, 0),
    "requires a single-element input tensor list": lambda pg: pg.gather([], [], 0),
    "requires a single-element output tensor list": lambda pg: pg.scatter([], [], 0),
    "invalid root tensor: 0": lambda pg: pg.broadcast([], 0),
    "unsupported reduction operation AVG": lambda pg: pg.allreduce(
        [torch.ones(2)] * 2, ReduceOp.AVG
    ),
    "tensors must all have the same type": lambda pg: pg.allreduce_coalesced(
        [torch.ones(2), torch.ones(2).double()]
    ),
    "invalid tensor layout at index 1": lambda pg: pg.allreduce_coalesced(
        [torch.ones(2), torch.ones(2).to_sparse()]
    ),
    "output lists should be equal to world size": lambda pg: pg.allgather_coalesced(
        [[torch.ones(2)]], [torch.ones(2)]
    ),
    "invalid size of output tensor at index 0": lambda pg: pg.allgather_coalesced(
        [[torch.ones(1)]] * 3, [torch.ones(2)]
    ),
    "requires non-empty input tensor list": lambda pg: pg.allgather([], []),
    "tensor lists to have the same length": lambda pg: pg.allgather([], [torch.ones(2)]),
    r"invalid output tensor list at index 0 \(expected length 3, got 1\)": lambda pg: pg.allgather(
        [[torch.ones(2)]], [torch.ones(2)]
    ),
    "invalid tensor type at index 0": lambda pg: pg.allgather(rows(), torch.ones(2).int()),
    "Incorrect input list size 1": lambda pg: pg.reduce_scatter(torch.ones(2), [torch.ones(2)]),
    "Incorrect output list size 2": lambda pg: pg.alltoall([torch.ones(2)] * 2, rows()),
    "broadcast: unsupported layout": lambda pg: pg.broadcast(torch.ones(2).to_sparse(), 0),
    "only works with ReduceOp.SUM": lambda pg: pg.allreduce(
        torch.ones(2).to_sparse(), ReduceOp.MAX
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_argument_raises_gloos_message_and_run_continues(world_of, words):
    def program(rank):
        if rank == 1:
            with pytest.raises(BadArgument, match=words):
                REFUSED[words](dist.group.WORLD)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert world_of(RANKS).run(program) == [3.0] * 3


OF_ONE_SIZE = {
    "all_gather": lambda pg: pg.allgather([[*rows()[1:], torch.ones(3)]], [torch.ones(2)]),
    "gather": lambda pg: pg.gather([[*rows()[1:], torch.ones(3)]], [torch.ones(2)], pg.rank()),
    "scatter": lambda pg: pg.scatter([torch.ones(2)], [[*rows()[1:], torch.ones(3)]], pg.rank()),
}


@pytest.mark.parametrize("kind", OF_ONE_SIZE)
def test_gloo_refuses_list_of_unequal_tensors(world_of, kind):
    def program(rank):
        dist.init_process_group("gloo")
        if rank == 1:
            with pytest.raises(BadArgument, match="invalid tensor size at index 2"):
                OF_ONE_SIZE[kind](dist.group.WORLD)

    world_of(RANKS).run(program)


def test_all_to_all_refuses_non_contiguous_tensors(world_of):
    def program(rank):
        square = torch.ones(2, 2).t()
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_to_all_single(torch.zeros(2, 2), square)

    world_of(2, strict=False).run(program)


def pair(rank, dtype=torch.float32):
    return [torch.tensor([2 * rank + i], dtype=dtype) for i in range(2)]


@pytest.mark.parametrize("timing", ["eager", "hostile"])
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, 15.0),
        (ReduceOp.MAX, 5.0),
        (ReduceOp.MIN, 0.0),
        (ReduceOp.PRODUCT, 0.0),
        (ReduceOp.BXOR, 1),
    ],
)
def test_a_rank_may_reduce_several_tensors(world_of, op, expected, timing):
    def program(rank):
        tensors = pair(rank, torch.float32 if isinstance(expected, float) else torch.int32)
        opts = dist.AllreduceOptions()
        opts.reduceOp = op
        result = dist.group.WORLD.allreduce(tensors, opts).get_future().wait()
        return [tensor.item() for tensor in (*tensors, *result)]

    assert world_of(RANKS, timing=timing).run(program) == [[expected] * 4] * RANKS


def test_a_rank_may_reduce_several_sparse_tensors(world_of):
    def program(rank):
        tensors = [tensor.to_sparse() for tensor in (torch.eye(2), torch.ones(2, 2))]
        dist.group.WORLD.allreduce(tensors).wait()
        return [tensor.to_dense().tolist() for tensor in tensors]

    assert world_of(2).run(program) == [[[[4.0, 2.0], [2.0, 4.0]]] * 2] * 2


@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_a_rank_may_broadcast_one_of_several_tensors_into_all(world_of, timing):
    def program(rank):
        tensors, opts = pair(rank), dist.BroadcastOptions()
        opts.rootRank, opts.rootTensor = 1, 1
        dist.group.WORLD.broadcast(tensors, opts).wait()
        return [tensor.item() for tensor in tensors]

    assert world_of(RANKS, timing=timing).run(program) == [[3.0, 3.0]] * RANKS


@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_a_rank_may_gather_several_tensors(world_of, timing):
    def program(rank):
        outputs = [[torch.zeros(1) for _ in range(4)] for _ in range(2)]
        result = dist.group.WORLD.allgather(outputs, pair(rank)).get_future().wait()
        return [[tensor.item() for tensor in row] for row in (*outputs, *result)]

    assert world_of(2, timing=timing).run(program) == [[[0.0, 1.0, 2.0, 3.0]] * 4] * 2


def test_duplicate_tensor_in_coalesced_call_is_reduced_once(world_of):
    def program(rank):
        tensor = torch.ones(1)
        dist.group.WORLD.allreduce_coalesced([tensor, tensor]).wait()
        return tensor.item()

    assert world_of(2, strict=False).run(program) == [2.0, 2.0]


def test_only_the_root_of_a_gather_or_scatter_has_a_list(world_of):
    def program(rank):
        group = dist.group.WORLD
        if rank:
            with pytest.raises(BadArgument, match="requires empty output on non-root"):
                group.gather([rows()], [torch.ones(2)], 0)
            with pytest.raises(BadArgument, match="requires empty input on non-root"):
                group.scatter([torch.ones(2)], [rows()], 0)
        else:
            with pytest.raises(BadArgument, match="Incorrect output list size 0"):
                group.gather([[]], [torch.ones(2)], 0)

    world_of(RANKS).run(program)


class TestSparse:
    @pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
    def test_a_sparse_tensor_is_summed_and_coalesced(self, world_of, timing):
        def program(rank):
            mine = torch.zeros(5)
            mine[rank : rank + 2] = torch.tensor([1.0, 2.0])
            mine = mine.to_sparse()
            work = dist.all_reduce(mine, async_op=True)
            work.wait()
            return mine.is_coalesced(), mine.to_dense().tolist()

        expected = (True, [1.0, 3.0, 3.0, 2.0, 0.0])
        assert world_of(3, timing=timing, races=True).run(program) == [expected] * 3

    def test_gradients_of_an_embedding_under_ddp_are_averaged(self, world_of):
        def program(rank):
            table = torch.nn.Embedding(4, 2, sparse=True)
            model = torch.nn.parallel.DistributedDataParallel(table)
            model(torch.tensor([rank, rank + 1])).sum().backward()
            return table.weight.grad.to_dense()[:, 0].tolist()

        assert world_of(2).run(program)[0] == [0.5, 1.0, 0.5, 0.0]

    def test_shape_mismatch_names_both_shapes(self, world_of):
        def program(rank):
            dist.all_reduce(torch.ones((4, 2) if rank else (2, 4)).to_sparse())

        with pytest.raises(ContractViolation, match=r"shape \(2, 4\)\n.*shape \(4, 2\)"):
            world_of(2).run(program)

    def test_data_fault_on_sparse_tensor_is_reported_as_missed(self, world_of):
        fault = Fault(kind="corrupt", rank=0, call=0)
        world = world_of(2)
        world.configure(faults=[fault])
        world.run(lambda rank: dist.all_reduce(torch.ones(2).to_sparse()))
        assert "sparse" in world.log.faults[0].effect
