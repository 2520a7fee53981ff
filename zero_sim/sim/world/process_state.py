"""Process-wide state that each rank needs for itself: torch's globals, flags, hooks.

When the baton moves, the new holder's values replace the previous holder's. A rank begins each
program with the values of `World.run`'s caller, and nothing that it sets outlives the program.
`zero_sim.sim.world.meshes` separates the state that torch keeps by device mesh.

If a rank imports a module during a program, other ranks have no values for its names yet. They get
the initial values in the table below.
"""

from __future__ import annotations

import copy
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch


def _nothing() -> None:
    return None


def _no() -> bool:
    return False


def _yes() -> bool:
    return True


class Name(NamedTuple):
    """A global of a module, or an attribute of its class, such as `Class.attribute`."""

    module: str
    path: str
    initial: Callable[[], Any] | None = None
    """Returns the other ranks' value if a rank imports the module; None to copy the rank's."""
    copied: bool = True
    """True to give each rank a copy of the caller's value, False for the value itself."""


_MODULES = "torch.nn.modules.module"
_MODES = "torch.utils._python_dispatch"
_WRAP = "torch.distributed.fsdp.wrap"
_ATTENTION = "torch.distributed.tensor.experimental._context_parallel._attention"
_RULES = "torch.distributed.tensor.experimental._context_parallel._sharding_rules"
_SHARDS = "torch.distributed._shard.sharded_tensor.api"
_FSDP = "torch.distributed.fsdp._fully_shard"

REPLACEABLE = (
    *(
        Name("torch.distributed", name, copied=False)
        for name in (
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_single",
            "all_reduce",
            "all_to_all",
            "all_to_all_single",
            "barrier",
            "broadcast",
            "gather",
            "irecv",
            "isend",
            "recv",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_single",
            "reduce_scatter_tensor",
            "scatter",
            "send",
        )
    ),
    Name(f"{_FSDP}._fsdp_param_group", "foreach_all_gather", copied=False),
    Name(f"{_FSDP}._fsdp_param_group", "foreach_reduce", copied=False),
    Name(f"{_FSDP}._fsdp_param_group", "FSDPParamGroup.unshard", copied=False),
    Name(f"{_FSDP}._fsdp_param_group", "FSDPParamGroup.reshard", copied=False),
    Name(f"{_FSDP}._fsdp_param_group", "FSDPParamGroup.post_backward", copied=False),
    Name(f"{_FSDP}._fsdp_param_group", "RegisterPostBackwardFunction.backward", copied=False),
)
"""Functions that programs replace, to count calls or to change them."""

