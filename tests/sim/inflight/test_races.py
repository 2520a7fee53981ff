"""Race detector: names the operation, its line and the elements; correct programs are clean."""

import inspect
import linecache
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero_sim.sim import DataRace, unwatched


@pytest.fixture
def world_of(world_of):
    """Non-strict worlds that detect races: some programs leave calls open or use strides."""

    def get(size, **settings):
        return world_of(size, **{"races": True, "strict": False, **settings})

    return get


def race_of(world, program, *, on=None):
    """Run a program that must race on a line marked `# race`, and return the race."""
    with pytest.raises(DataRace) as caught:
        world.run(program)
    race = caught.value
    lines, first = inspect.getsourcelines(on or program)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# race")]
    assert (race.access.file, [race.access.line]) == (__file__, marked)
    return race


def touched(race):
    """Operation, access and elements of a race, and the role of the buffer."""
    access = race.access
    verb = "writes" if access.writes else "reads"
    return access.operation, verb, access.start, access.stop, race.buffer.role


def scatter_in_flight(rank):
    """Input of 8 elements that two ranks are still reading, and its work."""
    x = torch.arange(8.0)
    return x, dist.reduce_scatter_single(torch.empty(4), x, async_op=True)


def gather_in_flight(rank):
    """Output of 8 elements that two ranks are still writing, and its work."""
    x = torch.zeros(8)
    return x, dist.all_gather_single(x, torch.ones(4), async_op=True)


WRITES = {
    "add_": (lambda v: v.add_(1), "aten::add_"),
    "copy_": (lambda v: v.copy_(torch.ones(3)), "aten::copy_"),
    "zero_": (lambda v: v.zero_(), "aten::zero_"),
    "out": (lambda v: torch.add(torch.ones(3), 1, out=v), "aten::add"),
    "out list": (lambda v: torch.split_with_sizes_copy(torch.ones(3), [3], out=[v]), None),
    "setitem": (lambda v: v.__setitem__(slice(None), 1.0), "aten::fill_"),
    "index_put_": (lambda v: v.index_put_((torch.tensor([0]),), torch.ones(1)), "aten::index_put_"),
    "foreach list": (lambda v: torch._foreach_mul_([torch.ones(1), v], 2.0), "aten::_foreach_mul_"),
    "random": (lambda v: v.uniform_(), "aten::uniform_"),
    "bytes of it": (lambda v: v.view(torch.uint8).fill_(1), "aten::fill_"),
    "param.data": (lambda v: nn.Parameter(v).data.mul_(2), "aten::mul_"),
}


class TestWritesOfInputs:
    """Every write to an input in flight is caught."""

    @pytest.mark.parametrize("name", WRITES)
    def test_every_kind_of_write_is_a_race(self, world_of, name):
        write, operation = WRITES[name]

        def program(rank):
            x, work = scatter_in_flight(rank)
            write(x[2:5])
            work.wait()

        with pytest.raises(DataRace) as caught:
            world_of(2).run(program)
        got, *rest = touched(caught.value)
        assert rest == ["writes", 2, 5, "input"]
        assert operation in (got, None)
        line = linecache.getline(__file__, caught.value.access.line)
        assert line.strip().startswith(f'"{name}"')

    def test_write_by_a_foreach_optimizer_is_a_race(self, world_of):
        def program(rank):
            x, _ = scatter_in_flight(rank)
            param = nn.Parameter(x[6:])
            param.grad = torch.ones(2)
            torch.optim.SGD([param], lr=1.0, foreach=True).step()  # race

        race = race_of(world_of(2), program)
        assert touched(race) == ("aten::_foreach_add_", "writes", 6, 8, "input")

    def test_write_missing_from_the_schema_is_a_race(self, world_of):
        def program(rank):
            norm = nn.BatchNorm1d(4)
            dist.broadcast(norm.running_mean, src=0, async_op=True)
            if rank == 0:
                norm.eval()(torch.ones(3, 4))
                norm.train()(torch.ones(3, 4))  # race
            dist.barrier()

        assert touched(race_of(world_of(2), program))[1:] == ("writes", 0, 4, "input")


READS = {
    "arithmetic": lambda v: v + 1,
    "item": lambda v: v[0].item(),
    "in a list": lambda v: torch.cat([torch.ones(1), v]),
    "matmul": lambda v: v.view(1, 3) @ torch.ones(3, 1),
    "by name": lambda v: torch.add(input=torch.ones(3), other=v),
    "index": lambda v: torch.ones(9)[v.long()],
    "clone": lambda v: v.clone(),
    "cast": lambda v: v.to(torch.bfloat16),
    "compare": lambda v: torch.equal(v, v),
}


