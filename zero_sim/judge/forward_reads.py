"""Params as the forward of a rank reads them, compared if the loss of that forward differs.

A system may give a forward other values than it reports in `params`: a gather that was wrong, came
too late, or did not happen. Then the first number that differs is a loss, which names no param. So
a case whose first finding is a loss is run once more with hooks that keep what the forward reads.
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
    """What the forward of one rank reads in one step and in the step before.

    Args:
        module: The bare model, before a system has it.
        step: The step whose loss differs.
        rank_time: Blocks of the harness.
    """

    def __init__(self, module: nn.Module, *, step: int, rank_time: RankTime) -> None:
        first = {param: name for name, param in module.named_parameters()}
        # Systems put other tensors in place of params, but below the same attributes.
        self._attributes = {
            owner: [(attribute, first[param]) for attribute, param in named]
            for owner in module.modules()
            if (named := [*owner.named_parameters(recurse=False, remove_duplicate=False)])
        }
        self._step, self._rank_time = step, rank_time
        self._at: tuple[int, int] | None = None
        self._reads: dict[tuple[int, int], dict[str, Tensor]] = {}
        """By step and micro-batch: copies of the params that its forward read, by name."""
        self._right: set[str] = set()
        """Names of the params of which a hook saw the right values in the step before."""

    def watch(self) -> None:
        """Set the hooks, after those of the system, which may gather in its own."""
        for owner in self._attributes:
            owner.register_forward_pre_hook(self._read)

    def before_forward(self, step: int, micro: int) -> None:
        """Note which forward comes next."""
        self._at = (step, micro) if self._step - 1 <= step <= self._step else None

    def before_evaluation(self, step: int) -> None:
        """Keep nothing of this forward, which is that of no micro-batch."""
        self._at = None

    def _read(self, owner: nn.Module, args: object) -> None:
        if self._at is None:
            return
        with self._rank_time.harness():
            kept = self._reads.setdefault(self._at, {})
            for attribute, name in self._attributes[owner]:
                value = getattr(owner, attribute, None)
                if name not in kept and isinstance(value, Tensor) and is_plain(value):
                    kept[name] = value.detach().clone()

    def note_right(self, step: int, params: Mapping[str, Tensor]) -> None:
        """Note of a step which params the hooks saw as they are.

        Args:
            step: A step whose losses are right.
            params: What the params were in that step.
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
        """Compare what a forward read whose loss differs.

        Args:
            params: What the params are in that step.
            group: The judged group.
            at: Step, rank and micro-batch of the loss.
        """
        step, rank, micro = at
        for name, got in self._reads.get((step, micro), {}).items():
            # A system that gathers after the hooks is seen with other values in every step.
            is_seen = step == group.first_step or name in self._right
            if not is_seen or _agrees(params.get(name), got) is not False:
                continue
            found = replace(
                findings.param(step, rank, name),
                phase=Phase.FORWARD,
                message=f"the forward of micro-batch {micro} read other values of this param than "
                "it has: a gather or a copy of it was wrong, came too late, or is missing",
            )
            known = [
                Known(what="what the forward read in the step before", values=before[name])
                for before in [self._reads.get((step - 1, 0), {})]
                if name in before
            ]
            yield group.differing(found, params[name], got, known=lambda known=known: known)


def _agrees(wanted: Tensor | None, got: Tensor) -> bool | None:
    """Whether values are the wanted ones; None if they cannot be compared, as in another dtype."""
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
        losses: By micro-batch.
        taken: The expected step; without params from before it if these are not kept.
        reads: What the rank's forwards read; None if that is not recorded.
        group: The judged group.
        rank: The rank, within the group.
    """
    expected, step = taken.losses, taken.step
    differ = [
        micro
        for micro, loss in enumerate(losses)
        if group.comparer.differs(expected[rank, micro], loss)
    ]
    if reads is not None and not differ:
        reads.note_right(step, taken.params_before)
    for micro in differ:
        if reads is not None:
            yield from reads.compare(taken.params_before, group=group, at=(step, rank, micro))
        at = findings.loss(step, rank, micro)
        known = partial(_known_losses, expected, group)
        yield group.differing(at, expected[rank, micro], losses[micro], known=known)


def _known_losses(
    expected: Mapping[tuple[int, int], Tensor], group: JudgedGroup
) -> Iterator[Known]:
    """Losses that may stand in place of another."""
    for (rank, micro), loss in expected.items():
        what = f"the loss of rank {group.world_ranks[rank]}, micro-batch {micro}"
        yield Known(what=what, values=loss)
