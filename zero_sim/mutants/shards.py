"""Faults of what sharded params are: shards, whole ones, and what stands for absent ones."""

from __future__ import annotations

from importlib import import_module

import torch

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import buffer as buffers
from zero_sim.zero import unit as units
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.schedule import OnUse
from zero_sim.zero.unit import ParamStep, Unit

# The package exports a function of the same name.
load = import_module("zero_sim.checkpoint.load")


@mutant("W24", "LAYOUT", "Z3 SP", seen_in="Megatron-LM 4b843668c3", core=True)
def shards_from_the_params_start(patch: Patches) -> None:
    """The rank's shard of a split param is cut from the param's start."""

    @patch(Buffer, "shard_params")
    def wrong(right, self):
        starts = {param: param.detach().reshape(-1) for param in self.memory}
        right(self)
        for param, memory in self.memory.items() if self.sharding.params else ():
            if memory.fragment is not None:
                own = memory.own_working
                own.copy_(starts[param][: own.numel()])


@mutant("W25", "LAYOUT", "Z3 B2", seen_in="class LAYOUT")
def last_unit_not_cut(patch: Patches) -> None:
    """The shards of the last unit are not filled when params are cut."""

    @patch(Buffer, "shard_params")
    def wrong(right, self):
        right(self)
        last = self.units[-1]
        if last.frees_params and len(self.units) > 1:
            last.param_shard.zero_()


@mutant("W26", "EMPTY", "Z3", seen_in="class EMPTY", core=True)
def zeros_for_what_is_absent(patch: Patches) -> None:
    """Memory of zeros stands for a param that is not there, and the last unit's is used so."""

    @patch(units, "absent")
    def freed(right, param):
        return torch.zeros_like(param)

    @patch(buffers, "absent")
    def cut(right, param):
        return torch.zeros_like(param)

    @patch(OnUse, "_gather")
    def wrong(right, self, needed, *, ahead):
        last = self._units[-1]
        rest = [unit for unit in needed if unit is not last]
        right(self, rest, ahead=[unit for unit in ahead if unit is not last])


@mutant("W27", "EMPTY", "Z3", seen_in="class EMPTY", kill="contract")
def absent_without_its_shape(patch: Patches) -> None:
    """What stands for a param that is not there has as many elements, but no shape."""

    @patch(units, "absent")
    def wrong(right, param):
        return right(param).reshape(-1)

    @patch(buffers, "absent")
    def cut(right, param):
        return right(param).reshape(-1)


@mutant("W28", "ALIAS", "Z3", seen_in="class ALIAS", core=True)
def params_one_element_on(patch: Patches) -> None:
    """A param behind another in its unit is a view that begins one element too early."""

    @patch(Unit, "_adopt_whole")
    def wrong(right, self):
        right(self)
        for memory in self.members if self.frees_params else ():
            span = memory.in_unit
            if span.start and span.numel:
                flat = self.params.narrow(0, span.start - 1, span.numel)
                memory.param.data = flat.view(memory.param.shape)


@mutant("W29", "ALIAS", "Z3 S2", seen_in="class ALIAS")
def last_shard_not_written(patch: Patches) -> None:
    """New values of the last unit are written to whole params, which are not there any more."""

    @patch(Buffer, "write_param_shard")
    def wrong(right, self, param, data):
        unit = self.unit_of(param)
        if unit is not self.units[-1] or not unit.frees_params:
            right(self, param, data)


@mutant("W30", "CKPT", "Z3 CK", seen_in="class CKPT", core=True)
def shards_not_loaded(patch: Patches) -> None:
    """A load into sharded params sets the masters and forgets the shards."""

    @patch(load, "_commit_weights")
    def wrong(right, loaded, ddp, optimizer):
        kept = [b.shard_data.clone() for b in ddp.buffers if b.shard_data is not None]
        right(loaded, ddp, optimizer)
        for buffer, shards in zip(ddp.buffers, kept, strict=False):
            buffer.shard_data.copy_(shards)


@mutant("W32", "EMPTY", "Z3 FZ", seen_in="class EMPTY", kill="contract")
def scalars_stay_absent(patch: Patches) -> None:
    """A param of one element is not given its place in what was gathered."""

    @patch(Unit, "_adopt_whole")
    def wrong(right, self):
        absent = {m.param: m.param.data for m in self.members if m.param.numel() == 1}
        right(self)
        for param, data in absent.items() if self.frees_params else ():
            param.data = data


@mutant("W36", "DTYPE", "Z3", seen_in="class DTYPE")
def gathered_in_low_precision(patch: Patches) -> None:
    """Params that are gathered on use travel in bf16."""

    @patch(Unit, "_adopt_whole")
    def wrong(right, self):
        right(self)
        if self.frees_params and self.params.dtype is torch.float32:
            self.params.copy_(self.params.to(torch.bfloat16))


