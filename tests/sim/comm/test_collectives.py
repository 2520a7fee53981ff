"""Data movement of every collective of torch.distributed, as documented."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import RankFailed

SIZES = (1, 2, 3, 5)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def values(rank, numel=6, dtype=torch.float32):
    """Small whole numbers that differ by rank; exact in every dtype."""
    return (torch.arange(numel) % 3 + rank % 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_in_every_dtype(world_of, size, dtype):
    def program(rank):
        x = values(rank, dtype=dtype)
        dist.all_reduce(x)
        return x

    total = values(0, dtype=dtype)
    for rank in range(1, size):
        total = total + values(rank, dtype=dtype)
    assert all(torch.equal(got, total) for got in world_of(size).run(program))


@pytest.mark.parametrize(
    ("op", "first", "expected"),
    [
        (dist.ReduceOp.SUM, [1.0, 2.0], [6, 9]),
        (dist.ReduceOp.AVG, [1.0, 2.0], [2, 3]),
        (dist.ReduceOp.MIN, [1.0, 2.0], [1, 2]),
        (dist.ReduceOp.MAX, [1.0, 2.0], [3, 4]),
        (dist.ReduceOp.PRODUCT, [1.0, 2.0], [6, 24]),
        (dist.ReduceOp.BAND, [4], [4]),
        (dist.ReduceOp.BOR, [4], [7]),
        (dist.ReduceOp.BXOR, [4], [4 ^ 5 ^ 6]),
    ],
)
def test_all_reduce_ops(world_of, op, first, expected):
    def program(rank):
        x = torch.tensor(first) + rank
        dist.all_reduce(x, op=op)
        return x.tolist()

    assert world_of(3).run(program) == [expected] * 3


@pytest.mark.parametrize("size", SIZES)
def test_reduce_writes_only_the_root(world_of, size):
    def program(rank):
        x = values(rank)
        dist.reduce(x, dst=size - 1)
        return x

    got = world_of(size).run(program)
    for rank in range(size - 1):
        assert torch.equal(got[rank], values(rank))
    assert torch.equal(got[-1], sum(values(rank) for rank in range(size)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("spelling", ["reduce_scatter_single", "reduce_scatter_tensor"])
@pytest.mark.parametrize("size", SIZES)
def test_flat_reduce_scatter_has_both_names(world_of, size, spelling):
    def program(rank):
        out = torch.empty(2)
        getattr(dist, spelling)(out, values(rank, 2 * size))
        return out

    total = sum(values(rank, 2 * size) for rank in range(size))
    assert torch.equal(torch.cat(world_of(size).run(program)), total)


def test_reduce_scatter_list_takes_uneven_entries(world_of):
    def program(rank):
        entries = [values(rank, numel) for numel in (1, 0, 3)]
        out = torch.empty(entries[rank].numel())
        dist.reduce_scatter(out, entries)
        return out

    got = world_of(3).run(program)
    for numel, out in zip((1, 0, 3), got, strict=True):
        assert torch.equal(out, sum(values(rank, numel) for rank in range(3)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("spelling", ["all_gather_single", "all_gather_into_tensor"])
@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_flat_all_gather_concatenates_or_stacks(world_of, spelling, shape):
    def program(rank):
        out = torch.empty(shape)
        getattr(dist, spelling)(out, values(rank, 2))
        return out.reshape(-1)

    expected = torch.cat([values(rank, 2) for rank in range(3)])
    assert all(torch.equal(got, expected) for got in world_of(3).run(program))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_list(world_of, size):
    def program(rank):
        outs = [torch.empty(6) for _ in range(size)]
        dist.all_gather(outs, values(rank))
        return outs

    for got in world_of(size).run(program):
        assert all(torch.equal(out, values(rank)) for rank, out in enumerate(got))


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_scatter_and_gather_from_any_root(world_of, root):
    def program(rank):
        shared = values(rank) + rank
        dist.broadcast(shared, src=root)
        mine = torch.empty(1)
        dist.scatter(
            mine, [torch.tensor([10.0 + r]) for r in range(3)] if rank == root else None, src=root
        )
        gathered = [torch.empty(1) for _ in range(3)] if rank == root else None
        dist.gather(mine * 2, gathered, dst=root)
        return shared, mine.item(), gathered

    got = world_of(3).run(program)
    assert all(torch.equal(shared, values(root) + root) for shared, _, _ in got)
    assert [mine for _, mine, _ in got] == [10, 11, 12]
    assert [out.item() for out in got[root][2]] == [20, 22, 24]


def test_all_to_all_list_and_uneven_single(world_of):
    def program(rank):
        outs = [torch.empty(rank + 1) for _ in range(3)]
        dist.all_to_all(
            outs, [torch.full((target + 1,), 10.0 * rank + target) for target in range(3)]
        )
        flat = torch.empty(3 * (rank + 1))
        dist.all_to_all_single(
            flat,
            torch.cat([torch.full((t + 1,), 10.0 * rank + t) for t in range(3)]),
            output_split_sizes=[rank + 1] * 3,
            input_split_sizes=[1, 2, 3],
        )
        return torch.cat(outs), flat

    for rank, (listed, flat) in enumerate(world_of(3).run(program)):
        expected = torch.cat([torch.full((rank + 1,), 10.0 * source + rank) for source in range(3)])
        assert torch.equal(listed, expected)
        assert torch.equal(flat, expected)


def test_send_and_receive_in_both_blocking_and_async_form(world_of):
    def program(rank):
        x = torch.empty(2)
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0]), dst=1)
            work = dist.irecv(x, src=1)
            work.wait()
        else:
            source = dist.recv(x)
            dist.isend(x * 10, dst=source).wait()
        return x.tolist()

    assert world_of(2).run(program) == [[10.0, 20.0], [1.0, 2.0]]


def test_batch_isend_irecv_rotates_a_ring(world_of):
    def program(rank):
        out = torch.empty(1)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % 4),
                dist.P2POp(dist.irecv, out, (rank - 1) % 4),
            ]
        )
        for work in works:
            work.wait()
        return out.item()

    assert world_of(4).run(program) == [3.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_coalescing_manager(world_of, device):
    def program(rank):
        a, b = values(rank), values(rank, 4)
        with dist._coalescing_manager(device=device):
            dist.all_reduce(a)
            dist.all_reduce(b)
        out = torch.empty(2)
        with dist._coalescing_manager(async_ops=True) as pending:
            dist.reduce_scatter_single(out, values(rank, 4))
        pending.wait()
        return a, b, out

    for rank, (a, b, out) in enumerate(world_of(2).run(program)):
        assert torch.equal(a, values(0) + values(1))
        assert torch.equal(b, values(0, 4) + values(1, 4))
        assert torch.equal(out, b[2 * rank : 2 * rank + 2])


def test_object_collectives(world_of):
    def program(rank):
        gathered = [None] * 3
        dist.all_gather_object(gathered, {"rank": rank})
        shared = [f"from {rank}"]
        dist.broadcast_object_list(shared, src=1)
        return gathered, shared

    for gathered, shared in world_of(3).run(program):
        assert gathered == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert shared == ["from 1"]


def test_sub_groups_reduce_among_their_members_only(world_of):
    def program(rank):
        evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = odds if rank % 2 else evens
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mine)
        return x.item(), dist.get_rank(mine), dist.get_world_size(mine)

    assert world_of(4).run(program) == [(2.0, 0, 2), (4.0, 0, 2), (2.0, 1, 2), (4.0, 1, 2)]


@pytest.mark.parametrize("numel", [0, 1, 7])
def test_all_reduce_accepts_any_memory_layout(world_of, numel):
    def program(rank):
        x = torch.zeros(numel, 2).t()[0] + rank
        y = torch.zeros(2, numel).t() + rank
        dist.all_reduce(x)
        dist.all_reduce(y)
        return x, y

    for x, y in world_of(3, strict=False).run(program):
        assert torch.equal(x, torch.full((numel,), 3.0))
        assert torch.equal(y, torch.full((numel, 2), 3.0))


def test_wait_completes_async_result_and_its_future(world_of):
    def program(rank):
        x = torch.tensor([float(rank)])
        work = dist.all_reduce(x, async_op=True)
        done_early = work.is_completed()
        work.wait()
        return done_early, work.is_completed(), x.item(), work.get_future().value()[0].item()

    assert world_of(3).run(program) == [(True, True, 3.0, 3.0)] * 3


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced.*:FutureWarning")
@pytest.mark.parametrize("timing", ["eager", "hostile"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shapes", [((2,), (2,)), ((1,), (3, 2), ())], ids=["alike", "unlike"])
def test_all_gather_coalesced_fills_a_list_per_rank(world_of, size, shapes, timing):
    def mine(rank):
        return [torch.full(shape, 10.0 * rank + i) for i, shape in enumerate(shapes)]

    def program(rank):
        outputs = [[torch.zeros(shape) for shape in shapes] for _ in range(size)]
        dist.all_gather_coalesced(outputs, mine(rank))
        return outputs

    expected = [mine(rank) for rank in range(size)]
    for got in world_of(size, timing=timing).run(program):
        for row, right in zip(got, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, right, strict=True))


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced.*:FutureWarning")
@pytest.mark.parametrize("lengths", [(2, 1), (2, 3), (1, 2)])
def test_all_gather_coalesced_refuses_unequal_list_lengths(world_of, lengths):
    def program(rank):
        outputs = [[torch.zeros(1) for _ in range(length)] for length in lengths]
        dist.all_gather_coalesced(outputs, [torch.ones(1), torch.ones(1)])

    with pytest.raises(RankFailed, match=r"invalid output size: \(expected length 2, got"):
        world_of(2).run(program)
