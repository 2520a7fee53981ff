"""The reference: what one device computes for a whole data-parallel run, rank by rank.

It knows no buckets, shards, buffers or collectives. Where an order of addition depends on a layout
(`ring`, `gloo` and others), the caller names it element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zero_sim.errors import ModelError, UsageError
from zero_sim.reference.adding import SumSpan, add_replicas
from zero_sim.reference.certificate import certify
from zero_sim.reference.division import Division, count_contributions
from zero_sim.reference.gradient import (
    Measure,
    clip_by_norm_,
    flatten_wide,
    measure,
    measure_together,
    unflatten,
)
from zero_sim.reference.placement import Addresses, MemoryPlace, place_params
from zero_sim.reference.quantization import decode, encode, find_scales, scale_for
from zero_sim.reference.replay import NonFinite, RankReplay, Replayer, isolated
from zero_sim.reference.scaling import LossScale
from zero_sim.reference.stepping import Stepper, lr_factor
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import EXACT_MODELS, Workload, build_module, build_workload

Orders = Mapping[str, Sequence[SumSpan]]
"""By param: spans that tile its flattened elements, each with its place in the calls that add."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceStep:
    """All that one step produced; valid until the next step, since tensors may be live state."""

    step: int
    """Optimizer step, from 0."""
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """Loss by (rank, micro-batch), not scaled."""
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """Sum over ranks, by param, before the division that `post` asks for and still scaled; zeros
    for a param that is frozen in this step."""
    divisor: int
    """What `grads` are yet to be divided by: 1 but for `post`."""
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    """The working params: the masters, cast; of all ranks, also those that only some hold."""
    scales: Mapping[str, Tensor]  # each 0D, fp32
    """Of params in fp8: what their values are multiplied by, after the step."""
    state: Mapping[str, Mapping[str, Tensor]]
    """torch's optimizer state by param and key, `step` included."""
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """By param: which elements of `grads` come out the same in every order of addition; see
    `reference.certificate`. None where the model does not claim that of any, or where a gradient is
    not finite."""
    norm: Tensor  # 0D, fp32
    """Norm of the whole master gradient before clipping."""
    norm_certified: bool
    """Whether every order of adding gives that norm. Where not, neither the norm is owed nor, if
    gradients are clipped by it, anything that follows."""
    zeros: int
    """Elements of the master gradient that are zero, before clipping."""
    skipped: bool
    """Whether nothing was updated, because a scaled gradient was not finite."""
    loss_scale: float | None
    """What losses were multiplied by in this step; None without loss scaling."""
    lr_factor: float
    """What learning rates were multiplied by in this step."""
    nonzero_fraction: float
    """Share of the elements of `grads` that are not zero; 0 where there are none."""
    data_digests: Mapping[int, bytes]
    """By rank: hash of the bytes of its batches."""
    nonfinite: NonFinite | None
    """First NaN or infinity among the local gradients; None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunStep:
    """A step whose gradients are there and whose update is not."""

    replays: Sequence[RankReplay]
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """As in `ReferenceStep`."""
    divisor: int
    """As in `ReferenceStep`."""
    flat: Tensor  # 1D, fp32
    """The master gradient of what is trained in this step, not clipped."""
    active: Sequence[str]
    """Names of the params in `flat`, in order."""
    measured: Measure
    """Of `flat`, but for what does not count here."""
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """As in `ReferenceStep`."""
    nonzero_fraction: float
    nonfinite: NonFinite | None


class Reference:
    """Runs a scenario on one device; the oracle that every system is compared with.

    A rank is replayed with the params that it holds. With expert parallelism those differ: rank r
    has the experts of index `r % ep`, and a param's gradients are added over its holders, in order.
    """

    def __init__(
        self, scenario: Scenario, *, workload: Workload, uncounted: Sequence[str] = ()
    ) -> None:
        """Build the module and one fp32 master per trained param.

        Args:
            scenario: The case. Layout settings and `optimizer.foreach` have no meaning here.
            workload: Its workload. Forward must not change the module: one module plays all ranks.
            uncounted: Endings of names that norm and zeros leave out, as another part of the model
                counts them.

        Raises:
            ModelError: The module has no param to train, or not one that is to be frozen.
        """
        self._scenario = scenario
        self._workload = workload
        self._uncounted = tuple(uncounted)
        shares = self._build_shares()
        first = shares[0]
        if not first.params:
            raise ModelError(
                "Expected a model with at least one param that requires a gradient, but got none "
                f"from model.name={scenario.model.name!r}. Try giving `model.shapes` a shape."
            )
        params = {name: param for share in shares for name, param in share.params.items()}
        _check_freeze(scenario, names=list(params))
        spec = scenario.optimizer
        self._scales = {
            name: scale.clone() for share in shares for name, scale in share.scales.items()
        }
        weights = {name: decode(params[name], scale=s) for name, s in self._scales.items()}
        self._stepper = Stepper(spec, params={**params, **weights})
        self._elems = sum(master.numel() for master in self._stepper.masters.values())
        self._loss_scale = None if spec.loss_scale is None else LossScale(spec.loss_scale)
        self._seat(shares)
        self._next_step = 0

    @property
    def held(self) -> Sequence[frozenset[str]]:
        """For every rank, the names of the params that it holds."""
        return self._held

    def place(self, addresses: Sequence[Addresses]) -> None:
        """Lay every param in memory as each rank has it.

        To be called before the first step, or the first one in another world.

        Args:
            addresses: For every rank, the address of each param; see [Note: addresses].
        """
        placed: dict[tuple[int, frozenset[tuple[str, MemoryPlace]]], Replayer] = {}
        unused = dict(enumerate(self._replayers))
        for rank, wanted in enumerate(addresses):
            share = rank % self._scenario.topology.ep
            key = share, frozenset(wanted.items())
            if key not in placed:
                placed[key] = unused.pop(share, None) or self._build_replayer(share)
                place_params(placed[key].params, wanted)
            self._replayer_of_rank[rank] = placed[key]
        self._replayers = list(placed.values())
        self._write_params()

    def continue_as(
        self,
        scenario: Scenario,
        *,
        workload: Workload | None = None,
        weights_only: bool = False,
    ) -> None:
        """Go on in another world: masters, optimizer state, loss scale and step index stay.

        Args:
            scenario: What holds from the next step on; of the same model, dtype and optimizer.
            workload: Its workload; built from it where left out.
            weights_only: Whether masters and step index alone stay: the optimizer has yet to make
                its state, and the loss scale is the first one again.

        Raises:
            UsageError: The model or the optimizer is another one.
        """
        for field in ("model", "optimizer"):
            before, after = getattr(self._scenario, field), getattr(scenario, field)
            if before != after:
                raise UsageError(
                    f"Expected a scenario that goes on with {field} = {before}, but got {after}. "
                    "Try changing only `world`, `system`, `data` and `run`."
                )
        self._scenario = scenario
        self._workload = build_workload(scenario) if workload is None else workload
        self._seat(self._build_shares())
        if weights_only:
            spec = scenario.optimizer
            self._stepper = Stepper(spec, params=self._stepper.masters)
            self._loss_scale = None if spec.loss_scale is None else LossScale(spec.loss_scale)
        self._write_params()

    def _seat(self, shares: Sequence[Replayer]) -> None:
        """Give every rank the replayer of its share of the experts."""
        ranks = range(self._scenario.world.size)
        names = [frozenset(share.params) for share in shares]
        self._held = [names[rank % len(shares)] for rank in ranks]
        self._replayers = list(shares)
        self._replayer_of_rank = [shares[rank % len(shares)] for rank in ranks]

    def _build_shares(self) -> list[Replayer]:
        """Build one replayer an expert-parallel index."""
        return [self._build_replayer(share) for share in range(self._scenario.topology.ep)]

    def _build_replayer(self, share: int) -> Replayer:
        module = build_module(self._workload, expert_index=share)
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        return Replayer(
            scenario=self._scenario,
            workload=self._workload,
            module=module,
            params=params,
            scales={name: s for name, s in find_scales(module).items() if name in params},
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
        active = self._freeze(step)
        with isolated():
            replays = [
                self._replay(step=step, rank=rank, scale=scale)
                for rank in range(scenario.world.size)
            ]
            division = self._division(replays)
            add = partial(
                add_replicas,
                replica_count=scenario.system.redundancy,
                order=scenario.world.order,
                seed=order_seed,
            )
            grads = self._reduce(
                replays, active=active, division=division, orders=orders or {}, add=add
            )
            flat = flatten_wide(grads, names=active)
            nonzero_fraction = int(flat.count_nonzero()) / max(1, self._elems)
            if scale is not None:
                flat.div_(scale)
            division.after_(flat)
            measured = self._measure(flat, active=active)
            # Before the optimizer moves the weights: the search replays this step.
            nonfinite = None if measured.finite else self._find_nonfinite(step, scale=scale)
        return BegunStep(
            replays=replays,
            grads=grads,
            divisor=division.count if division.how == "post" else 1,
            flat=flat,
            active=active,
            measured=measured,
            order_free=self._certify(replays, division=division)
            if measured.finite and self._is_exact
            else None,
            nonzero_fraction=nonzero_fraction,
            nonfinite=nonfinite,
        )

    def finish(self, begun: BegunStep, *, measured: Measure) -> ReferenceStep:
        """Clip and update, or skip, as the measure of the whole gradient says.

        Args:
            begun: From `begin`.
            measured: Its own measure; where it is one part of a model, that of all parts.
        """
        step, replays = self._next_step, begun.replays
        scale = None if self._loss_scale is None else self._loss_scale.scale
        factor = lr_factor(self._scenario.optimizer, step=step)
        skipped = self._loss_scale is not None and not measured.finite
        if not skipped:
            with isolated():
                self._update(begun.flat, norm=measured.norm, active=begun.active, factor=factor)
        if self._loss_scale is not None:
            self._loss_scale.update(finite=measured.finite)
        self._next_step += 1
        return ReferenceStep(
            step=step,
            losses={
                (rank, micro): loss
                for rank, replay in enumerate(replays)
                for micro, loss in enumerate(replay.losses)
            },
            grads=begun.grads,
            divisor=begun.divisor,
            masters=self._stepper.masters,
            params={
                name: param.detach()
                for replayer in self._replayers
                for name, param in replayer.params.items()
            },
            scales=dict(self._scales),
            state=self._stepper.state(),
            order_free=begun.order_free,
            norm=measured.norm,
            norm_certified=measured.norm_certified,
            zeros=measured.zeros,
            skipped=skipped,
            loss_scale=scale,
            lr_factor=factor,
            nonzero_fraction=begun.nonzero_fraction,
            data_digests={rank: replay.data_digest for rank, replay in enumerate(replays)},
            nonfinite=begun.nonfinite,
        )

    def _measure(self, flat: Tensor, *, active: Sequence[str]) -> Measure:
        """Measure the gradient: norm and zeros of what counts here, overflow of all of it."""
        whole = measure(flat)
        if not any(name.endswith(self._uncounted) for name in active):
            return whole
        pieces = unflatten(flat, like={name: self._stepper.masters[name] for name in active})
        counted = [name for name in active if not name.endswith(self._uncounted)]
        return replace(measure(flatten_wide(pieces, names=counted)), finite=whole.finite)

    def _freeze(self, step: int) -> list[str]:
        """Freeze what is frozen at a step; return the names of all other params, in order."""
        spans = self._scenario.model.freeze
        if not spans:
            return list(self._stepper.masters)
        frozen = {freeze.param for freeze in spans if freeze.start <= step < freeze.stop}
        for replayer in self._replayers:
            replayer.freeze(frozen)
        return [name for name in self._stepper.masters if name not in frozen]

    def _replay(self, *, step: int, rank: int, scale: float | None) -> RankReplay:
        in_fp32 = self._scenario.system.grad_dtype == "fp32"
        return self._replayer_of_rank[rank].replay_rank(
            step=step,
            rank=rank,
            grad_dtype=torch.float32 if in_fp32 else None,
            scale=scale,
            keep_micro=self._is_exact,
        )

    @property
    def _is_exact(self) -> bool:
        return self._scenario.model.name in EXACT_MODELS

    def _certify(self, replays: Sequence[RankReplay], *, division: Division) -> dict[str, Tensor]:
        """Certify each param's sum: of what every micro-batch of every rank brings.

        What ranks divide before the sum may be no multiple of a unit any more; then the quotients
        that they contribute are what is added.
        """
        split = [replay.rounds if division.is_before else replay.micro_grads for replay in replays]
        contributions = [grads for rank in split for grads in rank]
        certified: dict[str, Tensor] = {}
        for name, zero in replays[0].rounds[0].items():
            terms = [grads[name] for grads in contributions if name in grads]
            if division.is_before:
                terms = [division.before(term) for term in terms]
            certified[name] = certify(terms or [torch.zeros_like(zero)])
        return certified

    def _find_nonfinite(self, step: int, *, scale: float | None) -> NonFinite | None:
        """Name the first rank's gradient that is not finite."""
        for rank, replayer in enumerate(self._replayer_of_rank):
            found = replayer.find_nonfinite(step=step, rank=rank, scale=scale)
            if found is not None:
                return found
        return None

    def _division(self, replays: Sequence[RankReplay]) -> Division:
        system = self._scenario.system
        count = count_contributions(
            system.divide_by,
            rank_count=len(replays),
            micro_batches=self._scenario.run.micro_batches,
            rows=sum(replay.rows for replay in replays),
        )
        return Division(how=system.divide, count=count)

    def _reduce(
        self,
        replays: Sequence[RankReplay],
        *,
        active: Sequence[str],
        division: Division,
        orders: Orders,
        add: Callable[..., Tensor],
    ) -> dict[str, Tensor]:
        """Add the ranks' gradients round by round, divided first where the scenario says so."""
        reduced: dict[str, Tensor] = {}
        for rounds in zip(*(replay.rounds for replay in replays), strict=True):
            for name in active:
                local = [grads[name] for grads in rounds if name in grads]
                if division.is_before:
                    local = [division.before(grad) for grad in local]
                try:
                    total = add(local, spans=orders.get(name))
                except UsageError as error:
                    raise UsageError(f"param {name!r}: {error}") from error
                reduced[name] = reduced[name] + total if name in reduced else total
        # In the masters' order; what is frozen contributed zeros.
        zeros = {name: grad for replay in replays for name, grad in replay.rounds[0].items()}
        return {
            name: reduced[name] if name in reduced else zeros[name].clone()
            for name in self._stepper.masters
        }

    def _update(self, flat: Tensor, *, norm: Tensor, active: Sequence[str], factor: float) -> None:
        """Clip the master gradient, step the masters and cast them into the working params.

        Params in fp8 get new scales; those that are frozen keep theirs.
        """
        spec, masters = self._scenario.optimizer, self._stepper.masters
        if spec.clip_value is not None:
            flat.clamp_(-spec.clip_value, spec.clip_value)
        if spec.clip_norm is not None:
            clip_by_norm_(flat, norm=norm, norm_max=spec.clip_norm)
        like = {name: masters[name] for name in active}
        self._stepper.step(unflatten(flat, like=like), factor=factor)
        working = self._replayers[0].params
        for name in self._scales.keys() & like.keys():
            self._scales[name] = scale_for(masters[name], dtype=working[name].dtype)
        self._write_params()

    def _write_params(self) -> None:
        """Cast the masters into the working params of all replayers, fp8 with their scales."""
        with torch.no_grad():
            for replayer in self._replayers:
                for name, param in replayer.params.items():
                    param.copy_(self._cast(name, dtype=param.dtype))
                for name, scale in replayer.scales.items():
                    scale.copy_(self._scales[name])

    def _cast(self, name: str, *, dtype: torch.dtype) -> Tensor:
        """Return a master in fp8 where its param is; else as it is, for a copy to cast."""
        master = self._stepper.masters[name]
        if name not in self._scales:
            return master
        return encode(master, scale=self._scales[name], dtype=dtype)


def step_together(
    references: Sequence[Reference], orders: Sequence[Orders | None], *, order_seed: int = 0
) -> list[ReferenceStep]:
    """Run the next step of all parts of one model.

    Each part has params, data and ranks of its own; what they share is the norm, which is over all
    of them, and so the clipping, and the overflow, at which all of them skip the step.

    Args:
        references: One a part.
        orders: For each, as in `Reference.step`.
        order_seed: As in `Reference.step`.

    Raises:
        UsageError: As `Reference.step`.
    """
    begun = [
        reference.begin(order, order_seed=order_seed)
        for reference, order in zip(references, orders, strict=True)
    ]
    measured = measure_together([each.measured for each in begun])
    return [
        reference.finish(each, measured=measured)
        for reference, each in zip(references, begun, strict=True)
    ]


def _check_freeze(scenario: Scenario, *, names: Sequence[str]) -> None:
    for freeze in scenario.model.freeze:
        if freeze.param not in names:
            raise ModelError(
                f"Expected model.freeze to name a trained param of model "
                f"{scenario.model.name!r}, but got {freeze.param!r}. "
                f"Try one of {', '.join(names)}."
            )