class TestReadsOfOutputs:
    """Every read of an output in flight is caught."""

    @pytest.mark.parametrize("name", READS)
    def test_every_kind_of_read_is_a_race(self, world_of, name):
        def program(rank):
            x, work = gather_in_flight(rank)
            READS[name](x[2:5])
            work.wait()

        with pytest.raises(DataRace) as caught:
            world_of(2).run(program)
        race = caught.value
        assert not race.access.writes
        assert race.buffer.role == "output"
        stop = 3 if name == "item" else 5
        assert (race.access.start, race.access.stop) == (2, stop)
        assert linecache.getline(__file__, race.access.line).strip().startswith(f'"{name}"')

    @pytest.mark.parametrize(
        "operation", [lambda x: x.t().reshape(-1), lambda x: x.t().contiguous()]
    )
    def test_copying_reshape_in_inference_mode_is_a_race(self, world_of, operation):
        def program(rank):
            x, work = gather_in_flight(rank)
            with torch.inference_mode():
                x.view(2, 4).reshape(8).view(4, 2).contiguous()
                operation(x.view(2, 4))
            work.wait()

        with pytest.raises(DataRace, match=r"reads elements \[0, 8\) of the output"):
            world_of(2).run(program)


class TestBackward:
    """The mode is active inside backward, in hooks, and in torch's C++ code."""

    def test_gradient_accumulation_is_a_race(self, world_of):
        def program(rank):
            layer = nn.Linear(3, 2)
            layer(torch.ones(1, 3)).sum().backward()
            work = dist.all_reduce(layer.bias.grad, async_op=True)
            loss = layer(torch.ones(1, 3)).sum()
            loss.backward()  # race
            work.wait()

        race = race_of(world_of(2), program)
        assert touched(race) == ("aten::add_", "writes", 0, 2, "output")
        assert race.access.node == "AccumulateGrad"
        assert "in backward of AccumulateGrad" in str(race)

    def test_backward_reading_a_saved_tensor_is_a_race(self, world_of):
        def program(rank):
            layer = nn.Linear(3, 2, bias=False)
            loss = layer(torch.ones(1, 3, requires_grad=True)).sum()
            dist.all_gather_single(layer.weight.data.view(-1), torch.ones(3), async_op=True)
            loss.backward()  # race

        race = race_of(world_of(2), program)
        assert touched(race) == ("aten::mm", "reads", 0, 6, "output")
        assert race.access.node == "MmBackward0"

    def test_race_in_a_hook_names_the_hooks_line(self, world_of):
        flat = [torch.zeros(8) for _ in range(2)]

        def hook(param):
            flat[dist.get_rank()][4:6] += param.grad  # race

        def program(rank):
            layer = nn.Linear(3, 2)
            layer.bias.register_post_accumulate_grad_hook(hook)
            dist.all_reduce(flat[rank], async_op=True)
            layer(torch.ones(1, 3)).sum().backward()

        race = race_of(world_of(2), program, on=hook)
        assert touched(race) == ("aten::add_", "writes", 4, 6, "output")

    def test_collective_issued_in_a_hook_is_watched_after_the_hook(self, world_of):
        works = [[], []]

        def hook(param):
            works[dist.get_rank()].append(dist.all_reduce(param.grad, async_op=True))

        def program(rank):
            layer = nn.Linear(3, 2)
            for param in layer.parameters():
                param.register_post_accumulate_grad_hook(hook)
            layer(torch.ones(1, 3)).sum().backward()
            works[rank][0].wait()
            assert layer.bias.grad.sum() == 4
            layer.weight.grad.sum()  # race

        assert touched(race_of(world_of(2), program))[1:] == ("reads", 0, 6, "output")


