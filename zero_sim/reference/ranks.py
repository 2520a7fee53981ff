"""Replay of all ranks on one device, and their contributions to a step's sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from zero_sim.errors import ModelError, ScenarioError, UsageError
from zero_sim.reference.adding import AddOrder, SumSpan, add_block_sums, add_blocks, add_replicas
from zero_sim.reference.certificate import certify
from zero_sim.reference.division import Division, count_contributions
from zero_sim.reference.placement import Addresses, MemoryLayout, move_params
from zero_sim.reference.quantization import WorkingParams, decode, encode, find_scales
from zero_sim.reference.replay import NonFinite, RankReplay, Replayer
from zero_sim.reference.rules import GradDtype, Rules, Sync, dtype_named
from zero_sim.reference.scaling import LossFactors, LossRows, loss_factor
from zero_sim.scenario.derived import own_micro_batches
from zero_sim.scenario.names import check_names
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import Workload, build_module, keep_activations, saved_buffers

Orders = Mapping[str, Sequence[SumSpan]]
"""Spans by param, which tile its flattened elements, with positions in the calls that add them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adding:
    """Addition of rank gradients: within each shard group, then over the groups."""

    order: AddOrder
    seed: int = 0
    """World seed, used by `random-tree`."""
    block_count: int = 1
    """Number of shard groups, each of consecutive ranks."""

    def all(self, local: Sequence[Tensor], *, spans: Sequence[SumSpan] | None) -> Tensor:
        """Add gradients over all ranks; arguments as for `add_replicas`."""
        return add_replicas(
            local, replica_count=self.block_count, order=self.order, spans=spans, seed=self.seed
        )

    def in_blocks(
        self, local: Sequence[Tensor], *, spans: Sequence[SumSpan] | None
    ) -> list[Tensor]:
        """Add gradients within each shard group; arguments as for `add_replicas`."""
        return add_blocks(
            local, replica_count=self.block_count, order=self.order, spans=spans, seed=self.seed
        )

    def over_blocks(self, sums: Sequence[Tensor], *, spans: Sequence[SumSpan] | None) -> Tensor:
        """Add the shard groups' sums; arguments as for `add_replicas`."""
        # A single shard group has no second sum.
        if len(sums) == 1:
            return sums[0]
        return add_block_sums(sums, order=self.order, spans=spans, seed=self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contributions:
    """All ranks' contributions to one step, before addition."""

    names: Sequence[str]
    """Params that are trained in any step, in summation order."""
    active: Sequence[str]
    """Params that are trained in this step; see `Ranks.active`."""
    replays: Sequence[RankReplay]
    """Replays in rank order."""
    division: Division
    across_last: bool = False
    """True to sum each round within shard groups, and over the groups only once, after all
    rounds."""
    reduce_dtypes: Mapping[str, torch.dtype] | None = None
    """Dtype of the sum over ranks, by param; None for the accumulation dtype."""
    sum_dtypes: Mapping[str, torch.dtype] | None = None
    """Dtype in which round sums are added, by param; None for their own dtype."""
    replica_dtypes: Mapping[str, torch.dtype] | None = None
    """Dtype in which shard-group sums are added, by param; None for their own dtype."""

    @property
    def losses(self) -> dict[tuple[int, int], Tensor]:
        """Unscaled loss by (rank, micro-batch)."""
        return {
            (rank, micro): loss
            for rank, replay in enumerate(self.replays)
            for micro, loss in enumerate(replay.losses)
        }

    @property
    def data_digests(self) -> dict[int, bytes]:
        """Hash of each rank's batches."""
        return {rank: replay.data_digest for rank, replay in enumerate(self.replays)}

    @property
    def divisor(self) -> float:
        """Divisor still to apply to the sums; 1 if there is none."""
        return 1 if self.division.each_round else self.division.rest

    def brought(self) -> list[dict[str, Tensor]]:
        """Return each rank's terms for the step's last sum, after any division before the sum."""
        last = [replay.rounds[-1] for replay in self.replays]
        if not self.division.is_before and self.reduce_dtypes is None:
            return last
        return [{name: self._brought(name, g) for name, g in grads.items()} for grads in last]

    def _brought(self, name: str, grad: Tensor) -> Tensor:
        """Return a rank's term for a sum, from its accumulated gradient."""
        # Convert first: ranks divide in the dtype of the sum.
        if self.reduce_dtypes is not None:
            grad = grad.to(self.reduce_dtypes[name])
        return self.division.before(grad) if self.division.is_before else grad

    def certify(self) -> dict[str, Tensor]:
        """Certify each param's sum over micro-batches and ranks."""
        # Quotients may no longer be multiples of a unit. So if ranks divide before the sum, the
        # terms to certify are these quotients.
        before = self.division.is_before
        # Undivided sums have micro-batch gradients as terms, which covers any grouping.
        split = [each.rounds if before else each.micro_grads for each in self.replays]
        contributions = [grads for rank in split for grads in rank]
        certified: dict[str, Tensor] = {}
        for name, zero in self.replays[0].rounds[0].items():
            # Micro-batch gradients still have the param's own gradient dtype.
            terms = [grads[name].to(zero.dtype) for grads in contributions if name in grads]
            if before:
                terms = [self.division.before(term) for term in terms]
            # Without terms the sum is zero in every order.
            certified[name] = certify(terms or [torch.zeros_like(zero)])
            last = zero.dtype if self.replica_dtypes is None else self.replica_dtypes[name]
            if torch.promote_types(zero.dtype, last) != last:
                # Shard-group sums are rounded again, so exact terms prove nothing.
                certified[name] = torch.zeros_like(certified[name])
        return certified

    def reduce(self, adding: Adding, *, orders: Orders) -> dict[str, Tensor]:
        """Add gradients over ranks, round by round, after any division before the sum.

        Returns:
            Sums of all params; zeros for params without a gradient.
        """
        reduced = {
            name: self.reduce_param(name, adding, spans=orders.get(name)) for name in self.active
        }
        # Shapes and dtypes of all params, from any rank that has them.
        zeros = {name: grad for replay in self.replays for name, grad in replay.rounds[0].items()}
        dtypes = self.sum_dtypes or self.replica_dtypes or self.reduce_dtypes or {}
        return {
            name: reduced[name]
            if name in reduced
            # Inactive params: zeros in the dtype that their sum would have.
            else torch.zeros_like(zeros[name], dtype=dtypes.get(name))
            for name in self.names
        }

    def reduce_param(self, name: str, adding: Adding, *, spans: Sequence[SumSpan] | None) -> Tensor:
        """Add one param's gradients round by round.

        Raises:
            UsageError: The order depends on positions, and the spans do not tile the param.
        """
        # [rounds][ranks], each with the param's shape; ranks without the param are skipped.
        rounds = zip(*(replay.rounds for replay in self.replays), strict=True)
        held = [[grads[name] for grads in each if name in grads] for each in rounds]
        # If nothing is converted or divided first, gradients are the terms.
        plain = not self.division.is_before and self.reduce_dtypes is None
        brought = held
        if not plain:
            brought = [[self._brought(name, grad) for grad in each] for each in held]
        try:
            if not self.across_last:
                # Rounds are the outer sum: each is added over all ranks first.
                return self._added(name, [self._over_all(name, adding, g, spans) for g in brought])
            # Otherwise each shard group adds its rounds first, and a single call adds over groups.
            blocks = zip(*(adding.in_blocks(each, spans=spans) for each in brought), strict=True)
            sums = [self._added(name, sums) for sums in blocks]
            return adding.over_blocks(self._as_replicas(name, sums), spans=spans)
        except UsageError as error:
            # The sum does not know the name of its param.
            raise UsageError(f"param {name!r}: {error}") from error

    def _over_all(
        self, name: str, adding: Adding, grads: Sequence[Tensor], spans: Sequence[SumSpan] | None
    ) -> Tensor:
        """Add one round's gradients over all ranks."""
        if self.replica_dtypes is None:
            return adding.all(grads, spans=spans)
        sums = adding.in_blocks(grads, spans=spans)
        return adding.over_blocks(self._as_replicas(name, sums), spans=spans)

    def _as_replicas(self, name: str, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """Convert shard-group sums to the dtype in which they are added."""
        dtypes = self.replica_dtypes
        return sums if dtypes is None else [each.to(dtypes[name]) for each in sums]

    def _added(self, name: str, sums: Sequence[Tensor]) -> Tensor:
        """Add the rounds' sums, in sequence."""
        if self.division.each_round:
            # Each quotient is rounded before it is added.
            sums = [self.division.after(each) for each in sums]
        if self.sum_dtypes is not None:
            sums = [each.to(self.sum_dtypes[name]) for each in sums]
        total = sums[0]
        for each in sums[1:]:
            total = total + each
        return total


def _loss_factors(rules: Rules, at: LossRows, *, dynamic: float) -> LossFactors:
    # A dynamic scale is a power of two, so its product with another factor is exact.
    main, second = rules.scale_loss, rules.scale_second
    return LossFactors(
        main=dynamic * (1.0 if main is None else loss_factor(main, at)),
        second=None
        if second is None
        else dynamic * loss_factor(second, at, declared="scale_second"),
    )


class _Rounds(TypedDict):
    grad_dtype: torch.dtype | None
    every: bool


class Ranks:
    """A scenario's ranks, each replayed with its own params.

    Ranks with equal params and memory layouts share a module. With expert parallelism, rank r has
    expert-parallel index `r % ep`.

    Args:
        scenario: Case to replay.
        workload: The case's workload.
        rules: Rules for accumulation, division and sums.

    Raises:
        ModelError: The module has no trainable param.
        ScenarioError: The scenario names a param that the module lacks.
    """

    def __init__(
        self, scenario: Scenario, *, workload: Workload, rules: Rules | None = None
    ) -> None:
        self.rules = rules or Rules()
        self._scenario = scenario
        self._workload = workload
        shares = self._build_shares()
        if not shares[0].params:
            raise ModelError(
                "expected a model with at least one param that requires a gradient, got none "
                f"from model.name={scenario.model.name!r}. Give `model.shapes` a shape."
            )
        self._assign(shares)
        self._names = list(self.params())
        # Only the built module knows the names of its params.
        problems = tuple(check_names(scenario, self._names))
        if problems:
            raise ScenarioError(scenario.name or "scenario", problems)

    @property
    def held(self) -> Sequence[frozenset[str]]:
        """Param names of each rank."""
        return self._held

    def params(self) -> dict[str, Tensor]:
        """Return the working params of all ranks; live."""
        return {
            name: param.detach()
            for replayer in self._replayers
            for name, param in replayer.params.items()
        }

    def scales(self) -> dict[str, Tensor]:
        """Return the fp8 scales by param, copied."""
        return {name: s.clone() for each in self._replayers for name, s in each.scales.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return persistent buffers that only a checkpoint can restore; live."""
        if self._scenario.model.buffer != "saved":
            return {}
        return saved_buffers(self._replayers[0].module)

    def form(self, scales: Mapping[str, Tensor]) -> WorkingParams:
        """Return working dtypes and fp8 scales."""
        dtypes = {name: param.dtype for name, param in self.params().items()}
        return WorkingParams(dtypes=dtypes, scales=dict(scales))

    def weights(self) -> dict[str, Tensor]:
        """Return the working params' values, with fp8 decoded."""
        params = self.params()
        scales = self.scales().items()
        return {**params, **{name: decode(params[name], scale=scale) for name, scale in scales}}

    def move(self, scenario: Scenario, *, workload: Workload) -> None:
        """Continue with another world's ranks, for the same model. Call `write` next."""
        self._scenario, self._workload = scenario, workload
        self._assign(self._build_shares())

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Place every param in memory as on its rank; see [Note: addresses]. Call `write` next."""
        # One replayer per distinct layout and expert share. Existing replayers are reused first.
        placed: dict[tuple[int, frozenset[tuple[str, MemoryLayout]]], Replayer] = {}
        # Existing replayers, which may be moved to new addresses.
        unused = dict(enumerate(self._replayers))
        for rank, wanted in enumerate(addresses):
            share = rank % self._scenario.topology.ep
            # Equal layouts give equal bits, so their ranks share a module.
            key = share, frozenset(wanted.items())
            if key not in placed:
                placed[key] = unused.pop(share, None) or self._build_replayer(share)
                move_params(placed[key].params, wanted)
            self._replayer_of_rank[rank] = placed[key]
        self._replayers = list(placed.values())

    def write(self, values: Mapping[str, Tensor], *, scales: Mapping[str, Tensor]) -> None:
        """Cast values into all ranks' working params."""
        with torch.no_grad():
            for replayer in self._replayers:
                for name, param in replayer.params.items():
                    value = values[name]
                    if name in scales:
                        value = encode(value, scale=scales[name], dtype=param.dtype)
                    param.copy_(value)
                # The forward of an fp8 module decodes with the module's own scale.
                for name, scale in replayer.scales.items():
                    scale.copy_(scales[name])

    def replay(self, step: int, *, scale: float | None, keep_micro: bool = False) -> Contributions:
        """Replay all ranks from the current params. Call it inside `isolated()`.

        With `keep_micro`, keep each micro-batch's gradients as well.
        """
        rules = self.rules
        # Freezing depends on the step.
        self._freeze(step)
        scales = self._scales(step, scale=scale)
        replays = [
            replayer.replay_rank(
                step=step,
                rank=rank,
                scales=scales[rank],
                keep_micro=keep_micro,
                **self._rounds(rules),
            )
            for rank, replayer in enumerate(self._replayer_of_rank)
        ]
        return self.contributions(self.active(step, replays, rules), replays, rules)

    def _scales(self, step: int, *, scale: float | None) -> list[Sequence[LossFactors | None]]:
        """Return a step's loss factors, by rank and micro-batch."""
        run, rules, size = self._scenario.run, self.rules, len(self._replayer_of_rank)
        counts = [own_micro_batches(run, step=step, rank=rank) for rank in range(size)]
        # Without declared factors, all losses have the same factor.
        if rules.scale_loss is None and rules.scale_second is None:
            alike = None if scale is None else LossFactors(main=scale)
            return [(alike,) * count for count in counts]
        # A rank without data for a micro-batch has no entry for it.
        rows = [
            [self._workload.batch(step=step, rank=rank, micro=micro).rows for micro in range(count)]
            for rank, count in enumerate(counts)
        ]
        return [
            [
                _loss_factors(
                    rules,
                    LossRows(
                        rows=each,
                        rank_rows=sum(of_rank),
                        step_rows=sum(map(sum, rows)),
                        micro_batches=run.micro_batches,
                        world_size=size,
                        cp=self._scenario.topology.cp,
                    ),
                    dynamic=1.0 if scale is None else scale,
                )
                for each in of_rank
            ]
            for of_rank in rows
        ]

    def _rounds(self, rules: Rules) -> _Rounds:
        sync, accumulate, reduce = self._how(rules)
        # If each micro-batch is summed, nothing is accumulated before the sum.
        dtype = accumulate if sync == "last" else reduce
        return {"grad_dtype": dtype_named(dtype), "every": sync != "last"}

    def accumulate(
        self, rank: int, micros: Sequence[Mapping[str, Tensor]], names: Sequence[str], rules: Rules
    ) -> list[dict[str, Tensor]]:
        """Return a rank's terms for each reduction; see `RankReplay.rounds`.

        Params in `names` without terms get zeros.
        """
        return self._replayer_of_rank[rank].accumulate(micros, names, **self._rounds(rules))

    def trained(self, step: int) -> list[str]:
        """Return the params that are not frozen at a step, in order."""
        frozen = self._frozen(step)
        return [name for name in self._names if name not in frozen]

    def active(self, step: int, replays: Sequence[RankReplay], rules: Rules) -> list[str]:
        """Return the params with a gradient in a step under `rules`, in order."""
        trained = self.trained(step)
        # With `zeros`, an unused param is stepped like any other.
        if rules.unused != "left-alone":
            return trained
        used = frozenset[str]().union(*(replay.reached for replay in replays))
        return [name for name in trained if name in used]

    def contributions(
        self, active: Sequence[str], replays: Sequence[RankReplay], rules: Rules
    ) -> Contributions:
        """Return the replayed ranks' contributions under given rules, except for accumulation."""
        sync, accumulate, reduce = self._how(rules)
        # A single shard group has no second sum, so its dtype has no effect.
        copies = rules.replica_dtype if self._scenario.system.redundancy > 1 else None
        # Convert only if dtypes differ.
        differ = accumulate != reduce
        narrows = differ or copies is not None
        return Contributions(
            names=self._names,
            active=active,
            replays=replays,
            division=self._division(replays, rules),
            across_last=sync == "every-in-block",
            reduce_dtypes=self._grad_dtypes(reduce) if differ and sync == "last" else None,
            sum_dtypes=self._grad_dtypes(accumulate) if narrows and sync == "every" else None,
            replica_dtypes=None if copies is None else self._grad_dtypes(copies),
        )

    def _how(self, rules: Rules) -> tuple[Sync, GradDtype, GradDtype]:
        """Return the sync rule and the dtypes for accumulation and reduction."""
        system = self._scenario.system
        return (
            rules.sync or system.sync,
            rules.accumulate_dtype or system.grad_dtype,
            rules.reduce_dtype or system.grad_dtype,
        )

    def _grad_dtypes(self, dtype: GradDtype) -> dict[str, torch.dtype]:
        # `param` stands for each param's own gradient dtype.
        named = dtype_named(dtype)
        return {
            name: named or param.grad_dtype or param.dtype
            for replayer in self._replayers
            for name, param in replayer.params.items()
        }

    def find_nonfinite(self, step: int, *, scale: float | None) -> NonFinite | None:
        """Find the first non-finite local gradient by replaying the last step once more."""
        scales = self._scales(step, scale=scale)
        for rank, replayer in enumerate(self._replayer_of_rank):
            found = replayer.find_nonfinite(step=step, rank=rank, scales=scales[rank])
            if found is not None:
                return found
        return None

    def _assign(self, shares: Sequence[Replayer]) -> None:
        """Assign each rank the replayer with its experts."""
        # Expert-parallel indices alternate over consecutive ranks.
        ranks = range(self._scenario.world.size)
        names = [frozenset(share.params) for share in shares]
        self._held = [names[rank % len(shares)] for rank in ranks]
        self._replayers = list(shares)
        self._replayer_of_rank = [shares[rank % len(shares)] for rank in ranks]

    def _build_shares(self) -> list[Replayer]:
        return [self._build_replayer(share) for share in range(self._scenario.topology.ep)]

    def _build_replayer(self, share: int) -> Replayer:
        # autograd.grad refuses reentrant checkpoints, and kept activations change no bit.
        module = keep_activations(build_module(self._workload, expert_index=share))
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        return Replayer(
            scenario=self._scenario,
            workload=self._workload,
            module=module,
            params=params,
            scales={name: s for name, s in find_scales(module).items() if name in params},
        )

    def _freeze(self, step: int) -> None:
        if self._scenario.model.freeze:
            for replayer in self._replayers:
                replayer.freeze(self._frozen(step))

    def _frozen(self, step: int) -> set[str]:
        spans = self._scenario.model.freeze
        return {freeze.param for freeze in spans if freeze.start <= step < freeze.stop}

    def _division(self, replays: Sequence[RankReplay], rules: Rules) -> Division:
        system = self._scenario.system
        # A rule's own divisor replaces the scenario's count.
        count: float | None = rules.divide_by
        if count is None:
            count = count_contributions(
                system.divide_by,
                rank_count=len(replays),
                micro_batches=sum(len(replay.losses) for replay in replays),
                rows=sum(replay.rows for replay in replays),
            )
        return Division(
            how=rules.divide or system.divide,
            count=count,
            first=rules.predivide_by,
            each_round=rules.divide_each == "round",
        )
