"""Closed forms for a rank's bytes by category: between two steps, and at the peak within a step.

Bytes between steps are exact, and `zero_sim.cost.memory` checks runs against them. Bytes within a
step are upper bounds if modules run in sequence and have a bucket each (`zero_sim.cost.peaks`
checks them). Activations and temporary memory in kernels and autograd are not included, because
they depend on model and data.
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
    """A rank's memory in closed form."""

    held: Mapping[str, int]
    """Bytes between two steps by category: `params`, `gradients`, `sums` (shards of reduced
    gradients), `masters`, `arena` if used, and each optimizer state under torch's name."""
    moments: Mapping[str, Mapping[str, int]]
    """Maximum additional bytes in `forward`, `backward` and `step`, by category: `gathered` params,
    `whole_gradients`, and `staging` (owned gradients as fp32, in a step buffer if used)."""
    on_cpu: int = 0
    """Bytes in `held` that are on the CPU: masters and optimizer state if offloaded, else 0."""

    @property
    def total(self) -> int:
        """Bytes between two steps, over all categories."""
        return sum(self.held.values())

    @property
    def peak_at(self) -> str:
        """Moment with most additional bytes; the first if several are equal."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> int:
        """Bytes at `peak_at`, over all categories."""
        return self.total + sum(self.moments[self.peak_at].values())


def footprint_of(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, has_masters: bool = True
) -> Footprint:
    """Return a rank's memory.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case for a dp-cp group.
        rank: Group rank.
        has_masters: True for fp32 masters beside the params; False if the optimizer steps the
            params themselves.
    """
    forms = by_registration(sizes, scenario=scenario, rank=rank)
    # stored=0, because optimizer state is added below, under its own names.
    by_name = bytes_held(sizes, scenario=scenario, rank=rank, stored=0)
    held = {name: by_name[name] for name in ("params", "gradients", "sums", "masters")}
    if scenario.system.arena:
        held["arena"] = by_name["arena"]
    if not scenario.system.stage:
        # The closed form counts buffers, but at stage 0 params stay in the module.
        held["params"] = sum(size.elems * size.param_bytes for size in sizes)
    if not has_masters:
        held["masters"] = 0
    owned = sum(form.owned_elems for form in forms)
    held |= dict.fromkeys(state_names(scenario.optimizer), owned * STATE_BYTES)
    stepped = held["masters"] + sum(held[name] for name in state_names(scenario.optimizer))
    # The optimizer needs fp32 gradients. Without masters it can use fp32 gradients directly.
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
    """Return bytes by category between two steps, for training on one device without buffers.

    Args:
        sizes: The trained params.
        scenario: The case; only its optimizer matters.
        keeps_grads: True if gradients stay in memory until the next backward, as with
            `zero_grad(set_to_none=False)`.
        has_masters: True for fp32 masters beside the params.
    """
    elems = sum(size.elems for size in sizes)
    return {
        "params": sum(size.elems * size.param_bytes for size in sizes),
        "gradients": sum(size.elems * size.grad_bytes for size in sizes) if keeps_grads else 0,
        "masters": elems * _FP32_BYTES if has_masters else 0,
        **dict.fromkeys(state_names(scenario.optimizer), elems * STATE_BYTES),
    }


def _gathered_in_forward(forms: Sequence[BucketForm], *, scenario: Scenario) -> int:
    """Return the maximum bytes of unsharded params in forward, at stage 3."""
    if scenario.system.stage < 3:
        return 0
    # Without resharding all buckets are unsharded when forward ends.
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
    """Yield the indices of buckets with unsharded params while a bucket is used.

    Args:
        index: The bucket in use.
        forms: All buckets, in order of use.
        scenario: The case; only `system.prefetch` matters.
        backward: True if `forms` is in backward order.
    """
    # Experts' buckets have another shard group. So prefetched buckets, and the last bucket, which
    # is kept for backward, are counted separately for each shard group size.
    for ranks in dict.fromkeys(form.group_size for form in forms):
        line = [each for each, form in enumerate(forms) if form.group_size == ranks]
        come = [each for each in line if each <= index]
        if come:
            yield from line[len(come) :][: _prefetch(scenario)]
        # Last in forward is first in backward.
        kept = line[0] if backward else line[-1]
        if index in line:
            yield index
        # Forward keeps this bucket once it was used; backward has it until it is used.
        elif (kept in come) != backward:
            yield kept


def _in_backward(
    forms: Sequence[BucketForm], grads_sent: Sequence[GradForm], *, scenario: Scenario
) -> dict[str, int]:
    """Return bytes of unsharded params and gradients, at the bucket with the largest sum."""
    system = scenario.system
    if system.reduce_buffer_elems is not None:
        return {"gathered": 0, "whole_gradients": _in_reduce_buffers(grads_sent, scenario)}
    params = [form.elems * form.param_bytes for form in forms]
    grads = [form.elems * form.grad_bytes for form in forms]
    # Stages 0 and 1 keep the gradient buffer between steps, so nothing is additional.
    if system.stage < 2:
        return {"gathered": 0, "whole_gradients": 0}
    accumulates = keeps_grads(scenario)
    in_flight = 1 if overlaps_grads(system) else 0
    best = {"gathered": 0, "whole_gradients": 0}
    back = forms[::-1]
    for index in range(len(forms)):
        # Without resharding, forward kept all buckets, and backward reshards each after its use.
        gathered = sum(params[: index + 1] if not system.reshard_after_forward else ())
        gathered = gathered or sum(
            back[each].elems * back[each].param_bytes
            for each in _whole_at(len(forms) - 1 - index, back, scenario, backward=True)
        )
        now = {
            "gathered": gathered if system.stage == 3 else 0,
            # `held` counts the arena. Without an arena: all gradients if they accumulate, else the
            # bucket that fills and the bucket in flight.
            "whole_gradients": 0
            if system.arena
            else sum(grads if accumulates else grads[index : index + 1 + in_flight]),
        }
        best = max(best, now, key=lambda each: sum(each.values()))
    return best


def _in_reduce_buffers(forms: Sequence[GradForm], scenario: Scenario) -> int:
    """Return the maximum bytes of reduce buffers, and of gradients that do not fit or wait."""
    system, turns = scenario.system, buffer_turns(scenario)
    buffers: dict[tuple[str, str, int], int] = {}
    in_flight = most = 0
    for form in forms:
        size = form.buffer_elems * form.grad_bytes
        # At stage 2 a unit's gradients wait until all have arrived, and are then copied together.
        # With contiguous_grads each is copied on arrival. At stage 1 gradients are resident, so
        # they are not additional.
        waiting = form.elems * form.grad_bytes
        if system.contiguous_grads or system.stage == 1:
            waiting = 0
        # Overlapped reductions take turns with two buffers per kind and dtype.
        if not form.has_own_memory:
            buffers[form.kind, form.grad_dtype, form.turn % turns] = size
            size = 0
        fixed = sum(buffers.values()) + waiting
        # Without contiguous_grads, new memory is allocated after the previous unit's sum has ended.
        most = max(most, fixed + size, fixed + in_flight)
        # With it, a gradient too long for the buffer can arrive while that sum is in flight.
        if system.contiguous_grads:
            most = max(most, fixed + in_flight + size)
        in_flight = size if overlaps_grads(system) else 0
    return most


def _prefetch(scenario: Scenario) -> int:
    return 1 if scenario.system.prefetch is None else scenario.system.prefetch
