"""Futures of works: waiting for a future waits for its work; nothing else does."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import ContractViolation, DataRace, Deadlock

TIMINGS = ("eager", "lazy", "hostile")


def future_of(x):
    return dist.all_reduce(x, async_op=True).get_future()


def doubled(future):
    return future.value()[0].mul_(2)


def ones(rank):
    """Four elements that sum to 12 over two ranks."""
    return torch.ones(4) * (rank + 1)


WAITS = {
    "future": lambda future: future.wait()[0],
    "child": lambda future: future.then(lambda each: each.value()[0]).wait(),
    "grandchild": lambda future: (
        future.then(lambda each: each.wait()).then(lambda each: each.wait()[0]).wait()
    ),
    "collect_all": lambda future: torch.futures.collect_all([future]).wait()[0].value()[0],
    "child of collect_all": lambda future: (
        torch.futures.collect_all([future]).then(lambda each: each.value()[0].value()[0]).wait()
    ),
    "wait_all": lambda future: torch.futures.wait_all([future])[0][0],
    "jit": lambda future: torch.jit.wait(future)[0],
}


@pytest.fixture(params=TIMINGS)
def timing(request):
    return request.param


class TestWaits:
    """Every wait for a future waits for its work."""

    @pytest.mark.parametrize("name", WAITS)
    @pytest.mark.parametrize("races", [False, True])
    def test_each_way_of_waiting_waits_for_the_work(self, world_of, timing, name, races):
        def program(rank):
            future = future_of(ones(rank))
            result = WAITS[name](future)
            return result.sum().item()

        for seed in range(4):
            world = world_of(2, timing=timing, races=races, seed=seed)
            assert world.run(program) == [12.0, 12.0]

    def test_other_ranks_run_while_a_rank_waits(self, world_of, timing):
        order = []

        def program(rank):
            if rank:
                order.append("second")
                return future_of(ones(rank)).wait()[0][0].item()
            future = future_of(ones(rank))
            order.append("first")
            value = future.wait()[0][0].item()
            order.append("waited")
            return value

        assert world_of(2, timing=timing).run(program) == [3.0, 3.0]
        assert order == ["first", "second", "waited"]

    def test_missing_rank_is_named(self, world_of, timing):
        def program(rank):
            if rank == 0:
                future_of(ones(rank)).wait()

        with pytest.raises(Deadlock, match="ranks that never came: 1"):
            world_of(2, timing=timing).run(program)

    def test_a_wait_for_the_work_completes_its_futures(self, world_of, timing):
        def program(rank):
            work = dist.all_reduce(ones(rank), async_op=True)
            future, ran = work.get_future(), []
            child = future.then(lambda each: ran.append(each.value()[0][0].item()))
            work.wait()
            return future.done(), child.done(), ran, future.value()[0][0].item()

        world = world_of(2, timing=timing, races=True)
        assert world.run(program) == [(True, True, [3.0], 3.0)] * 2

    def test_polling_a_work_until_done_is_a_wait(self, world_of, timing):
        # With NCCL, is_completed() is true only after the device has finished.
        def program(rank):
            x = ones(rank)
            work = dist.all_reduce(x, async_op=True)
            while not work.is_completed():
                pass
            return x.sum().item()

        assert world_of(2, timing=timing, races=True).run(program) == [12.0, 12.0]


def peek_value(x, future):
    while not future.done():
        pass
    return future.value()[0].sum()


PEEKS = {
    "memory": lambda x, future: x.sum(),
    "value after done": peek_value,
    "memory after then": lambda x, future: (future.then(doubled), x.sum()),
    "value after done of a child": lambda x, future: peek_value(
        x, future.then(lambda each: each.wait())
    ),
    "memory after collect_all": lambda x, future: (torch.futures.collect_all([future]), x.sum()),
    "write": lambda x, future: x.zero_(),
}


class TestNoWaits:
    """Other uses of a future leave its memory in flight."""

    @pytest.mark.parametrize("name", PEEKS)
    def test_access_before_the_wait_is_a_race(self, world_of, timing, name):
        def program(rank):
            x = ones(rank)
            future = future_of(x)
            PEEKS[name](x, future)
            future.wait()

        for seed in range(4):
            with pytest.raises(DataRace):
                world_of(2, timing=timing, races=True, seed=seed).run(program)

    def test_write_to_an_input_before_the_wait_is_a_race(self, world_of, timing):
        def program(rank):
            x, out = torch.ones(4), torch.empty(2)
            future = dist.reduce_scatter_single(out, x, async_op=True).get_future()
            x.sum()
            x.add_(1)
            future.wait()

        with pytest.raises(DataRace, match=r"writes elements \[0, 4\) of the input"):
            world_of(2, timing=timing, races=True).run(program)

    def test_without_the_detector_a_late_timing_shows_poison(self, world_of):
        def program(rank):
            x = ones(rank)
            future = future_of(x)
            while not future.done():
                pass
            early = future.value()[0].isnan().all().item()
            return early, future.wait()[0][0].item()

        assert world_of(2, timing="lazy").run(program) == [(True, 3.0)] * 2

    @pytest.mark.parametrize(
        "leave",
        [
            lambda future: None,
            lambda future: [None for _ in iter(future.done, True)],
            lambda future: future.then(doubled),
            lambda future: torch.futures.collect_all([future]),
        ],
        ids=["dropped", "done", "then", "collect_all"],
    )
    def test_unwaited_future_is_reported(self, world_of, timing, leave):
        with pytest.raises(ContractViolation, match="without having waited") as caught:
            world_of(2, timing=timing).run(lambda rank: leave(future_of(ones(rank))))
        assert caught.value.aspect == "never-waited"

    def test_value_of_an_unfinished_future_raises(self, world_of, timing):
        def program(rank):
            future = future_of(ones(rank))
            if rank == 0:  # Rank 0 runs first.
                with pytest.raises(RuntimeError, match="expected a future that is done"):
                    future.value()
            future.wait()

        world_of(2, timing=timing).run(program)

    @pytest.mark.parametrize("races", [False, True])
    def test_polling_makes_progress(self, world_of, timing, races):
        def program(rank):
            polls = 0
            future = future_of(ones(rank)).then(doubled)
            while not future.done():
                polls += 1
            return polls < 20, future.wait().sum().item()

        for seed in range(4):
            world = world_of(2, timing=timing, races=races, seed=seed)
            assert world.run(program) == [(True, 24.0)] * 2


class TestCallbacks:
    """Callbacks run once, in the rank's own thread, when the outputs are complete."""

    @pytest.mark.parametrize("races", [False, True])
    def test_a_callback_may_use_the_memory_in_place(self, world_of, timing, races):
        def program(rank):
            x, seen = ones(rank), []
            future = future_of(x)
            child = future.then(doubled)
            child.add_done_callback(lambda each: seen.append((dist.get_rank(), each.value()[0])))
            dist.barrier()
            child.wait()
            return x.tolist(), [(who, value.item()) for who, value in seen]

        for seed in range(4):
            world = world_of(2, timing=timing, races=races, seed=seed)
            assert world.run(program) == [([6.0] * 4, [(rank, 6.0)]) for rank in range(2)]

    def test_a_callback_may_wait_for_calls_of_its_own(self, world_of, timing):
        def gather(future):
            (shard,) = future.value()
            full = torch.empty(2)
            return dist.all_gather_single(full, shard, async_op=True).get_future().wait()[0]

        def program(rank):
            shard = torch.empty(1)
            work = dist.reduce_scatter_single(shard, torch.arange(2.0), async_op=True)
            return work.get_future().then(gather).wait().tolist()

        for seed in range(4):
            world = world_of(2, timing=timing, races=True, seed=seed)
            assert world.run(program) == [[0.0, 2.0]] * 2

    def test_a_callback_may_wait_for_another_future_of_its_work(self, world_of, timing):
        def program(rank):
            work = dist.all_reduce(ones(rank), async_op=True)
            first, second = work.get_future(), work.get_future()
            return first.then(lambda each: second.wait()[0][0].item()).wait()

        assert world_of(2, timing=timing).run(program) == [3.0, 3.0]

    def test_callback_error_is_raised_by_the_wait(self, world_of, timing):
        def program(rank):
            child = future_of(ones(rank)).then(lambda each: 1 / 0).then(lambda each: each.wait())
            with pytest.raises(RuntimeError, match="running the callback: ZeroDivisionError"):
                child.wait()
            collected = torch.futures.collect_all([child])
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                collected.wait()

        world_of(2, timing=timing).run(program)

    def test_unwaited_callback_error_is_printed(self, world_of, timing, capfd):
        def program(rank):
            future = future_of(ones(rank))
            future.add_done_callback(lambda each: 1 / 0)
            future.wait()

        world_of(1, timing=timing).run(program)
        assert "ZeroDivisionError" in capfd.readouterr().err

    def test_a_race_in_a_callback_ends_the_run(self, world_of, timing):
        def program(rank):
            x = ones(rank)
            other = future_of(x)
            future_of(ones(rank)).then(lambda each: x.sum()).wait()
            other.wait()

        with pytest.raises(DataRace):
            world_of(2, timing=timing, races=True).run(program)

    def test_collect_all_mixes_futures_of_works_and_others(self, world_of, timing):
        def program(rank):
            own = torch.futures.Future()
            both = torch.futures.collect_all([future_of(ones(rank)), own])
            assert not both.done()
            own.set_result(rank)
            first, second = both.wait()
            return first.value()[0][0].item(), second.value()

        assert world_of(2, timing=timing).run(program) == [(3.0, 0), (3.0, 1)]


