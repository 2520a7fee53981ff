"""Faults of what a wrapped module is when it is given back."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer


@mutant("K01", "ALIAS", "", seen_in="class ALIAS", core=True)
def hook_stays(patch: Patches) -> None:
    """The last hook stays on the module that is given back."""
    patch[DistributedDataParallel.unwrap, "in self._handles"] = "in self._handles[:-1]"


@mutant("K02", "ALIAS", "", seen_in="class ALIAS")
def param_stays_a_view(patch: Patches) -> None:
    """A param that is given back still lies in the flat buffer."""
    patch[DistributedDataParallel.unwrap, "param.data = whole[name]"] = """
        if param.data.untyped_storage().nbytes() <= param.data.nbytes:
            ..."""


@mutant("K03", "ALIAS", "Z3", seen_in="class ALIAS")
def sharded_params_stay_away(patch: Patches) -> None:
    """What stands for a sharded param is given back in its place."""
    patch[DistributedDataParallel.unwrap, "param.data = whole[name]"] = """
        if not self.config.sharding.params:
            ..."""


@mutant("K04", "ALIAS", "", seen_in="class ALIAS")
def main_grad_stays(patch: Patches) -> None:
    """Params that are given back still have the gradients of their last step."""
    patch[DistributedDataParallel.unwrap, 'vars(param).pop("main_grad", None)'] = "pass"


@mutant("K05", "ALIAS", "", seen_in="class ALIAS")
def values_of_another_param(patch: Patches) -> None:
    """Params of one shape are given back with each other's values."""
    patch[DistributedDataParallel.unwrap, "param.data = whole[name]"] = """
        kind = param.shape, param.dtype
        alike = [other for other, each in whole.items() if (each.shape, each.dtype) == kind]
        param.data = whole[alike[alike.index(name) - 1]]"""


def _note_offloading(patch: Patches) -> None:
    patch[DistributedOptimizer.__init__, "self._scale_of_step = 1.0"] = """
        ...
        self._is_offloaded = state_device is not None"""


@mutant("K06", "OPTST", "", seen_in="class OPTST")
def offloaded_step_is_not_copied_back(patch: Patches) -> None:
    """A param whose master is on another device keeps the values that it had before the step."""
    _note_offloading(patch)
    patch[DistributedOptimizer._write_back, "master.buffer.write_param_shard("] = """
        if not self._is_offloaded or master is not trained[0]:
            ..."""


@mutant("K07", "OPTST", "", seen_in="class OPTST")
def offloaded_masters_are_rounded(patch: Patches) -> None:
    """Masters on another device come back from a step as their working params, rounded."""
    _note_offloading(patch)
    patch[DistributedOptimizer._write_back, "master.leaf.grad = None"] = """
        if self._is_offloaded and master.param.dtype.itemsize > 1:
            master.leaf.copy_(master.leaf.to(master.param.dtype))
        ..."""
