"""The bytes of one rank by category in closed form: between two steps, and at its fullest.

What is held between steps is exact (`zero_sim.cost.memory` holds runs to it). What comes on top
within a step is what the stage lets be whole at most (`zero_sim.cost.peaks` holds runs to that,
moment by moment), with modules that run one after another, a bucket each. Activations, and what
kernels and autograd need on their way, are no part of it: they depend on model and data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.calculators.state import STATE_BYTES, state_names
from zero_sim.cost.forms import BucketForm, ParamSize, by_registration
from zero_sim.cost.grad_forms import GradForm, buffer_turns, grad_forms
from zero_sim.cost.memory import bytes_held, keeps_grads
from zero_sim.cost.staging import staging_peak
from zero_sim.scenario.derived import overlaps_grads
from zero_sim.scenario.spec import Scenario

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What one rank has in memory."""

    held: Mapping[str, int]
    """Bytes between two steps by category: `params`, `gradients`, `sums` of them, `masters`, the
    `arena` of whole gradients where there is one, and each of the optimizer's states under torch's
    name."""
    moments: Mapping[str, Mapping[str, int]]
    """What comes on top at most in `forward`, `backward` and `step`: `gathered` params and what few
    ranks keep of them, `whole_gradients`, and `staging`, the gradients of what the rank owns as
    fp32, or of as much of it as a step buffer takes."""
    on_cpu: int = 0
    """Bytes of what it holds that are on the CPU wherever the model is: masters and state, where
    these are offloaded."""

    @property
    def total(self) -> int:
        """All bytes between two steps."""
        return sum(self.held.values())

    @property
    def peak_at(self) -> str:
        """The moment at which most comes on top; the first of several."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> int:
        """All bytes then."""
        return self.total + sum(self.moments[self.peak_at].values())


def footprint_of(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, has_masters: bool = True
) -> Footprint:
    """The bytes of a rank.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        has_masters: Whether there are fp32 masters beside the params; where not, the optimizer
            steps the params themselves.
    """
    forms = by_registration(sizes, scenario=scenario, rank=rank)
    by_name = bytes_held(sizes, scenario=scenario, rank=rank, stored=0)
    held = {name: by_name[name] for name in ("params", "gradients", "sums", "masters")}
    if scenario.system.arena:
        held["arena"] = by_name["arena"]
    if not scenario.system.stage:
        # Nothing is in buffers: the module has its own.
        held["params"] = sum(size.elems * size.param_bytes for size in sizes)
    if not has_masters:
        held["masters"] = 0
    owned = sum(form.owned_elems for form in forms)
    held |= dict.fromkeys(state_names(scenario.optimizer), owned * STATE_BYTES)
    stepped = held["masters"] + sum(held[name] for name in state_names(scenario.optimizer))
    needs_copies = has_masters or any(form.grad_bytes != _FP32_BYTES for form in forms)
    staged = owned * _FP32_BYTES
    if scenario.system.step_buffer_elems is not None:
        staged = staging_peak(sizes, scenario=scenario, rank=rank)
    return Footprint(
        held=held,
        on_cpu=stepped if scenario.system.offload_state else 0,
        moments={
            "forward": {"gathered": _gathered_in_forward(forms, scenario=scenario)},
            "backward": _in_backward(
                forms, grad_forms(sizes, scenario=scenario, rank=rank), scenario=scenario
            ),
            "step": {"staging": staged if needs_copies else 0},
        },
    )


def single_device(
    sizes: Sequence[ParamSize], *, scenario: Scenario, keeps_grads: bool, has_masters: bool = True
) -> Mapping[str, int]:
    """The bytes of one device that trains alone, without buffers, between two steps.

    Args:
        sizes: The params that are trained.
        scenario: Says with which optimizer.
        keeps_grads: Whether gradients stay in memory until the next backward, as they do with
            `zero_grad(set_to_none=False)`.
        has_masters: Whether it keeps fp32 masters.
    """
    elems = sum(size.elems for size in sizes)
    return {
        "params": sum(size.elems * size.param_bytes for size in sizes),
        "gradients": sum(size.elems * size.grad_bytes for size in sizes) if keeps_grads else 0,
        "masters": elems * _FP32_BYTES if has_masters else 0,
        **dict.fromkeys(state_names(scenario.optimizer), elems * STATE_BYTES),
    }


def _gathered_in_forward(forms: Sequence[BucketForm], *, scenario: Scenario) -> int:
    """Whole params of stage 3: a bucket in use and those ahead, or all that are kept."""
    if scenario.system.stage < 3:
        return 0
    whole = [form.elems * form.param_bytes for form in forms]
    if not scenario.system.reshard_after_forward:
        return sum(whole)
    at_each = (
        sum(whole[each] for each in _whole_at(index, forms, scenario))
        for index in range(len(forms))
    )
    return max(at_each, default=0)


def _whole_at(
    index: int, forms: Sequence[BucketForm], scenario: Scenario, *, backward: bool = False
) -> Iterator[int]:
    """Buckets whose params are whole while one of them is used.

    How far is gathered ahead, and which one is kept from forward to backward, is counted among
    those that as many ranks shard.

    Args:
        index: The one in use.
        forms: All of them, in the order in which they are used.
        scenario: Says how far is gathered ahead.
        backward: Whether that is the order of a backward.
    """
    for ranks in dict.fromkeys(form.group_size for form in forms):
        line = [each for each, form in enumerate(forms) if form.group_size == ranks]
        come = [each for each in line if each <= index]
        if come:
            yield from line[len(come) :][: _prefetch(scenario)]
        kept = line[0] if backward else line[-1]
        if index in line:
            yield index
        elif (kept in come) != backward:
            yield kept


def _in_backward(
    forms: Sequence[BucketForm], grads_sent: Sequence[GradForm], *, scenario: Scenario
) -> dict[str, int]:
    """Whole params and gradients at the bucket at which both together take most."""
    system = scenario.system
    if system.reduce_buffer_elems is not None:
        return {"gathered": 0, "whole_gradients": _in_reduce_buffers(grads_sent, scenario)}
    params = [form.elems * form.param_bytes for form in forms]
    grads = [form.elems * form.grad_bytes for form in forms]
    if system.stage < 2:
        return {"gathered": 0, "whole_gradients": 0}
    accumulates = keeps_grads(scenario)
    in_flight = 1 if overlaps_grads(system) else 0
    best = {"gathered": 0, "whole_gradients": 0}
    back = forms[::-1]
    for index in range(len(forms)):
        # Backward begins with all params that forward kept, and drops each once it is past.
        gathered = sum(params[: index + 1] if not system.reshard_after_forward else ())
        gathered = gathered or sum(
            back[each].elems * back[each].param_bytes
            for each in _whole_at(len(forms) - 1 - index, back, scenario, backward=True)
        )
        now = {
            "gathered": gathered if system.stage == 3 else 0,
            # In an arena they are held between steps as well.
            "whole_gradients": 0
            if system.arena
            else sum(grads if accumulates else grads[index : index + 1 + in_flight]),
        }
        best = max(best, now, key=lambda each: sum(each.values()))
    return best


def _in_reduce_buffers(forms: Sequence[GradForm], scenario: Scenario) -> int:
    """Buffers, what is too long for them, and at stage 2 what waits to be copied together."""
    system, turns = scenario.system, buffer_turns(scenario)
    buffers: dict[tuple[str, str, int], int] = {}
    in_flight = most = 0
    for form in forms:
        size = form.buffer_elems * form.grad_bytes
        waiting = form.elems * form.grad_bytes
        if system.contiguous_grads or system.stage == 1:
            waiting = 0
        if not form.has_own_memory:
            buffers[form.kind, form.grad_dtype, form.turn % turns] = size
            size = 0
        fixed = sum(buffers.values()) + waiting
        # New memory for what goes together is made once the last is out of flight.
        most = max(most, fixed + size, fixed + in_flight)
        if system.contiguous_grads:
            most = max(most, fixed + in_flight + size)
        in_flight = size if overlaps_grads(system) else 0
    return most


def _prefetch(scenario: Scenario) -> int:
    return 1 if scenario.system.prefetch is None else scenario.system.prefetch