def sharded_step(rank):
    """One step of a sharded optimizer that keeps futures in dicts, like public examples."""
    size = dist.get_world_size()
    params = [torch.arange(float(size * n)) + n for n in (1, 2, 3)]
    infos = []
    for param in params:
        grad = param * (rank + 1)
        shard = torch.empty(len(param) // size)
        work = dist.reduce_scatter_single(shard, grad, op=dist.ReduceOp.SUM, async_op=True)
        infos.append({"future": work.get_future(), "shard": shard, "grad": grad})
    small = torch.full((3,), float(rank))
    small_info = {"future": dist.all_reduce(small, async_op=True).get_future(), "grad": small}
    gathers = []
    for param, info in zip(params, infos, strict=True):
        info["future"].wait()
        mine = param.view(size, -1)[rank]
        mine.sub_(info["shard"], alpha=0.1)
        gathers.append(dist.all_gather_single(param, mine, async_op=True).get_future())
    small_info["future"].wait()
    torch.futures.collect_all(gathers).wait()
    return torch.cat([*params, small_info["grad"]])


class TestCorrectPrograms:
    """Results depend neither on timing nor on schedule or seed."""

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_step_with_stored_futures_is_reproducible(self, world_of, size):
        expected = world_of(size).run(sharded_step)
        for timing in TIMINGS:
            for schedule in ("round-robin", "random"):
                for seed in range(3):
                    world = world_of(size, timing=timing, schedule=schedule, seed=seed, races=True)
                    got = world.run(sharded_step)
                    assert all(map(torch.equal, got, expected))


def functional_elem(x):
    from torch.distributed import _functional_collectives as functional

    result = functional.all_reduce(x, "sum", dist.group.WORLD)
    return result.elem, result.wait


def functional_operator(x):
    operators = torch.ops._c10d_functional
    result = operators.all_reduce(x, "sum", dist.group.WORLD.group_name)
    return result, lambda: operators.wait_tensor(result)


def coalesced(x):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(2))
    return x, manager.wait


