"""The reference: a whole data-parallel run, computed rank by rank on one device.

It has no buckets, shards, buffers or collectives. For summation orders that depend on a layout
(`ring`, `gloo` and others), the caller passes each element's position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.reference.again import Again, StepAgain
from zero_sim.reference.clipping import clip_is_certified
from zero_sim.reference.division import quotient
from zero_sim.reference.following import Update
from zero_sim.reference.gradient import (
    Measure,
    flatten_wide,
    measure,
    measure_together,
    unflatten,
)
from zero_sim.reference.norms import Holdings, measure_by
from zero_sim.reference.one_device import OneDevice
from zero_sim.reference.placement import Addresses
from zero_sim.reference.quantization import scale_for
from zero_sim.reference.ranks import Adding, Contributions, Orders, Ranks
from zero_sim.reference.replay import RankReplay, isolated
from zero_sim.reference.rules import Rules, clip_by_rule_
from zero_sim.reference.scaling import LossScale
from zero_sim.reference.stepping import Stepper, lr_factor
from zero_sim.reference.steps import (
    OptimizerHistory,
    OptimizerStep,
    PendingStep,
    ReferenceStep,
    StepStart,
    TrainingState,
)
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import EXACT_MODELS, Workload, build_workload

if TYPE_CHECKING:
    from zero_sim.reference.cuts import CutStep

KEPT_ELEMS_MAX = 1 << 20
"""Most elements to keep for repeating steps: params times ranks for a step's start, params times
steps for the history. Beyond this limit nothing is kept."""


class Reference:
    """Runs a scenario on one device, for comparison with every system.

    Each rank is replayed with its own params. With expert parallelism, rank r has expert-parallel
    index `r % ep`. A param's gradients are added over the ranks that have it, in order.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        workload: Workload,
        uncounted: Sequence[str] = (),
        elsewhere: Sequence[str] = (),
        rules: Rules | None = None,
    ) -> None:
        """Build the module and one fp32 master per trained param.

        Args:
            scenario: The case. Layout settings have no effect.
            workload: The case's workload. Forward must not change the module, because one module
                plays all ranks.
            uncounted: Name suffixes of params to omit from norm and zeros, because another part of
                the model counts them.
            elsewhere: Name suffixes of params that only other groups' ranks have. This reference
                trains them, too.
            rules: Arithmetic rules that the scenario leaves open.

        Raises:
            ModelError: The module has no trainable param, or lacks a param to freeze.
        """
        self._scenario = scenario
        self._uncounted = tuple(uncounted)
        self._elsewhere = tuple(elsewhere)
        self._holdings: Callable[[], Holdings] = tuple
        self._ranks = Ranks(scenario, workload=workload, rules=rules)
        self._scales = self._ranks.scales()
        spec = scenario.optimizer
        self._stepper = self._new_stepper(self._ranks.weights())
        self._history = self._new_history()
        self._loss_scale = None if spec.loss_scale is None else LossScale(spec.loss_scale)
        self._one_device = self._build_one_device()
        self._next_step = 0
        self.certified = True
        """True if every summation order clips alike in all steps so far."""
        self.sees_all = True
        """True if the system reports masters and state on all ranks; see `adopt`."""

    @property
    def _rules(self) -> Rules:
        return self._ranks.rules

    @property
    def _elems(self) -> int:
        return sum(master.numel() for master in self._stepper.masters.values())

    @property
    def held(self) -> Sequence[frozenset[str]]:
        """Param names of each rank."""
        if not self._elsewhere:
            return self._ranks.held
        return [
            frozenset(name for name in names if not name.endswith(self._elsewhere))
            for names in self._ranks.held
        ]

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Start from other values than the workload's. Call before `set_addresses`."""
        starts = {
            name: params.get(name, master).to(master.device)
            for name, master in self._stepper.masters.items()
        }
        self._stepper = self._new_stepper(starts)
        self._history = self._new_history()

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Place every param in memory as on its rank; see [Note: addresses].

        Call it before the first step in a world.
        """
        self._ranks.set_addresses(addresses)
        if self._one_device is not None:
            self._one_device.set_address(addresses[0])
        self._write_params()

    def set_holdings(self, holdings: Callable[[], Holdings]) -> None:
        """Set the source for each rank's owned parts, for norms that depend on them."""
        # A function, because only some norms need the parts.
        self._holdings = holdings

    def continue_as(
        self,
        scenario: Scenario,
        *,
        workload: Workload | None = None,
        weights_only: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """Continue in another world, with the same masters, optimizer state and step index.

        Args:
            scenario: Scenario from the next step on, with the same model, dtype and optimizer.
            workload: The scenario's workload; None to build it.
            weights_only: True to keep only masters and step index, not optimizer state and loss
                scale.
            rules: Rules from the next step on; None for the present rules.

        Raises:
            UsageError: The model or the optimizer differs.
        """
        for name in ("model", "optimizer"):
            before, after = getattr(self._scenario, name), getattr(scenario, name)
            if before != after:
                raise UsageError(
                    f"expected a scenario that continues with {name} = {before}, got {after}. "
                    "Change only `world`, `system`, `data` and `run`."
                )
        self._scenario = scenario
        self._ranks.rules = rules or self._rules
        workload = build_workload(scenario) if workload is None else workload
        self._ranks.move(scenario, workload=workload)
        self._one_device = self._build_one_device()
        if weights_only:
            spec = scenario.optimizer
            self._stepper = self._new_stepper(self._stepper.masters)
            self._loss_scale = None if spec.loss_scale is None else LossScale(spec.loss_scale)
            self._history = self._new_history()
        self._write_params()

    def training_state(self) -> TrainingState:
        """Return the state before the next step."""
        scale = self._loss_scale
        return TrainingState(
            next_step=self._next_step,
            masters=self._stepper.masters,
            params=self._ranks.params(),
            scales=self._scales,
            buffers=self._ranks.buffers(),
            state=self._stepper.state(),
            settings=self._stepper.settings(),
            loss_scale=None if scale is None else scale.scale,
            good_steps=None if scale is None else scale.good_steps,
        )

    def step(self, orders: Orders | None = None, *, order_seed: int = 0) -> ReferenceStep:
        """Run the next optimizer step on all ranks.

        Args:
            orders: Spans that tile each param, with their positions in the calls that add them.
                Ignored unless `world.order` depends on positions.
            order_seed: World seed, used by `random-tree`.

        Raises:
            UsageError: The order depends on positions, and a param's spans are missing or do not
                tile it.
        """
        begun = self.begin(orders, order_seed=order_seed)
        return self.finish(begun, measured=begun.measured)

    def begin(self, orders: Orders | None = None, *, order_seed: int = 0) -> PendingStep:
        """Run the next step up to the whole gradient's norm; arguments as for `step`."""
        scenario, step = self._scenario, self._next_step
        scale = self._scale
        adding = Adding(
            order=scenario.world.order,
            seed=order_seed,
            block_count=scenario.system.redundancy,
        )
        is_exact = scenario.model.name in EXACT_MODELS
        start = self._start(adding, orders or {})
        with isolated():
            local = self._ranks.replay(step, scale=scale, keep_micro=is_exact)
            begun = self._begun(local, local.reduce(adding, orders=orders or {}), start=start)
            one_device = None
            if self._one_device is not None:
                one_device = self._one_device.gradients(
                    step, masters=self._stepper.masters, scales=self._scales, scale=scale
                )
            # Before the optimizer changes the weights, because the search replays this step.
            nonfinite = None
            if not begun.measured.finite:
                nonfinite = self._ranks.find_nonfinite(step, scale=scale)
        # Only exact models promise sums that no order can change.
        is_certified = begun.measured.finite and is_exact
        return replace(
            begun,
            one_device=one_device,
            order_free=local.certify() if is_certified else None,
            nonfinite=nonfinite,
        )

    @property
    def _scale(self) -> float | None:
        return None if self._loss_scale is None else self._loss_scale.scale

    def _start(self, adding: Adding, orders: Orders) -> StepStart | None:
        """Copy the state before the next step; None if there are too many elements."""
        if not self._fits:
            return None
        return StepStart(
            stepper=self._stepper.fork(),
            loss_scale=copy(self._loss_scale),
            working=self._ranks.form(self._scales),
            adding=adding,
            orders=orders,
            history=self._history,
        )

    def _begun(
        self,
        local: Contributions,
        grads: Mapping[str, Tensor],
        *,
        start: StepStart | None = None,
    ) -> PendingStep:
        """Unscale, divide and measure the sums over ranks."""
        # 1D, fp32: all trained params
        flat = self._flatten(grads, local)
        # Counted before unscaling, because `grads` are still scaled.
        nonzero_fraction = int(flat.count_nonzero()) / max(1, self._elems)
        if self._scale is not None:
            flat = quotient(flat, self._scale)
        if local.divisor != 1:
            local.division.after_(flat)
        return PendingStep(
            local=local,
            grads=grads,
            start=start,
            flat=flat,
            one_device=None,
            measured=self._measure(flat, active=local.active),
            order_free=None,
            nonzero_fraction=nonzero_fraction,
            nonfinite=None,
        )

    def _flatten(self, grads: Mapping[str, Tensor], local: Contributions) -> Tensor:
        """Concatenate the trained params' sums, as fp32."""
        # A division in the sums' dtype must come before the conversion.
        if local.division.is_rounded and local.divisor != 1:
            grads = {name: local.division.after(grads[name]) for name in local.active}
        return flatten_wide(grads, names=local.active)

    def finish(
        self, begun: PendingStep, *, measured: Measure, reported_norm: Tensor | None = None
    ) -> ReferenceStep:
        """Clip and update, or skip the update if the gradient is not finite.

        Args:
            begun: From `begin`.
            measured: Measure of the gradient, or of all model parts together.
            reported_norm: The system's reported norm, 0-D fp32, for norm rule `reported`.

        Raises:
            UntrainableError: torch's optimizer cannot take the step.
        """
        step, local, scale = self._next_step, begun.local, self._scale
        factor = lr_factor(self._scenario.optimizer, step=step)
        skips = self._loss_scale is not None or self._rules.nonfinite != "stepped"
        skipped = skips and not measured.finite
        if self._rules.norm == "reported" and reported_norm is not None:
            measured = replace(measured, norm=reported_norm, norm_certified=True)
        norm_max = self._scenario.optimizer.clip_norm
        stepped: Mapping[str, Tensor] = {}
        before: Mapping[str, Tensor] = {}
        # Without fp32 masters an update can be rounded away, so compare before and after.
        if self._rules.masters == "param":
            before = {name: master.clone() for name, master in self._stepper.masters.items()}
        if not skipped:
            with isolated():
                stepped = self._update(
                    begun.flat, measured=measured, active=local.active, factor=factor
                )
            self._add_to_history(stepped)
        if self._loss_scale is not None:
            self._loss_scale.update(finite=measured.finite)
        self._next_step += 1
        clip_certified = norm_max is None or self._clip_is_certified(measured, norm_max)
        cut_dependence = self._cut_dependence()
        clip_certified &= not cut_dependence
        self.certified &= clip_certified
        return ReferenceStep(
            step=step,
            losses=local.losses,
            grads=begun.grads,
            one_device=begun.one_device,
            update=Update(division=local.division, scale=scale, lr_factor=factor),
            stepped=stepped,
            masters=self._stepper.masters,
            params=self._ranks.params(),
            scales=dict(self._scales),
            state=self._stepper.state(),
            order_free=begun.order_free,
            measured=measured,
            clip_certified=clip_certified,
            skipped=skipped,
            nonzero_fraction=begun.nonzero_fraction,
            data_digests=local.data_digests,
            nonfinite=begun.nonfinite,
            start=begun.start,
            cut_dependence=cut_dependence,
            unmoved=frozenset(
                name
                for name, was in before.items()
                if was.numel() and torch.equal(was, self._stepper.masters[name])
            ),
        )

    @property
    def _fits(self) -> bool:
        """True if the state before each step is kept."""
        return self._elems * self._scenario.world.size <= KEPT_ELEMS_MAX

    def _cut_dependence(self) -> str:
        """Return the reason why the target rule's bits are unknown; empty if known."""
        own, masters = self._rules.own, self._stepper.masters
        if own is None or not own.elementwise:
            return ""
        # Imported here and below, because hardly any case needs it.
        from zero_sim.reference.cuts import why_unknown

        shows_cuts = self.sees_all and self._fits and not self._scales
        spec = self._scenario.optimizer
        return why_unknown(spec, rules=self._rules, params=masters, shows_cuts=shows_cuts)

    def cut_step(self, taken: ReferenceStep, *, name: str) -> CutStep | None:
        """Return a param's step, to repeat it with cuts; None unless an elementwise rule took it.

        `taken` is a step of this reference in its present world.
        """
        own, masters = self._rules.own, self._stepper.masters
        if own is None or not own.elementwise or taken.start is None or name not in taken.stepped:
            return None
        from zero_sim.reference.cuts import CutStep, probe

        probed = probe(self._scenario.optimizer, rules=self._rules, params=masters)
        return CutStep(
            start=taken.start.stepper,
            name=name,
            grad=taken.stepped[name],
            factor=taken.update.lr_factor,
            counters=probed.counters,
        )

    def adopt(self, name: str, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Continue from the system's bits, which the target's rule can also give.

        Args:
            name: Param name.
            index: 1D, flattened elements.
            values: Values of these elements, from the last step's `CutStep`.
        """
        self._stepper.put(name, index, values)
        # The history holds gradients only, which no longer lead to these masters.
        self._history = None
        self._write_params()

    def again(self, taken: ReferenceStep) -> Again | None:
        """Prepare to repeat an earlier step; None if its start was not kept.

        `taken` is a step of this reference in its present world.
        """
        start = taken.start
        if start is None:
            return None
        replay = partial(self._replay_again, taken, start)
        return Again(
            scenario=self._scenario,
            taken=taken,
            start=start,
            rules=self._rules,
            ranks=self._ranks,
            replays=replay(self._rules),
            replay=replay,
            holdings=self._holdings(),
            finish=self._finish_again,
        )

    def _replay_again(
        self, taken: ReferenceStep, start: StepStart, rules: Rules
    ) -> Sequence[RankReplay]:
        """Replay the ranks of an earlier step, without moving this reference."""
        ranks = copy(self._ranks)
        ranks.rules = rules
        with isolated():
            ranks.write(start.stepper.masters, scales=start.working.scales)
            local = ranks.replay(taken.step, scale=taken.loss_scale, keep_micro=True)
            self._write_params()
        return local.replays

    def _finish_again(self, by: StepAgain) -> ReferenceStep:
        """Repeat a step from its sums, without moving this reference."""
        taken, start = by.again.taken, by.again.start
        twin = copy(self)
        twin._stepper, twin._loss_scale = start.stepper.fork(), copy(start.loss_scale)
        twin._scales, twin._next_step = dict(start.working.scales), taken.step
        twin._ranks, twin._history = copy(self._ranks), None
        twin._ranks.rules = by.rules
        local = by.contributions()
        with isolated():
            begun = twin._begun(local, {name: by.sum(name) for name in local.names})
        # In a model with several parts, `taken.measured` covers all parts.
        measured = taken.measured if by.differs_only_in_clip else begun.measured
        step = twin.finish(begun, measured=measured, reported_norm=taken.norm)
        params = {name: param.clone() for name, param in step.params.items()}
        self._write_params()
        return replace(step, params=params)

    def _new_stepper(self, params: Mapping[str, Tensor]) -> Stepper:
        return Stepper(
            self._scenario.optimizer,
            params=params,
            on_host=self._scenario.system.offload_state,
            rules=self._rules,
        )

    def _new_history(self) -> OptimizerHistory | None:
        if self._elems > KEPT_ELEMS_MAX:
            return None
        masters = {name: master.clone() for name, master in self._stepper.masters.items()}
        return OptimizerHistory(masters=masters)

    def _add_to_history(self, stepped: Mapping[str, Tensor]) -> None:
        """Append a step; forget all steps if they have too many elements."""
        history = self._history
        if history is None or not stepped:
            return
        steps = (*history.steps, OptimizerStep(step=self._next_step, grads=stepped))
        fits = len(steps) * self._elems <= KEPT_ELEMS_MAX
        self._history = replace(history, steps=steps) if fits else None

    def _build_one_device(self) -> OneDevice | None:
        if not self._scenario.expect.one_device:
            return None
        device = next(iter(self._stepper.masters.values())).device
        return OneDevice(self._scenario, device=str(device))

    def _clip_is_certified(self, measured: Measure, norm_max: float) -> bool:
        form = self._rules.known_clip
        if form is None or self._rules.norm != "of-elements":
            return measured.norm_certified
        return clip_is_certified(measured, norm_max=norm_max, form=form)

    def _measure(self, flat: Tensor, *, active: Sequence[str]) -> Measure:
        """Measure the gradient: norm and zeros without `uncounted`, overflow over all params."""
        whole, norm = measure(flat), self._rules.norm
        if norm not in ("of-elements", "reported"):
            grads = unflatten(flat, like={name: self._stepper.masters[name] for name in active})
            return measure_by(
                norm,
                whole,
                grads=grads,
                # Each shard group has all rows.
                rank_count=self._scenario.world.size // self._scenario.system.redundancy,
                order=self._scenario.world.order,
                holdings=self._holdings(),
            )
        if not any(name.endswith(self._uncounted) for name in active):
            return whole
        pieces = unflatten(flat, like={name: self._stepper.masters[name] for name in active})
        counted = [name for name in active if not name.endswith(self._uncounted)]
        return replace(measure(flatten_wide(pieces, names=counted)), finite=whole.finite)

    def _update(
        self, flat: Tensor, *, measured: Measure, active: Sequence[str], factor: float
    ) -> Mapping[str, Tensor]:
        """Clip the master gradient, step the masters and cast them into the working params.

        Returns the optimizer gradients, fp32 by param.
        """
        spec, masters = self._scenario.optimizer, self._stepper.masters
        # By value before by norm: the norm was measured before both.
        if spec.clip_value is not None:
            flat.clamp_(-spec.clip_value, spec.clip_value)
        if spec.clip_norm is not None:
            clip_by_rule_(flat, measured=measured, norm_max=spec.clip_norm, rules=self._rules)
        like = {name: masters[name] for name in active}
        stepped = unflatten(flat, like=like)
        self._stepper.step(stepped, factor=factor)
        # fp8 params get new scales after a step. Frozen params keep their scales.
        working = self._ranks.params() if self._scales else {}
        for name in self._scales.keys() & like.keys():
            self._scales[name] = scale_for(masters[name], dtype=working[name].dtype)
        self._write_params()
        return stepped

    def _write_params(self) -> None:
        """Cast the masters into all ranks' working params."""
        self._ranks.write(self._stepper.masters, scales=self._scales)


def step_together(
    references: Sequence[Reference],
    orders: Sequence[Orders | None],
    *,
    order_seed: int = 0,
    reported_norm: Tensor | None = None,
) -> list[ReferenceStep]:
    """Run the next step of all model parts.

    Each part has its own params, data and ranks. The parts share one norm, so they clip and skip
    together. Arguments, one per part, are as for `Reference.step` and `Reference.finish`.
    """
    begun = [
        reference.begin(order, order_seed=order_seed)
        for reference, order in zip(references, orders, strict=True)
    ]
    # One norm over all parts, hence between `begin` and `finish`.
    measured = measure_together([each.measured for each in begun])
    return [
        reference.finish(each, measured=measured, reported_norm=reported_norm)
        for reference, each in zip(references, begun, strict=True)
    ]