class TestBuffersInFlight:
    """Each collective has exactly those bytes in flight that NCCL would read and write."""

    def test_in_place_gather_only_reads_its_own_chunk(self, world_of):
        def program(rank):
            x = torch.zeros(6)
            mine = x[2 * rank : 2 * rank + 2]
            dist.all_gather_single(x, mine, async_op=True)
            mine.clone()
            if rank == 1:
                mine += 1  # race
            dist.barrier()

        race = race_of(world_of(3), program)
        assert touched(race) == ("aten::add_", "writes", 0, 2, "input")

    def test_elements_of_an_in_place_gather_are_numbered_in_its_output(self, world_of):
        def program(rank):
            x = torch.zeros(6)
            dist.all_gather_single(x, x[2 * rank : 2 * rank + 2], async_op=True)
            if rank == 1:
                x[5].item()  # race
            dist.barrier()

        race = race_of(world_of(3), program)
        assert touched(race)[1:] == ("reads", 5, 6, "output")
        assert "shape (6,)" in str(race)

    def test_send_input_may_be_read_but_recv_output_not_written(self, world_of):
        def program(rank):
            x = torch.ones(4)
            if rank == 0:
                work = dist.isend(x, dst=1)
                x.sum()
                work.wait()
                x.zero_()
            else:
                dist.irecv(x, src=0)
                x[:1] += 1  # race

        race = race_of(world_of(2), program)
        assert touched(race) == ("aten::add_", "writes", 0, 1, "output")
        assert race.buffer.what == "recv from rank 0 in group world"

    def test_list_inputs_may_be_read_but_list_outputs_not_written(self, world_of):
        def program(rank):
            parts = [torch.ones(2), torch.ones(3)]
            outputs = [torch.empty(2 + rank) for _ in range(2)]
            dist.all_to_all(outputs, parts, async_op=True)
            parts[1].sum()
            outputs[1][0] = 1  # race

        race = race_of(world_of(2), program)
        assert touched(race) == ("aten::copy_", "writes", 0, 1, "output")

    @pytest.mark.parametrize("waits", [True, False])
    def test_batch_of_messages_completes_together(self, world_of, waits):
        def program(rank):
            x, y = torch.ones(2), torch.zeros(2)
            with dist._coalescing_manager(device=x.device, async_ops=True) as manager:
                dist.isend(x, dst=1 - rank)
                dist.irecv(y, src=1 - rank)
            if waits:
                manager.wait()
            x += y  # race
            return x.tolist()

        if waits:
            assert world_of(2).run(program) == [[2.0, 2.0]] * 2
        else:
            assert touched(race_of(world_of(2), program))[-1] == "input"

    def test_coalesced_collectives_complete_together(self, world_of):
        def program(rank):
            a, b = torch.ones(2), torch.ones(3)
            with dist._coalescing_manager(async_ops=True) as manager:
                dist.all_reduce(a)
                dist.all_reduce(b)
            if rank == 1:
                manager.wait()
            return (a.sum() + b.sum()).item()  # race

        race = race_of(world_of(2), program)
        assert race.rank == 0


