"""The judged group of ranks: its settings, and state shared by its judge and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_sim.findings import describe as findings
from zero_sim.findings.compare import same_bits
from zero_sim.findings.recognition import Known, recognize
from zero_sim.findings.records import Finding
from zero_sim.judge.factors import FactorCauses
from zero_sim.judge.ownership import Ownership
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Numerics, OwnedPart
from zero_sim.targets.adapt import DIVISION, GRADIENTS, PARTS

if TYPE_CHECKING:
    from zero_sim.targets.recorded import Record

Guesses = Callable[[], Iterable[Known]]
"""Returns candidates for an observed value."""


class Comparer:
    """Compares tensors bit for bit, and counts their elements."""

    def __init__(self) -> None:
        self.elems = 0
        """Number of compared elements."""

    def differs(self, expected: Tensor, got: Tensor) -> bool:
        """Return True if dtype, number of elements or bits differ."""
        # A tensor with a wrong dtype counts as compared, too.
        self.elems += expected.numel()
        if expected.dtype != got.dtype or expected.numel() != got.numel():
            return True
        # torch.equal first, because nearly all tensors are equal. Only others need the NaN rule.
        return not torch.equal(expected, got) and not same_bits(expected, got)


def beside(got: Tensor, expected: Tensor) -> Tensor:
    """Move a 0D tensor to the device of the expected tensor.

    Step counts are on the CPU or on the param's device, depending on the optimizer's options.
    """
    return got if got.dim() else got.to(expected.device)


def cut_state(state: Tensor, *, master: Tensor, start: int, stop: int) -> Tensor:
    """Cut a state tensor to a part of its master.

    State of another shape than the master's, such as counters and matrix factors, belongs to the
    whole param and is not cut.

    Args:
        state: State tensor of a whole param.
        master: The whole master.
        start: First element of the part, in the flattened param.
        stop: End of the part.

    Returns:
        1D, or 0D for counters.
    """
    if not state.dim():
        return state
    flat = state.reshape(-1)
    return flat[start:stop] if state.shape == master.shape else flat


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """Snapshot of a judged group's mutable fields."""

    elems: int
    unobserved: frozenset[str]
    reporting: Mapping[int, bool]
    guessed: frozenset[tuple[str, int | None, int | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGroup:
    """A judged group of ranks, shared by its judge and comparisons."""

    scenario: Scenario
    numerics: Numerics
    ownership: Ownership
    world_ranks: Sequence[int]
    """For findings."""
    first_step: int
    """The first judged step."""
    sees_all: bool
    """True if the judge observes all ranks of the group."""
    explainer: str = ""
    """`module:name` of a class that explains differences; empty for no explanations."""
    recorder: Record | None = None
    """Records the state after each step, to compare layouts; None if not needed."""
    comparer: Comparer = field(default_factory=Comparer)
    unobserved: set[str] = field(default_factory=set)
    """Items that the engine does not report. Grows during the run."""
    reporting: dict[int, bool] = field(default_factory=dict)
    """True if a rank reports any part's gradient in its current step, by rank."""
    _guessed: set[tuple[str, int | None, int | None]] = field(default_factory=set)
    """Check, step and rank of findings for which candidates were searched."""

    @property
    def reports_divided(self) -> bool:
        """True if reported gradients are already divided."""
        return self.numerics.reported_at != "before-division"

    @property
    def shows_grads_of_params(self) -> bool:
        """True if gradients of whole params are reported and can be compared."""
        spec = self.scenario.optimizer
        # Clipping and unscaling change gradients in place, so they cannot be compared unless the
        # target declares that it reports them afterwards.
        changed = spec.clip_norm or spec.clip_value or spec.loss_scale
        return self.numerics.grads_in_params and (self.numerics.is_reported_wide or not changed)

    @property
    def compares_layouts(self) -> bool:
        """True if another layout's masters and state are expected."""
        return self.scenario.pair is not None and self.recorder is None

    def of_layouts(self, at: Finding) -> Finding:
        """Change a finding's check to `equality.layout` if layouts are compared."""
        return replace(at, check=Check.EQUALITY_LAYOUT) if self.compares_layouts else at

    def note_unreported(self, *, divisor: float) -> None:
        """Record gradients or their division as unobserved, if nothing reported depends on them.

        Args:
            divisor: Divisor of the sum over ranks; 1 for none.
        """
        if PARTS not in self.unobserved:
            # Masters and state depend on the gradient's magnitude.
            return
        if not self.shows_grads_of_params:
            self.unobserved.add(GRADIENTS)
        shows_mean = self.shows_grads_of_params and (self.reports_divided or divisor == 1)
        # SGD's params depend on the gradient's magnitude. Most other optimizers normalise it.
        if not shows_mean and self.scenario.optimizer.name != "sgd":
            self.unobserved.add(DIVISION)

    def noted(self) -> Noted:
        """Return a snapshot, for checks that may be repeated."""
        return Noted(
            elems=self.comparer.elems,
            unobserved=frozenset(self.unobserved),
            reporting=dict(self.reporting),
            guessed=frozenset(self._guessed),
        )

    def go_back(self, noted: Noted) -> None:
        """Restore a snapshot.

        Args:
            noted: Returned by `noted`.
        """
        self.comparer.elems = noted.elems
        for kept, before in ((self.unobserved, noted.unobserved), (self._guessed, noted.guessed)):
            # In place, because fields of a frozen dataclass cannot be assigned.
            kept.intersection_update(before)
        self.reporting.clear()
        self.reporting.update(noted.reporting)

    def differing(
        self,
        at: Finding,
        expected: Tensor,
        got: Tensor,
        *,
        known: Guesses = tuple,
        factors: FactorCauses | None = None,
    ) -> Finding:
        """Fill in a difference, and a description of the observed value if it is recognised.

        Args:
            at: Template, with the offset of the first compared element.
            expected: Any shape.
            got: Tensor of the system.
            known: Returns candidates.
            factors: Causes of a common factor, for gradients and norms.
        """
        hint, key = "", (at.check, at.step, at.rank)
        # Only once per check, step and rank, because candidates may need a replay.
        if key not in self._guessed and expected.dtype == got.dtype:
            self._guessed.add(key)
            if expected.numel() == got.numel():
                hint = self._guess(expected, got, known)
        if factors is None:
            return findings.differing(at, expected, got, hint=hint)
        return findings.differing(at, expected, got, hint=hint, explain=factors.explain)

    def _guess(self, expected: Tensor, got: Tensor, known: Guesses) -> str:
        what = recognize(expected, got, known=known())
        if what:
            return f"the value {what}"
        timing = self.scenario.world.timing
        # The system may have computed NaN itself, so this is only a hint.
        if timing != "eager" and bool((got.isnan() & ~expected.isnan()).any()):
            return (
                f"it contains NaN, like memory in flight under timing {timing!r}; it may have "
                "been read before its wait"
            )
        return ""

    def compare_update(
        self,
        part: OwnedPart,
        *,
        rank: int,
        step: int,
        master: Tensor,
        state: Mapping[str, Tensor],
        known: Callable[[str], Iterable[Known]] = lambda key: (),
    ) -> Iterator[Finding]:
        """Compare a part's master and optimizer state after an update.

        Args:
            part: Reported by its engine.
            rank: Its owner.
            step: The completed step.
            master: Expected master, cut to the part.
            state: Expected optimizer state by torch's key, cut to the part.
            known: Returns candidates for a key, or for the master if the key is empty.
        """
        place = part.place
        # State first, because the master is computed from it.
        compared = [
            (Check.EQUALITY_STATE, key, state[key], beside(part.state[key], state[key]))
            for key in sorted(state.keys() & part.state.keys())
        ]
        compared.append((Check.EQUALITY_MASTER, "", master, part.master))
        for check, key, value, got in compared:
            if self.comparer.differs(value, got):
                at = self.of_layouts(findings.owned(check, key, step, rank, place))
                yield self.differing(at, value, got, known=partial(known, key))
        # Keys on only one side were not compared above.
        for key in sorted(state.keys() ^ part.state.keys()):
            at = self.of_layouts(findings.owned(Check.EQUALITY_STATE, key, step, rank, place))
            side = "the other layout" if self.compares_layouts else "the reference"
            side = side if key in part.state else "the system"
            yield findings.missing(at, f"optimizer state {key!r} is missing in {side}")
