"""All ranks of a scenario, replayed on one device, and what they bring to the sums of a step."""

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
"""By param: spans that tile its flattened elements, each with its place in the calls that add."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adding:
    """How the ranks' gradients are added: over blocks of ranks, then over these."""

    order: AddOrder
    seed: int = 0
    """Seed of the world, from which `random-tree` draws."""
    block_count: int = 1
    """Number of blocks of consecutive ranks."""

    def all(self, local: Sequence[Tensor], *, spans: Sequence[SumSpan] | None) -> Tensor:
        """Add the gradients of all ranks; arguments as for `add_replicas`."""
        return add_replicas(
            local, replica_count=self.block_count, order=self.order, spans=spans, seed=self.seed
        )

    def in_blocks(
        self, local: Sequence[Tensor], *, spans: Sequence[SumSpan] | None
    ) -> list[Tensor]:
        """Add those of each block; arguments as for `add_replicas`."""
        return add_blocks(
            local, replica_count=self.block_count, order=self.order, spans=spans, seed=self.seed
        )

    def over_blocks(self, sums: Sequence[Tensor], *, spans: Sequence[SumSpan] | None) -> Tensor:
        """Add the sums of all blocks; arguments as for `add_replicas`."""
        if len(sums) == 1:
            return sums[0]
        return add_block_sums(sums, order=self.order, spans=spans, seed=self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contributions:
    """What all ranks bring to one step, before anything is added."""

    names: Sequence[str]
    """Of all params that are trained in some step, in the order in which sums are told."""
    active: Sequence[str]
    """Of those that are trained in this one."""
    replays: Sequence[RankReplay]
    """By rank."""
    division: Division
    across_last: bool = False
    """Whether each round is summed within the blocks of ranks, and the last one over them, too."""
    reduce_dtypes: Mapping[str, torch.dtype] | None = None
    """By param: in which ranks are summed; None for the dtype of what they accumulated."""
    sum_dtypes: Mapping[str, torch.dtype] | None = None
    """By param: in which the sums of several rounds are added; None for the dtype of these."""
    copies_dtypes: Mapping[str, torch.dtype] | None = None
    """By param: in which sums of blocks are added over these; None for the dtype of these."""

    @property
    def losses(self) -> dict[tuple[int, int], Tensor]:
        """Loss by (rank, micro-batch), not scaled."""
        return {
            (rank, micro): loss
            for rank, replay in enumerate(self.replays)
            for micro, loss in enumerate(replay.losses)
        }

    @property
    def data_digests(self) -> dict[int, bytes]:
        """By rank: hash of the bytes of its batches."""
        return {rank: replay.data_digest for rank, replay in enumerate(self.replays)}

    @property
    def divisor(self) -> float:
        """What the sums are yet to be divided by: 1 where nothing is."""
        return 1 if self.division.each_round else self.division.rest

    def brought(self) -> list[dict[str, Tensor]]:
        """What each rank adds to the last sum of the step, by param, divided where that is before.

        Returns:
            By rank.
        """
        last = [replay.rounds[-1] for replay in self.replays]
        if not self.division.is_before and self.reduce_dtypes is None:
            return last
        return [{name: self._brought(name, g) for name, g in grads.items()} for grads in last]

    def _brought(self, name: str, grad: Tensor) -> Tensor:
        """What a rank brings to a sum, of what it accumulated."""
        if self.reduce_dtypes is not None:
            grad = grad.to(self.reduce_dtypes[name])
        return self.division.before(grad) if self.division.is_before else grad

    def certify(self) -> dict[str, Tensor]:
        """Certify each param's sum: of what every micro-batch of every rank brings.

        What ranks divide before the sum may be no multiple of a unit any more; then the quotients
        that they contribute are what is added.
        """
        before = self.division.is_before
        split = [each.rounds if before else each.micro_grads for each in self.replays]
        contributions = [grads for rank in split for grads in rank]
        certified: dict[str, Tensor] = {}
        for name, zero in self.replays[0].rounds[0].items():
            # Of every micro-batch they are in its own dtype.
            terms = [grads[name].to(zero.dtype) for grads in contributions if name in grads]
            if before:
                terms = [self.division.before(term) for term in terms]
            certified[name] = certify(terms or [torch.zeros_like(zero)])
            last = zero.dtype if self.copies_dtypes is None else self.copies_dtypes[name]
            if torch.promote_types(zero.dtype, last) != last:
                # Sums of blocks are rounded once more, so exact terms prove nothing.
                certified[name] = torch.zeros_like(certified[name])
        return certified

    def reduce(self, adding: Adding, *, orders: Orders) -> dict[str, Tensor]:
        """Add the ranks' gradients round by round, divided first where a rule says so.

        Args:
            adding: How the gradients of all ranks, of one param in one round, are added.
            orders: By param, where it stands in the calls that add it, as far as that matters.

        Returns:
            The sums of all params; zeros of those that have no gradient.
        """
        reduced = {
            name: self.reduce_param(name, adding, spans=orders.get(name)) for name in self.active
        }
        zeros = {name: grad for replay in self.replays for name, grad in replay.rounds[0].items()}
        dtypes = self.sum_dtypes or self.copies_dtypes or self.reduce_dtypes or {}
        return {
            name: reduced[name]
            if name in reduced
            # Of a param that is not used it may be no gradient of zeros.
            else torch.zeros_like(zeros[name], dtype=dtypes.get(name))
            for name in self.names
        }

    def reduce_param(self, name: str, adding: Adding, *, spans: Sequence[SumSpan] | None) -> Tensor:
        """Add one param's gradients round by round.

        Args:
            name: The param, one of `active`.
            adding: As for `reduce`.
            spans: Where it stands in the calls that add it.

        Raises:
            UsageError: The order depends on positions, and they do not tile the param.
        """
        rounds = zip(*(replay.rounds for replay in self.replays), strict=True)
        held = [[grads[name] for grads in each if name in grads] for each in rounds]
        plain = not self.division.is_before and self.reduce_dtypes is None
        brought = held
        if not plain:
            brought = [[self._brought(name, grad) for grad in each] for each in held]
        try:
            if not self.across_last:
                return self._added(name, [self._over_all(name, adding, g, spans) for g in brought])
            blocks = zip(*(adding.in_blocks(each, spans=spans) for each in brought), strict=True)
            sums = [self._added(name, sums) for sums in blocks]
            return adding.over_blocks(self._as_copies(name, sums), spans=spans)
        except UsageError as error:
            raise UsageError(f"param {name!r}: {error}") from error

    def _over_all(
        self, name: str, adding: Adding, grads: Sequence[Tensor], spans: Sequence[SumSpan] | None
    ) -> Tensor:
        """The sum of all ranks' gradients of one round."""
        if self.copies_dtypes is None:
            return adding.all(grads, spans=spans)
        sums = adding.in_blocks(grads, spans=spans)
        return adding.over_blocks(self._as_copies(name, sums), spans=spans)

    def _as_copies(self, name: str, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sums of blocks as they are added over these."""
        dtypes = self.copies_dtypes
        return sums if dtypes is None else [each.to(dtypes[name]) for each in sums]

    def _added(self, name: str, sums: Sequence[Tensor]) -> Tensor:
        """The sums of all rounds, one after the other."""
        if self.division.each_round:
            sums = [self.division.after(each) for each in sums]
        if self.sum_dtypes is not None:
            sums = [each.to(self.sum_dtypes[name]) for each in sums]
        total = sums[0]
        for each in sums[1:]:
            total = total + each
        return total


def _loss_factors(rules: Rules, at: LossRows, *, dynamic: float) -> LossFactors:
    """Return the factors of a micro-batch's loss.

    A power of two times a number is exact, so one product is as good as two.
    """
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
    """All ranks of a scenario, each replayed with the params that it holds.

    Those that hold the same, laid out alike, are played by one module. With expert parallelism what
    they hold differs: rank r has the experts of index `r % ep`.

    Args:
        scenario: The case that is replayed.
        workload: Its workload.
        rules: How gradients are accumulated, divided and summed.

    Raises:
        ModelError: The module has no param to train.
        ScenarioError: It has none of a name that the scenario says something of.
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
                f"from model.name={scenario.model.name!r}. Try giving `model.shapes` a shape."
            )
        self._assign(shares)
        self._names = list(self.params())
        problems = tuple(check_names(scenario, self._names))
        if problems:
            raise ScenarioError(scenario.name or "scenario", problems)

    @property
    def held(self) -> Sequence[frozenset[str]]:
        """For every rank, the names of the params that it holds."""
        return self._held

    def params(self) -> dict[str, Tensor]:
        """The working params of all ranks, as they are; live."""
        return {
            name: param.detach()
            for replayer in self._replayers
            for name, param in replayer.params.items()
        }

    def scales(self) -> dict[str, Tensor]:
        """The scales of params in fp8, copied."""
        return {name: s.clone() for each in self._replayers for name, s in each.scales.items()}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers that only a checkpoint has after a load; live."""
        if self._scenario.model.buffer != "saved":
            return {}
        return saved_buffers(self._replayers[0].module)

    def form(self, scales: Mapping[str, Tensor]) -> WorkingParams:
        """The form of the working params.

        Args:
            scales: Of those in fp8.
        """
        dtypes = {name: param.dtype for name, param in self.params().items()}
        return WorkingParams(dtypes=dtypes, scales=dict(scales))

    def weights(self) -> dict[str, Tensor]:
        """What the working params stand for: themselves, fp8 by its scales."""
        params = self.params()
        scales = self.scales().items()
        return {**params, **{name: decode(params[name], scale=scale) for name, scale in scales}}

    def move(self, scenario: Scenario, *, workload: Workload) -> None:
        """Go on in another world of the same model, with its ranks; params are yet to be written.

        Args:
            scenario: What holds from now on.
            workload: Its workload.
        """
        self._scenario, self._workload = scenario, workload
        self._assign(self._build_shares())

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Lay every param in memory as each rank has it; params are yet to be written.

        Args:
            addresses: For every rank, the address of each param; see [Note: addresses].
        """
        placed: dict[tuple[int, frozenset[tuple[str, MemoryLayout]]], Replayer] = {}
        unused = dict(enumerate(self._replayers))
        for rank, wanted in enumerate(addresses):
            share = rank % self._scenario.topology.ep
            key = share, frozenset(wanted.items())
            if key not in placed:
                placed[key] = unused.pop(share, None) or self._build_replayer(share)
                move_params(placed[key].params, wanted)
            self._replayer_of_rank[rank] = placed[key]
        self._replayers = list(placed.values())

    def write(self, values: Mapping[str, Tensor], *, scales: Mapping[str, Tensor]) -> None:
        """Cast values into the working params of all ranks.

        Args:
            values: By param.
            scales: Of those in fp8.
        """
        with torch.no_grad():
            for replayer in self._replayers:
                for name, param in replayer.params.items():
                    value = values[name]
                    if name in scales:
                        value = encode(value, scale=scales[name], dtype=param.dtype)
                    param.copy_(value)
                for name, scale in replayer.scales.items():
                    scale.copy_(scales[name])

    def replay(self, step: int, *, scale: float | None, keep_micro: bool = False) -> Contributions:
        """Replay all ranks from the current params; to be called while `isolated`.

        Args:
            step: Optimizer step, from 0.
            scale: The dynamic loss scale; None without one.
            keep_micro: Whether to keep the gradients of each micro-batch, too.
        """
        rules = self.rules
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
        """Return the factors of the losses of a step, by rank and micro-batch.

        Args:
            step: Optimizer step, from 0.
            scale: The dynamic scale; None without one.
        """
        run, rules, size = self._scenario.run, self.rules, len(self._replayer_of_rank)
        counts = [own_micro_batches(run, step=step, rank=rank) for rank in range(size)]
        if rules.scale_loss is None and rules.scale_second is None:
            alike = None if scale is None else LossFactors(main=scale)
            return [(alike,) * count for count in counts]
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
        # Where each micro-batch is summed, nothing is accumulated before that.
        dtype = accumulate if sync == "last" else reduce
        return {"grad_dtype": dtype_named(dtype), "every": sync != "last"}

    def accumulate(
        self, rank: int, micros: Sequence[Mapping[str, Tensor]], names: Sequence[str], rules: Rules
    ) -> list[dict[str, Tensor]]:
        """Return what a rank brings to each reduction; see `RankReplay.rounds`.

        Args:
            rank: Index of the rank.
            micros: Gradients of each of its micro-batches, by param.
            names: Params of which a sum without terms is zeros.
            rules: How gradients are accumulated.
        """
        return self._replayer_of_rank[rank].accumulate(micros, names, **self._rounds(rules))

    def trained(self, step: int) -> list[str]:
        """Return the names of params not frozen at a step, in order.

        Args:
            step: Optimizer step, from 0.
        """
        frozen = self._frozen(step)
        return [name for name in self._names if name not in frozen]

    def active(self, step: int, replays: Sequence[RankReplay], rules: Rules) -> list[str]:
        """Return the names of params with a gradient in a step, in order.

        Args:
            step: Optimizer step, from 0.
            replays: By rank.
            rules: They decide if an unused param has one.
        """
        trained = self.trained(step)
        if rules.unused != "left-alone":
            return trained
        used = frozenset[str]().union(*(replay.reached for replay in replays))
        return [name for name in trained if name in used]

    def contributions(
        self, active: Sequence[str], replays: Sequence[RankReplay], rules: Rules
    ) -> Contributions:
        """What replayed ranks bring to a step by some rules.

        Args:
            active: Names of the params that have a gradient.
            replays: By rank.
            rules: How gradients are divided and summed; accumulated they are already.
        """
        sync, accumulate, reduce = self._how(rules)
        copies = rules.copies_dtype if self._scenario.system.redundancy > 1 else None
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
            copies_dtypes=None if copies is None else self._grad_dtypes(copies),
        )

    def _how(self, rules: Rules) -> tuple[Sync, GradDtype, GradDtype]:
        """When ranks are summed, and the dtypes in which gradients are accumulated and reduced."""
        system = self._scenario.system
        return (
            rules.sync or system.sync,
            rules.accumulate_dtype or system.grad_dtype,
            rules.reduce_dtype or system.grad_dtype,
        )

    def _grad_dtypes(self, dtype: GradDtype) -> dict[str, torch.dtype]:
        named = dtype_named(dtype)
        return {
            name: named or param.grad_dtype or param.dtype
            for replayer in self._replayers
            for name, param in replayer.params.items()
        }

    def find_nonfinite(self, step: int, *, scale: float | None) -> NonFinite | None:
        """Name the first rank's gradient that is not finite, by replaying a step once more.

        Args:
            step: The step that was replayed last.
            scale: As for `replay`.
        """
        scales = self._scales(step, scale=scale)
        for rank, replayer in enumerate(self._replayer_of_rank):
            found = replayer.find_nonfinite(step=step, rank=rank, scales=scales[rank])
            if found is not None:
                return found
        return None

    def _assign(self, shares: Sequence[Replayer]) -> None:
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
        """Freeze params for a step, and no others."""
        if self._scenario.model.freeze:
            for replayer in self._replayers:
                replayer.freeze(self._frozen(step))

    def _frozen(self, step: int) -> set[str]:
        spans = self._scenario.model.freeze
        return {freeze.param for freeze in spans if freeze.start <= step < freeze.stop}

    def _division(self, replays: Sequence[RankReplay], rules: Rules) -> Division:
        system = self._scenario.system
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