class TestClean:
    """Accesses of correct programs are no races."""

    def test_reading_an_input_is_clean(self, world_of):
        def program(rank):
            x, work = scatter_in_flight(rank)
            total = x.sum().item()
            work.wait()
            return total

        assert world_of(2).run(program) == [28.0] * 2

    def test_views_and_metadata_are_clean(self, world_of):
        def program(rank):
            x, work = gather_in_flight(rank)
            views = [x.view(2, 4).t(), x[3:], x.as_strided((2,), (3,)), x.detach(), x.unsqueeze(0)]
            views += [
                *x.split(2),
                *x.chunk(3),
                x.view(torch.int32),
                x.expand(2, 8),
                x.reshape(4, 2),
            ]
            views[0].squeeze_()
            torch.zeros_like(x), torch.empty_like(x), x.new_zeros(3), x.numel(), x.contiguous()
            torch.ones(4, 2).view_as(x.view(4, 2)), torch.ones(1).expand_as(x), x.float()
            nn.Parameter(x).data = torch.ones(3)
            work.wait()
            return sum(view.numel() for view in views)

        world_of(2).run(program)

    def test_views_and_metadata_in_inference_mode_are_clean(self, world_of):
        def program(rank):
            x, work = gather_in_flight(rank)
            with torch.inference_mode():
                like = torch.ones(8)
                like.view_as(x), like.expand_as(x), like.reshape_as(x), like.type_as(x), like.to(x)
                x.reshape(2, 4), x.contiguous(), x.to(torch.float32), x.chunk(2)
            work.wait()

        world_of(2).run(program)

    def test_access_after_waiting_is_clean(self, world_of):
        def program(rank):
            x, work = gather_in_flight(rank)
            work.wait()
            x += 1
            y, work = scatter_in_flight(rank)
            while not work.is_completed():
                pass
            y += 1
            return x.tolist()

        assert world_of(2).run(program) == [[2.0] * 8] * 2

    @pytest.mark.parametrize("column", [0, 1, 2])
    def test_interleaved_columns_are_distinguished(self, world_of, column):
        def program(rank):
            table = torch.zeros(4, 6)
            dist.all_reduce(table[:, 2:4], async_op=True)
            table[:, 2 * column : 2 * column + 2] += 1  # race
            dist.barrier()

        if column == 1:
            race = race_of(world_of(2), program)
            assert touched(race)[1:] == ("writes", 0, 8, "output")
        else:
            world_of(2).run(program)

    def test_reading_an_input_next_to_an_output_is_clean(self, world_of):
        def program(rank):
            table = torch.zeros(4, 2)
            sent = dist.isend(table[:, 0], dst=1 - rank)
            received = dist.irecv(table[:, 1], src=1 - rank)
            table[:, 0].sum()
            sent.wait()
            received.wait()

        world_of(2).run(program)

    def test_second_operation_on_memory_in_flight_is_clean(self, world_of):
        # Operations of one group run in order on a device, so this can be correct.
        def program(rank):
            x, total = torch.ones(2), torch.zeros(2)
            works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)]
            works += [dist.isend(x, dst=1 - rank), dist.irecv(total, src=1 - rank)]
            for work in works:
                work.wait()
            return total.tolist()

        assert world_of(2).run(program) == [[4.0, 4.0]] * 2

    def test_pipeline_over_slices_of_a_flat_buffer_is_clean(self, world_of):
        def program(rank, *, late=False):
            flat, works = torch.zeros(12), []
            for start in range(0, 12, 3):
                bucket = flat[start : start + 3]
                bucket += rank + 1
                works.append(dist.all_reduce(bucket, async_op=True))
                if len(works) > 1:
                    before = flat[start - 3 : start]
                    if not late:
                        works[-2].wait()
                    before /= 2
            works[-1].wait()
            return flat.tolist()

        assert world_of(2).run(program) == [[1.5] * 9 + [3.0] * 3] * 2
        with pytest.raises(DataRace, match=r"aten::div_ .* writes elements \[0, 3\) of the output"):
            world_of(2).run(lambda rank: program(rank, late=True))

    def test_functional_collectives_wait_when_they_are_used(self, world_of):
        from torch.distributed import _functional_collectives as functional

        def program(rank):
            x = functional.all_reduce(torch.ones(2) * rank, "sum", dist.group.WORLD)
            return (x + 1).tolist()

        assert world_of(2).run(program) == [[2.0, 2.0]] * 2

    def test_accesses_through_dtensor_are_detected(self, world_of):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        def program(rank):
            mesh = init_device_mesh("cpu", (2,))
            x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            inner = x.to_local()
            total = (x * 2).redistribute(mesh, [Replicate()]).to_local().sum().item()
            dist.all_reduce(inner, async_op=True)
            x.add_(1)  # race
            return total

        race = race_of(world_of(2), program)
        assert touched(race) == ("aten::add_", "writes", 0, 2, "output")


class Count(TorchDispatchMode):
    """Dispatch mode of the program."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))  # race


def modes():
    """Class names of this thread's mode stack, from bottom to top."""
    count = torch._C._len_torch_dispatch_stack()
    return [type(torch._C._get_dispatch_stack_at(i)).__name__ for i in range(count)]


