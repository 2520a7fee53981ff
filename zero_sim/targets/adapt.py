"""The one surface around an engine: what the training loop drives and the judge asks.

It fills the gaps of an engine that has less than it may have and keeps book of them, holds what is
told to the protocol, and says who answers for the asking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zero_sim.errors import ProtocolError, UsageError
from zero_sim.scenario.spec import CheckpointForm
from zero_sim.targets import answers
from zero_sim.targets.bare_model import Model, Seen, look_at
from zero_sim.targets.protocol import (
    CostedEngine,
    Engine,
    FullEngine,
    OwnedPart,
    Place,
    Saving,
    Settings,
    StepResult,
)
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


Asking = Callable[[], AbstractContextManager[object]]


class CompletedEngine:
    """An engine with all methods; those that it lacks do nothing, and `unreported` says what of it.

    Args:
        engine: What a target built.
        model: The bare model; where left out, what is told is not held to it.
        asking: Makes the block in which the engine is asked something.
    """

    def __init__(
        self, engine: Engine, *, model: Model | None = None, asking: Asking = nullcontext
    ) -> None:
        self._engine = engine
        self._model = model
        self._asking = asking
        self._has_stepped = False
        self._told: dict[str, Tensor] = {}
        """What it told last of all params, where some are never trained."""
        self._answers: dict[object, Any] | None = None
        """What it was asked in a block of `asked_once`, and answered."""
        self._names = answers.check_names(getattr(engine, "names", None), engine=engine)
        self._tied = {} if model is None else model.tied
        self._repeated: list[tuple[str, str, Tensor]] = []
        """Params that it told a second time: the name, the other name, and the values there."""
        self.tied_parts: dict[str, str] = {}
        """First name of each tied param of which it told parts under another name, by that name."""
        self.module = engine.module
        self.unreported = frozenset(
            what for name, what in _OBSERVED.items() if not hasattr(engine, name)
        )
        """What nothing is known of, in words for the notes."""
        self.can_reload = hasattr(engine, "save") and hasattr(engine, "load")
        self.can_unwrap = getattr(engine, "unwrap", None) is not None
        self.costed = engine if isinstance(engine, CostedEngine) else None
        """The engine itself, if it declares that the closed forms of its stage hold."""

    @contextmanager
    def asked_once(self) -> Iterator[None]:
        """A block in which the engine does nothing: asked again, it answers as it did before.

        What it tells may take calls that all ranks have to make alike.
        """
        self._answers = {}
        try:
            yield
        finally:
            self._answers = None

    def _once(self, question: object, ask: Callable[[], Any]) -> Any:
        """What an engine answers; in a block of `asked_once`, what it answered first."""
        if self._answers is None:
            return ask()
        if question not in self._answers:
            self._answers[question] = ask()
        return self._answers[question]

    def zero_grad(self) -> None:
        """As the engine does."""
        self._engine.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """As the engine does, if it has to be told."""
        start = getattr(self._engine, "start_micro_batch", None)
        if start is not None:
            start(last=last)

    def join_micro_batch(self, *, last: bool) -> None:
        """As the engine does.

        Raises:
            ProtocolError: It has no such method.
        """
        join = getattr(self._engine, "join_micro_batch", None)
        if join is None:
            raise ProtocolError(
                f"expected join_micro_batch(*, last) of {type(self._engine).__name__}, whose "
                "target follows run.own_micro_batches, got none. Try adding it, or leaving that "
                "path out of what its capabilities follow."
            )
        join(last=last)

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """As the engine does."""
        self._engine.backward(loss, last_micro=last_micro, rows=rows)

    def step(self, *, lr_factor: float) -> StepResult:
        """As the engine does; an empty record where it says nothing of the step.

        Raises:
            ProtocolError: It says something else than the protocol has.
        """
        answer = self._engine.step(lr_factor=lr_factor)
        self._has_stepped = True
        return answers.check_step(answer, engine=self._engine, model=self._model)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """What the engine's module gives.

        Raises:
            ProtocolError: It is no tensor.
        """
        output = self.module(*args, **named)
        answers.check_output(output, engine=self._engine)
        return output

    def settle(self) -> None:
        """As the engine does; one without it leaves nothing in flight."""
        settle = getattr(self._engine, "settle", None)
        if settle is not None:
            settle()

    def params(self) -> dict[str, Tensor]:
        """Full working params on this rank, as the engine tells them.

        Raises:
            ProtocolError: They are no tensors by name of the model's params; or, before the first
                step, of other sizes.
        """
        return {name: param.detach() for name, param in self._params().items()}

    def gradients(self) -> dict[str, Tensor]:
        """What the full working params have in `.grad`."""
        return {
            name: param.grad.detach()
            for name, param in self._params().items()
            if param.grad is not None
        }

    def _params(self) -> dict[str, Tensor]:
        return self._once("params", self._ask_params)

    def _ask_params(self) -> dict[str, Tensor]:
        with self._asking():
            told: object = self._engine.params()
            if isinstance(told, Mapping):
                told = self._told_once(told)
            reported = answers.check_params(told, engine=self._engine, model=self._model)
            if self._model is not None and not self._has_stepped:
                answers.check_sizes(reported, engine=self._engine, model=self._model)
            if self._model is not None and self._model.untrained and isinstance(told, Mapping):
                self._told = {**reported, **answers.told_untrained(told, model=self._model)}
            return dict(reported)

    def _told_once(self, told: Mapping[Any, Any]) -> dict[Any, Any]:
        """Params by their names in the bare model; what is told again goes to `_repeated`."""
        once: dict[Any, Any] = {}
        self._repeated = []
        for own, value in told.items():
            other = self._names.get(own, own)
            name = self._tied.get(other, other)
            if name in once:
                checked = answers.check_params(
                    {name: value}, engine=self._engine, model=self._model
                )
                self._repeated += [(name, own, again) for again in checked.values()]
            else:
                once[name] = value
        return once

    def repeated(self) -> Iterable[tuple[str, str, Tensor]]:
        """Params that `params` told twice, such as tied ones: name, other name and values there.

        Raises:
            ProtocolError: As for `params`.
        """
        self._params()
        return [(name, own, value.detach()) for name, own, value in self._repeated]

    def untrained(self) -> Iterator[Seen]:
        """Params that are never trained, as they are now; asks for `params`, if there are any.

        Raises:
            ProtocolError: As for `params`.
        """
        if self._model is None or not self._model.untrained:
            return
        self._params()
        with self._asking():
            held = {
                self._names.get(name, name): param
                for name, param in self._engine.module.named_parameters()
            }
        yield from look_at(self._model.untrained, told=self._told, held=held)

    def module_tensors(self) -> dict[str, Tensor]:
        """Params and buffers of the module as it is now, whatever they are for.

        Those that are sharded (DTensors) are left out: what each rank has of them differs by right,
        and `params` tells them whole.
        """
        with self._asking():
            params = dict(self._engine.module.named_parameters())
            return {
                name: tensor.detach()
                for name, tensor in (params | dict(self._engine.module.named_buffers())).items()
                if not hasattr(tensor, "full_tensor")
            }

    def scales(self, names: Collection[str]) -> dict[str, Tensor | None]:
        """Scales of params in fp8: buffers of the module, as the workload says; None for none."""
        if not names:
            return {}
        with self._asking():
            buffers = dict(self._engine.module.named_buffers())
        return {name: buffers.get(name + SCALE_SUFFIX) for name in names}

    def parts(self) -> Sequence[OwnedPart]:
        """What this rank owns of the optimizer, as the engine tells; none where it tells none.

        Raises:
            ProtocolError: They are no parts of params.
        """
        return self._once("parts", self._ask_parts)

    def _ask_parts(self) -> Sequence[OwnedPart]:
        parts = getattr(self._engine, "parts", None)
        if parts is None:
            return ()
        with self._asking():
            try:
                reported: object = parts()
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
            if isinstance(reported, list) and (self._names or self._tied):
                reported = [self._renamed(part) for part in reported]
            checked = answers.check_parts(reported, engine=self._engine, model=self._model)
            return list(checked)

    def settings(self) -> Settings | None:
        """What it steps with, as the engine tells; None where it tells none.

        Raises:
            ProtocolError: They are of another type.
        """
        return self._once("settings", self._ask_settings)

    def _ask_settings(self) -> Settings | None:
        settings = getattr(self._engine, "settings", None)
        if settings is None:
            return None
        with self._asking():
            checked = answers.check_settings(settings(), engine=self._engine)
            if not self._names:
                return checked
            own = {self._names.get(name, name): said for name, said in checked.params.items()}
            return replace(checked, params=own)

    def _renamed(self, part: object) -> object:
        """A part with its param by its name in the bare model; what is no part stays as it is."""
        if not isinstance(part, OwnedPart) or not isinstance(part.place, Place):
            return part
        own = self._names.get(part.place.param, part.place.param)
        name = self._tied.get(own, own)
        if name != own:
            self.tied_parts[own] = name
        return replace(part, place=replace(part.place, param=name))

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Where gradient buffers hold a nonzero they must not; empty where it is not told.

        Raises:
            ProtocolError: It tells no text.
        """
        return self._once(
            ("stray_gradients", padding_only),
            partial(self._stray, "stray_gradients", padding_only=padding_only),
        )

    def stray_padding(self) -> str:
        """Where padding of params and masters is not zero; empty where it is not told.

        Raises:
            ProtocolError: It tells no text.
        """
        return self._once("stray_padding", partial(self._stray, "stray_padding"))

    def _stray(self, method: str, **options: bool) -> str:
        stray = getattr(self._engine, method, None)
        if stray is None:
            return ""
        with self._asking():
            return answers.check_text(stray(**options), engine=self._engine, method=method)

    def notes(self) -> Iterable[str]:
        """As the engine has them.

        Raises:
            ProtocolError: They are no text.
        """
        notes = getattr(self._engine, "notes", None)
        return () if notes is None else answers.check_notes(notes(), engine=self._engine)

    def unwrap(self) -> nn.Module:
        """The module as the engine gives it back; `can_unwrap` says whether it does.

        Raises:
            ProtocolError: It gives none.
        """
        unwrap = getattr(self._engine, "unwrap")  # noqa: B009  (an Engine need not have it)
        return answers.check_module(unwrap(), engine=self._engine)

    def held_bytes(self) -> Mapping[str, int]:
        """As the engine tells; empty where it does not.

        Raises:
            ProtocolError: They are no numbers by name.
        """
        return self._once("held_bytes", self._ask_held_bytes)

    def _ask_held_bytes(self) -> Mapping[str, int]:
        if self.costed is None:
            return {}
        with self._asking():
            reported = self.costed.held_bytes()
            return answers.check_numbers(reported, engine=self._engine, method="held_bytes")

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """As the engine does; `can_reload` says whether it does."""
        self._checkpointing("save").save(path, form=form)

    def save_async(self, path: Path, *, form: CheckpointForm) -> Saving:
        """As the engine does.

        Raises:
            ProtocolError: It has no such method, or gives nothing that can be waited for.
        """
        save = getattr(self._engine, "save_async", None)
        if save is None:
            raise ProtocolError(
                f"expected save_async(path, *, form) of {type(self._engine).__name__}, whose "
                "target follows reload.async_steps, got none. Try adding it, or leaving that path "
                "out of what its capabilities follow."
            )
        return answers.check_saving(save(path, form=form), engine=self._engine)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """As the engine does; `can_reload` says whether it does."""
        self._checkpointing("load").load(path, weights_only=weights_only)

    def _checkpointing(self, method: str) -> FullEngine:
        if not self.can_reload:
            raise UsageError(
                f"expected an engine with save and load for a scenario with `reload`, got "
                f"{type(self._engine).__name__} asked to {method}. Try a scenario without it."
            )
        return self._engine  # pyrefly: ignore


def complete(
    engine: Engine, *, model: Model | None = None, asking: Asking = nullcontext
) -> CompletedEngine:
    """An engine with all that the harness calls, from one that has at least what it must have.

    Args:
        engine: What a target built; one that is complete already comes back as it is.
        model: The bare model, which what the engine tells is held to.
        asking: As for `CompletedEngine`.

    Raises:
        ProtocolError: It lacks something that it must have; names all of that. Or it has it in
            another form.
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
    answers.check_calls(engine)
    return CompletedEngine(engine, model=model, asking=asking)
