"""The judged group of ranks: its settings, and notes that its judge and comparisons share."""

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
"""Returns candidates for the observed value."""


class Comparer:
    """Compares tensors bit for bit, and counts their elements."""

    def __init__(self) -> None:
        self.elems = 0
        """Number of elements compared so far."""

    def differs(self, expected: Tensor, got: Tensor) -> bool:
        """Return True if dtype, number of elements or bits differ."""
        # Count first: a tensor of a wrong dtype was compared, too.
        self.elems += expected.numel()
        if expected.dtype != got.dtype or expected.numel() != got.numel():
            return True
        # torch.equal first: nearly all tensors are equal, and only others need the rule for NaN.
        return not torch.equal(expected, got) and not same_bits(expected, got)


def beside(got: Tensor, expected: Tensor) -> Tensor:
    """Move a tensor without dimensions to the device of another.

    Step counts are on the CPU or on the param's device, depending on options of the optimizer.
    """
    return got if got.dim() else got.to(expected.device)


def cut_state(state: Tensor, *, master: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements of a state tensor that belong to a part of its master.

    Only state of the master's shape is cut. Counters, and state of another shape such as factors of
    a matrix, belong to the whole param.

    Args:
        state: State tensor of a whole param.
        master: The whole master.
        start: First element of the part, in the flattened param.
        stop: One past its last element.

    Returns:
        1D, or 0D for counters.
    """
    if not state.dim():
        return state
    flat = state.reshape(-1)
    return flat[start:stop] if state.shape == master.shape else flat


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """Snapshot of the notes of a judged group."""

    elems: int
    unobserved: frozenset[str]
    telling: Mapping[int, bool]
    guessed: frozenset[tuple[str, int | None, int | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGroup:
    """A judged group of ranks, shared by its judge and comparisons."""

    scenario: Scenario
    numerics: Numerics
    ownership: Ownership
    world_ranks: Sequence[int]
    """World ranks of the group, for findings."""
    first_step: int
    """The first judged step."""
    sees_all: bool
    """True if the judge observes all ranks of the group."""
    explainer: str = ""
    """`module:name` of the class that explains differences; empty for no explanations."""
    recorder: Record | None = None
    """Records the state after each step, to compare layouts; None if not needed."""
    comparer: Comparer = field(default_factory=Comparer)
    unobserved: set[str] = field(default_factory=set)
    """Items that the engine does not report; grows."""
    telling: dict[int, bool] = field(default_factory=dict)
    """True if a rank reports gradients of any of its parts in its current step, by rank."""
    _guessed: set[tuple[str, int | None, int | None]] = field(default_factory=set)
    """Check, step and rank of findings that candidates were searched for."""

    @property
    def tells_divided(self) -> bool:
        """True if reported gradients are already divided, for divisions after the sum."""
        return self.numerics.told_at != "before-division"

    @property
    def shows_grads_of_params(self) -> bool:
        """True if gradients of whole params are reported as they were summed."""
        spec = self.scenario.optimizer
        # Clipping and unscaling change the gradients, unless the target declares that it reports
        # them after that.
        changed = spec.clip_norm or spec.clip_value or spec.loss_scale
        return self.numerics.grads_in_params and (self.numerics.is_told_wide or not changed)

    @property
    def compares_layouts(self) -> bool:
        """True if masters and state are compared with those of another layout."""
        return self.scenario.pair is not None and self.recorder is None

    def of_layouts(self, at: Finding) -> Finding:
        """Return a finding with the check `equality.layout` if layouts are compared."""
        return replace(at, check=Check.EQUALITY_LAYOUT) if self.compares_layouts else at

    def note_unreported(self, *, divisor: float) -> None:
        """Record that gradients or their division are unobserved, if no optimizer state shows them.

        Args:
            divisor: Divisor of the sum over ranks, 1 for none.
        """
        if PARTS not in self.unobserved:
            # Masters and state show the size of the gradient.
            return
        if not self.shows_grads_of_params:
            self.unobserved.add(GRADIENTS)
        shows_mean = self.shows_grads_of_params and (self.tells_divided or divisor == 1)
        # Only SGD's params show the size of a gradient. Other optimizers normalise it away.
        if not shows_mean and self.scenario.optimizer.name != "sgd":
            self.unobserved.add(DIVISION)

    def noted(self) -> Noted:
        """Return a snapshot of the notes, for a comparison that may be repeated."""
        return Noted(
            elems=self.comparer.elems,
            unobserved=frozenset(self.unobserved),
            telling=dict(self.telling),
            guessed=frozenset(self._guessed),
        )

    def go_back(self, noted: Noted) -> None:
        """Restore the notes of a snapshot.

        Args:
            noted: Returned by `noted`.
        """
        self.comparer.elems = noted.elems
        for kept, before in ((self.unobserved, noted.unobserved), (self._guessed, noted.guessed)):
            # In place, because the record is frozen.
            kept.intersection_update(before)
        self.telling.clear()
        self.telling.update(noted.telling)

    def differing(
        self,
        at: Finding,
        expected: Tensor,
        got: Tensor,
        *,
        known: Guesses = tuple,
        factors: FactorCauses | None = None,
    ) -> Finding:
        """Fill in a finding with the difference, and with the observed value if it is recognised.

        Args:
            at: Template, with the offset of the first compared element.
            expected: Any shape.
            got: Tensor of the system.
            known: Returns candidates; only called for the first finding of each check and rank.
            factors: Causes of a common factor, for gradients and norms.
        """
        hint, key = "", (at.check, at.step, at.rank)
        # Only once per check, step and rank: candidates may take a replay to compute.
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
        # NaN may also be the system's own, so this is only a hint.
        if timing != "eager" and bool((got.isnan() & ~expected.isnan()).any()):
            return (
                f"it contains NaN, as memory in flight does under timing {timing!r}; it may have "
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
        """Compare master and optimizer state of a part after an update.

        Args:
            part: The part, as reported by its engine.
            rank: Its owner.
            step: The step with this update.
            master: Expected master, cut to the part.
            state: Expected optimizer state by torch's key, cut to the part.
            known: Returns candidates for a key; for an empty key, for the master.
        """
        place = part.place
        # State before master, as in the dataflow: the master is computed from the state.
        compared = [
            (Check.EQUALITY_STATE, key, state[key], beside(part.state[key], state[key]))
            for key in sorted(state.keys() & part.state.keys())
        ]
        compared.append((Check.EQUALITY_MASTER, "", master, part.master))
        for check, key, value, got in compared:
            if self.comparer.differs(value, got):
                at = self.of_layouts(findings.owned(check, key, step, rank, place))
                yield self.differing(at, value, got, known=partial(known, key))
        # A key on one side only is a finding; comparing common keys alone would hide it.
        for key in sorted(state.keys() ^ part.state.keys()):
            at = self.of_layouts(findings.owned(Check.EQUALITY_STATE, key, step, rank, place))
            side = "the other layout" if self.compares_layouts else "the reference"
            side = side if key in part.state else "the system"
            yield findings.missing(at, f"optimizer state {key!r} is missing in {side}")
