"""Costs: bytes moved, calls, resident bytes and overlap that a target declares."""

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
# No known library rounds up further. For example, Megatron-Core pads each param to 64 elements.
ALIGN_ELEMS = 128
"""Default of `Costs.align_elems`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostCase:
    """A rank and a step of a case: the argument of a target's own closed forms.

    Example:
        >>> from zero_sim.scenario.spec import ModelSpec
        >>> case = Scenario(schema=1, model=ModelSpec(name="mlp"))
        >>> form = lambda given: {"float32": 4 * sum(given.elems.values())}
        >>> form(CostCase(scenario=case, rank=0, elems={"up": 6, "down": 4}))
        {'float32': 40}
    """

    scenario: Scenario
    rank: int
    """Group rank in the data-parallel group."""
    elems: Mapping[str, int]
    """Elements of each param that the rank trains, by name, in registration order."""
    skipped: bool = False
    """True if the step updated nothing."""


ByName = Callable[[CostCase], Mapping[str, int]]
AtMost = Callable[[CostCase], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Costs of a step. They are checked in the simulated world; None if not checked.

    `"textbook"` stands for the closed forms of zero_sim's own system at the same stage. A control
    message is a call of a few numbers, such as a norm or a flag.

    Example:
        >>> costs = Costs(volume="textbook", calls="reported-buckets", control_calls=2)
        >>> list(costs.undeclared())
        ['closed form of bytes held', 'closed form of what is in flight']
    """

    volume: Literal["textbook"] | ByName | None = None
    """Bytes that a rank contributes in a step, by dtype, such as `{"float32": 4096}`. Each call
    counts the rank's input tensor. For `broadcast` and `reduce` this is the whole tensor on every
    rank, root or not. Control messages are not counted."""
    calls: Literal["textbook", "reported-buckets", "reported-buckets-at-most"] | None = None
    """Kind, group and elements of all calls besides control messages.

    - `textbook`: as in zero_sim's own system.
    - `reported-buckets`: one reduction for each bucket in `parts` (`reduced_by`, `call_elems`) and
      each sum over ranks. If the target follows `system.bucket_elems`, buckets have about this
      size. If parts have `gathered_by`, their buckets are gathered, and nothing else.
    - `reported-buckets-at-most`: the same, but no bucket with several params exceeds
      `bucket_elems`."""
    held: Literal["textbook"] | ByName | None = None
    """Resident bytes, by the names in the engine's `held_bytes`, a method that it must have. A
    function returns only the names it covers. Its names `whole gradients` and `whole params` bound
    `whole_bytes` at any moment of a step. `textbook` also checks `whole_bytes` if the engine has
    it."""
    in_flight: Literal["textbook"] | AtMost | None = None
    """Times at which collectives are issued and waited for (`textbook`), or a function that returns
    the most bytes in flight at any moment of a step."""
    calls_in_flight: AtMost | None = None
    """Function that returns how many calls with `async_op` must be in flight together at some
    moment of a step."""
    control_calls: int | None = None
    """Most control messages of a rank in a step. None for any number."""
    # Stage 3 gathers twice in a micro-batch, in forward and in backward.
    gathers: int | None = None
    """Most gathers of an element in a step. None for the most that any ZeRO stage needs: two for
    each micro-batch, and one after the update. Below stage 3, None stands for 1 if buckets have
    `gathered_by`."""
    align_elems: int = ALIGN_ELEMS
    """Largest alignment, in elements, of a param and of a rank's part of a bucket."""

    def __post_init__(self) -> None:
        """Check values and types.

        Raises:
            UsageError: A field has a value that it cannot have.
        """
        for name, words in _WORDS.items():
            value = getattr(self, name)
            # `calls` takes no function: it would have to predict kind and group of each call.
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
        """Yield the costs that are not checked, as reports name them."""
        for name, words in _IN_WORDS.items():
            if getattr(self, name) is None:
                yield words


_WORDS: dict[str, tuple[str, ...]] = {
    "volume": ("textbook",),
    "calls": ("textbook", "reported-buckets", "reported-buckets-at-most"),
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
"""Costs of zero_sim's own system."""


def costs_of(target: Target, scenario: Scenario, *, engine: object = None) -> Costs:
    """Return the costs that a target declares for a case.

    If the target has no `costs`, they are `TEXTBOOK` for an engine with `held_bytes`.

    Raises:
        ProtocolError: `costs` is something else, or declares `held` for an engine without
            `held_bytes`.
    """
    declared: object = getattr(target, "costs", None)
    if callable(declared):
        try:
            declared = declared(scenario)
        # The target's code may raise anything.
        except Exception as error:
            raise ProtocolError(
                f"expected `costs` of target {target.name!r} to return the costs of a case, got "
                f"{type(error).__name__}: {error}."
            ) from error
    # So engines like ours only need `held_bytes` to get all checks.
    if declared is None:
        declared = TEXTBOOK if isinstance(engine, CostedEngine) else Costs()
    if not isinstance(declared, Costs):
        raise ProtocolError(
            f"expected `costs` of target {target.name!r} to be zero_sim.targets.Costs or None, got "
            f"{shown(declared)}."
        )
    # Only the engine can count resident bytes; the simulated world only logs calls.
    if declared.held is not None and engine is not None and not isinstance(engine, CostedEngine):
        raise ProtocolError(
            f"expected {type(engine).__name__} to have held_bytes(), because its target declares "
            "Costs.held, got no such method. Add it, or remove `held` from the costs."
        )
    # A forward may gather a param at each use, which closed forms of calls do not count.
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
    """Return the value of a target's own closed form: an int, or a mapping of names to ints.

    Raises:
        ProtocolError: The form raises, or returns another type.
    """
    wanted = "an integer" if kind is int else "a mapping of names to integers"
    try:
        given: object = form(case)
    # The target's code may raise anything.
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise ProtocolError(f"expected Costs.{name} to return {wanted}, got {got}.") from error
    numbers = list(given.values()) if isinstance(given, Mapping) else [given]
    # Not isinstance, because True is an int to Python.
    if not isinstance(given, kind) or not all(type(number) is int for number in numbers):
        raise ProtocolError(f"expected Costs.{name} to return {wanted}, got {shown(given)}.")
    return given
