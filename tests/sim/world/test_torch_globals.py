"""Process-wide state of torch is private to a rank, or listed here with a reason to share it.

A torch version with new state fails this test, which names it. Find out if the state depends on
the rank. If so, a line in `zero_sim.sim.world.process_state` moves it with the baton. If it is
keyed by device meshes, `zero_sim.sim.world.meshes` may have to clear it. Otherwise, add it here
with the reason why ranks may share it.
"""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from zero_sim.sim.world.meshes import CACHES
from zero_sim.sim.world.process_state import NAMES, REPLACEABLE


def _reader():
    path = Path(__file__).with_name("torch_globals.py")
    spec = importlib.util.spec_from_file_location("torch_globals", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch_globals = _reader()

MAY_BE_SHARED = {
    "answers that depend on the arguments alone, among which is no mesh, group or rank": """
        torch._subclasses.fake_tensor:FakeTensorMode.cache
        torch._subclasses.fake_tensor:_is_indexed_device_type
        torch._subclasses.fake_tensor:get_schema_info
        torch._subclasses.fake_tensor:init_gpu_context
        torch._subclasses.fake_tensor:torch_decomp_decompositions
        torch.distributed.device_mesh:_distributed_opaque_types_registered
        torch.distributed.fsdp._flat_param:_get_dtype_size
        torch.distributed.pipelining.schedules:_get_profiler_function_name
        torch.distributed.tensor.experimental._context_parallel._attention:_compiled_create_block_mask
        torch.overrides:_get_overridable_functions
        torch.overrides:_get_tensor_methods
        torch.overrides:get_default_nowrap_functions
        torch.overrides:get_ignored_functions
        torch.overrides:get_testing_overrides
        torch.utils._device:_device_constructors
        torch.utils._python_dispatch:get_alias_info
    """,
    "answers keyed by a mesh, which knows its rank, in a cache of few entries or of one thread": """
        torch.distributed.tensor._ops.single_dim_strategy:_expand_single_dim_strategy_to_mesh._create_expanded_strategy_impl
        torch.distributed.tensor._sharding_prop:LocalLRUCache.__call__.
    """,
    "what is kept for one tensor, module or function, which is a rank's": """
        torch.distributed._composable_state:_module_state_mapping
        torch.distributed.checkpoint.state_dict:_patched_state_dict
        torch.distributed.fsdp._common_utils:_MODULE_TO_INP_DTYPE
        torch.distributed.optim.apply_optimizer_in_backward:param_to_acc_grad_map
        torch.distributed.optim.apply_optimizer_in_backward:param_to_optim_hook_handle_map
    """,
    "names of backends, formats and the like, registered on import and alike for all": """
        torch.distributed._dist2:_BACKENDS
        torch.distributed._meta_registrations:used_ids
        torch.distributed._shard.sharding_spec.api:_CUSTOM_SHARDING_SPEC_OPS
        torch.distributed.algorithms._optimizer_overlap.optimizer_overlap:_registered_overlapped_optims
        torch.distributed.checkpoint._experimental.barriers:BARRIER_REGISTRY
        torch.distributed.distributed_c10d:Backend._plugins
        torch.distributed.distributed_c10d:Backend.backend_capability
        torch.distributed.distributed_c10d:Backend.backend_list
        torch.distributed.distributed_c10d:Backend.backend_type_map
        torch.distributed.distributed_c10d:Backend.default_device_backend_map
        torch.distributed.optim.utils:functional_optim_map
        torch.distributed.rendezvous:_rendezvous_handlers
        torch.distributed.tensor._ops._pointwise_ops:_specially_registered_ops
        torch.distributed.tensor._tp_conv:torch
    """,
    "counts, ids, warnings given once and times taken, on which nothing depends": """
        torch._subclasses.fake_tensor:FakeTensorMode.cache_bypasses
        torch._subclasses.fake_tensor:FakeTensorMode.cache_hits
        torch._subclasses.fake_tensor:FakeTensorMode.cache_misses
        torch._subclasses.fake_tensor:RECURSION_COUNT
        torch.distributed.flight_recorder.components.fr_logger:FlightRecorderLogger._instance
        torch.distributed.flight_recorder.components.fr_logger:FlightRecorderLogger._instance.logger
        torch.distributed.fsdp._debug_utils:SimpleProfiler.profiling
        torch.distributed.fsdp._debug_utils:SimpleProfiler.results
        torch.distributed.fsdp._flat_param:_warn_skip_writeback_check
        torch.distributed.fsdp._flat_param:_warn_use_fake_all_gather
        torch.distributed.fsdp._flat_param:_warn_use_fake_reduce
        torch.distributed.tensor.debug._op_coverage:graphs
        torch.random:_fork_rng_warned_already
        torch.utils.hooks:RemovableHandle.next_id
    """,
    "c10d's own state, which zero_sim.sim.world.c10d makes a rank's; or set alike by all": """
        torch.distributed.distributed_c10d:_backend
        torch.distributed.distributed_c10d:_default_pg_init_method
        torch.distributed.distributed_c10d:_group_count
        torch.distributed.distributed_c10d:_pg_backend_config
        torch.distributed.distributed_c10d:_pg_group_ranks
        torch.distributed.distributed_c10d:_pg_map
        torch.distributed.distributed_c10d:_pg_names
        torch.distributed.distributed_c10d:_pg_to_tag
        torch.distributed.distributed_c10d:_tags_to_pg
        torch.distributed.distributed_c10d:_world
        torch.distributed.distributed_c10d:sys.excepthook
    """,
    "the same thing as a name that moves with the baton, under the name of who sets it": """
        torch.distributed._composable.replicate:DistributedDataParallel._active_ddp_module
        torch.distributed.checkpoint.default_planner:_version._derived_version
        torch.distributed.distributed_c10d:sys.stderr
        torch.distributed.tensor._api:random._rng_tracker
        torch.distributed.tensor._dispatch:random._rng_tracker
    """,
    "kept by torch for each thread, under this name": """
        torch.distributed.tensor._utils:ExplicitRedistributionContext._local._active
        torch.distributed.tensor.experimental:DTensor._op_dispatcher._allow_implicit_replication
    """,
    "no global at all: a local variable or a class made in a function has the name": """
        torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__
    """,
    "set by compilers, alike for all ranks": """
        torch.nn.parallel.distributed:torch._inductor.config._fuse_ddp_bucket_size
        torch.nn.parallel.distributed:torch._inductor.config._fuse_ddp_communication
    """,
    "torch's profiler, which only one rank at a time may use": """
        torch.autograd.profiler:KinetoStepTracker._current_step
        torch.autograd.profiler:KinetoStepTracker._step_dict
        torch.autograd.profiler:_cupti_monitor_checked
        torch.autograd.profiler:_cupti_monitor_module
        torch.autograd.profiler:_is_profiler_enabled
    """,
    "another simulation of ranks, for which a rank of ours has no use": """
        torch.distributed._local_tensor:LocalRunnerMode.runner_context.id
        torch.distributed._local_tensor:_LOCAL_RUNNER_MODE
        torch.distributed._local_tensor:_PROCESS_LOCAL_TENSOR_MODE
        torch.distributed._local_tensor:_PROCESS_MODE
        torch.distributed._local_tensor:_THREAD_LOCAL_TENSOR_MODE
    """,
    "memory that GPUs of several processes share; there is none in one process": """
        torch.distributed._symmetric_memory._nvshmem_triton:NvshmemKernelRegistry._to_init
        torch.distributed._symmetric_memory._nvshmem_triton:NvshmemLibFinder.found_device_lib_path
        torch.distributed._symmetric_memory._nvshmem_triton:triton.knobs.runtime.jit_post_compile_hook
        torch.distributed._symmetric_memory._nvshmem_triton:triton_kernels
        torch.distributed._symmetric_memory._rocshmem_triton:RocshmemLibFinder.found_device_lib_path
        torch.distributed._symmetric_memory._shmem_triton_utils:ShmemKernelRegistry._to_init
        torch.distributed._symmetric_memory._shmem_triton_utils:triton.knobs.runtime.jit_post_compile_hook
        torch.distributed._symmetric_memory:_SymmetricMemory.signal_pad_size
        torch.distributed._symmetric_memory:_backend_streams
        torch.distributed._symmetric_memory:_group_name_to_store
        torch.distributed._symmetric_memory:_group_name_to_workspace_tensor
        torch.distributed._symmetric_memory:_is_test_mode
        torch.distributed._symmetric_memory:_mocked_group_names
        torch.distributed._symmetric_memory:_symm_mem_pools
        torch.distributed._symmetric_memory:_use_implicit_mempool
    """,
    "a server, a debugger or a starter of processes: one a process, and no part of training": """
        torch.distributed.debug:_DEBUG_SERVER_PROC
        torch.distributed.debug:_WORKER_SERVER
        torch.distributed.run:sys.argv
        torch.distributed:_breakpoint_cache
        torch.distributed:sys.stdin
    """,
}
"""Names by the reason why ranks may share them."""

SINCE_2_14 = {
    "torch.autograd.profiler:_active_cupti_profiler_observer": "of the profiler, which only one "
    "rank at a time may use",
    "torch.distributed._token_switch:_NCCL_EP_KEEPALIVE": "libraries loaded, alike for all",
    "torch.distributed.pipelining.stage:_PP_DIRECTION_GROUP_CACHE": "kept for one group, which is "
    "a rank's",
    "torch.distributed:_spmd_types_available": "whether a package is installed",
}
"""Names that torch 2.13 lacks, and why ranks may share them."""

NOT_SET_WHERE_IT_IS = {
    "torch.nn.functional:scaled_dot_product_attention",
    "torch.distributed.checkpoint._version:_derived_version",
    "torch.distributed.tensor.experimental._context_parallel._attention:"
    "DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs",
    "torch.distributed.tensor.experimental._context_parallel._attention:"
    "DTensor._op_dispatcher.sharding_propagator.op_to_schema_info",
}
"""Names that move with the baton and are set by a call or by another module."""


@pytest.fixture(scope="module")
def found():
    return torch_globals.changing_state()


@pytest.fixture(scope="module")
def moved():
    return {f"{name.module}:{name.path}" for name in NAMES}


@pytest.fixture(scope="module")
def shared():
    return [name for names in MAY_BE_SHARED.values() for name in names.split()]


@pytest.fixture(scope="module")
def by_mesh():
    names = {f"{module}:{path}" for module, path in CACHES}
    # ShardingPropagator is reached through DTensor's dispatcher.
    methods = "torch.distributed.tensor._sharding_prop:ShardingPropagator."
    return names | {methods + name.rpartition(".")[2] for name in names if "sharding_prop" in name}


def test_all_process_wide_state_of_torch_is_reviewed(found, moved, shared, by_mesh):
    unreviewed = sorted(found.keys() - moved - by_mesh - set(shared) - SINCE_2_14.keys())
    assert not unreviewed, f"new in torch {torch.__version__}: " + ", ".join(
        f"{name} ({found[name]})" for name in unreviewed
    )


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions keep less")
def test_every_listed_name_exists(found, moved, shared):
    functions = {f"{name.module}:{name.path}" for name in REPLACEABLE}
    inside = {name for name in moved if name.startswith("torch.")} - functions
    assert sorted((inside | set(shared)) - found.keys() - NOT_SET_WHERE_IT_IS) == []


def test_nothing_is_listed_twice(moved, shared):
    assert len(shared) == len(set(shared))
    assert not moved & set(shared)


@pytest.mark.parametrize(
    ("source", "name", "how"),
    [
        ("@functools.lru_cache(8)\ndef f(): pass", "f", "cache"),
        ("class C:\n  @cache\n  def f(self): pass", "C.f", "cache"),
        ("x = None\ndef f():\n  global x\n  x = 1", "x", "set"),
        ("x = {}\ndef f():\n  x[1] = 2", "x", "filled"),
        ("x = []\ndef f():\n  x.append(2)", "x", "filled"),
        ("class C:\n  x = {}\n  def f(self):\n    self.x[1] = 2", "C.x", "filled"),
        ("class C:\n  x = 1\n  @classmethod\n  def f(cls):\n    cls.x = 2", "C.x", "set"),
        ("import m\ndef f():\n  m.x = 2", "m.x", "set"),
        ("def f(g):\n  return lru_cache(g)", "f.g", "cache"),
    ],
)
def test_reader_finds_process_wide_state(source, name, how):
    assert torch_globals.state_in(ast.parse(source)) == {name: how}


@pytest.mark.parametrize(
    "source",
    [
        "x = {}\nx[1] = 2",
        "class C:\n  x: dict\n  def f(self):\n    self.x[1] = 2",
        "class C:\n  x = None\n  def f(self):\n    self.x = {}\n    self.x[1] = 2",
        "def f():\n  x = {}\n  x[1] = 2",
    ],
)
def test_reader_ignores_other_state(source):
    assert torch_globals.state_in(ast.parse(source)) == {}