@mutant("W37", "LAYOUT", "Z3 PD", seen_in="class LAYOUT")
def padding_of_param_shards(patch: Patches) -> None:
    """The padding of the params' shards is not zeroed."""

    @patch(Buffer, "shard_params")
    def wrong(right, self):
        right(self)
        for unit in self.units if self.sharding.params else ():
            padded = unit.plan.padding.start - unit.plan.span.start - unit.own_span.start
            unit.param_shard[max(0, padded) :] = 1


@mutant("W38", "GROUP", "Z3 DR", seen_in="replicas that begin apart", core=True)
def cut_before_they_are_equal(patch: Patches) -> None:
    """Where params are sharded, each rank cuts its shards from what it has built itself."""

    @patch(DistributedDataParallel, "_replicated_tensors")
    def wrong(right, self):
        return [] if self.config.sharding.params else right(self)


def _left_out(patch: Patches, which: ParamStep) -> None:
    @patch(Unit, "_step_params")
    def wrong(right, self, step):
        if step != which or not self.frees_params:
            right(self, step)


@mutant("W44", "OPTST", "Z3", seen_in="a transition left out", kill="contract")
def gathering_not_noted(patch: Patches) -> None:
    """That a gather begins is not noted: the transition to GATHERING is left out."""
    _left_out(patch, "gather")


@mutant("W45", "OPTST", "Z3", seen_in="a transition left out", kill="contract")
def whole_not_noted(patch: Patches) -> None:
    """That a gather has ended is not noted: the transition to WHOLE is left out."""
    _left_out(patch, "finish")


@mutant("W46", "OPTST", "Z3", seen_in="a transition left out", kill="contract")
def freeing_not_noted(patch: Patches) -> None:
    """That params are freed is not noted: the transition to SHARDED is left out."""
    _left_out(patch, "free")


@mutant("W48", "ALIAS", "Z3 S2", seen_in="class ALIAS")
def gathered_into_the_memory_before(patch: Patches) -> None:
    """A unit that was gathered once is not filled any more: its first values are found again."""
    first: dict[Unit, torch.Tensor] = {}

    @patch(Unit, "_adopt_whole")
    def wrong(right, self):
        right(self)
        if self.frees_params:
            self.params.copy_(first.setdefault(self, self.params.clone()))


@mutant("W49", "EMPTY", "Z3 FZ", seen_in="class EMPTY")
def frozen_shards_lost(patch: Patches) -> None:
    """Freeing a unit loses the shards of params that are frozen for now."""

    @patch(Unit, "free_params")
    def wrong(right, self):
        right(self)
        for memory in self.members if self.frees_params else ():
            if not memory.param.requires_grad:
                memory.own_working.zero_()


@mutant("W50", "LAYOUT", "Z3 NC", seen_in="apex#1794")
def whole_params_transposed(patch: Patches) -> None:
    """A square param that is gathered is a view of its place with its strides exchanged."""

    @patch(Unit, "_adopt_whole")
    def wrong(right, self):
        right(self)
        for memory in self.members if self.frees_params else ():
            shape = memory.param.shape
            if len(shape) == 2 and shape[0] == shape[1]:
                memory.param.data = memory.param.data.t()


@mutant("W51", "VOLUME", "Z3", seen_in="class VOLUME", kill="memory", core=True)
def whole_copy_beside_the_shards(patch: Patches) -> None:
    """A rank keeps a whole copy of the params beside its shards."""

    @patch(Buffer, "shard_params")
    def wrong(right, self):
        copies = [param.detach().clone() for param in self.memory]
        right(self)
        if self.sharding.params:
            self.__dict__["_copies"] = copies


@mutant("W52", "VOLUME", "Z3", seen_in="class VOLUME", kill="memory")
def storage_of_freed_params_kept(patch: Patches) -> None:
    """Freed params leave their module, but their memory is kept for the next gather."""

    @patch(Unit, "free_params")
    def wrong(right, self):
        whole = self.params
        right(self)
        if self.frees_params:
            self.param_storage._whole = whole


@mutant("W53", "VOLUME", "Z3", seen_in="class VOLUME", kill="memory", core=True)
def views_of_freed_params_kept(patch: Patches) -> None:
    """What is freed is the unit's own reference: the module's params keep the whole memory."""

    @patch(Unit, "free_params")
    def wrong(right, self):
        views = [memory.param.data for memory in self.members]
        right(self)
        for memory, view in zip(self.members, views, strict=True):
            if self.frees_params:
                memory.param.data = view
