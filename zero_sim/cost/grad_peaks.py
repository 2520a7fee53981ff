"""Memory peaks with reduce buffers: closed form, and check.

[Note: contents of reduce buffers]
Units are reduced in a fixed order (`zero_sim.cost.grad_forms`). Consider the first unit with a
missing gradient:

    before it   units are done. With overlap, the last of them may be in flight.
    this unit   fills a buffer from its first arrival on. Without contiguous gradients, its
                gradients stay in autograd's memory.
    after it    gradients that have arrived wait in autograd's memory.

Stage 2 drops copied gradients. Stage 1 keeps them, so only buffers come and go. So besides its
shards, a rank has at most two buffers, or longer gradients instead, and gradients that arrived out
of order.
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
"""Name under which engines report all reduce buffers together."""


@dataclass(slots=True, eq=False)
class _Replay:
    """Replay of a micro-batch's gradient arrivals; see [Note: contents of reduce buffers]."""

    forms: Sequence[GradForm]
    scenario: Scenario
    step: int
    autograd_bytes: Mapping[str, int]
    """Bytes of autograd's gradient, by param."""
    micro: int | None = None
    _arrived: set[str] = field(default_factory=set)
    _opened: set[int] = field(default_factory=set)

    def arrive(self, moment: Moment) -> tuple[dict[int, int], int]:
        """Record an arrival; return the allowed bytes by unit, and for all buffers together."""
        if moment.micro != self.micro:
            self.micro = moment.micro
            self._arrived.clear()
            self._opened.clear()
        self._arrived.add(moment.param)
        return self._wanted()

    def _wanted(self) -> tuple[dict[int, int], int]:
        system, run = self.scenario.system, self.scenario.run
        # Micro-batches before the last only accumulate, so buffers must be empty.
        if system.sync == "last" and self.micro != run.micro_batches - 1:
            return {}, 0
        # Frozen params get no gradient in this step, so their unit does not wait for them.
        frozen = frozen_at(self.scenario.model, step=self.step)
        missing = [{*form.names} - frozen - self._arrived for form in self.forms]
        current = next((i for i, names in enumerate(missing) if names), len(self.forms))
        # Units before the first incomplete unit are reduced; the last of them may be in flight.
        wanted: dict[int, int] = {}
        if current and overlaps_grads(system):
            wanted[current - 1] = self._bytes(current - 1)
        for index, form in enumerate(self.forms[current:], start=current):
            there = [name for name in form.names if name in self._arrived]
            if index == current and system.contiguous_grads:
                # Frozen gradients are zeros and count as arrived, so they open the buffer.
                if there or not frozen.isdisjoint(form.names):
                    wanted[index] = self._bytes(index)
            elif system.stage == 2:
                # Waiting gradients are still autograd's. At stage 1, they count as resident.
                wanted[index] = sum(self.autograd_bytes[name] for name in there)
        if system.contiguous_grads:
            # Once opened, a buffer stays allocated until the micro-batch ends.
            self._opened |= {*range(current), current} & {*range(len(self.forms))}
        turns = buffer_turns(self.scenario)
        # Units with the same kind and dtype alternate between their buffers.
        buffers = {
            (form.kind, form.grad_dtype, form.turn % turns): self._bytes(index)
            for index, form in enumerate(self.forms)
            if index in self._opened and not form.has_own_memory
        }
        return wanted, sum(buffers.values())

    def _bytes(self, index: int) -> int:
        form = self.forms[index]
        return form.buffer_elems * form.grad_bytes


def _check_grad_peaks(
    moments: Sequence[Moment], *, replay: _Replay, rank: int
) -> Iterator[Finding]:
    forms = replay.forms
    index_of = {name: index for index, form in enumerate(forms) for name in form.names}
    for moment in moments:
        if moment.what != "grad":
            continue
        wanted, buffers = replay.arrive(moment)
        for what, param, held in moment.whole:
            most = buffers if what == BUFFERS else wanted.get(index_of[param], 0)
            # Buffers are reported as a total, gradients by param.
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
    """Record gradient arrivals, after the system's hooks, and check memory at each.

    Args:
        recorder: The step's recorder. It receives the closed form.
        names: Params with their names in the bare model.
        sizes: The rank's trained params, in registration order.
        scenario: The dp-cp group's case.
        rank: Group rank.
    """
    replay = _Replay(
        forms=grad_forms(sizes, scenario=scenario, rank=rank),
        scenario=scenario,
        step=recorder.step,
        autograd_bytes={size.name: size.elems * size.grad_bytes for size in sizes},
    )
    recorder.forms.append(partial(_check_grad_peaks, replay=replay, rank=rank))
    recorder.watch_grads(names)
