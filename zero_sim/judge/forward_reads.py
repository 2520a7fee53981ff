"""Params as read by a rank's forward, compared if the loss of that forward differs.

A forward may read other values than the engine reports in `params`: a gather was wrong, late or
missing. The first difference is then a loss, which names no param. So if the first finding of a
case is a loss, the case is run again with hooks that keep what its forwards read.
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
        rank_time: Accounts for time of the harness.
    """

    def __init__(self, module: nn.Module, *, step: int, rank_time: RankTime) -> None:
        first = {param: name for name, param in module.named_parameters()}
        # Systems replace params by other tensors, but under the same attributes.
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
        """Params that a hook observed with the right values in the step before."""

    def watch(self) -> None:
        """Register the hooks, after the system's own, which may gather."""
        for owner in self._attributes:
            owner.register_forward_pre_hook(self._read)

    def before_forward(self, step: int, micro: int) -> None:
        """Record which forward comes next."""
        # Only the two steps that matter, because copies of all params are large.
        self._at = (step, micro) if self._step - 1 <= step <= self._step else None

    def before_evaluation(self, step: int) -> None:
        """Ignore this forward: it belongs to no micro-batch."""
        self._at = None

    def _read(self, owner: nn.Module, args: object) -> None:
        if self._at is None:
            return
        # Copying is the harness's time, not the system's.
        with self._rank_time.harness():
            kept = self._reads.setdefault(self._at, {})
            for attribute, name in self._attributes[owner]:
                value = getattr(owner, attribute, None)
                # A module may run several times; its first read counts. Freed and distributed
                # params have no values here.
                if name not in kept and isinstance(value, Tensor) and is_plain(value):
                    kept[name] = value.detach().clone()

    def note_right(self, step: int, params: Mapping[str, Tensor]) -> None:
        """Record the params that hooks observed with their right values.

        Args:
            step: A step with right losses.
            params: Params of the reference in this step.
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
        """Compare the params read by a forward with a differing loss.

        Args:
            params: Params of the reference in this step.
            group: The judged group.
            at: Step, rank and micro-batch of the loss.
        """
        step, rank, micro = at
        for name, got in self._reads.get((step, micro), {}).items():
            # If a system gathers after the hooks, they observe other values in every step.
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
            # A default argument, because a closure would see the value of the loop's last turn.
            yield group.differing(found, params[name], got, known=lambda known=known: known)


def _agrees(wanted: Tensor | None, got: Tensor) -> bool | None:
    """Return True if values are equal; None if they cannot be compared, as in another dtype."""
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
    """Compare a rank's losses, and if one differs the params that its forward read.

    Args:
        losses: Loss of each micro-batch.
        taken: The expected step; `params_before` may be empty.
        reads: Reads of the rank's forwards; None if not recorded.
        group: The judged group.
        rank: Rank in the group.
    """
    expected, step = taken.losses, taken.step
    differ = [
        micro
        for micro, loss in enumerate(losses)
        if group.comparer.differs(expected[rank, micro], loss)
    ]
    if reads is not None and not differ:
        # Learn from right steps which params the hooks observe at all.
        reads.note_right(step, taken.params_before)
    for micro in differ:
        # Params first: they explain the loss.
        if reads is not None:
            yield from reads.compare(taken.params_before, group=group, at=(step, rank, micro))
        at = findings.loss(step, rank, micro)
        known = partial(_known_losses, expected, group)
        yield group.differing(at, expected[rank, micro], losses[micro], known=known)


def _known_losses(
    expected: Mapping[tuple[int, int], Tensor], group: JudgedGroup
) -> Iterator[Known]:
    """Yield the losses of all ranks and micro-batches, as candidates."""
    for (rank, micro), loss in expected.items():
        what = f"the loss of rank {group.world_ranks[rank]}, micro-batch {micro}"
        yield Known(what=what, values=loss)
