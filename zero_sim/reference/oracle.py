"""The reference: what one device computes for a whole data-parallel run, rank by rank.

It knows no buckets, shards, buffers or collectives. Where an order of addition depends on a layout
(`ring`, `gloo` and others), the caller names it element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.reference.clipping import clip_is_certified
from zero_sim.reference.division import quotient
from zero_sim.reference.gradient import (
    Measure,
    flatten_wide,
    measure,
    measure_together,
    unflatten,
)
from zero_sim.reference.mistakes import Mistakes, StepHistory
from zero_sim.reference.norms import Holdings, Norm, measure_by
from zero_sim.reference.one_device import OneDevice
from zero_sim.reference.other_sums import OtherSums
from zero_sim.reference.otherwise import Otherwise
from zero_sim.reference.placement import Addresses
from zero_sim.reference.quantization import scale_for
from zero_sim.reference.ranks import Adding, Contributions, Orders, Ranks
from zero_sim.reference.replay import isolated
from zero_sim.reference.rules import Rules, clip_by_rule_
from zero_sim.reference.scaling import LossScale
from zero_sim.reference.stepping import Stepper, lr_factor
from zero_sim.reference.steps import BegunStep, ReferenceStep, Standing
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import EXACT_MODELS, Workload, build_workload

KEPT_ELEMS_MAX = 1 << 20
"""Elements that a step keeps besides, for what they may explain: of a larger model, none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """An update, each field as in `ReferenceStep`; by default of a step that is skipped."""

    stepped: Mapping[str, Tensor] = field(default_factory=dict)
    otherwise: Otherwise | None = None
    mistakes: Mistakes | None = None


