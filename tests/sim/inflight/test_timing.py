"""Late reads and writes: wrong programs are caught or change results; correct ones do not."""

import functools

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import InFlightBuffer, InFlightRace

LATE = ("lazy", "hostile")
SEEDS = range(12)


@pytest.fixture
def world_of(world_of):
    """Worlds that are not strict: these programs also leave calls open or use strides."""
    return functools.partial(world_of, strict=False)


def race(world, program):
    with pytest.raises(InFlightRace) as caught:
        world.run(program)
    return caught.value


class TestWrongPrograms:
    """Programs that pass under eager timing, and fail or give other results under the others."""

    def test_result_read_before_the_wait_is_poison(self, world_of):
        def program(rank):
            x = torch.ones(3)
            work = dist.all_reduce(x, async_op=True)
            seen = x.clone()
            work.wait()
            return seen, x

        # The last rank to issue sees the result of an eager world at once.
        assert world_of(2).run(program)[1][0].tolist() == [2.0] * 3
        for seen, x in world_of(2, timing="lazy").run(program):
            assert seen.isnan().all()
            assert seen.view(torch.int32).tolist() == [0x7FDEAD5A] * 3
            assert x.tolist() == [2.0] * 3

    def test_hostile_timing_shows_both_results_of_a_missing_wait(self, world_of):
        def program(rank):
            x = torch.ones(1)
            work = dist.all_reduce(x, async_op=True)
            dist.barrier()
            dist.barrier()
            seen = x.isnan().item()
            work.wait()
            return seen

        runs = [world_of(2, timing="hostile", seed=seed).run(program) for seed in SEEDS]
        assert {seen for run in runs for seen in run} == {True, False}

    @pytest.mark.parametrize("timing", LATE)
    @pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "broadcast", "send"])
    def test_input_refilled_in_flight_is_a_race(self, world_of, timing, kind):
        def program(rank):
            x = torch.arange(4.0)
            if kind == "all_gather":
                work = dist.all_gather_single(torch.empty(8), x, async_op=True)
            elif kind == "reduce_scatter":
                work = dist.reduce_scatter_single(torch.empty(2), x, async_op=True)
            elif kind == "broadcast":
                work = dist.broadcast(x, src=0, async_op=True)
            else:
                work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
            if rank == 0:
                x[2:] = 7.0
            work.wait()

        world_of(2).run(program)
        for seed in SEEDS:
            failure = race(world_of(2, timing=timing, seed=seed), program)
            assert (failure.rank, failure.changed.index, failure.changed.count) == (0, 2, 2)
            assert (failure.changed.old_bits, failure.changed.new_bits) == (0x40000000, 0x40E00000)
            assert (failure.memory.dtype, failure.memory.shape) == ("float32", (4,))
            assert "changed between issue and wait" in str(failure)
            assert "element 2 of 4 was 0x40000000 (2.0) and is 0x40e00000 (7.0)" in str(failure)
            assert "test_timing.py:" in failure.memory.site

    @pytest.mark.parametrize("timing", LATE)
    def test_gather_issued_before_the_update_is_a_race(self, world_of, timing):
        def program(rank):
            flat = torch.zeros(4)
            mine = flat[2 * rank : 2 * rank + 2]
            work = dist.all_gather_single(flat, mine, async_op=True)
            mine += 1
            work.wait()
            return flat

        # Under eager timing the gathered values depend on the last rank to call.
        assert world_of(2).run(program)[0].tolist() == [1, 1, 0, 0]
        for seed in SEEDS:
            failure = race(world_of(2, timing=timing, seed=seed), program)
            assert failure.memory.operation == "all_gather #0 of group world"

    @pytest.mark.parametrize("timing", LATE)
    def test_output_zeroed_in_flight_is_a_race(self, world_of, timing):
        def program(rank):
            out = torch.empty(4)
            work = dist.all_gather_single(out, torch.ones(2), async_op=True)
            if rank == 1:
                out.zero_()
            work.wait()

        for seed in SEEDS:
            failure = race(world_of(2, timing=timing, seed=seed), program)
            assert failure.rank == 1
            assert "was written by the program while in flight" in str(failure)

    @pytest.mark.parametrize("timing", LATE)
    @pytest.mark.parametrize("which", ["input", "output"])
    @pytest.mark.parametrize("later_bytes", [0, 4096])
    def test_storage_resized_in_flight_is_a_race(self, world_of, timing, which, later_bytes):
        def program(rank):
            mine, out = torch.ones(2), torch.empty(4)
            work = dist.all_gather_single(out, mine, async_op=True)
            (mine if which == "input" else out).untyped_storage().resize_(later_bytes)
            work.wait()

        for seed in SEEDS:
            failure = race(world_of(2, timing=timing, seed=seed), program)
            assert f"storage of the {which} of all_gather #0" in str(failure)

    def test_wait_on_a_later_operation_does_not_complete_an_earlier_one(self, world_of):
        def program(rank):
            first, second = torch.ones(1), torch.ones(1)
            dist.all_reduce(first, async_op=True)
            dist.all_reduce(second, async_op=True).wait()
            return first.item(), second.item()

        assert world_of(2).run(program) == [(2.0, 2.0)] * 2
        for first, second in world_of(2, timing="lazy").run(program):
            assert first != first
            assert second == 2.0

    @pytest.mark.parametrize("timing", LATE)
    def test_memory_in_flight_twice_is_a_race(self, world_of, timing):
        def program(rank):
            x = torch.ones(4)
            first = dist.all_reduce(x, async_op=True)
            second = dist.all_gather_single(torch.empty(4), x[1:3], async_op=True)
            first.wait()
            second.wait()

        failure = race(world_of(2, timing=timing), program)
        assert "issued on memory that all_reduce #0 of group world has in flight" in str(failure)

    def test_restored_value_is_caught_under_some_seeds(self, world_of):
        def program(rank):
            x = torch.ones(2)
            work = dist.all_gather_single(torch.empty(4), x, async_op=True)
            x.zero_()
            dist.barrier()
            x.fill_(1.0)
            work.wait()

        def caught(seed):
            try:
                world_of(2, timing="hostile", seed=seed).run(program)
            except InFlightRace:
                return True
            return False

        assert {caught(seed) for seed in SEEDS} == {True, False}


