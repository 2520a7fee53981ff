"""Peaks of gradients that go through reduce buffers: how much may be in memory, against what is.

[Note: what a reduce buffer may hold]
Gradients go in one order, that of `zero_sim.cost.grad_forms`. Those up to the first that is missing
are on their way or done: only the last that is complete is in flight, and only where reductions
overlap backward. The next ones fill a buffer from the first of them that comes; where they are not
copied one by one they stay where autograd left them. Those behind wait there for their turn. At
stage 2 what was copied is dropped; at stage 1 gradients stay whole, and only buffers come and go.
So beside its shards a rank holds no more than two buffers, or longer gradients in their place, and
what came out of turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from zero_sim.cost.forms import ParamSize
from zero_sim.cost.grad_forms import GradForm, buffer_turns, grad_forms
from zero_sim.cost.memory_recorder import MemoryRecorder, Moment
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.derived import overlaps_grads
from zero_sim.scenario.names import frozen_at
from zero_sim.scenario.spec import Scenario

BUFFERS = "reduce buffers"
"""What an engine calls all of them together, whoever uses them."""


@dataclass(slots=True, eq=False)
class _Replay:
    """Gradients of a micro-batch, as they arrive; see [Note: what a reduce buffer may hold]."""

    forms: Sequence[GradForm]
    scenario: Scenario
    step: int
    autograd_bytes: Mapping[str, int]
    """By param the bytes of its gradient where autograd leaves it."""
    micro: int | None = None
    _arrived: set[str] = field(default_factory=set)
    _opened: set[int] = field(default_factory=set)

    def arrive(self, moment: Moment) -> tuple[dict[int, int], int]:
        """Return the bytes that may be there by unit, and of all buffers, as a gradient arrives."""
        if moment.micro != self.micro:
            self.micro = moment.micro
            self._arrived.clear()
            self._opened.clear()
        self._arrived.add(moment.param)
        return self._owed()

    def _owed(self) -> tuple[dict[int, int], int]:
        system, run = self.scenario.system, self.scenario.run
        if system.sync == "last" and self.micro != run.micro_batches - 1:
            return {}, 0
        frozen = frozen_at(self.scenario.model, step=self.step)
        missing = [{*form.names} - frozen - self._arrived for form in self.forms]
        current = next((i for i, names in enumerate(missing) if names), len(self.forms))
        owed: dict[int, int] = {}
        if current and overlaps_grads(system):
            owed[current - 1] = self._bytes(current - 1)
        for index, form in enumerate(self.forms[current:], start=current):
            there = [name for name in form.names if name in self._arrived]
            if index == current and system.contiguous_grads:
                # What is frozen is zero, and as good as there.
                if there or not frozen.isdisjoint(form.names):
                    owed[index] = self._bytes(index)
            elif system.stage == 2:
                owed[index] = sum(self.autograd_bytes[name] for name in there)
        if system.contiguous_grads:
            self._opened |= {*range(current), current} & {*range(len(self.forms))}
        turns = buffer_turns(self.scenario)
        buffers = {
            (form.kind, form.grad_dtype, form.turn % turns): self._bytes(index)
            for index, form in enumerate(self.forms)
            if index in self._opened and not form.has_own_memory
        }
        return owed, sum(buffers.values())

    def _bytes(self, index: int) -> int:
        form = self.forms[index]
        return form.buffer_elems * form.grad_bytes


def _check_grad_peaks(
    moments: Sequence[Moment], *, replay: _Replay, rank: int
) -> Iterator[Finding]:
    """Check what was there whenever a gradient arrived."""
    forms = replay.forms
    index_of = {name: index for index, form in enumerate(forms) for name in form.names}
    for moment in moments:
        if moment.what != "grad":
            continue
        owed, buffers = replay.arrive(moment)
        for what, param, held in moment.whole:
            most = buffers if what == BUFFERS else owed.get(index_of[param], 0)
            if held > most:
                names = forms[index_of[param]].names
                where = "" if what == BUFFERS else f" that go with {', '.join(names[:3])}"
                yield Finding(
                    check=Check.INVARIANT_MEMORY,
                    step=replay.step,
                    rank=rank,
                    phase=Phase.BACKWARD,
                    param=param,
                    message=f"this rank holds {held} bytes of {what}{where} as the gradient "
                    f"of {moment.param} arrived in micro-batch {moment.micro}, expected {most} by "
                    f"the closed form of its stage",
                )


def watch_grad_peaks(
    recorder: MemoryRecorder,
    *,
    names: Mapping[Tensor, str],
    sizes: Sequence[ParamSize],
    scenario: Scenario,
    rank: int,
) -> None:
    """Record the arrival of gradients, behind the hooks of the system that trains them.

    Args:
        recorder: Records them, and gets the closed form.
        names: The params by the names that they had before.
        sizes: What the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    replay = _Replay(
        forms=grad_forms(sizes, scenario=scenario, rank=rank),
        scenario=scenario,
        step=recorder.step,
        autograd_bytes={size.name: size.elems * size.grad_bytes for size in sizes},
    )
    recorder.forms.append(partial(_check_grad_peaks, replay=replay, rank=rank))
    recorder.watch_grads(names)
