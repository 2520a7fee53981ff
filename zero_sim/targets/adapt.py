"""Adapter around an engine, used by the training loop and the judge.

Optional methods that the engine lacks become no-ops; `unreported` lists the state that is then not
observed. All return values are validated. Time spent in the engine is charged to it.
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
from zero_sim.targets.bare_model import Model, UntrainedValue, look_at
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
"""State that each method reports, as notes name it."""

_DEFAULTS: dict[str, object] = {
    "start_micro_batch": None,
    "settle": None,
    "parts": (),
    "stray_gradients": "",
    "stray_padding": "",
    "notes": (),
    "held_bytes": {},
}
"""Return values of missing optional methods."""


Charging = Callable[[], AbstractContextManager[object]]
_Query = TypeVar("_Query", bound=Callable[..., Any])


def _query(method: _Query) -> _Query:
    """Charge a query to the engine, and run it only once within `queried_once`."""

    @wraps(method)
    def query(self: EngineAdapter, **options: object) -> object:
        # None outside of `queried_once`, because the engine may have trained since the last query.
        known = self._answers
        question = (method.__name__, *options.items())
        if known is not None and question in known:
            return known[question]
        with self._charging():
            answer = method(self, **options)
        if known is not None:
            known[question] = answer
        return answer

    return query  # pyrefly: ignore


class EngineAdapter:
    """An engine with all methods of the protocol; missing methods do nothing.

    Methods raise ProtocolError if the engine returns something that the protocol does not allow.

    Args:
        engine: The engine that a target built.
        model: The bare model; None to check types only.
        charging: Factory of a context manager that charges a query to the engine.
    """

    def __init__(
        self, engine: Engine, *, model: Model | None = None, charging: Charging = nullcontext
    ) -> None:
        # Any, because optional methods are looked up by name.
        self._engine: Any = engine
        self._check = Answers(engine, model=model)
        self._charging = charging
        self._has_stepped = False
        self._answers: dict[object, Any] | None = None
        """Results within `queried_once`, by method and arguments."""
        # From the engine's param names to the bare model's.
        self._names = self._check.names(getattr(engine, "names", None))
        self._reported: dict[str, Tensor] = {}
        """Last reported params, including untrained params; empty if the model has none of
        these."""
        self._repeated: list[tuple[str, str, Tensor]] = []
        """Params that were reported twice: name, second name, second value."""
        self.tied_parts: dict[str, str] = {}
        """First name of each tied param whose parts use another name, by this name."""
        self.module = engine.module
        self.unreported = frozenset(
            what for name, what in _OBSERVED.items() if not hasattr(engine, name)
        )
        """State that is not observed, as notes name it."""
        self.costed = engine if isinstance(engine, CostedEngine) else None
        """The engine if it has `held_bytes`, else None."""

    @property
    def has_start_step(self) -> bool:
        """True if the engine has start_step()."""
        return getattr(self._engine, "start_step", None) is not None

    @property
    def can_unwrap(self) -> bool:
        """True if the engine has unwrap()."""
        return getattr(self._engine, "unwrap", None) is not None

    @property
    def can_reload(self) -> bool:
        """True if the engine has save() and load()."""
        return hasattr(self._engine, "save") and hasattr(self._engine, "load")

    @contextmanager
    def queried_once(self) -> Iterator[None]:
        """Run each query only once within this context, in which the engine must not train."""
        # A query may run collectives. All ranks must call these equally often, so the number of
        # queries must not depend on a rank's findings.
        self._answers = {}
        try:
            yield
        finally:
            self._answers = None

    def _optional(self, method: str, **options: object) -> Any:
        found = getattr(self._engine, method, None)
        return _DEFAULTS[method] if found is None else found(**options)

    def _followed(self, method: str, *, path: str) -> Callable[..., Any]:
        """Return a method that the engine needs because its target follows the field `path`."""
        found = getattr(self._engine, method, None)
        if found is None:
            raise ProtocolError(
                f"expected {type(self._engine).__name__} to have {CALLS[method][0]}, because its "
                f"target follows {path}, got no such method. Add it, or remove the path from "
                "Capabilities.follows."
            )
        return found

    def _checkpointing(self, method: str) -> Any:
        if not self.can_reload:
            raise UsageError(
                f"expected an engine with save() and load() because the scenario has `reload`, got "
                f"{type(self._engine).__name__} at {method}(). Remove `reload`, or add them."
            )
        return self._engine

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._engine.zero_grad()

    def start_step(self, *, rows: Sequence[int]) -> None:
        """Prepare for the micro-batches of a step, if `has_start_step`."""
        self._engine.start_step(rows=rows)

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepare for a forward and its backward."""
        self._optional("start_micro_batch", last=last)

    def join_micro_batch(self, *, last: bool) -> None:
        """Take part in a micro-batch without data."""
        self._followed("join_micro_batch", path="run.own_micro_batches")(last=last)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Run the engine's module, which returns one tensor."""
        return self._check.output(self.module(*args, **named))

    def backward(self, *terms: Tensor, last_micro: bool, rows: int) -> None:
        """Run backward for one micro-batch; sum the terms if the engine lacks backward_terms."""
        # Only models with a second loss have two terms. The reference adds them the same way.
        split = getattr(self._engine, "backward_terms", None) if len(terms) > 1 else None
        if split is not None:
            split(*terms, last_micro=last_micro, rows=rows)
        else:
            self._engine.backward(total_loss(terms), last_micro=last_micro, rows=rows)

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params. Returns an empty record if the engine returns None."""
        answer = self._engine.step(lr_factor=lr_factor)
        self._has_stepped = True
        return self._check.step(answer)

    def try_step(self, *, lr_factor: float) -> StepResult:
        """Update the params of an engine that may raise if a gradient is not finite."""
        try:
            result = self.step(lr_factor=lr_factor)
        except ZeroSimError:
            # An error of zero_sim, such as a deadlock, and not the engine's own.
            raise
        except (ArithmeticError, RuntimeError, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
            return StepResult(skipped=True, raised=raised)
        return replace(result, skipped=False, raised="")

    def settle(self) -> None:
        """Wait for communication that the last step left in flight."""
        self._optional("settle")

    def params(self) -> dict[str, Tensor]:
        """Return whole trainable params on this rank."""
        return {name: param.detach() for name, param in self._params().items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients in `.grad` of whole params."""
        return {
            name: param.grad.detach()
            for name, param in self._params().items()
            if param.grad is not None
        }

    @_query
    def _params(self) -> dict[str, Tensor]:
        model = self._check.model
        returned: object = self._engine.params()
        # `Answers.params` refuses any other type below.
        if isinstance(returned, Mapping):
            returned = self._without_repeats(returned)
        reported = self._check.params(returned)
        # After a step, a wrong size is a finding about the system, not a mistake in the adapter.
        if not self._has_stepped:
            self._check.sizes(reported)
        # `Answers.params` drops untrained params, so keep them here for `untrained`.
        if model is not None and model.untrained and isinstance(returned, Mapping):
            untrained = {name: returned.get(name) for name in model.untrained}
            self._reported = reported | {
                name: value for name, value in untrained.items() if isinstance(value, Tensor)
            }
        return reported

    def _without_repeats(self, returned: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return params by their names in the bare model; repeated params go to `_repeated`."""
        once: dict[Any, Any] = {}
        self._repeated = []
        for own, value in returned.items():
            name = self._first_name(self._names.get(own, own))
            # The first report counts; the judge compares the others with it.
            if name in once:
                checked = self._check.params({name: value})
                self._repeated += [(name, own, again) for again in checked.values()]
            else:
                once[name] = value
        return once

    def _first_name(self, name: Any) -> Any:
        model = self._check.model
        return name if model is None else model.tied.get(name, name)

    def repeated(self) -> Iterable[tuple[str, str, Tensor]]:
        """Return params that `params` reported twice, such as tied params.

        Returns:
            Tuples of name, second name and second value.
        """
        self._params()
        return [(name, own, value.detach()) for name, own, value in self._repeated]

    def untrained(self) -> Iterator[UntrainedValue]:
        """Yield the present values of untrained params. Calls `params` if the model has any."""
        model = self._check.model
        if model is None or not model.untrained:
            return
        self._params()
        # Read the module's params, because many engines do not report untrained params.
        with self._charging():
            held = {
                self._names.get(name, name): param
                for name, param in self._engine.module.named_parameters()
            }
        yield from look_at(model.untrained, reported=self._reported, held=held)

    def module_tensors(self) -> dict[str, Tensor]:
        """Return the module's present params and buffers, without DTensors."""
        # Each rank has another shard of a DTensor; `params` returns the whole param.
        with self._charging():
            params = dict(self._engine.module.named_parameters())
            return {
                name: tensor.detach()
                for name, tensor in (params | dict(self._engine.module.named_buffers())).items()
                if not hasattr(tensor, "full_tensor")
            }

    def scales(self, names: Collection[str]) -> dict[str, Tensor | None]:
        """Return the scales of fp8 params from the module's buffers; None for missing scales."""
        if not names:
            return {}
        with self._charging():
            buffers = dict(self._engine.module.named_buffers())
        return {name: buffers.get(name + SCALE_SUFFIX) for name in names}

    @_query
    def parts(self) -> Sequence[OwnedPart]:
        """Return this rank's parts of the optimizer; empty if none are reported."""
        try:
            reported = self._optional("parts")
            # Run a generator here, where its errors can be explained.
            reported = list(reported) if isinstance(reported, Iterable) else reported
        except (AttributeError, TypeError) as error:
            # Before the first step, the likely cause is `.grad.reshape(-1)` with `.grad` None.
            if self._has_stepped:
                raise
            raise ProtocolError(
                f"expected `parts` of {type(self._engine).__name__} to work before the first "
                "step too, when no param has a gradient, got "
                f"{type(error).__name__}: {error}. Return OwnedPart(grad=None) while .grad is None."
            ) from error
        if isinstance(reported, list):
            reported = [self._renamed(part) for part in reported]
        return self._check.parts(reported)

    def _renamed(self, part: object) -> object:
        """Return a part under its param's name in the bare model; anything else unchanged."""
        if not isinstance(part, OwnedPart) or not isinstance(part.place, Place):
            return part
        own = self._names.get(part.place.param, part.place.param)
        name = self._first_name(own)
        # For the judge, which reports two owners of a tied param under its first name.
        if name != own:
            self.tied_parts[own] = name
        if name == part.place.param:
            return part
        return replace(part, place=replace(part.place, param=name))

    # Queries may run collectives: see `queried_once`.
    @_query
    def settings(self) -> Settings | None:
        """Return the optimizer's settings; None if the engine reports none."""
        # An attribute that is None counts as a missing method.
        if getattr(self._engine, "settings", None) is None:
            return None
        checked = self._check.settings(self._engine.settings())
        own = {self._names.get(name, name): values for name, values in checked.params.items()}
        return replace(checked, params=own)

    @_query
    def stray_gradients(self, *, padding_only: bool) -> str:
        """Describe a nonzero gradient that must be zero; "" if none or not reported."""
        stray = self._optional("stray_gradients", padding_only=padding_only)
        return self._check.text("stray_gradients", stray)

    @_query
    def stray_padding(self) -> str:
        """Describe nonzero padding of params or masters; "" if none or not reported."""
        return self._check.text("stray_padding", self._optional("stray_padding"))

    @_query
    def held_bytes(self) -> Mapping[str, int]:
        """Return resident bytes by name; empty if the engine reports none."""
        return self._check.bytes_by_name(self._optional("held_bytes"))

    def notes(self) -> Iterable[str]:
        """Return notes on the whole run."""
        return self._check.notes(self._optional("notes"))

    def unwrap(self) -> nn.Module:
        """Return the unwrapped module, if `can_unwrap`."""
        return self._check.module(self._engine.unwrap())

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint, if `can_reload`."""
        self._checkpointing("save").save(path, form=form)

    def save_async(self, path: Path, *, form: CheckpointForm) -> Saving:
        """Start to write a checkpoint while training goes on."""
        save = self._followed("save_async", path="reload.async_steps")
        return self._check.saving(save(path, form=form))

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Load a checkpoint, if `can_reload`."""
        self._checkpointing("load").load(path, weights_only=weights_only)


def complete(
    engine: Engine, *, model: Model | None = None, charging: Charging = nullcontext
) -> EngineAdapter:
    """Wrap an engine into an adapter with all methods that the harness calls.

    Args:
        engine: Engine from a target's `build`. An adapter is returned unchanged.
        model: The bare model, against which return values are checked.
        charging: As for `EngineAdapter`.

    Raises:
        ProtocolError: Required members are missing, or a method takes other arguments.
    """
    # Callers need not know if an engine is already wrapped.
    if isinstance(engine, EngineAdapter):
        return engine
    missing = [name for name in _REQUIRED if not hasattr(engine, name)]
    if missing:
        raise ProtocolError(
            f"expected an engine with {', '.join(_REQUIRED)}, got {type(engine).__name__} "
            f"without {', '.join(missing)}. Add them; zero_sim.targets.Engine documents each."
        )
    check_calls(engine)
    return EngineAdapter(engine, model=model, charging=charging)
