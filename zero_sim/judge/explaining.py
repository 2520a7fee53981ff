"""Seam between the comparison and the explanations of what differs.

Explanations take the step again, by other rules. They live in a wing (`zero_sim.rules`), which the
judge does not import: whoever opens a judge hands in the name of an explainer. It is loaded once
something differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from zero_sim.findings.recognition import Known
from zero_sim.judge.judged_group import JudgedGroup, cut_state
from zero_sim.judge.rules_tried import RulesTried, What
from zero_sim.judge.told import sum_as_reported
from zero_sim.reference import Reference, ReferenceStep, StepAgain
from zero_sim.targets import Numerics, OwnedPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A place in a rank's state: part of a gradient, a master with its state, or a param."""

    what: What
    rank: int
    """The rank, within the group."""
    pick: Callable[[StepAgain], Mapping[str, Tensor]]
    """Returns the tensors there, by name, for a step by any rules."""


class Explainer(Protocol):
    """Explains the differences in one step."""

    def look(self, seen: Seen, got: Mapping[str, Tensor], *, agrees: bool) -> None:
        """Note another place.

        Args:
            seen: The place.
            got: The rank's tensors there, named as by `seen.pick`.
            agrees: True if they are as expected.
        """
        ...

    def known_grads(self, name: str, *, rank: int, start: int) -> Iterator[Known]:
        """Return gradients without some terms, which may stand in place of a reduced one.

        Args:
            name: The param.
            rank: The observed rank, within the group.
            start: Offset where the compared part begins.
        """
        ...

    def explain_norm(self, norm: Tensor) -> str:
        """Return the rules by which a norm is right; empty if there are none.

        Args:
            norm: 0-D fp32, of a rank.
        """
        ...

    def tried(self) -> RulesTried | None:
        """Return what came of trying rules; None if no gradient and no update differs."""
        ...


class Explanations:
    """The explainers of all steps of a group.

    Args:
        group: The judged group, and what is known of it.
        reference: Returns its oracle.
    """

    def __init__(self, group: JudgedGroup, *, reference: Callable[[], Reference]) -> None:
        self._group = group
        self._reference = reference
        self._agreed: dict[int, list[Seen]] = {}
        """Agreeing places, by step, until something differs."""
        self._explainers: dict[int, Explainer] = {}

    def note(
        self, expected: ReferenceStep, seen: Seen, got: Mapping[str, Tensor], *, agrees: bool
    ) -> None:
        """Note a compared place.

        Args:
            expected: The step as the reference took it.
            seen: The place.
            got: The rank's tensors there.
            agrees: True if they are as expected.
        """
        if agrees and expected.step not in self._explainers:
            if expected.start is not None:
                self._agreed.setdefault(expected.step, []).append(seen)
            return
        explainer = self.of(expected)
        if explainer is not None:
            explainer.look(seen, got, agrees=agrees)

    def of(self, expected: ReferenceStep) -> Explainer | None:
        """Return the explainer of a step; None if it cannot be explained.

        Args:
            expected: The step, in which something differs.
        """
        step, name = expected.step, self._group.explainer
        if step not in self._explainers and name and expected.start is not None:
            module, _, attribute = name.partition(":")
            explainer: Callable[..., Explainer] = getattr(
                importlib.import_module(module), attribute
            )
            self._explainers[step] = explainer(
                expected,
                reference=self._reference(),
                group=self._group,
                agreed=self._agreed.pop(step, []),
            )
        return self._explainers.get(step)

    def forget(self, step: int) -> None:
        """Forget a step in which nothing differs."""
        self._agreed.pop(step, None)

    def tried(self, step: int | None) -> RulesTried | None:
        """Return what came of trying rules on a step; None if nothing differs there."""
        explainer = None if step is None else self._explainers.get(step)
        return None if explainer is None else explainer.tried()


def part_seen(part: OwnedPart, *, rank: int) -> tuple[Seen, Mapping[str, Tensor]]:
    """Return the place where a part's master and state are, and their values.

    Args:
        part: An owned part, as the engine shows it.
        rank: The rank, within the group.
    """
    place = part.place

    def pick(by: StepAgain) -> dict[str, Tensor]:
        master, state = by.step.masters[place.param], by.step.state[place.param]
        cut = partial(cut_state, master=master, start=place.start, stop=place.stop)
        held = {name: cut(value) for name, value in state.items()}
        return {"master": master.reshape(-1)[place.start : place.stop], **held}

    seen = Seen(what="update", rank=rank, pick=pick)
    return seen, {"master": part.master, **part.state}


def grad_seen(
    name: str,
    got: Tensor,
    *,
    cut: Callable[[Tensor], Tensor],
    rank: int,
    numerics: Numerics,
) -> tuple[Seen, Mapping[str, Tensor]]:
    """Return the same of a reduced gradient.

    Args:
        name: The param.
        got: The reported gradient.
        cut: Cuts a whole one to the same size.
        rank: The rank, within the group.
        numerics: Declared by the target.
    """

    def pick(by: StepAgain) -> dict[str, Tensor]:
        return {name: cut(sum_as_reported(by, name, numerics=numerics))}

    return Seen(what="gradient", rank=rank, pick=pick), {name: got}


def param_seen(name: str, got: Tensor, *, rank: int) -> tuple[Seen, Mapping[str, Tensor]]:
    """Return the same of a working param.

    Args:
        name: The working param.
        got: Its values on the rank.
        rank: The rank, within the group.
    """
    seen = Seen(what="update", rank=rank, pick=lambda by: {name: by.step.params[name]})
    return seen, {name: got}