class TestPoison:
    """Poison covers exactly the elements that the operation writes, in every dtype."""

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.complex64,
        ],
    )
    def test_floating_point_output_in_flight_is_nan(self, world_of, dtype):
        def program(rank):
            out = torch.zeros(4).to(dtype)
            work = dist.all_gather_single(out, torch.ones(2).to(dtype), async_op=True)
            seen = out.clone()
            work.wait()
            return seen, out

        wide = torch.complex64 if dtype.is_complex else torch.float32
        for seen, out in world_of(2, timing="lazy").run(program):
            assert seen.to(wide).isnan().all()
            assert (out.to(wide) == 1).all()

    def test_integer_poison_is_a5_and_bool_poison_is_a_valid_bool(self, world_of):
        def program(rank):
            numbers, flags = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)
            works = [
                dist.all_gather_single(numbers, numbers[:1].clone(), async_op=True),
                dist.all_gather_single(flags, flags[:1].clone(), async_op=True),
            ]
            seen = numbers.tolist(), flags.view(torch.uint8).tolist()
            for work in works:
                work.wait()
            return seen, numbers.tolist(), flags.tolist()

        a5 = int.from_bytes(b"\xa5" * 4, signed=True)
        for seen, numbers, flags in world_of(2, timing="lazy").run(program):
            assert seen == ([a5, a5], [1, 1])
            assert numbers == [0, 0]
            assert flags == [False, False]

    def test_only_written_elements_are_poisoned(self, world_of):
        def poisoned(issue, *tensors):
            work = issue()
            seen = [tensor.isnan().tolist() for tensor in tensors]
            work.wait()
            return seen

        def program(rank):
            gathered, scattered, shared, rooted = (torch.ones(4) for _ in range(4))
            strided = torch.ones(4, 2)
            mine = slice(2 * rank, 2 * rank + 2)
            return (
                poisoned(
                    lambda: dist.all_gather_single(gathered, gathered[mine], async_op=True),
                    gathered,
                ),
                poisoned(
                    lambda: dist.reduce_scatter_single(scattered[mine], scattered, async_op=True),
                    scattered,
                ),
                poisoned(lambda: dist.broadcast(shared, src=0, async_op=True), shared),
                poisoned(lambda: dist.reduce(rooted, dst=0, async_op=True), rooted),
                poisoned(lambda: dist.all_reduce(strided[:, 1], async_op=True), strided[:, 0]),
            )

        no, yes = False, True
        first, second = world_of(2, timing="lazy").run(program)
        assert first == (
            [[no, no, yes, yes]],
            [[yes, yes, no, no]],
            [[no] * 4],
            [[yes] * 4],
            [[no] * 4],
        )
        assert second == (
            [[yes, yes, no, no]],
            [[no, no, yes, yes]],
            [[yes] * 4],
            [[no] * 4],
            [[no] * 4],
        )


