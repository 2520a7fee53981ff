"""Fills the gaps of an engine that has less than it may have, and keeps book of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import CheckpointForm
from zero_sim.targets.protocol import CostedEngine, Engine, FullEngine, OwnedPart, StepResult

_REQUIRED = ("module", "zero_grad", "backward", "step", "params")

PARTS = "masters and optimizer state"
STRAY_GRADIENTS = "gradients between steps and their padding"
STRAY_PADDING = "padding of params and masters"

_OBSERVED = {
    "parts": PARTS,
    "stray_gradients": STRAY_GRADIENTS,
    "stray_padding": STRAY_PADDING,
}
"""Methods that show something of the engine's state, and what."""


class CompletedEngine:
    """An engine with all methods; those that it lacks do nothing, and `untold` says what of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.module = engine.module
        self.untold = frozenset(
            what for name, what in _OBSERVED.items() if not hasattr(engine, name)
        )
        """What nothing is known of, in words for the notes."""
        self.can_reload = hasattr(engine, "save") and hasattr(engine, "load")
        self.costed = engine if isinstance(engine, CostedEngine) else None
        """The engine itself, if it declares that the closed forms of its stage hold."""

    def zero_grad(self) -> None:
        """As the engine does."""
        self._engine.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """As the engine does, if it has to be told."""
        start = getattr(self._engine, "start_micro_batch", None)
        if start is not None:
            start(last=last)

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """As the engine does."""
        self._engine.backward(loss, last_micro=last_micro, rows=rows)

    def step(self, *, lr_factor: float) -> StepResult:
        """As the engine does; an empty record where it says nothing of the step."""
        return self._engine.step(lr_factor=lr_factor) or StepResult()

    def settle(self) -> None:
        """As the engine does; one without it leaves nothing in flight."""
        settle = getattr(self._engine, "settle", None)
        if settle is not None:
            settle()

    def params(self) -> Mapping[str, Tensor]:
        """As the engine tells them.

        Raises:
            UsageError: It gives something else than a mapping.
        """
        params = self._engine.params()
        if not isinstance(params, Mapping):
            raise UsageError(
                f"expected `params` of an engine to give a mapping of names to tensors, got "
                f"{type(params).__name__} from {type(self._engine).__name__}. Try "
                "dict(model.named_parameters()) of the bare model."
            )
        return params

    def parts(self) -> Iterable[OwnedPart]:
        """As the engine tells them; none where it tells none."""
        parts = getattr(self._engine, "parts", None)
        return () if parts is None else parts()

    def stray_gradients(self, *, padding_only: bool) -> str:
        """As the engine tells; empty where it tells nothing."""
        stray = getattr(self._engine, "stray_gradients", None)
        return "" if stray is None else stray(padding_only=padding_only)

    def stray_padding(self) -> str:
        """As the engine tells; empty where it tells nothing."""
        stray = getattr(self._engine, "stray_padding", None)
        return "" if stray is None else stray()

    def notes(self) -> Iterable[str]:
        """As the engine has them."""
        notes = getattr(self._engine, "notes", None)
        return () if notes is None else notes()

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """As the engine does; `can_reload` says whether it does."""
        self._checkpointing("save").save(path, form=form)

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


def complete(engine: Engine) -> CompletedEngine:
    """An engine with all that the harness calls, from one that has at least what it must have.

    Args:
        engine: What a target built; one that is complete already comes back as it is.

    Raises:
        UsageError: It lacks something that it must have; names all of that.
    """
    if isinstance(engine, CompletedEngine):
        return engine
    missing = [name for name in _REQUIRED if not hasattr(engine, name)]
    if missing:
        raise UsageError(
            f"expected an engine with {', '.join(_REQUIRED)}, got {type(engine).__name__} "
            f"without {', '.join(missing)}. Try adding it; zero_sim.targets.Engine says what each "
            "is for."
        )
    return CompletedEngine(engine)