class TestModeStack:
    """The detector is on the mode stack only while memory is in flight, and in backward."""

    def test_detector_is_active_from_issue_to_wait(self, world_of):
        def program(rank):
            before = modes()
            _, work = gather_in_flight(rank)
            _, other = scatter_in_flight(rank)
            dist.all_reduce(torch.ones(2))
            work.wait()
            during = modes()
            other.wait()
            dist.all_reduce(torch.ones(2))
            return before, during, modes()

        assert world_of(2).run(program) == [([], ["RaceDetector"], [])] * 2

    def test_collective_issued_in_a_hook_is_watched_in_the_same_backward(self, world_of):
        lent = [torch.zeros(2) for _ in range(2)]
        works = [None, None]

        def first(grad):
            works[dist.get_rank()] = dist.all_reduce(lent[dist.get_rank()], async_op=True)

        def second(grad):
            lent[dist.get_rank()].add_(1)  # race

        def program(rank):
            x = torch.ones(2, requires_grad=True)
            y = x * 2
            y.register_hook(second)
            z = y * 3
            z.register_hook(first)
            torch.autograd.grad(z.sum(), x)

        race = race_of(world_of(2), program, on=second)
        assert touched(race) == ("aten::add_", "writes", 0, 2, "output")

    def test_detector_is_inactive_after_a_backward_with_all_calls_complete(self, world_of):
        def hook(param):
            dist.all_reduce(param.grad, async_op=True).wait()

        def program(rank):
            param = nn.Parameter(torch.ones(2))
            param.register_post_accumulate_grad_hook(hook)
            param.sum().backward()
            return modes(), param.grad.tolist()

        assert world_of(2).run(program) == [([], [2.0, 2.0])] * 2

    def test_detector_stays_active_in_a_nested_backward(self, world_of):
        seen = []

        def hook(grad):
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
            seen.append(modes())

        def program(rank):
            x = torch.ones(2, requires_grad=True)
            x.register_hook(hook)
            x.sum().backward()
            return modes()

        assert world_of(1).run(program) == [[]]
        assert seen == [["RaceDetector"]]

    @pytest.mark.parametrize("waits_inside", [True, False])
    def test_detector_is_placed_below_existing_modes(self, world_of, waits_inside):
        def program(rank):
            with Count():
                _, work = gather_in_flight(rank)
                inside = modes()
                if waits_inside:
                    work.wait()
            outside = modes()
            if not waits_inside:
                work.wait()
            with unwatched():
                pass
            return inside, outside, modes()

        expected = (["RaceDetector", "Count"], ["RaceDetector"], [])
        assert world_of(2).run(program) == [expected] * 2

    def test_call_issued_while_unwatched_is_watched_afterwards(self, world_of):
        def program(rank):
            with unwatched():
                x, _ = gather_in_flight(rank)
                x.sum()
            x.sum()  # race

        race_of(world_of(2), program)

    def test_torchs_engine_is_restored(self, world_of):
        from torch.autograd import Variable

        before = Variable._execution_engine
        inside = world_of(2).run(lambda rank: type(Variable._execution_engine).__name__)
        assert inside == ["_Engine"] * 2
        assert Variable._execution_engine is before
        assert type(before).__name__ != "_Engine"


class TestWorld:
    """A race ends the run and leaves no trace in later runs."""

    def test_race_message_names_both_sides(self, world_of):
        def program(rank):
            x, _ = gather_in_flight(rank)
            x.mul_(2)  # race

        race = race_of(world_of(2), program)
        text = str(race)
        assert race.rank == 0
        assert "rank 0: aten::mul_ at " in text
        assert "writes elements [0, 8) of the output of all_gather #0 of group world" in text
        assert race.buffer.file == __file__
        assert f"issued at {race.buffer.site}" in text
        assert "shape (8,), torch.float32" in text
        assert "Call wait()" in text

    def test_next_program_starts_with_nothing_in_flight(self, world_of):
        x = torch.zeros(8)

        def leave(rank):
            if rank == 0:
                dist.irecv(x, src=1, tag=1)

        def use(rank):
            if rank == 0:
                x.add_(1)

        world = world_of(2)
        world.run(leave)
        world.run(use)
        assert all(not len(buffers) for buffers in world.in_flight)

    def test_nothing_is_recorded_without_detection(self, world_of):
        def program(rank):
            x, _ = gather_in_flight(rank)
            x.sum()
            return len(world.in_flight[rank])

        world = world_of(2, races=False)
        assert world.run(program) == [0, 0]

    def test_memory_in_flight_on_another_rank_does_not_count(self, world_of):
        shared = torch.zeros(2)

        def program(rank):
            if rank == 0:
                work = dist.irecv(shared, src=1)
                work.wait()
            else:
                shared.add_(1)
                dist.send(torch.ones(2), dst=0)

        world_of(2).run(program)

    def test_unwatched_accesses_are_no_races(self, world_of):
        def program(rank):
            x, work = gather_in_flight(rank)
            with unwatched():
                with unwatched():
                    x.add_(1)
                seen = x.sum().item()
            x.mul_(2)  # race
            work.wait()
            return seen

        race_of(world_of(2), program)
        with unwatched():
            pass

    def test_race_is_detected_below_a_mode_of_the_program(self, world_of):
        def program(rank):
            x, _ = gather_in_flight(rank)
            with Count() as mode:
                with unwatched():
                    x.sum()
                assert mode.seen == 1
                x.mul_(2)

        race_of(world_of(2), program, on=Count)

    def test_unwound_rank_leaves_no_mode(self, world_of):
        def program(rank):
            if rank:
                dist.barrier()
            raise ValueError

        def clean(rank):
            return torch._C._len_torch_dispatch_stack(), isinstance(unwatched(), nullcontext)

        world = world_of(3)
        with pytest.raises(Exception, match="rank 0"):
            world.run(program)
        world.configure(races=False)
        assert world.run(clean) == [(0, True)] * 3
        world.configure(races=True)
        assert world.run(clean) == [(0, False)] * 3
