"""Process-wide state of torch and Python is private to each rank, and ends with the program."""

import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from zero_sim.sim import RankFailed
from zero_sim.sim.world import process_state
from zero_sim.sim.world.process_state import Name, ProcessState


def test_global_module_hook_is_private_to_its_rank(world_of):
    def program(rank):
        calls = []
        if rank:
            register_module_forward_hook(lambda module, args, output: calls.append(rank))
        dist.barrier()
        nn.Identity()(torch.ones(1))
        dist.barrier()
        nn.Identity()(torch.ones(1))
        return calls

    assert world_of(3).run(program) == [[], [1, 1], [2, 2]]
    assert not nn.modules.module._global_forward_hooks


def test_replaced_torch_function_is_private_to_its_rank(world_of):
    original = dist.all_reduce

    def program(rank):
        calls = []
        replaced = dist.all_reduce

        def counted(*args, **options):
            calls.append(rank)
            return replaced(*args, **options)

        dist.all_reduce = counted
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.all_reduce = replaced
        dist.all_reduce(torch.ones(1))
        return calls

    assert world_of(2).run(program) == [[0], [1]]
    assert dist.all_reduce is original


def test_replaced_static_method_is_restored_as_static(world_of):
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

    original = vars(RegisterPostBackwardFunction)["backward"]

    def program(rank):
        RegisterPostBackwardFunction.backward = staticmethod(lambda *_: rank)
        dist.barrier()
        return RegisterPostBackwardFunction.backward()

    assert world_of(2).run(program) == [0, 1]
    assert vars(RegisterPostBackwardFunction)["backward"] is original


def test_a_hook_is_removed_by_its_handle(world_of):
    def program(rank):
        calls = []
        handle = register_module_forward_hook(lambda *_: calls.append(rank))
        dist.barrier()
        handle.remove()
        dist.barrier()
        nn.Identity()(torch.ones(1))
        return calls, len(nn.modules.module._global_forward_hooks)

    assert world_of(2).run(program) == [([], 0)] * 2


def test_callers_hook_applies_to_every_rank_and_survives(world_of):
    calls = []
    handle = register_module_forward_hook(lambda *_: calls.append(0))

    def program(rank):
        register_module_forward_hook(lambda *_: None)
        dist.barrier()
        nn.Identity()(torch.ones(1))

    world_of(2).run(program)
    assert len(calls) == 2
    handle.remove()
    assert not nn.modules.module._global_forward_hooks


def test_global_optimizer_hook_is_private_to_its_rank(world_of):
    def program(rank):
        calls = []
        if rank == 0:
            register_optimizer_step_post_hook(lambda *_: calls.append(rank))
        dist.barrier()
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
        return calls

    assert world_of(2).run(program) == [[0], []]


def test_default_dtype_is_private_to_its_rank(world_of):
    def program(rank):
        if rank:
            torch.set_default_dtype(torch.float64)
        dist.barrier()
        return torch.ones(1).dtype

    assert world_of(2).run(program) == [torch.float32, torch.float64]
    assert torch.get_default_dtype() == torch.float32


def test_a_default_device_ends_with_the_program(world_of):
    def program(rank):
        before = torch.ones(1).device.type
        torch.set_default_device("meta")
        dist.barrier()
        return before, torch.ones(1).device.type

    for _ in range(2):
        assert world_of(2).run(program) == [("cpu", "meta")] * 2


