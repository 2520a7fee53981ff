"""Costs that a target declares: bytes moved, calls, resident bytes and overlap, one by one."""

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
# Known libraries round up no further: Megatron-Core, for example, pads each param to 64 elements.
ALIGN_ELEMS = 128
"""Default of `Costs.align_elems`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostCase:
    """Argument of a target's own closed forms: one rank and one step of one case.

    Example:
        >>> from zero_sim.scenario.spec import ModelSpec
        >>> case = Scenario(schema=1, model=ModelSpec(name="mlp"))
        >>> form = lambda given: {"float32": 4 * sum(given.elems.values())}
        >>> form(CostCase(scenario=case, rank=0, elems={"up": 6, "down": 4}))
        {'float32': 40}
    """

    scenario: Scenario
    """The case."""
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
    """Costs of a step, checked against closed forms in the simulated world. None: not checked.

    `"textbook"` stands for the closed forms of the project's own system at the same stage. A
    control message is a call of a few numbers, such as a norm or a flag.

    Example:
        >>> costs = Costs(volume="textbook", calls="told-buckets", control_calls=2)
        >>> list(costs.undeclared())
        ['closed form of bytes held', 'closed form of what is in flight']
    """

    volume: Literal["textbook"] | ByName | None = None
    """Bytes that a rank contributes in a step, by dtype, such as `{"float32": 4096}`. A call counts
    with the tensor that the rank passes in. For `broadcast` and `reduce` that is the whole tensor
    on every rank, root or not. Control messages are not counted."""
    calls: Literal["textbook", "told-buckets", "told-buckets-at-most"] | None = None
    """Kind, group and elements of all calls besides control messages.

    - `textbook`: those of the project's own system.
    - `told-buckets`: one reduction for each bucket in `parts` (`reduced_by`, `call_elems`) and each
      sum over ranks. If the target follows `system.bucket_elems`, buckets have about that size. If
      parts have `gathered_by`, their buckets are gathered, and nothing else.
    - `told-buckets-at-most`: the same, with `bucket_elems` as upper bound for buckets of several
      params."""
    held: Literal["textbook"] | ByName | None = None
    """Resident bytes, by the names that `held_bytes` of the engine returns; it must have that
    method. A function returns the names it covers. Its names `whole gradients` and `whole params`
    are upper bounds of `whole_bytes` at any moment of a step. `textbook` also checks `whole_bytes`,
    if the engine has it."""
    in_flight: Literal["textbook"] | AtMost | None = None
    """Times at which collectives are issued and waited for; or a function that returns the most
    bytes issued and not yet waited for at any moment of a step."""
    calls_in_flight: AtMost | None = None
    """Least number of calls with `async_op` that are in flight together at some moment of a step,
    as a function."""
    control_calls: int | None = None
    """Most control messages of a rank in a step. None for any number."""
    # Twice a micro-batch, in forward and in backward, is stage 3.
    gathers: int | None = None
    """Most gathers of an element in a step. None for the most that any ZeRO stage needs: two for
    each micro-batch, and one after the update. Below stage 3, for buckets with `gathered_by`, None
    stands for 1."""
    align_elems: int = ALIGN_ELEMS
    """Most elements to which a param, and a rank's part of a bucket, is rounded up."""

    def __post_init__(self) -> None:
        """Check words, numbers and types.

        Raises:
            UsageError: A field has a value that it cannot have.
        """
        for name, words in _WORDS.items():
            value = getattr(self, name)
            # `calls` has words only: a function would have to predict kind and group of each call.
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
        """Yield the costs that are not checked, in the words of the report."""
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
"""Costs of the project's own system."""


def costs_of(target: Target, scenario: Scenario, *, engine: object = None) -> Costs:
    """Return the costs that a target declares for a case.

    Args:
        target: A target whose `costs` are a `Costs`, or a function from the case to one.
        scenario: The case, as the target gets it.
        engine: The engine. If it has `held_bytes` and the target declares nothing, the costs are
            `TEXTBOOK`.

    Raises:
        ProtocolError: `costs` is something else, or declares `held` for an engine without
            `held_bytes`.
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
    # `held_bytes` declares the textbook, so that engines like ours need one method for all checks.
    if declared is None:
        declared = TEXTBOOK if isinstance(engine, CostedEngine) else Costs()
    if not isinstance(declared, Costs):
        raise ProtocolError(
            f"expected `costs` of target {target.name!r} to be zero_sim.targets.Costs or None, got "
            f"{shown(declared)}."
        )
    # Only the engine can count resident bytes, because the simulated world logs calls.
    if declared.held is not None and engine is not None and not isinstance(engine, CostedEngine):
        raise ProtocolError(
            f"expected held_bytes() of {type(engine).__name__}, whose target declares Costs.held, "
            "got none. Add it, or remove `held` from the costs."
        )
    # A forward may gather a param for each of its uses, which closed forms of calls do not count.
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
    """Return the value of a target's own closed form.

    Args:
        form: The form.
        case: Its argument.
        name: Its field in `Costs`.
        kind: `int`, or `Mapping` for integers by name.

    Raises:
        ProtocolError: The form raises, or returns another type.
    """
    wanted = "an integer" if kind is int else "a mapping of names to integers"
    try:
        given: object = form(case)
    # Code of the target's own may raise anything.
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise ProtocolError(f"expected Costs.{name} to give {wanted}, got {got}.") from error
    numbers = list(given.values()) if isinstance(given, Mapping) else [given]
    # Not isinstance, because True is an int to Python.
    if not isinstance(given, kind) or not all(type(number) is int for number in numbers):
        raise ProtocolError(f"expected Costs.{name} to give {wanted}, got {shown(given)}.")
    return given
