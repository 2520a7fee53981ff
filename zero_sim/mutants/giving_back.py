"""Faults of what a wrapped module is when it is given back."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import absent


@mutant("K01", "ALIAS", "", seen_in="class ALIAS", core=True)
def hook_stays(patch: Patches) -> None:
    """The last hook stays on the module that is given back."""

    @patch(DistributedDataParallel, "unwrap")
    def wrong(right, self):
        self._handles.pop()
        return right(self)


@mutant("K02", "ALIAS", "", seen_in="class ALIAS")
def param_stays_a_view(patch: Patches) -> None:
    """A param that is given back still lies in the flat buffer."""

    @patch(DistributedDataParallel, "unwrap")
    def wrong(right, self):
        before = {param: param.data for param in self.params.values()}
        module = right(self)
        for param, data in before.items():
            if data.untyped_storage().nbytes() > data.nbytes:
                param.data = data
                break
        return module


@mutant("K03", "ALIAS", "Z3", seen_in="class ALIAS")
def sharded_params_stay_away(patch: Patches) -> None:
    """What stands for a sharded param is given back in its place."""

    @patch(DistributedDataParallel, "unwrap")
    def wrong(right, self):
        module = right(self)
        for param in self.params.values() if self.config.sharding.params else ():
            param.data = absent(param)
        return module


@mutant("K04", "ALIAS", "", seen_in="class ALIAS")
def main_grad_stays(patch: Patches) -> None:
    """Params that are given back still have the gradients of their last step."""

    @patch(DistributedDataParallel, "unwrap")
    def wrong(right, self):
        grads = {param: vars(param).get("main_grad") for param in self.params.values()}
        module = right(self)
        for param, grad in grads.items():
            if grad is not None:
                param.main_grad = grad
        return module


@mutant("K05", "ALIAS", "", seen_in="class ALIAS")
def values_of_another_param(patch: Patches) -> None:
    """Params of one shape are given back with each other's values."""

    @patch(DistributedDataParallel, "unwrap")
    def wrong(right, self):
        module = right(self)
        last = {}
        for param in self.params.values():
            other = last.setdefault((param.shape, param.dtype), param)
            if other is not param:
                values = param.data.clone()
                param.data.copy_(other.data)
                other.data.copy_(values)
        return module


@mutant("K06", "OPTST", "", seen_in="class OPTST")
def offloaded_step_is_not_copied_back(patch: Patches) -> None:
    """A param whose master is on another device keeps the values that it had before the step."""
    offloaded: set[int] = set()

    @patch(DistributedOptimizer, "__init__")
    def wrong(right, self, ddp, **settings):
        right(self, ddp, **settings)
        if settings.get("state_device") is not None:
            offloaded.add(id(self))

    @patch(DistributedOptimizer, "_step_masters")
    def wrong_step(right, self, trained, grads):
        kept = [each.buffer.memory[each.param].own_working for each in trained]
        before = [values.clone() for values in kept]
        right(self, trained, grads)
        if id(self) in offloaded and kept:
            kept[0].copy_(before[0])


@mutant("K07", "OPTST", "", seen_in="class OPTST")
def offloaded_masters_are_rounded(patch: Patches) -> None:
    """Masters on another device come back from a step as their working params, rounded."""
    offloaded: set[int] = set()

    @patch(DistributedOptimizer, "__init__")
    def wrong(right, self, ddp, **settings):
        right(self, ddp, **settings)
        if settings.get("state_device") is not None:
            offloaded.add(id(self))

    @patch(DistributedOptimizer, "_step_masters")
    def wrong_step(right, self, trained, grads):
        right(self, trained, grads)
        for each in trained if id(self) in offloaded else ():
            dtype = each.param.dtype
            if dtype.itemsize > 1:
                each.leaf.detach().copy_(each.leaf.detach().to(dtype))
