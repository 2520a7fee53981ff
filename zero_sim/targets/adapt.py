"""The adapter around an engine, which the training loop drives and the judge queries.

Optional methods that the engine lacks do nothing, and `unreported` lists what is not observed
then. Every return value is validated. Time spent in the engine is charged to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from zero_sim.errors import ProtocolError, UsageError, ZeroSimError
from zero_sim.scenario.spec import CheckpointForm
from zero_sim.targets.answers import CALLS, Answers, check_calls
from zero_sim.targets.bare_model import Model, Seen, look_at
from zero_sim.targets.protocol import (
    CostedEngine,
    Engine,
    OwnedPart,
    Place,
    Saving,
    Settings,
    StepResult,
)
from zero_sim.workloads import total_loss
from zero_sim.workloads.fp8 import SCALE_SUFFIX

_REQUIRED = ("module", "zero_grad", "backward", "step", "params")

PARTS = "masters and optimizer state"
GRADIENTS = "reduced gradients"
DIVISION = "division of gradients"
STRAY_GRADIENTS = "gradients between steps and their padding"
STRAY_PADDING = "padding of params and masters"
UNTRAINED = "params that are never trained"

_OBSERVED = {
    "parts": PARTS,
    "stray_gradients": STRAY_GRADIENTS,
    "stray_padding": STRAY_PADDING,
}
"""Methods that show something of the engine's state, and what."""

_DEFAULTS: dict[str, object] = {
    "start_micro_batch": None,
    "settle": None,
    "parts": (),
    "stray_gradients": "",
    "stray_padding": "",
    "notes": (),
    "held_bytes": {},
}
"""Returned by optional methods that an engine lacks."""


Asking = Callable[[], AbstractContextManager[object]]
_Query = TypeVar("_Query", bound=Callable[..., Any])


def _query(method: _Query) -> _Query:
    """Charge a query to the engine, and answer it once within a block of `asked_once`."""

    @wraps(method)
    def ask(self: CompletedEngine, **options: object) -> object:
        known = self._answers
        question = (method.__name__, *options.items())
        if known is not None and question in known:
            return known[question]
        with self._asking():
            answer = method(self, **options)
        if known is not None:
            known[question] = answer
        return answer

    return ask  # pyrefly: ignore