def overlapped(rank):
    """Run several operations at once, wait for them in every way, and touch no memory early."""
    size = dist.get_world_size()
    grads = torch.arange(4.0 * size) * (rank + 1)
    params = torch.zeros(2 * size).bfloat16()
    shard, out = torch.empty(4), torch.empty(1)
    works = [dist.reduce_scatter_single(shard, grads, async_op=True)]
    norm = torch.tensor([float(rank + 1)])
    works.append(dist.all_reduce(norm, async_op=True))
    for work in works:
        while not work.is_completed():
            pass
    params[2 * rank : 2 * rank + 2] = (shard[:2] / norm).bfloat16()
    gather = dist.all_gather_single(params, params[2 * rank : 2 * rank + 2], async_op=True)
    ring = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, shard[:1], (rank + 1) % size),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
    )
    pending = torch.rand(3).t()
    pair = pending.clone(), torch.ones(2, 3).t()[1]
    with dist._coalescing_manager(async_ops=True) as coalesced:
        dist.all_reduce(pair[0], op=dist.ReduceOp.MAX)
        dist.all_reduce(pair[1])
    dist.barrier()
    for work in ring:
        work.wait()
    future = gather.get_future().wait()[0]
    coalesced.wait()
    lists = [torch.empty(1) for _ in range(size)]
    dist.all_gather(lists, out)
    return torch.cat([shard, params.float(), out, *pair, pending, future.float(), *lists])


class TestCorrectPrograms:
    """Results do not depend on timing, schedule or seed."""

    @pytest.mark.parametrize("order", ["linear", "ring", "tree"])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_overlapped_program_gives_equal_bits(self, world_of, size, order):
        expected = None
        for timing in ("eager", *LATE):
            for schedule in ("round-robin", "random", "pct"):
                for seed in range(4):
                    world = world_of(size, order=order, timing=timing, schedule=schedule, seed=seed)

                    def program(rank):
                        torch.manual_seed(rank)
                        return overlapped(rank)

                    got = world.run(program)
                    expected = expected or got
                    for a, b in zip(got, expected, strict=True):
                        assert torch.equal(a, b)
                    assert not any(world.in_flight)

    @pytest.mark.parametrize("timing", LATE)
    def test_polling_ranks_do_not_starve_a_third_rank(self, world_of, timing):
        def program(rank):
            x, y = torch.ones(1), torch.ones(1)
            if rank == 2:
                dist.recv(y, src=0)  # Rank 2 joins the all-reduce only after this.
            elif rank == 0:
                sent = dist.isend(torch.tensor([5.0]), 2)
            work = dist.all_reduce(x, async_op=True)
            while not work.is_completed():
                pass
            if rank == 0:
                sent.wait()
            return x.item(), y.item()

        for schedule in ("round-robin", "random", "pct"):
            for seed in range(5):
                world = world_of(3, timing=timing, schedule=schedule, seed=seed)
                assert world.run(program) == [(3.0, 1.0), (3.0, 1.0), (3.0, 5.0)]

    def test_hostile_polls_fail_a_bounded_number_of_times(self, world_of):
        def program(rank):
            x = torch.ones(1)
            work = dist.all_reduce(x, async_op=True)
            dist.barrier()
            refusals = 0
            while not work.is_completed():
                refusals += 1
            return refusals, x.item()

        seen = [
            result
            for seed in SEEDS
            for result in world_of(2, timing="hostile", seed=seed).run(program)
        ]
        assert {x for _, x in seen} == {2.0}
        assert len({refusals for refusals, _ in seen}) > 1
        assert max(refusals for refusals, _ in seen) < 10

    @pytest.mark.parametrize("timing", LATE)
    def test_inference_mode_memory_is_reduced(self, world_of, timing):
        def program(rank):
            with torch.inference_mode(rank == 0):
                x = torch.ones(2)
                dist.all_reduce(x)
                return x.tolist()

        assert world_of(2, timing=timing).run(program) == [[2.0, 2.0]] * 2

    @pytest.mark.parametrize("timing", LATE)
    def test_error_in_an_operation_is_a_rank_failure(self, world_of, timing):
        def program(rank):
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND)

        from zero_sim.sim import RankFailed

        with pytest.raises(RankFailed, match="bitwise_and"):
            world_of(2, timing=timing).run(program)
        assert world_of(2).run(lambda rank: rank) == [0, 1]