NAMES = (
    # Hooks on every module and optimizer in the process.
    Name(_MODULES, "_global_backward_pre_hooks"),
    Name(_MODULES, "_global_backward_hooks"),
    Name(_MODULES, "_global_is_full_backward_hook"),
    Name(_MODULES, "_global_forward_pre_hooks"),
    Name(_MODULES, "_global_forward_hooks"),
    Name(_MODULES, "_global_forward_hooks_always_called"),
    Name(_MODULES, "_global_forward_hooks_with_kwargs"),
    Name(_MODULES, "_global_buffer_registration_hooks"),
    Name(_MODULES, "_global_module_registration_hooks"),
    Name(_MODULES, "_global_parameter_registration_hooks"),
    Name("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    Name("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    # Flags of open contexts, which ranks leave in any order.
    Name(_MODES, "_is_in_torch_dispatch_mode"),
    Name(_MODES, "_is_in_non_infra_torch_dispatch_mode"),
    Name(_MODES, "_is_in_any_mode_without_ignore_compile_internals"),
    Name("torch.autograd.graph", "_allow_mutation_on_saved_tensors_enabled"),
    Name("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module"),
    Name("torch.nn.utils.parametrize", "_cache"),
    Name("torch.nn.utils.parametrize", "_cache_enabled"),
    Name("torch.utils._device", "CURRENT_DEVICE", _nothing),
    Name("torch.utils.checkpoint", "_checkpoint_debug_enabled"),
    Name("torch.utils.checkpoint", "_enable_checkpoint_early_stop"),
    Name("torch.utils.checkpoint", "DefaultDeviceType._default_device_type"),
    Name(_WRAP, "_ConfigAutoWrap.in_autowrap_context", _no),
    Name(_WRAP, "_ConfigAutoWrap.wrapper_cls", _nothing),
    Name(_WRAP, "_ConfigAutoWrap.kwargs", dict),
    Name("torch.distributed.fsdp._fully_shard._fully_shard", "_enable_fsdp_module_new_init", _yes),
    Name("torch.distributed._shard.api", "_CURRENT_PROCESS_GROUP", _nothing),
    Name("torch.distributed.checkpoint._version", "_derived_version", _nothing),
    # Settings and caches of a rank.
    Name("torch.distributed.tensor._random", "_rng_tracker", _nothing),
    Name("torch.distributed.tensor._redistribute", "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", _nothing),
    Name(
        "torch.distributed.tensor._redistribute",
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        _no,
    ),
    Name("torch.distributed.fsdp._fsdp_extensions", "_extensions", _nothing),
    Name(_SHARDS, "_sharded_tensor_current_id", int),
    Name(_SHARDS, "_sharded_tensor_map", dict),
    Name("torch.distributed.checkpoint._async_process_executor", "_CHECKPOINT_PROCESS", _nothing),
    # Context parallelism replaces torch's functions by functions for the rank's mesh.
    Name("torch.nn.functional", "scaled_dot_product_attention"),
    Name(_ATTENTION, "_replaced_functions", dict),
    Name(_ATTENTION, "_cp_options"),
    Name(_ATTENTION, "_dispatch_mode"),
    Name(_ATTENTION, "DTensor._op_dispatcher._custom_op_handlers"),
    Name(_ATTENTION, "DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs"),
    Name(_ATTENTION, "DTensor._op_dispatcher.sharding_propagator.op_to_schema_info"),
    Name(_RULES, "_cp_strategy_contexts", dict),
    Name(_RULES, "_original_strategies", dict),
    *REPLACEABLE,
    # Python globals, which a rank may replace while it waits for others.
    Name("warnings", "filters"),
    Name("warnings", "showwarning", copied=False),
    Name("warnings", "_showwarnmsg_impl", copied=False),
    Name("sys", "stdout", copied=False),
    Name("sys", "stderr", copied=False),
)
"""Globals that differ by rank. Names missing in a version of torch are skipped."""


class Switch(NamedTuple):
    """A process-wide setting in torch's C++."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


def _plain(get: str, put: str) -> Switch:
    return Switch(get, getattr(torch._C, get), getattr(torch._C, put))


SWITCHES = (
    Switch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Switch(
        "anomaly mode",
        torch.is_anomaly_enabled,
        lambda value: torch.set_anomaly_enabled(value, torch.is_anomaly_check_nan_enabled()),
    ),
    Switch(
        "anomaly mode's check for NaN",
        torch.is_anomaly_check_nan_enabled,
        lambda value: torch.set_anomaly_enabled(torch.is_anomaly_enabled(), value),
    ),
    Switch(
        "deterministic algorithms",
        torch._C._get_deterministic_algorithms,
        lambda value: torch._C._set_deterministic_algorithms(
            value, warn_only=torch._C._get_deterministic_algorithms_warn_only()
        ),
    ),
    Switch(
        "deterministic algorithms' mere warning",
        torch._C._get_deterministic_algorithms_warn_only,
        lambda value: torch._C._set_deterministic_algorithms(
            torch._C._get_deterministic_algorithms(), warn_only=value
        ),
    ),
    _plain("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    _plain("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    _plain("_get_math_sdp_enabled", "_set_sdp_use_math"),
    _plain("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    _plain("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    _plain("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    _plain("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
)
"""Settings that contexts set and restore. Ranks leave such contexts in any order."""


_GETTERS = [switch.get for switch in SWITCHES]

_AS_AT_BEGINNING: Any = object()
"""Stands for the value of a name that its owner has not changed."""


class _Values(NamedTuple):
    """An owner's values."""

    of_names: list[Any]
    """Empty if the owner changed none. Lacks names that were found later."""
    of_switches: list[Any]


class _Beginning(NamedTuple):
    """Initial values, arranged for a fast comparison at every turn."""

    namespaces: list[Any]
    readers: list[Callable[[Any], Any]]
    """For each namespace, a function that reads all names at once."""
    unchanged: list[Any]
    """Results of `readers` while no name is replaced."""
    mutables: list[Any]
    """Initial values that can change in place."""
    images: list[Any]
    """Copies of `mutables` in their initial state."""


class ProcessState:
    """Saves and restores process state for each owner: the ranks, and the caller.

    Few programs change any of this state, so owners that changed nothing share the initial values.
    If an owner changes an initial value in place, it keeps the object and the others get a copy.
    """

    def __init__(self) -> None:
        self._saved: dict[int, _Values] = {}
        # Names in modules that are not imported yet.
        self._absent: list[Name] = []
        self._module_count = 0
        self._modules: dict[str, Any] = {}
        """Imported modules with any of the names."""
        self._names: list[tuple[Any, str]] = []
        """Names found, each as (module or class, key)."""
        self._beginnings: list[Any] = []
        """Initial values, by index in `_names`."""
        self._images: dict[int, Any] = {}
        """Copies of initial values that can change in place, by index in `_names`."""
        self._beginning = _Beginning([], [], [], [], [])
        self._switches: list[Any] = []
        self._last: tuple[list[Any], list[Any]] = ([], [])
        """Results of the readers at the last change, and the values derived from them."""
        self._begun_with: list[Any] | None = None
        """Values at the start of the run; None if more names were found since."""

    def begin(self, caller: int) -> None:
        """Save the current state as `caller`'s. Each rank begins with a copy of it."""
        self._saved.clear()
        self._switches = _read_switches()
        # `_changed` compares by identity: a rank's copies are equal, but not the same objects.
        values = self._in_place()
        if not self._is_as_begun(values):
            self._images.clear()
            self._absent = list(NAMES)
            self._names, self._beginnings, self._modules = [], [], {}
            self._look_for_names(at_start=True)
            values = self._begun_with = self._in_place()
        self._last = ([], [])
        self._saved[caller] = _Values(values, self._switches)

    def take_out(self, owner: int) -> None:
        """Save the current state as `owner`'s."""
        # A module imported since may have brought names.
        if len(sys.modules) != self._module_count:
            self._look_for_names(at_start=False)
        self._saved[owner] = _Values(self._changed(), _read_switches())

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Restore `owner`'s state, just after `previous`'s was taken out."""
        before = self._saved[previous]
        values = self._saved.get(owner)
        if values is None:
            values = self._saved[owner] = _Values([], self._switches)
        # Often equal: with race detection, all ranks set the same names to the same values.
        if not _are_same(values.of_names, before.of_names):
            self._put_names(values.of_names)
        if values.of_switches != before.of_switches:
            for switch, value in zip(SWITCHES, values.of_switches, strict=True):
                switch.put(value)

    def _in_place(self) -> list[Any]:
        return [vars(place).get(key) for place, key in self._names]

    def _is_as_begun(self, values: list[Any]) -> bool:
        """Return True if the caller's values are unchanged since its last run."""
        return (
            self._begun_with is not None
            and len(sys.modules) == self._module_count
            and all(sys.modules.get(name) is module for name, module in self._modules.items())
            and _are_same(values, self._begun_with)
            and [values[index] for index in self._images] == self._beginning.images
            and self._beginning.mutables == self._beginning.images
        )

    def _changed(self) -> list[Any]:
        """Return the current values; empty if all are initial."""
        beginning = self._beginning
        read = list(map(operator.call, beginning.readers, beginning.namespaces))
        are_as_at_beginning = beginning.mutables == beginning.images
        # Fast path, taken at almost every turn.
        if are_as_at_beginning and read == beginning.unchanged:
            return []
        found, before = list(chain.from_iterable(read)), self._last
        if are_as_at_beginning and _are_same(found, before[0]):
            return before[1]
        values = self._in_place()
        has_other_beginnings = False
        for index, value in enumerate(values):
            if value is not self._beginnings[index]:
                continue
            if index not in self._images or value == self._images[index]:
                values[index] = _AS_AT_BEGINNING
            else:
                # Changed in place: the owner keeps the object and the others get a copy.
                self._beginnings[index] = copy.copy(self._images[index])
                has_other_beginnings = True
        if has_other_beginnings:
            self._note_unchanged()
        self._last = (found, values)
        return values

    def _put_names(self, values: Sequence[Any]) -> None:
        filters = warnings.filters
        for index, (place, key) in enumerate(self._names):
            value = values[index] if index < len(values) else _AS_AT_BEGINNING
            setattr(place, key, self._beginnings[index] if value is _AS_AT_BEGINNING else value)
        if warnings.filters is not filters:
            # Or Python would use its cache, which is for the other rank's filters.
            _forget_warnings_given()

    def _look_for_names(self, *, at_start: bool) -> None:
        """Find names in modules imported since the last call.

        The current values are the caller's if `at_start`, otherwise an importing rank's.
        """
        self._module_count = len(sys.modules)
        self._begun_with = None
        absent = []
        for name in self._absent:
            *path, key = name.path.split(".")
            place: Any = sys.modules.get(name.module)
            for part in path:
                place = getattr(place, part, None)
            if place is None or key not in vars(place):
                absent.append(name)
                continue
            # Not with getattr, which would unwrap static methods.
            value = vars(place)[key]
            if not at_start and name.initial is not None:
                value = name.initial()
            elif name.copied:
                value = copy.copy(value)
            # A copy of an immutable value is the same object.
            if name.copied and copy.copy(value) is not value:
                self._images[len(self._names)] = copy.copy(value)
            self._names.append((place, key))
            self._modules[name.module] = sys.modules[name.module]
            self._beginnings.append(value)
        self._absent = absent
        self._note_unchanged()

    def _note_unchanged(self) -> None:
        """Prepare the comparison at every turn, which must be fast."""
        values: dict[int, dict[str, Any]] = {}
        places = {id(place): place for place, _ in self._names}
        for (place, key), value in zip(self._names, self._beginnings, strict=True):
            values.setdefault(id(place), {})[key] = value
        self._beginning = _Beginning(
            namespaces=[vars(place) for place in places.values()],
            readers=[_reader_of(list(values[each])) for each in places],
            unchanged=[_reader_of(list(each))(each) for each in values.values()],
            mutables=[self._beginnings[index] for index in self._images],
            images=list(self._images.values()),
        )
        self._last = ([], [])


def _reader_of(keys: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function that reads names of a namespace as a tuple."""
    # Read the first name twice, because a single name would not give a tuple.
    return operator.itemgetter(*keys, keys[0])


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if both contain identical objects."""
    return len(values) == len(others) and all(map(operator.is_, values, others))


def _read_switches() -> list[Any]:
    return list(map(operator.call, _GETTERS))


def _forget_warnings_given() -> None:
    mutated: Any = getattr(warnings, "_filters_mutated", None)
    if mutated is not None:
        mutated()
