"""Costs that a target declares: what it moves, calls, holds and has in flight, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from zero_sim.errors import ProtocolError, UsageError
from zero_sim.scenario.kinds import may_gather_again
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.answers import shown
from zero_sim.targets.protocol import CostedEngine, Target

_OF_CALLS = ("volume", "calls", "in_flight")
ALIGN_ELEMS = 128
"""The most that a library is known to round up to of itself, for each param and each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostCase:
    """What a closed form of a target's own is given: one rank of one case."""

    scenario: Scenario
    rank: int
    """In its data-parallel group."""
    elems: Mapping[str, int]
    """Of each param that the rank trains, in registration order."""
    skipped: bool = False
    """Whether the step updated nothing."""


ByName = Callable[[CostCase], Mapping[str, int]]
AtMost = Callable[[CostCase], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What of a target's costs is held to closed forms; None for what is not.

    `textbook` stands for the closed forms of the project's own system at the same stage.
    """

    volume: Literal["textbook"] | ByName | None = None
    """Bytes that a rank contributes in a step, by dtype, such as `{"float32": 4096}`. Control
    messages may come on top: calls of a few numbers. A call counts with the tensor that the rank
    passes in: a `broadcast` or a `reduce` with all of it on every rank, root or not."""
    calls: Literal["textbook", "told-buckets", "told-buckets-at-most"] | None = None
    """Kind, group and elements of every call, as in the textbook; or each bucket that the parts
    tell, by `reduced_by` and `call_elems`, is reduced once for each sum over ranks, and nothing
    else is but control messages; where it follows `system.bucket_elems`, in buckets of about that
    size, or with `told-buckets-at-most` never of more, but for a bucket of one param. If parts have
    `gathered_by`, each of their buckets is gathered, and nothing else is."""
    held: Literal["textbook"] | ByName | None = None
    """Bytes between two steps under the names of `held_bytes`, which the engine must have. A form
    of its own names those that it speaks of, and as `whole gradients` and `whole params` the most
    bytes that `whole_bytes` may return of these at any moment of a step; `textbook` holds the
    engine also to what is whole within a step, where it tells."""
    in_flight: Literal["textbook"] | AtMost | None = None
    """When collectives are issued and waited for, as in the textbook; or the most bytes that are
    issued and not waited for at any moment of a step."""
    calls_in_flight: AtMost | None = None
    """How many calls at least, made with `async_op`, are issued and not waited for at some moment
    of a step."""
    control_calls: int | None = None
    """Most control messages of a rank in a step; None for any number."""
    gathers: int | None = None
    """How often a step gathers each element at most; None for what no ZeRO needs more than: twice
    a micro-batch, and once after the update. Of buckets with `gathered_by`, below stage 3, None is
    1."""
    align_elems: int = ALIGN_ELEMS
    """What a param, and a rank's part of a bucket, is rounded up to at most."""

    def __post_init__(self) -> None:
        """Refuse what is no declaration.

        Raises:
            UsageError: A word, a number or a type that is none.
        """
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value is None or value in words or (name != "calls" and callable(value)):
                continue
            kinds = [*map(repr, words), *(["a function of a CostCase"] * (name != "calls")), "None"]
            raise UsageError(f"expected Costs.{name} to be {' or '.join(kinds)}, got {value!r}.")
        for name, least in (("control_calls", 0), ("gathers", 0), ("align_elems", 1)):
            value = getattr(self, name)
            if (value is not None or name == "align_elems") and (
                type(value) is not int or value < least
            ):
                raise UsageError(
                    f"expected Costs.{name} to be an integer at least {least}, got {value!r}."
                )

    def undeclared(self) -> Iterator[str]:
        """What is not held to any form, in the words of the table of what was compared."""
        for name, words in _IN_WORDS.items():
            if getattr(self, name) is None:
                yield words


_WORDS: dict[str, tuple[str, ...]] = {
    "volume": ("textbook",),
    "calls": ("textbook", "told-buckets", "told-buckets-at-most"),
    "held": ("textbook",),
    "in_flight": ("textbook",),
    "calls_in_flight": (),
}

_IN_WORDS = {
    "volume": "closed form of bytes moved",
    "calls": "closed form of calls",
    "held": "closed form of bytes held",
    "in_flight": "closed form of what is in flight",
}

TEXTBOOK = Costs(volume="textbook", calls="textbook", held="textbook", in_flight="textbook")
"""All that the project's own system is held to."""


def costs_of(target: Target, scenario: Scenario, *, engine: object = None) -> Costs:
    """What a target declares of its costs in a case.

    Args:
        target: Whose `costs` are one record, or a function of the case that gives one.
        scenario: The case, as the target is given it.
        engine: What it built. One that has `held_bytes`, of a target that declares nothing, is
            held to all of the textbook.

    Raises:
        ProtocolError: It declares something else, or holds bytes that its engine does not tell.
    """
    declared: object = getattr(target, "costs", None)
    if callable(declared):
        try:
            declared = declared(scenario)
        # Code of the target's own may raise anything.
        except Exception as error:
            raise ProtocolError(
                f"expected `costs` of target {target.name!r} to give the costs of a case, got "
                f"{type(error).__name__}: {error}."
            ) from error
    if declared is None:
        declared = TEXTBOOK if isinstance(engine, CostedEngine) else Costs()
    if not isinstance(declared, Costs):
        raise ProtocolError(
            f"expected `costs` of target {target.name!r} to be zero_sim.targets.Costs or None, got "
            f"{shown(declared)}."
        )
    if declared.held is not None and engine is not None and not isinstance(engine, CostedEngine):
        raise ProtocolError(
            f"expected held_bytes() of {type(engine).__name__}, whose target declares Costs.held, "
            "got none. Try adding it, or leaving out what it holds."
        )
    if may_gather_again(scenario):
        uncounted: dict[str, Any] = {
            name: None for name in _OF_CALLS if getattr(declared, name) == "textbook"
        }
        return replace(declared, **uncounted)
    return declared


_Given = TypeVar("_Given", int, Mapping[str, int])


def form_of(
    form: Callable[[CostCase], _Given], case: CostCase, *, name: str, kind: type[_Given]
) -> _Given:
    """What a target's own closed form gives.

    Args:
        form: The form.
        case: What it is given.
        name: The field of `Costs` that it stands in.
        kind: `int`, or `Mapping` for integers by name.

    Raises:
        ProtocolError: It raises, or gives something else.
    """
    wanted = "an integer" if kind is int else "a mapping of names to integers"
    try:
        given: object = form(case)
    # Code of the target's own may raise anything.
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise ProtocolError(f"expected Costs.{name} to give {wanted}, got {got}.") from error
    numbers = list(given.values()) if isinstance(given, Mapping) else [given]
    if not isinstance(given, kind) or not all(type(number) is int for number in numbers):
        raise ProtocolError(f"expected Costs.{name} to give {wanted}, got {shown(given)}.")
    return given