class TestFlights:
    """Buffers in flight are listed during a call, and after the run if it was never waited for."""

    def test_buffers_are_in_flight_until_the_wait(self, world_of):
        world = world_of(2, timing="lazy")

        def roles(rank):
            return [(buffer.role, buffer.tensor.numel()) for buffer in world.in_flight[rank]]

        def program(rank):
            flat = torch.zeros(6)
            work = dist.all_gather_single(flat, flat[3 * rank : 3 * rank + 3], async_op=True)
            during = roles(rank)
            work.wait()
            return during, roles(rank)

        assert world.run(program) == [([("input", 3), ("output", 3)], [])] * 2

    @pytest.mark.parametrize("timing", ["eager", *LATE])
    def test_buffers_of_incomplete_calls_are_listed_after_the_run(self, world_of, timing):
        def program(rank):
            dist.all_reduce(torch.ones(1), async_op=True)
            if rank == 0:
                dist.isend(torch.ones(2), 1)
            elif rank == 1:
                dist.irecv(torch.ones(2), 0)

        world = world_of(3, timing=timing, races=True)
        world.run(program)
        left = [[buffer.what for buffer in buffers] for buffers in world.in_flight]
        reduction = "all_reduce #0 of group world"
        assert left == [
            [reduction, "send to rank 1 in group world"],
            [reduction, "recv from rank 0 in group world"],
            [reduction],
        ]
        buffer: InFlightBuffer = next(iter(world.in_flight[0]))
        assert buffer.file == __file__
        world.run(lambda rank: None)
        assert not any(world.in_flight)

    @pytest.mark.parametrize("timing", LATE)
    def test_unwaited_operation_is_performed_at_the_end(self, world_of, timing):
        def program(rank, *, refill):
            x = torch.ones(2)
            dist.all_gather_single(torch.empty(4), x, async_op=True)
            if refill:
                x.zero_()

        world = world_of(2, timing=timing)
        world.run(lambda rank: program(rank, refill=False))
        performed = [moment.rank for moment in world.log.moments if moment.what == "perform"]
        assert sorted(performed) == [0, 1]
        failure = race(world_of(2, timing="lazy"), lambda rank: program(rank, refill=rank == 1))
        assert failure.rank == 1

    def test_operation_that_lacks_a_rank_does_not_hang_the_end(self, world_of):
        def program(rank):
            if rank:
                dist.all_reduce(torch.ones(1), async_op=True)
            return rank

        for timing in LATE:
            world = world_of(3, timing=timing)
            assert world.run(program) == [0, 1, 2]
            assert [len(buffers) for buffers in world.in_flight] == [0, 1, 1]


class TestMoments:
    """The log records when each side of an operation reached which point."""

    def program(self, rank):
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        work.wait()

    def test_eager_timing_logs_only_issue_wait_and_land(self, world_of):
        world = world_of(2)
        world.run(self.program)
        for rank in range(2):
            of_rank = [moment for moment in world.log.moments if moment.rank == rank]
            assert [moment.what for moment in of_rank] == ["issue", "wait", "land"]
            assert {world.log.collectives[moment.record].rank for moment in of_rank} == {rank}

    def test_lazy_timing_reads_after_the_wait_began(self, world_of):
        world = world_of(2, timing="lazy")
        world.run(self.program)
        for rank in range(2):
            of_rank = [moment.what for moment in world.log.moments if moment.rank == rank]
            assert of_rank == ["issue", "wait", "read", "perform", "write", "land"]
        ticks = [moment.tick for moment in world.log.moments]
        assert ticks == sorted(ticks)

    def test_hostile_moments_depend_on_the_seed_and_enter_the_digest(self, world_of):
        def moments(seed):
            world = world_of(2, timing="hostile", seed=seed)
            world.run(self.program)
            return tuple(moment.what for moment in world.log.moments), world.log.digest()

        seen = [moments(seed) for seed in SEEDS]
        assert len({kinds for kinds, _ in seen}) > 3
        assert len({digest for _, digest in seen}) >= len({kinds for kinds, _ in seen})
