"""Planned faults: each has its effect, keeps the sender's memory intact, and is recorded."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.sim import Deadlock, Fault, InjectedCrash, RankFailed, RankStalled, World
from zero_sim.sim.faults import PASSED_OVER_MAX, SlowedSchedule
from zero_sim.sim.schedule import RoundRobin

SITE = "test_faults.py:"


@pytest.fixture
def struck(world_of):
    """Function that runs a program with faults, and returns results and fault records."""

    def run(program, *faults, size=3, seed=0, strict=True):
        world = world_of(size, seed=seed, strict=strict)
        world.configure(faults=faults)
        try:
            return world.run(program), world.log.faults
        finally:
            world.configure(faults=())

    return run


def all_reduce(rank):
    x = torch.tensor([1.0, 2.0, 4.0]) * 10**rank
    dist.all_reduce(x)
    return x.tolist()


def reduce_scatter(rank, op=dist.ReduceOp.SUM):
    source, output = torch.tensor([1.0, 2.0, 4.0]) * 10**rank, torch.zeros(1)
    before = source.clone()
    dist.reduce_scatter_single(output, source, op=op)
    assert source.equal(before)
    return output.item()


def reduce_scatter_max(rank):
    return reduce_scatter(rank, dist.ReduceOp.MAX)


def reduce_scatter_min(rank):
    return reduce_scatter(rank, dist.ReduceOp.MIN)


def reduce_scatter_product(rank):
    return reduce_scatter(rank, dist.ReduceOp.PRODUCT)


def all_gather(rank):
    source, output = torch.tensor([rank + 1.0]), torch.zeros(3)
    dist.all_gather_single(output, source)
    assert source.item() == rank + 1
    return output.tolist()


def all_gather_in_place(rank):
    output = torch.zeros(3)
    output[rank] = rank + 1
    dist.all_gather_single(output, output[rank : rank + 1])
    return output.tolist()


def gather_list(rank):
    outputs = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(outputs, torch.tensor([rank + 1.0]))
    return [output.item() for output in outputs]


GATHERS = (all_gather, all_gather_in_place, gather_list)


def to_root(rank):
    source = torch.tensor([rank + 1.0])
    outputs = [torch.zeros(1) for _ in range(3)] if rank == 0 else None
    dist.gather(source, outputs, dst=0)
    return [output.item() for output in outputs or []]


def broadcast(rank):
    x = torch.tensor([rank + 1.0])
    dist.broadcast(x, src=0)
    return x.item()


def all_to_all(rank):
    output = torch.zeros(3)
    dist.all_to_all_single(output, torch.full((3,), rank + 1.0))
    return output.tolist()


class TestCrash:
    """A crash fault raises at the planned call."""

    def test_crash_ends_the_world_and_is_reported_as_planned(self, world_of):
        world = world_of(3)
        world.configure(faults=[Fault(kind="crash", rank=1, call=1)])

        def program(rank):
            dist.barrier()
            return all_reduce(rank)

        with pytest.raises(RankFailed) as failed:
            world.run(program)
        world.configure(faults=())
        assert failed.value.rank == 1
        assert isinstance(failed.value.error, InjectedCrash)
        assert "crashed by plan at its 2nd call (call = 1, all_reduce #1" in str(failed.value)
        (record,) = world.log.faults
        assert record.fired
        assert SITE in record.site
        assert world.run(all_reduce) == [[111.0, 222.0, 444.0]] * 3

    def test_program_cannot_swallow_a_crash(self, world_of):
        world = world_of(2)
        world.configure(faults=[Fault(kind="crash", rank=0)])

        def program(rank):
            try:
                dist.barrier()
            except Exception:  # noqa: BLE001  The test is about this.
                return "went on"

        with pytest.raises(RankFailed):
            world.run(program)


class TestStall:
    """A stalled rank never arrives at its call."""

    def test_deadlock_names_the_stalled_rank(self, world_of):
        world = world_of(3)
        world.configure(faults=[Fault(kind="stall", rank=2, call=6)])

        def program(rank):
            for _ in range(8):
                dist.barrier()

        with pytest.raises(Deadlock, match="ranks that never came: 2") as failed:
            world.run(program)
        world.configure(faults=())
        assert "rank 2: stalled by plan at its 7th call (call = 6, barrier #6" in str(failed.value)
        assert world.log.faults[0].fired
        assert world.run(all_reduce) == [[111.0, 222.0, 444.0]] * 3

    def test_stall_is_reported_if_no_other_rank_waits_for_it(self, world_of):
        world = world_of(2)
        world.configure(faults=[Fault(kind="stall", rank=0)])
        with pytest.raises(Deadlock, match="stalled by plan"):
            world.run(lambda rank: dist.barrier() if rank == 0 else None)


class TestCorrupt:
    """A corrupt fault flips one bit of one element."""

    def test_sent_element_is_corrupted(self, struck):
        fault = Fault(kind="corrupt", rank=1, element=2, bit=31)
        results, (record,) = struck(all_reduce, fault)
        assert results == [[111.0, 222.0, 364.0]] * 3
        assert record.effect == "bit 31 of element 2 that it sends: 40.0 -> -40.0"

    def test_received_element_is_corrupted(self, struck):
        fault = Fault(kind="corrupt", rank=1, element=2, bit=31, side="receive")
        results, (record,) = struck(all_gather, fault)
        assert results == [[1.0, 2.0, 3.0], [1.0, 2.0, -3.0], [1.0, 2.0, 3.0]]
        assert record.effect == "bit 31 of element 2 that it receives: 3.0 -> -3.0"

    def test_bits_are_those_of_the_dtype(self, struck):
        def program(rank):
            values = []
            for dtype in (torch.bfloat16, torch.int64, torch.bool):
                x = torch.ones(1, dtype=dtype)
                dist.broadcast(x, src=0)
                values.append(x.item())
            return values

        plan = [
            Fault(kind="corrupt", rank=0, call=call, bit=bit)
            for call, bit in ((0, 15), (1, 63), (2, 0))
        ]
        results, _ = struck(program, *plan)
        assert results[1] == [-1.0, 1 - 2**63, False]

    def test_non_contiguous_memory_is_corrupted(self, struck):
        def program(rank):
            x = torch.arange(6.0).reshape(2, 3).t()
            dist.broadcast(x, src=0)
            return x.tolist()

        results, _ = struck(
            program, Fault(kind="corrupt", rank=1, element=3, bit=31, side="receive"), strict=False
        )
        assert results[1] == [[0.0, 3.0], [1.0, -4.0], [2.0, 5.0]]
        assert results[2] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


SENT_AND_KEPT = (
    # A sender keeps its own value.
    *(
        (Fault(kind="corrupt", rank=1, bit=31), gather, [[1, -2, 3], [1, 2, 3], [1, -2, 3]])
        for gather in GATHERS
    ),
    (Fault(kind="corrupt", rank=0, bit=31), broadcast, [1, -1, -1]),
    # A reduction of any kind omits a dropped contribution. The rank still gets the result.
    (Fault(kind="drop", rank=1), reduce_scatter, [101, 202, 404]),
    (Fault(kind="drop", rank=2), reduce_scatter_max, [10, 20, 40]),
    (Fault(kind="drop", rank=2), reduce_scatter_min, [1, 2, 4]),
    (Fault(kind="drop", rank=2), reduce_scatter_product, [10, 40, 160]),
    (Fault(kind="drop", rank=2), all_reduce, [[11, 22, 44]] * 3),
    # Dropped values arrive as zeros on other ranks; the sender keeps them.
    *(
        (Fault(kind="drop", rank=2), gather, [[1, 2, 0], [1, 2, 0], [1, 2, 3]])
        for gather in GATHERS
    ),
    (Fault(kind="drop", rank=2), to_root, [[1, 2, 0], [], []]),
    (Fault(kind="drop", rank=1), all_to_all, [[1, 0, 3], [1, 2, 3], [1, 0, 3]]),
    # In a gather, duplicated data takes the next position.
    (Fault(kind="duplicate", rank=1), reduce_scatter, [121, 242, 484]),
    (Fault(kind="duplicate", rank=0), all_gather_in_place, [[1, 1, 3], [1, 2, 3], [1, 1, 3]]),
)


@pytest.mark.parametrize(
    ("fault", "program", "expected"),
    SENT_AND_KEPT,
    ids=[f"{fault.kind}-{program.__name__}" for fault, program, _ in SENT_AND_KEPT],
)
def test_fault_changes_only_received_data(struck, fault, program, expected):
    assert struck(program, fault)[0] == expected


def test_duplicate_does_not_change_a_maximum(struck):
    results, (record,) = struck(reduce_scatter_max, Fault(kind="duplicate", rank=2))
    assert results == [100.0, 200.0, 400.0]
    assert record.fired
    assert "changes nothing" in record.effect


class TestSlow:
    """A slow rank gets its turn last."""

    @staticmethod
    def order(world):
        seen = []

        def program(rank):
            for _ in range(2):
                seen.append(rank)
                dist.barrier()

        world.run(program)
        return seen

    def test_slow_rank_runs_after_all_others(self, world_of):
        world = world_of(3)
        world.configure(faults=[Fault(kind="slow", rank=0)])
        seen = self.order(world)
        (record,) = world.log.faults
        world.configure(faults=())
        assert seen == [1, 2, 0, 0, 1, 2]
        assert record.fired
        assert self.order(world)[:3] == [0, 1, 2]

    def test_polling_rank_does_not_starve_a_slow_rank(self, struck):
        def program(rank):
            work = dist.barrier(async_op=True) if rank else None
            while work is not None and not work.is_completed():
                pass
            if work is None:
                dist.barrier()
            return "done"

        results, _ = struck(program, Fault(kind="slow", rank=0), size=2)
        assert results == ["done", "done"]

    def test_slow_rank_runs_after_a_bounded_number_of_turns(self):
        schedule = SlowedSchedule(RoundRobin(), slow={0: 0}, passed_over=lambda index: None)
        schedule.add(0)
        picks = []
        for _ in range(PASSED_OVER_MAX + 1):
            schedule.add(1)
            picks.append(schedule.pick())
        assert picks == [1] * PASSED_OVER_MAX + [0]

    def test_slow_fault_on_a_single_rank_does_not_fire(self, struck):
        _, (record,) = struck(lambda rank: None, Fault(kind="slow", rank=0), size=1)
        assert not record.fired


class TestPlan:
    """Choice of the struck call, and the reason if none is struck."""

    def test_fault_on_one_collective_counts_only_its_calls(self, struck):
        def program(rank):
            all_reduce(rank)
            dist.barrier()
            return all_reduce(rank)

        fault = Fault(kind="drop", rank=0, call=1, collective="all_reduce")
        results, (record,) = struck(program, fault)
        assert results[0] == [110.0, 220.0, 440.0]
        assert "at its 2nd all_reduce call (call = 1, all_reduce #2 of group world)" in record.when

    def test_random_call_depends_on_the_seed(self, struck):
        def program(rank):
            return [all_reduce(rank)[0] for _ in range(6)]

        fault = Fault(kind="drop", rank=0, at="random", call=1, call_stop=6)
        places = set()
        for seed in range(12):
            results, _ = struck(program, fault, seed=seed)
            assert (results, _) == struck(program, fault, seed=seed)
            places.add(results[0].index(110.0))
        assert len(places) > 1
        assert min(places) >= 1

    def test_run_with_faults_is_reproducible(self, world_of):
        world = world_of(3, seed=5)
        world.configure(faults=[Fault(kind="corrupt", rank=1)])
        runs = {(repr(world.run(all_reduce)), world.log.digest()) for _ in range(5)}
        world.configure(faults=())
        assert len(runs) == 1
        world.run(all_reduce)
        assert world.log.digest() not in {digest for _, digest in runs}

    @pytest.mark.parametrize(
        ("program", "fault", "reason"),
        [
            (all_reduce, Fault(kind="drop", rank=1, call=3), "made 1 collective call, and it was"),
            (broadcast, Fault(kind="drop", rank=1), "not the root sends nothing"),
            (
                broadcast,
                Fault(kind="corrupt", rank=0, side="receive"),
                "receives no element in this broadcast",
            ),
            (lambda rank: dist.barrier(), Fault(kind="drop", rank=1), "sends no element"),
            (broadcast, Fault(kind="duplicate", rank=0), "nothing can count twice"),
            (all_reduce, Fault(kind="corrupt", rank=1, element=3), "only 3 elements"),
            (all_reduce, Fault(kind="corrupt", rank=1, bit=32), "bit 32 of a 32-bit"),
        ],
    )
    def test_fault_that_cannot_fire_reports_the_reason(self, struck, program, fault, reason):
        plain, _ = struck(program)
        results, (record,) = struck(program, fault)
        assert not record.fired
        assert reason in record.effect
        assert results == plain

    @pytest.mark.parametrize(
        ("fault", "name"),
        [
            (Fault(kind="drop", rank=3), "rank of fault 0"),
            (Fault(kind="melt", rank=0), "kind of fault 0"),
            (Fault(kind="drop", rank=0, call=-1), "call of fault 0"),
            (Fault(kind="drop", rank=0, at="random", call=2, call_stop=2), "call_stop of fault 0"),
            (Fault(kind="drop", rank=0, collective="sum"), "collective of fault 0"),
        ],
    )
    def test_impossible_plan_is_refused(self, world_of, fault, name):
        with pytest.raises(UsageError, match=name):
            world_of(3).configure(faults=[fault])


class TestPausedClock:
    """Time spent in the harness does not count as the program's."""

    def test_long_paused_block_is_not_a_stall(self, stall_clock):
        with World(2) as world:

            def program(rank):
                if rank == 0:
                    with world.pause_clock():
                        stall_clock.passes(times=3)
                dist.barrier()
                return rank

            assert world.run(program) == [0, 1]

    @pytest.mark.parametrize("is_within", [True, False], ids=["the program's own", "after it"])
    def test_stall_after_a_pause_is_detected(self, stall_clock, is_within):
        with World(2) as world:

            def program(rank):
                if rank == 0:
                    with world.pause_clock(), world.pause_clock(False):
                        while is_within and stall_clock.runs_out():
                            pass
                    while stall_clock.runs_out():
                        pass
                dist.barrier()

            with pytest.raises(RankStalled):
                world.run(program)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_invalid_stall_limit_is_refused(self, world_of, seconds):
        with pytest.raises(UsageError, match="stall_seconds"):
            world_of(2).configure(stall_seconds=seconds)
