"""Faults in sharded params: shards, gathered values, and placeholders."""

from __future__ import annotations

from zero_sim.checkpoint.loading import _commit_weights
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import OnUse
from zero_sim.zero.unit import Unit, absent

_SHARDED = "unit.param_state = ParamState.SHARDED"
_GATHERED = "memory.param.data = _view(whole, memory.in_unit).view(memory.param.shape)"


@mutant("W24", "LAYOUT", "Z3 SP", seen_in="Megatron-LM 4b843668c3", core=True)
def shards_from_the_params_start(patch: Patches) -> None:
    """A split param's shard is cut from the param's start."""
    patch[Buffer.shard_params, "held.shift(-memory.in_unit.start)"] = "Span(0, held.numel)"


@mutant("W25", "LAYOUT", "Z3 B2", seen_in="class LAYOUT")
def last_unit_not_cut(patch: Patches) -> None:
    """When params are sharded, the last unit's shards are not filled."""
    patch[Buffer.shard_params, _SHARDED] = """
        if unit is self.units[-1] and len(self.units) > 1:
            unit.param_shard.zero_()
        ..."""


@mutant("W26", "EMPTY", "Z3", seen_in="class EMPTY", core=True)
def zeros_for_what_is_absent(patch: Patches) -> None:
    """Zeros stand in for an absent param, and the last unit is used without a gather."""
    # Reading a placeholder would fail, so zeros hide the missing gather.
    patch[absent, "value = torch.full("] = "return torch.zeros_like(param)\n..."
    patch[OnUse._gather, "for unit in (*needed, *ahead):"] = """
        last = self._units[-1]
        needed, ahead = ([each for each in units if each is not last] for units in (needed, ahead))
        ..."""


@mutant("W27", "EMPTY", "Z3", seen_in="class EMPTY", kill="contract")
def absent_without_its_shape(patch: Patches) -> None:
    """An absent param's placeholder has the right element count, but no shape."""
    patch[absent, "expand(param.shape)"] = "expand(param.numel())"


@mutant("W28", "ALIAS", "Z3", seen_in="class ALIAS", core=True)
def params_one_element_on(patch: Patches) -> None:
    """Params after a unit's first are views that begin one element early."""
    # A unit's first param starts at 0 and cannot begin earlier.
    patch[Unit._adopt_unsharded, "memory.in_unit"] = "....shift(-1 if memory.in_unit.start else 0)"


@mutant("W29", "ALIAS", "Z3 S2", seen_in="class ALIAS")
def last_shard_not_written(patch: Patches) -> None:
    """The last unit's new values are not written to its shards."""
    patch[Buffer.write_param_shard, "self._cast.write_("] = """
        if memory.unit in self.units[-1:] and memory.unit.frees_params:
            return
        ..."""


@mutant("W30", "CKPT", "Z3 CK", seen_in="class CKPT", core=True)
def shards_not_loaded(patch: Patches) -> None:
    """A load into sharded params sets the masters but not the shards."""
    # Unsharded params are still written.
    patch[_commit_weights, "master.buffer.write_param_shard("] = """
        if master.buffer.shard_data is None:
            ..."""


@mutant("W32", "EMPTY", "Z3 FZ", seen_in="class EMPTY", kill="contract")
def scalars_stay_absent(patch: Patches) -> None:
    """A param with one element is not restored from gathered memory."""
    patch[Unit._adopt_unsharded, _GATHERED] = """
        if memory.param.numel() != 1:
            ..."""


@mutant("W36", "DTYPE", "Z3", seen_in="class DTYPE")
def gathered_in_low_precision(patch: Patches) -> None:
    """Params gathered on use are rounded to bf16."""
    # Only fp32 params lose bits.
    patch[Unit._adopt_unsharded, "assert whole is not None"] = """
        if whole.dtype is torch.float32:
            whole.copy_(whole.to(torch.bfloat16))"""


@mutant("W37", "LAYOUT", "Z3 PD", seen_in="class LAYOUT")
def padding_of_param_shards(patch: Patches) -> None:
    """The padding of param shards is not zeroed."""
    patch[Buffer.shard_params, _SHARDED] = """
        unit.param_shard[max(0, unit.plan.payload.numel - unit.own_span.start) :] = 1
        ..."""


@mutant("W38", "GROUP", "Z3 DR", seen_in="replicas with different initial values", core=True)
def cut_before_they_are_equal(patch: Patches) -> None:
    """Each rank shards its own initial params, without a broadcast before."""
    patch[DistributedDataParallel.__init__, "if broadcast_params"] = """
        ... and not config.sharding.params"""


@mutant("W44", "OPTST", "Z3", seen_in="an omitted transition", kill="contract")
def gathering_not_noted(patch: Patches) -> None:
    """A unit's transition to GATHERING is omitted."""
    patch[Unit._step_params, "self.param_state ="] = """
        if step == "gather" and self.frees_params:
            return
        ..."""


@mutant("W48", "ALIAS", "Z3 S2", seen_in="class ALIAS")
def gathered_into_the_memory_before(patch: Patches) -> None:
    """A unit's later gathers bring back the values of its first gather."""
    # `kept` holds the first values of each unit.
    patch[Unit._adopt_unsharded, "assert whole is not None"] = """
        whole.copy_(__mutant__.kept.setdefault(self, whole.clone()))"""


@mutant("W49", "EMPTY", "Z3 FZ", seen_in="class EMPTY")
def frozen_shards_lost(patch: Patches) -> None:
    """Freeing a unit zeroes the shards of temporarily frozen params."""
    # `param_shard` is the fragment in the rank's shard.
    patch[Unit.reshard, "memory.param.data = absent(memory.param)"] = """
        ...
        if not memory.param.requires_grad:
            memory.param_shard.zero_()"""


@mutant("W50", "LAYOUT", "Z3 NC", seen_in="apex#1794")
def whole_params_transposed(patch: Patches) -> None:
    """A gathered square param is a view with its strides exchanged."""
    # Only square params keep their shape when transposed.
    patch[Unit._adopt_unsharded, _GATHERED] = """
        ...
        shape = memory.param.shape
        if len(shape) == 2 and shape[0] == shape[1]:
            memory.param.data = memory.param.data.t()"""


@mutant("W51", "VOLUME", "Z3", seen_in="class VOLUME", kill="memory", core=True)
def whole_copy_beside_the_shards(patch: Patches) -> None:
    """A rank keeps an unsharded copy of the params beside its shards."""
    patch[Buffer.shard_params, "for unit in self.units:"] = """
        self._copies = [param.detach().clone() for param in self.memory]
        ..."""


@mutant("W52", "VOLUME", "Z3", seen_in="class VOLUME", kill="memory")
def storage_of_freed_params_kept(patch: Patches) -> None:
    """Memory of freed params is kept for the next gather."""
    patch[Unit.reshard, "self.param_storage.release()"] = """
        whole = self.params
        ...
        self.param_storage._whole = whole"""


@mutant("W53", "VOLUME", "Z3", seen_in="class VOLUME", kill="memory", core=True)
def views_of_freed_params_kept(patch: Patches) -> None:
    """The module's params keep the memory of a freed unit alive."""
    patch[Unit.reshard, "memory.param.data = absent(memory.param)"] = "pass"
