"""Params as a rank's forward reads them, compared if its loss differs.

If a gather is wrong, late or missing, a forward reads other values than the engine reports in
`params`. Then the first difference is a loss, which does not point to a param. So if the first
finding is a loss, the case is run again with hooks that copy the params read by its forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from zero_sim.cost.observer import Observer
from zero_sim.findings import describe as findings
from zero_sim.findings.compare import same_bits
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.recognition import Known
from zero_sim.findings.records import Finding
from zero_sim.judge.harness import RankTime
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.reference import BoundedStep, ReferenceStep
from zero_sim.targets.bare_model import is_plain


class ForwardReads(Observer):
    """Params read by one rank's forwards in a step and in the step before.

    Args:
        module: The bare model, before a system wraps it.
        step: The step with a differing loss.
        rank_time: Accounts for harness time.
    """

    def __init__(self, module: nn.Module, *, step: int, rank_time: RankTime) -> None:
        first = {param: name for name, param in module.named_parameters()}
        # By attribute, because systems replace params by other tensors.
        self._attributes = {
            owner: [(attribute, first[param]) for attribute, param in named]
            for owner in module.modules()
            if (named := [*owner.named_parameters(recurse=False, remove_duplicate=False)])
        }
        self._step, self._rank_time = step, rank_time
        self._at: tuple[int, int] | None = None
        self._reads: dict[tuple[int, int], dict[str, Tensor]] = {}
        """Copies of the params that a forward read, by step and micro-batch."""
        self._right: set[str] = set()
        """Params whose right values a hook observed in the step before."""

    def watch(self) -> None:
        """Register the hooks. Call this after the system registers its own, which may gather."""
        for owner in self._attributes:
            owner.register_forward_pre_hook(self._read)

    def before_forward(self, step: int, micro: int) -> None:
        """Record that a micro-batch's forward comes next."""
        # Only for two steps, because copies of all params are large.
        self._at = (step, micro) if self._step - 1 <= step <= self._step else None

    def before_evaluation(self, step: int) -> None:
        """Ignore the next forward, which belongs to no micro-batch."""
        self._at = None

    def _read(self, owner: nn.Module, args: object) -> None:
        if self._at is None:
            return
        # Do not charge the copies to the system.
        with self._rank_time.harness():
            kept = self._reads.setdefault(self._at, {})
            for attribute, name in self._attributes[owner]:
                value = getattr(owner, attribute, None)
                # If a module runs several times, keep its first read. Resharded and distributed
                # params have no values here.
                if name not in kept and isinstance(value, Tensor) and is_plain(value):
                    kept[name] = value.detach().clone()

    def note_right(self, step: int, params: Mapping[str, Tensor]) -> None:
        """Record the params that hooks can observe.

        Args:
            step: A step with right losses.
            params: The reference's params in this step.
        """
        for (when, _), reads in self._reads.items():
            if when == step:
                self._right |= {name for name in reads if _agrees(params.get(name), reads[name])}

    def compare(
        self,
        params: Mapping[str, Tensor],
        *,
        group: JudgedGroup,
        at: tuple[int, int, int],
    ) -> Iterator[Finding]:
        """Compare the params read by a forward whose loss differs.

        Args:
            params: The reference's params in this step.
            group: The judged group.
            at: Step, group rank and micro-batch.
        """
        step, rank, micro = at
        for name, got in self._reads.get((step, micro), {}).items():
            # If a system gathers after the hooks run, they never observe right values.
            is_seen = step == group.first_step or name in self._right
            if not is_seen or _agrees(params.get(name), got) is not False:
                continue
            found = replace(
                findings.param(step, rank, name),
                phase=Phase.FORWARD,
                message=f"the forward of micro-batch {micro} read other values of this param: "
                "a gather or a copy of it was wrong, late or missing",
            )
            known = [
                Known(what="that read in the step before", values=before[name])
                for before in [self._reads.get((step - 1, 0), {})]
                if name in before
            ]
            # A default argument, because a closure would use the last iteration's value.
            yield group.differing(found, params[name], got, known=lambda known=known: known)


def _agrees(wanted: Tensor | None, got: Tensor) -> bool | None:
    """Return True if values are equal; None if they differ in dtype or size."""
    if wanted is None or wanted.dtype != got.dtype or wanted.numel() != got.numel():
        return None
    return same_bits(wanted, got)


def compare_losses(
    losses: Sequence[Tensor],
    taken: ReferenceStep | BoundedStep,
    *,
    reads: ForwardReads | None,
    group: JudgedGroup,
    rank: int,
) -> Iterator[Finding]:
    """Compare a rank's losses. If a loss differs, also compare the params its forward read.

    Args:
        losses: Losses by micro-batch.
        taken: The expected step; `params_before` may be empty.
        reads: Params read by the rank's forwards; None if not recorded.
        group: The judged group.
        rank: Group rank.
    """
    expected, step = taken.losses, taken.step
    differ = [
        micro
        for micro, loss in enumerate(losses)
        if group.comparer.differs(expected[rank, micro], loss)
    ]
    if reads is not None and not differ:
        # Learn from right steps which params the hooks can observe.
        reads.note_right(step, taken.params_before)
    for micro in differ:
        # Params first, because they explain the loss.
        if reads is not None:
            yield from reads.compare(taken.params_before, group=group, at=(step, rank, micro))
        at = findings.loss(step, rank, micro)
        known = partial(_known_losses, expected, group)
        yield group.differing(at, expected[rank, micro], losses[micro], known=known)


def _known_losses(
    expected: Mapping[tuple[int, int], Tensor], group: JudgedGroup
) -> Iterator[Known]:
    """Yield all ranks' losses, as candidates."""
    for (rank, micro), loss in expected.items():
        what = f"the loss of rank {group.world_ranks[rank]}, micro-batch {micro}"
        yield Known(what=what, values=loss)