class CompletedEngine:
    """An engine with all methods; those that it lacks do nothing.

    Methods raise ProtocolError if the engine returns something else than the protocol has.

    Args:
        engine: What a target built.
        model: The bare model; None to check types alone.
        asking: Makes the block in which the engine is asked something.
    """

    def __init__(
        self, engine: Engine, *, model: Model | None = None, asking: Asking = nullcontext
    ) -> None:
        self._engine: Any = engine
        self._check = Answers(engine, model=model)
        self._asking = asking
        self._has_stepped = False
        self._answers: dict[object, Any] | None = None
        """Answers within a block of `asked_once`, by question."""
        self._names = self._check.names(getattr(engine, "names", None))
        self._told: dict[str, Tensor] = {}
        """Params as last reported, untrained ones included, if the model has any."""
        self._repeated: list[tuple[str, str, Tensor]] = []
        """Params that were reported a second time: name, other name, and values there."""
        self.tied_parts: dict[str, str] = {}
        """First name of each tied param, by the other name under which its parts were reported."""
        self.module = engine.module
        self.unreported = frozenset(
            what for name, what in _OBSERVED.items() if not hasattr(engine, name)
        )
        """State that is not observed, in words for the notes."""
        self.costed = engine if isinstance(engine, CostedEngine) else None
        """The engine itself, if it declares that the closed forms of its stage hold."""

    @property
    def has_start_step(self) -> bool:
        """True if the engine takes the rows of a step."""
        return getattr(self._engine, "start_step", None) is not None

    @property
    def can_unwrap(self) -> bool:
        """True if the engine gives its module back."""
        return getattr(self._engine, "unwrap", None) is not None

    @property
    def can_reload(self) -> bool:
        """True if the engine has save() and load()."""
        return hasattr(self._engine, "save") and hasattr(self._engine, "load")

    @contextmanager
    def asked_once(self) -> Iterator[None]:
        """Open a block in which the engine does nothing, so each query is answered once.

        An answer may take collectives, which all ranks have to call equally often.
        """
        self._answers = {}
        try:
            yield
        finally:
            self._answers = None

    def _optional(self, method: str, **options: object) -> Any:
        """Call a method, or return its default if the engine lacks it."""
        found = getattr(self._engine, method, None)
        return _DEFAULTS[method] if found is None else found(**options)

    def _followed(self, method: str, *, path: str) -> Callable[..., Any]:
        """Return a method that the engine has to have, because its target follows a field."""
        found = getattr(self._engine, method, None)
        if found is None:
            raise ProtocolError(
                f"expected {CALLS[method][0]} of {type(self._engine).__name__}, whose target "
                f"follows {path}, got none. Try adding it, or leaving that path out of what its "
                "capabilities follow."
            )
        return found

    def _checkpointing(self, method: str) -> Any:
        if not self.can_reload:
            raise UsageError(
                f"expected an engine with save and load for a scenario with `reload`, got "
                f"{type(self._engine).__name__} asked to {method}. Try a scenario without it."
            )
        return self._engine

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._engine.zero_grad()

    def start_step(self, *, rows: Sequence[int]) -> None:
        """Get ready for the micro-batches of a step, if `has_start_step`."""
        self._engine.start_step(rows=rows)

    def start_micro_batch(self, *, last: bool) -> None:
        """Get ready for a forward and its backward."""
        self._optional("start_micro_batch", last=last)

    def join_micro_batch(self, *, last: bool) -> None:
        """Take part in a micro-batch without data."""
        self._followed("join_micro_batch", path="run.own_micro_batches")(last=last)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Run the engine's module, which returns one tensor."""
        return self._check.output(self.module(*args, **named))

    def backward(self, *terms: Tensor, last_micro: bool, rows: int) -> None:
        """Run backward for one micro-batch, from the sum of terms that the engine does not split.

        Args:
            terms: The loss, or main loss and second loss.
            last_micro: True if the step has no micro-batch after this one.
            rows: Rows that the loss was taken over.
        """
        split = getattr(self._engine, "backward_terms", None) if len(terms) > 1 else None
        if split is not None:
            split(*terms, last_micro=last_micro, rows=rows)
        else:
            self._engine.backward(total_loss(terms), last_micro=last_micro, rows=rows)

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params; an empty record if the engine returns none."""
        answer = self._engine.step(lr_factor=lr_factor)
        self._has_stepped = True
        return self._check.step(answer)

    def try_step(self, *, lr_factor: float) -> StepResult:
        """Update the params, if the engine may raise because a gradient is not finite.

        Errors of zero_sim's own, such as a deadlock, are no such refusal.
        """
        try:
            result = self.step(lr_factor=lr_factor)
        except ZeroSimError:
            raise
        except (ArithmeticError, RuntimeError, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
            return StepResult(skipped=True, raised=raised)
        return replace(result, skipped=False, raised="")

    def settle(self) -> None:
        """Wait for whatever the last step left in flight."""
        self._optional("settle")

    def params(self) -> dict[str, Tensor]:
        """Full working params on this rank; before the first step, of the model's sizes."""
        return {name: param.detach() for name, param in self._params().items()}

    def gradients(self) -> dict[str, Tensor]:
        """Gradients that the full working params have in `.grad`."""
        return {
            name: param.grad.detach()
            for name, param in self._params().items()
            if param.grad is not None
        }

    @_query
    def _params(self) -> dict[str, Tensor]:
        model = self._check.model
        told: object = self._engine.params()
        if isinstance(told, Mapping):
            told = self._told_once(told)
        reported = self._check.params(told)
        if not self._has_stepped:
            self._check.sizes(reported)
        if model is not None and model.untrained and isinstance(told, Mapping):
            untrained = {name: told.get(name) for name in model.untrained}
            self._told = reported | {
                name: value for name, value in untrained.items() if isinstance(value, Tensor)
            }
        return reported

    def _told_once(self, told: Mapping[Any, Any]) -> dict[Any, Any]:
        """Params by their names in the bare model; repeated ones go to `_repeated`."""
        once: dict[Any, Any] = {}
        self._repeated = []
        for own, value in told.items():
            name = self._first_name(self._names.get(own, own))
            if name in once:
                checked = self._check.params({name: value})
                self._repeated += [(name, own, again) for again in checked.values()]
            else:
                once[name] = value
        return once

    def _first_name(self, name: Any) -> Any:
        """The first name of a tied param; of any other its own."""
        model = self._check.model
        return name if model is None else model.tied.get(name, name)

    def repeated(self) -> Iterable[tuple[str, str, Tensor]]:
        """Params that `params` returned twice, such as tied ones: name, other name, values."""
        self._params()
        return [(name, own, value.detach()) for name, own, value in self._repeated]

    def untrained(self) -> Iterator[Seen]:
        """Params that are never trained, as they are now; calls `params` if there are any."""
        model = self._check.model
        if model is None or not model.untrained:
            return
        self._params()
        with self._asking():
            held = {
                self._names.get(name, name): param
                for name, param in self._engine.module.named_parameters()
            }
        yield from look_at(model.untrained, told=self._told, held=held)

    def module_tensors(self) -> dict[str, Tensor]:
        """Params and buffers of the module as it is now.

        Sharded ones (DTensors) are omitted: each rank rightly has another shard, and `params`
        returns them whole.
        """
        with self._asking():
            params = dict(self._engine.module.named_parameters())
            return {
                name: tensor.detach()
                for name, tensor in (params | dict(self._engine.module.named_buffers())).items()
                if not hasattr(tensor, "full_tensor")
            }

    def scales(self, names: Collection[str]) -> dict[str, Tensor | None]:
        """Scales of params in fp8, which are buffers of the module; None for none."""
        if not names:
            return {}
        with self._asking():
            buffers = dict(self._engine.module.named_buffers())
        return {name: buffers.get(name + SCALE_SUFFIX) for name in names}

    @_query
    def parts(self) -> Sequence[OwnedPart]:
        """Parts of the optimizer that this rank owns; empty if the engine reports none."""
        try:
            reported = self._optional("parts")
            reported = list(reported) if isinstance(reported, Iterable) else reported
        except (AttributeError, TypeError) as error:
            if self._has_stepped:
                raise
            raise ProtocolError(
                f"expected `parts` of {type(self._engine).__name__} to tell what this rank "
                "owns before the first step too, when no param has a gradient, got "
                f"{type(error).__name__}: {error}. Try OwnedPart(grad=None) as long as .grad "
                "is None."
            ) from error
        if isinstance(reported, list):
            reported = [self._renamed(part) for part in reported]
        return self._check.parts(reported)

    def _renamed(self, part: object) -> object:
        """Return a part with its param's name in the bare model; anything else unchanged."""
        if not isinstance(part, OwnedPart) or not isinstance(part.place, Place):
            return part
        own = self._names.get(part.place.param, part.place.param)
        name = self._first_name(own)
        if name != own:
            self.tied_parts[own] = name
        if name == part.place.param:
            return part
        return replace(part, place=replace(part.place, param=name))

    @_query
    def settings(self) -> Settings | None:
        """Settings of the optimizer; None if the engine reports none."""
        if getattr(self._engine, "settings", None) is None:
            return None
        checked = self._check.settings(self._engine.settings())
        own = {self._names.get(name, name): values for name, values in checked.params.items()}
        return replace(checked, params=own)

    @_query
    def stray_gradients(self, *, padding_only: bool) -> str:
        """Name a nonzero gradient where all must be zero; '' if there is none, or not reported."""
        stray = self._optional("stray_gradients", padding_only=padding_only)
        return self._check.text("stray_gradients", stray)

    @_query
    def stray_padding(self) -> str:
        """Name nonzero padding of params or masters; '' if there is none, or not reported."""
        return self._check.text("stray_padding", self._optional("stray_padding"))

    @_query
    def held_bytes(self) -> Mapping[str, int]:
        """Bytes between two steps, by name; empty if the engine reports none."""
        return self._check.bytes_by_name(self._optional("held_bytes"))

    def notes(self) -> Iterable[str]:
        """Notes on the whole run."""
        return self._check.notes(self._optional("notes"))

    def unwrap(self) -> nn.Module:
        """The module as the engine gives it back, if `can_unwrap`."""
        return self._check.module(self._engine.unwrap())

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint, if `can_reload`."""
        self._checkpointing("save").save(path, form=form)

    def save_async(self, path: Path, *, form: CheckpointForm) -> Saving:
        """Begin a checkpoint that is written while training goes on."""
        save = self._followed("save_async", path="reload.async_steps")
        return self._check.saving(save(path, form=form))

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint, if `can_reload`."""
        self._checkpointing("load").load(path, weights_only=weights_only)


def complete(
    engine: Engine, *, model: Model | None = None, asking: Asking = nullcontext
) -> CompletedEngine:
    """Wrap an engine with the required methods into one with all that the harness calls.

    Args:
        engine: Engine from a target's `build`; a complete one is returned unchanged.
        model: The bare model, against which answers are checked.
        asking: As for `CompletedEngine`.

    Raises:
        ProtocolError: It lacks something required; names all of that. Or it has another form.
    """
    if isinstance(engine, CompletedEngine):
        return engine
    missing = [name for name in _REQUIRED if not hasattr(engine, name)]
    if missing:
        raise ProtocolError(
            f"expected an engine with {', '.join(_REQUIRED)}, got {type(engine).__name__} "
            f"without {', '.join(missing)}. Try adding it; zero_sim.targets.Engine says what each "
            "is for."
        )
    check_calls(engine)
    return CompletedEngine(engine, model=model, asking=asking)