def test_ranks_may_exit_process_wide_contexts_in_any_order(world_of):
    def settings():
        return (
            torch.is_anomaly_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def program(rank):
        with (
            torch.autograd.set_detect_anomaly(True),
            sdpa_kernel(SDPBackend.MATH),
            torch.autograd.graph.allow_mutation_on_saved_tensors(),
        ):
            torch.use_deterministic_algorithms(True, warn_only=True)
            for _ in range(1 + rank):
                dist.barrier()
            inside = settings()
        for _ in range(2 - rank):
            dist.barrier()
        return inside, settings()

    before = settings()
    inside, after = (True, True, False, True), (False, True, True, True)
    assert world_of(3).run(program) == [(inside, after)] * 3
    assert settings() == before


def test_parametrization_cache_is_private_to_its_rank(world_of):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    def program(rank):
        layer = nn.Linear(1, 1)
        parametrize.register_parametrization(layer, "weight", Doubled())
        if rank == 0:
            with parametrize.cached():
                dist.barrier()
                dist.barrier()
            return None
        dist.barrier()
        before = layer.weight.item()
        with torch.no_grad():
            layer.parametrizations.weight.original.mul_(3)
        after = layer.weight.item()
        dist.barrier()
        return after / before

    assert world_of(2).run(program) == [None, 3.0]


def test_each_rank_records_its_own_warnings(world_of):
    def program(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.barrier()
            warnings.warn(f"rank {rank}", stacklevel=1)
            dist.barrier()
        return [str(each.message) for each in caught]

    filters, show = list(warnings.filters), warnings.showwarning
    assert world_of(3).run(program) == [[f"rank {rank}"] for rank in range(3)]
    assert warnings.filters == filters
    assert warnings.showwarning is show


def test_warning_filter_is_private_to_its_rank(world_of):
    filters, before = warnings.filters, list(warnings.filters)

    def program(rank):
        # Added to the existing list, not to a copy as inside catch_warnings.
        warnings.simplefilter("ignore" if rank else "error")
        dist.barrier()
        try:
            warnings.warn(f"rank {rank}", stacklevel=1)
        except UserWarning:
            return "raised"
        return "ignored"

    assert world_of(3).run(program) == ["raised", "ignored", "ignored"]
    assert warnings.filters is filters
    assert filters == before


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_comm_debug_mode_counts_each_ranks_collectives(world_of, timing):
    """CommDebugMode hooks all modules and sets process-wide flags."""
    from torch.distributed.tensor import DeviceMesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def program(rank):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(net, DeviceMesh("cpu", [0, 1]), plan)
        with CommDebugMode() as counts:
            net(torch.ones(2, 4)).sum().backward()
        return counts.get_total_counts()

    assert world_of(2, timing=timing).run(program) == [1, 1]


def test_ranks_may_wrap_models_at_the_same_time(world_of):
    from torch.distributed.fsdp.wrap import enable_wrap, wrap

    class Box(nn.Module):
        def __init__(self, module, rank):
            super().__init__()
            self.rank = rank

    def program(rank):
        with enable_wrap(wrapper_cls=Box, rank=rank):
            dist.barrier()
            inside = wrap(nn.Linear(1, 1)).rank
            dist.barrier()
        return inside, type(wrap(nn.Linear(1, 1)))

    assert world_of(2).run(program) == [(0, nn.Linear), (1, nn.Linear)]


@pytest.fixture
def late_module(monkeypatch):
    """Function that imports a module with registered names for the first time."""
    names = (Name("late_module", "mode", lambda: "none"), Name("late_module", "Kept.by_name", dict))
    monkeypatch.setattr(process_state, "NAMES", names)
    module = types.ModuleType("late_module")
    module.mode = "none"
    module.Kept = type("Kept", (), {"by_name": {}})
    return lambda: monkeypatch.setitem(sys.modules, "late_module", module) or module


def test_state_of_a_late_imported_module_is_private_to_its_rank(late_module):
    state = ProcessState()
    state.begin(-1)
    state.put_in_place(0, previous=-1)
    module = late_module()
    module.mode = "set by 0"
    module.Kept.by_name["a"] = 0
    state.take_out(0)
    state.put_in_place(1, previous=0)
    assert (module.mode, module.Kept.by_name) == ("none", {})
    module.Kept.by_name["b"] = 1
    state.take_out(1)
    state.put_in_place(0, previous=1)
    assert (module.mode, module.Kept.by_name) == ("set by 0", {"a": 0})
    state.take_out(0)
    state.put_in_place(1, previous=0)
    assert (module.mode, module.Kept.by_name) == ("none", {"b": 1})
    state.take_out(1)
    state.put_in_place(-1, previous=1)
    assert (module.mode, module.Kept.by_name) == ("none", {})


def test_ranks_that_set_a_name_alike_may_later_set_it_apart(world_of):
    alike, apart = object(), object()

    def program(rank):
        dist.all_reduce = alike
        barrier = dist.barrier
        barrier()
        seen = [dist.all_reduce]
        if rank:
            dist.all_reduce = apart
        barrier()
        barrier()
        return [*seen, dist.all_reduce]

    assert world_of(3).run(program) == [[alike, alike], [alike, apart], [alike, apart]]


class Incomparable:
    """Value that cannot be compared, like a tensor of several elements."""

    __hash__ = None

    def __eq__(self, other):
        raise ValueError("expected no comparison")


def test_incomparable_value_fails_its_rank_without_a_hang(world_of):
    original = dist.send
    world = world_of(2)

    def program(rank):
        dist.send = Incomparable()
        dist.barrier()

    with pytest.raises(RankFailed, match="expected no comparison"):
        world.run(program)
    assert world.run(lambda rank: dist.send is original) == [True, True]


def test_callers_changes_between_runs_apply_to_every_rank(world_of):
    """This includes changes to the contents of the same object."""
    world = world_of(2)

    def program(rank):
        filters = [each[0] for each in warnings.filters[:1]]
        return filters, len(module_hooks._global_forward_pre_hooks)

    before = world.run(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        handle = register_module_forward_pre_hook(lambda module, args: None)
        assert world.run(program) == [(["error"], 1)] * 2
        handle.remove()
    assert world.run(program) == before


def test_in_place_changes_of_a_rank_end_with_the_run(world_of):
    world = world_of(2)

    def program(rank):
        if rank:
            register_module_forward_pre_hook(lambda module, args: None)
        dist.barrier()
        return len(module_hooks._global_forward_pre_hooks)

    assert world.run(program) == world.run(program) == [0, 1]