def coalesced_list(x):
    with pytest.warns(FutureWarning):
        future = dist.all_reduce_coalesced([x], async_op=True)
    return x, future.wait


def coalesced_messages(x):
    out, rank = torch.empty_like(x), dist.get_rank()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
    )
    return out, lambda: [work.wait() for work in works]


def result(x):
    work = dist.all_reduce(x, async_op=True)
    return work.result()[0], work.wait


DOORS = (
    functional_elem, functional_operator, coalesced, coalesced_list, coalesced_messages, result
)  # fmt: skip


class TestOtherAccess:
    """Other ways to reach a call's memory are no waits; their own waits are."""

    @pytest.mark.parametrize("door", DOORS)
    def test_read_before_the_wait_is_a_race(self, world_of, timing, door):
        def program(rank):
            memory, wait = door(ones(rank))
            try:
                memory.sum()
            finally:
                wait()  # Otherwise torch warns at process exit.

        with pytest.raises(DataRace):
            world_of(2, timing=timing, races=True).run(program)

    @pytest.mark.parametrize("door", DOORS)
    def test_read_after_the_wait_is_accepted(self, world_of, timing, door):
        def program(rank):
            memory, wait = door(ones(rank))
            wait()
            return memory.sum().item()

        expected = [8.0, 4.0] if door is coalesced_messages else [12.0, 12.0]
        assert world_of(2, timing=timing, races=True).run(program) == expected

    @pytest.mark.parametrize("door", [d for d in DOORS if not d.__name__.startswith("functional")])
    def test_missing_wait_is_reported(self, world_of, timing, door):
        with pytest.raises(ContractViolation, match="without having waited"):
            world_of(2, timing=timing).run(lambda rank: door(ones(rank)) and None)


def test_future_waited_for_by_one_rank_is_unwaited_on_the_other(world_of, timing):
    def program(rank):
        future = future_of(ones(rank))
        if rank == 0:
            future.wait()

    with pytest.raises(ContractViolation) as caught:
        world_of(2, timing=timing).run(program)
    assert caught.value.rank == 1
