"""Systems for worker processes: faulty ones, and one that records all of its state."""

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.run.summing import ShowsMeans, Undivided
from zero_sim.errors import UsageError
from zero_sim.reference import Reference
from zero_sim.targets import Numerics
from zero_sim.targets.own import ZeroSimEngine

_REFERENCE_BEGINS = Reference.begin


class _Target:
    capabilities = None
    name = "test"

    def __init__(self, engine):
        self._engine = engine

    def build(self, module, *, scenario, group):
        return self._engine(module, scenario=scenario, group=group)


class _Engine(ZeroSimEngine):
    def __init__(self, module, *, scenario, group):
        super().__init__(module, scenario=scenario, group=group)
        self.steps = 0
        self.rank = group.rank()

    def step(self, *, lr_factor):
        self.steps += 1
        if self.rank == 1 and self.steps == 2:
            self.go_wrong()
        return super().step(lr_factor=lr_factor)

    def go_wrong(self):
        pass


class _Flips(_Engine):
    def go_wrong(self):
        with torch.no_grad():
            next(iter(self.parts())).master[0] += 1


class _Stale(_Engine):
    """Rank 1 keeps the params from before one step, except those that it owns."""

    def step(self, *, lr_factor):
        before = {name: param.detach().clone() for name, param in self.params().items()}
        result = super().step(lr_factor=lr_factor)
        if self.rank == 1 and self.steps == 2:
            self.settle()
            own = {name: param.detach().clone() for name, param in self.params().items()}
            for name, param in self.params().items():
                param.detach().copy_(before[name])
            for part in self.parts():
                name, start, stop = part.place.param, part.place.start, part.place.stop
                kept = own[name].reshape(-1)[start:stop]
                self.params()[name].detach().view(-1)[start:stop].copy_(kept)
        return result


class _Misreads(_Engine):
    """Rank 1 reports a wrong param after one step; a report takes a gather."""

    def params(self):
        params = dict(super().params())
        if self.rank == 1 and self.steps == 2:
            params["0.up.bias"] = params["0.up.bias"] + 1
        return params


class _Misnames(_Engine):
    """Every rank reports a norm one ulp below that of the gradients."""

    def step(self, *, lr_factor):
        result = super().step(lr_factor=lr_factor)
        return replace(result, norm=torch.nextafter(result.norm, torch.tensor(0.0)))


class _Counts(_Engine):
    """Writes a line to its rank's file for each step of its process's reference."""

    def __init__(self, module, *, scenario, group):
        super().__init__(module, scenario=scenario, group=group)
        rank, begin = self.rank, _REFERENCE_BEGINS

        def counted(reference, *args, **options):
            with Path(os.environ["ZERO_SIM_TEST_TELLS"], f"steps-{rank}").open("a") as told:
                told.write("step\n")
            return begin(reference, *args, **options)

        Reference.begin = counted

    def notes(self):
        Reference.begin = _REFERENCE_BEGINS
        return ()


class _FlipsAndCounts(_Counts, _Flips):
    pass


class _Raises(_Engine):
    def go_wrong(self):
        raise ValueError("rank 1 has had enough")


class _Dies(_Engine):
    def go_wrong(self):
        os._exit(3)


class _Hangs(_Engine):
    def go_wrong(self):
        time.sleep(600)


class _HangsInA(_Hangs):
    """Hangs only in cases whose name begins with `a`."""

    def __init__(self, module, *, scenario, group):
        super().__init__(module, scenario=scenario, group=group)
        self.name = scenario.name
        self.aside = dist.new_group([0, 1])

    def go_wrong(self):
        if self.name.startswith("a"):
            dist.all_reduce(torch.ones(7), group=self.aside)


class _DiesInA(_HangsInA):
    def go_wrong(self):
        if self.name.startswith("a"):
            os._exit(3)


class _Slow(_Engine):
    """Each step takes a third of the stall limit."""

    def __init__(self, module, *, scenario, group):
        super().__init__(module, scenario=scenario, group=group)
        self.step_seconds = scenario.run.stall_seconds / 3

    def step(self, *, lr_factor):
        time.sleep(self.step_seconds)
        return super().step(lr_factor=lr_factor)


class _Refuses(_Engine):
    def __init__(self, module, *, scenario, group):
        if group.rank() == 1:
            raise UsageError("expected another scenario")
        super().__init__(module, scenario=scenario, group=group)


class _Hides(_Engine):
    """Omits the size of the call that reduced its gradients."""

    def parts(self):
        for part in super().parts():
            yield replace(part, place=replace(part.place, call_elems=None))


class _Tells(_Engine):
    """Appends a hash of its state to a file of its rank, before every step and at the end."""

    # The hash waits for gathers early, so the engine declares no textbook costs.
    held_bytes = None

    def zero_grad(self):
        self.share_facts()
        super().zero_grad()

    def notes(self):
        self.share_facts()
        return ()

    def share_facts(self):
        self.settle()
        digest = hashlib.sha256()
        for part in self.parts():
            for tensor in (
                part.grad,
                part.master,
                *(part.state[key] for key in sorted(part.state)),
            ):
                digest.update(_bits(tensor))
        for _, param in sorted(self.params().items()):
            digest.update(_bits(param))
        with Path(os.environ["ZERO_SIM_TEST_TELLS"], f"rank-{self.rank}").open("a") as told:
            told.write(digest.hexdigest() + "\n")


def _bits(tensor):
    plus_zero = torch.where(tensor == 0, torch.zeros_like(tensor), tensor)
    return plus_zero.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


counts, flips_and_counts = _Target(_Counts), _Target(_FlipsAndCounts)
flips, raises, dies = _Target(_Flips), _Target(_Raises), _Target(_Dies)
stale, misnames = _Target(_Stale), _Target(_Misnames)
hangs, refuses, tells = _Target(_Hangs), _Target(_Refuses), _Target(_Tells)
misreads = _Target(_Misreads)
hangs_in_a, dies_in_a = _Target(_HangsInA), _Target(_DiesInA)
hides, slow = _Target(_Hides), _Target(_Slow)
shows_means, undivided = ShowsMeans(), Undivided()
misdeclares = _Target(_Engine)
misdeclares.numerics = Numerics(divide="premul")