class Reference:
    """Runs a scenario on one device; the oracle that every system is compared with.

    A rank is replayed with the params that it holds. With expert parallelism those differ: rank r
    has the experts of index `r % ep`, and a param's gradients are added over its holders, in order.
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
            scenario: The case. Layout settings have no meaning here.
            workload: Its workload. Forward must not change the module: one module plays all ranks.
            uncounted: Endings of names that norm and zeros leave out, as another part of the model
                counts them.
            elsewhere: Endings of names of params that only ranks of other groups hold: parts of the
                same model, all of which this one device trains.
            rules: By which rules it computes what the scenario leaves open.

        Raises:
            ModelError: The module has no param to train, or not one that is to be frozen.
        """
        self._scenario = scenario
        self._uncounted = tuple(uncounted)
        self._elsewhere = tuple(elsewhere)
        self._rules = rules or Rules()
        self._holdings: Callable[[], Holdings] = tuple
        self._ranks = Ranks(scenario, workload=workload, rules=self._rules)
        self._scales = self._ranks.scales()
        spec = scenario.optimizer
        on_host = scenario.system.offload_state
        self._stepper = Stepper(spec, params=self._ranks.weights(), on_host=on_host)
        self._elems = sum(master.numel() for master in self._stepper.masters.values())
        kept = self._elems * scenario.world.size * scenario.run.micro_batches
        self._keeps_micro = kept <= KEPT_ELEMS_MAX
        self._history = StepHistory(self._stepper.masters, elems_max=KEPT_ELEMS_MAX)
        self._loss_scale = None if spec.loss_scale is None else LossScale(spec.loss_scale)
        self._one_device = self._build_one_device()
        self._next_step = 0
        self.certified = True
        """Whether every order of addition gives the same clipping in all steps so far."""

    @property
    def held(self) -> Sequence[frozenset[str]]:
        """For every rank, the names of the params that it holds."""
        if not self._elsewhere:
            return self._ranks.held
        return [
            frozenset(name for name in names if not name.endswith(self._elsewhere))
            for names in self._ranks.held
        ]

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Lay every param in memory as each rank has it.

        To be called before the first step, or the first one in another world.

        Args:
            addresses: For every rank, the address of each param; see [Note: addresses].
        """
        self._ranks.set_addresses(addresses)
        if self._one_device is not None:
            self._one_device.set_address(addresses[0])
        self._write_params()

    def set_holdings(self, holdings: Callable[[], Holdings]) -> None:
        """Tell what each rank of one replica owns, for norms that are taken of that.

        Args:
            holdings: Gives it by rank, where a norm is; see `norms.Holding`.
        """
        self._holdings = holdings

    def continue_as(
        self,
        scenario: Scenario,
        *,
        workload: Workload | None = None,
        weights_only: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """Go on in another world: masters, optimizer state, loss scale and step index stay.

        Args:
            scenario: What holds from the next step on; of the same model, dtype and optimizer.
            workload: Its workload; built from it where left out.
            weights_only: Whether masters and step index alone stay: the optimizer has yet to make
                its state, and the loss scale is the first one again.
            rules: By which rules it goes on; the same ones where left out.

        Raises:
            UsageError: The model or the optimizer is another one.
        """
        for name in ("model", "optimizer"):
            before, after = getattr(self._scenario, name), getattr(scenario, name)
            if before != after:
                raise UsageError(
                    f"expected a scenario that goes on with {name} = {before}, got {after}. "
                    "Try changing only `world`, `system`, `data` and `run`."
                )
        self._scenario = scenario
        self._rules = self._ranks.rules = rules or self._rules
        workload = build_workload(scenario) if workload is None else workload
        self._ranks.move(scenario, workload=workload)
        self._one_device = self._build_one_device()
        if weights_only:
            spec = scenario.optimizer
            on_host = scenario.system.offload_state
            self._stepper = Stepper(spec, params=self._stepper.masters, on_host=on_host)
            self._loss_scale = None if spec.loss_scale is None else LossScale(spec.loss_scale)
            self._history = StepHistory(self._stepper.masters, elems_max=KEPT_ELEMS_MAX)
        self._write_params()

    def standing(self) -> Standing:
        """What the next step begins with."""
        scale = self._loss_scale
        return Standing(
            next_step=self._next_step,
            masters=self._stepper.masters,
            params=self._ranks.params(),
            scales=self._scales,
            state=self._stepper.state(),
            settings=self._stepper.settings(),
            loss_scale=None if scale is None else scale.scale,
            good_steps=None if scale is None else scale.good_steps,
        )

    def step(self, orders: Orders | None = None, *, order_seed: int = 0) -> ReferenceStep:
        """Run the next optimizer step of all ranks.

        Args:
            orders: By param, spans that tile its flattened elements, each with its place in the
                calls that add it. Not read where `world.order` does not depend on positions.
            order_seed: Seed of the world, from which `random-tree` draws.

        Raises:
            UsageError: The order depends on positions, and the spans of a param are missing or do
                not tile it.
        """
        begun = self.begin(orders, order_seed=order_seed)
        return self.finish(begun, measured=begun.measured)

    def begin(self, orders: Orders | None = None, *, order_seed: int = 0) -> BegunStep:
        """Run the next step up to where the norm of the whole gradient has to be known.

        Args:
            orders: As in `step`.
            order_seed: As in `step`.

        Raises:
            UsageError: As `step`.
        """
        scenario, step = self._scenario, self._next_step
        scale = None if self._loss_scale is None else self._loss_scale.scale
        adding = Adding(
            order=scenario.world.order,
            seed=order_seed,
            block_count=scenario.system.redundancy,
        )
        is_exact = scenario.model.name in EXACT_MODELS
        with isolated():
            local = self._ranks.replay(step, scale=scale, keep_micro=is_exact or self._keeps_micro)
            grads = local.reduce(adding, orders=orders or {})
            flat = self._flatten(grads, local)
            one_device = None
            if self._one_device is not None:
                one_device = self._one_device.gradients(
                    step, masters=self._stepper.masters, scales=self._scales, scale=scale
                )
            nonzero_fraction = int(flat.count_nonzero()) / max(1, self._elems)
            if scale is not None:
                flat = quotient(flat, scale)
            if local.divisor != 1:
                local.division.after_(flat)
            measured = self._measure(flat, active=local.active)
            # Before the optimizer moves the weights: the search replays this step.
            nonfinite = None if measured.finite else self._ranks.find_nonfinite(step, scale=scale)
        other_sums = None
        if self._keeps_micro:
            other_sums = OtherSums(
                scenario=scenario,
                ranks=self._ranks,
                local=local,
                adding=adding,
                orders=orders or {},
                followed=self._rules,
            )
        return BegunStep(
            local=local,
            other_sums=other_sums,
            grads=grads,
            flat=flat,
            one_device=one_device,
            measured=measured,
            order_free=local.certify() if measured.finite and is_exact else None,
            nonzero_fraction=nonzero_fraction,
            nonfinite=nonfinite,
        )

    def _flatten(self, grads: Mapping[str, Tensor], local: Contributions) -> Tensor:
        """Join what is trained in a step, divided already where that rounds to the sums' dtype."""
        if local.division.is_rounded and local.divisor != 1:
            grads = {name: local.division.after(grads[name]) for name in local.active}
        return flatten_wide(grads, names=local.active)

    def finish(
        self, begun: BegunStep, *, measured: Measure, told: Tensor | None = None
    ) -> ReferenceStep:
        """Clip and update, or skip, as the measure of the whole gradient says.

        Args:
            begun: From `begin`.
            measured: Its own measure; where it is one part of a model, that of all parts.
            told: 0-D fp32, the norm that the system tells, where it is to be taken from it.

        Raises:
            UntrainableError: torch's optimizer cannot take the step.
        """
        step, local = self._next_step, begun.local
        scale = None if self._loss_scale is None else self._loss_scale.scale
        factor = lr_factor(self._scenario.optimizer, step=step)
        skips = self._loss_scale is not None or self._rules.nonfinite == "skipped"
        skipped = skips and not measured.finite
        if self._rules.norm == "told" and told is not None:
            measured = replace(measured, norm=told, norm_certified=True)
        norm_max = self._scenario.optimizer.clip_norm
        keeps = self._elems * len(local.replays) <= KEPT_ELEMS_MAX
        masters_before = _copied(self._stepper.masters) if keeps else {}
        params_before = _copied(self._ranks.params()) if keeps else {}
        taken = _Taken()
        if not skipped:
            taken = self._take(begun, measured=measured, before=masters_before)
        if self._loss_scale is not None:
            self._loss_scale.update(finite=measured.finite)
        self._next_step += 1
        clip_certified = norm_max is None or self._clip_is_certified(measured, norm_max)
        self.certified &= clip_certified
        return ReferenceStep(
            step=step,
            losses=local.losses,
            grads=begun.grads,
            one_device=begun.one_device,
            divisor=local.divisor,
            division=local.division,
            stepped=taken.stepped,
            masters=self._stepper.masters,
            params=self._ranks.params(),
            scales=dict(self._scales),
            state=self._stepper.state(),
            order_free=begun.order_free,
            norm=measured.norm,
            norm_certified=measured.norm_certified,
            clip_certified=clip_certified,
            other_sums=begun.other_sums,
            otherwise=taken.otherwise,
            zeros=measured.zeros,
            skipped=skipped,
            loss_scale=scale,
            lr_factor=factor,
            nonzero_fraction=begun.nonzero_fraction,
            data_digests=local.data_digests,
            nonfinite=begun.nonfinite,
            lost=self._stepper.find_nonfinite(),
            mistakes=taken.mistakes,
            masters_before=masters_before,
            params_before=params_before,
        )

    def _take(self, begun: BegunStep, *, measured: Measure, before: Mapping[str, Tensor]) -> _Taken:
        """Update, and keep what explains another update; `before` is empty where that is much."""
        otherwise, active, step = None, begun.local.active, self._next_step
        factor = lr_factor(self._scenario.optimizer, step=step)
        with isolated():
            if before:
                otherwise = self._otherwise(begun, measured=measured)
            stepped = self._update(begun.flat, measured=measured, active=active, factor=factor)
        mistakes = self._history.add(
            step,
            stepped,
            scenario=self._scenario,
            working=self._ranks.form(self._scales),
            holdings=self._holdings,
            otherwise=otherwise,
        )
        return _Taken(stepped=stepped, otherwise=otherwise, mistakes=mistakes)

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

    def _measure(self, flat: Tensor, *, active: Sequence[str], norm: Norm | None = None) -> Measure:
        """Measure the gradient: norm and zeros of what counts here, overflow of all of it."""
        whole, norm = measure(flat), norm or self._rules.norm
        if norm not in ("of-elements", "told"):
            grads = unflatten(flat, like={name: self._stepper.masters[name] for name in active})
            return measure_by(
                norm,
                whole,
                grads=grads,
                # Each block of ranks holds all rows.
                rank_count=self._scenario.world.size // self._scenario.system.redundancy,
                order=self._scenario.world.order,
                holdings=self._holdings(),
            )
        if not any(name.endswith(self._uncounted) for name in active):
            return whole
        pieces = unflatten(flat, like={name: self._stepper.masters[name] for name in active})
        counted = [name for name in active if not name.endswith(self._uncounted)]
        return replace(measure(flatten_wide(pieces, names=counted)), finite=whole.finite)

    def _otherwise(self, begun: BegunStep, *, measured: Measure) -> Otherwise:
        """Keep what the update starts from, before it does."""
        spec, local, step = self._scenario.optimizer, begun.local, self._next_step
        clips = spec.clip_norm is not None and not bool(measured.norm < spec.clip_norm / 2)
        flat = begun.flat
        if clips or spec.clip_value is not None:
            flat = flat.clone()
        return Otherwise(
            before=self._stepper.fork().fork,
            grads=unflatten(
                flat, like={name: self._stepper.masters[name] for name in local.active}
            ),
            sums=begun.other_sums,
            unused=self._other_params(local),
            measured=measured,
            measure=self._measure,
            clip_norm=spec.clip_norm,
            clip_value=spec.clip_value,
            scale=None if self._loss_scale is None else self._loss_scale.scale,
            followed=self._rules,
            order=self._scenario.world.order,
            factor=lr_factor(spec, step=step),
            working=self._ranks.form(self._scales),
            holdings=self._holdings,
        )

    def _other_params(self, local: Contributions) -> tuple[str, ...]:
        """Names of the params that no rank used, whatever becomes of these."""
        used = frozenset[str]().union(*(replay.reached for replay in local.replays))
        if len(used) >= len(local.names):
            return ()
        frozen = {
            f.param for f in self._scenario.model.freeze if f.start <= self._next_step < f.stop
        }
        return tuple(name for name in local.names if name not in used and name not in frozen)

    def _update(
        self, flat: Tensor, *, measured: Measure, active: Sequence[str], factor: float
    ) -> Mapping[str, Tensor]:
        """Clip the master gradient, step the masters and cast them into the working params.

        Params in fp8 get new scales; those that are frozen keep theirs.

        Returns:
            What the masters were stepped with.
        """
        spec, masters = self._scenario.optimizer, self._stepper.masters
        if spec.clip_value is not None:
            flat.clamp_(-spec.clip_value, spec.clip_value)
        if spec.clip_norm is not None:
            clip_by_rule_(flat, measured=measured, norm_max=spec.clip_norm, rules=self._rules)
        like = {name: masters[name] for name in active}
        stepped = unflatten(flat, like=like)
        self._stepper.step(stepped, factor=factor)
        working = self._ranks.params() if self._scales else {}
        for name in self._scales.keys() & like.keys():
            self._scales[name] = scale_for(masters[name], dtype=working[name].dtype)
        self._write_params()
        return stepped

    def _write_params(self) -> None:
        """Cast the masters into the working params of all ranks."""
        self._ranks.write(self._stepper.masters, scales=self._scales)


def step_together(
    references: Sequence[Reference],
    orders: Sequence[Orders | None],
    *,
    order_seed: int = 0,
    told: Tensor | None = None,
) -> list[ReferenceStep]:
    """Run the next step of all parts of one model.

    Each part has params, data and ranks of its own; what they share is the norm, which is over all
    of them, and so the clipping, and the overflow, at which all of them skip the step.

    Args:
        references: One a part.
        orders: For each, as in `Reference.step`.
        order_seed: As in `Reference.step`.
        told: As in `Reference.finish`.

    Raises:
        UsageError: As `Reference.step`.
    """
    begun = [
        reference.begin(order, order_seed=order_seed)
        for reference, order in zip(references, orders, strict=True)
    ]
    measured = measure_together([each.measured for each in begun])
    return [
        reference.finish(each, measured=measured, told=told)
        for reference, each in zip(references, begun, strict=True)
    ]


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
