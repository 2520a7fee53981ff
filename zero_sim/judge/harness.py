"""What is the harness's own in a rank's turn, kept apart from what is the system's.

Judge and workload run in the ranks' threads, between the system's own calls. What fails there says
nothing about the system, and how long it takes is not the system's time. Inside the judge, in turn,
whatever it asks the engine is the system's again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from torch import Tensor

from zero_sim.errors import EnvironmentProblem, UntrainableError, ZeroSimError
from zero_sim.sim import unwatched
from zero_sim.targets import Engine, OwnedPart, Settings, complete
from zero_sim.workloads.fp8 import SCALE_SUFFIX

Excused = Callable[[bool], AbstractContextManager[object]]
"""Makes a block in which the calling rank's time is not its program's; or is again, given False."""

Answer = TypeVar("Answer")


class JudgeFailed(ZeroSimError):
    """The judge, the reference or the workload raised: nothing is said about the system."""

    def __init__(self, error: Exception, traceback_text: str) -> None:
        self.error = error
        self.traceback_text = traceback_text
        super().__init__(f"the judge itself failed: {type(error).__name__}: {error}")


class _SystemRaised(Exception):
    """An engine raised when the judge asked it something."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


@contextmanager
def ours(excused: Excused) -> Iterator[None]:
    """A block that is the harness's own.

    Raises:
        JudgeFailed: Anything in it raised, but for what the machine lacks, what no system could
            train and what an engine raised when it was asked: those come through as they are.
    """
    try:
        # What the judge reads is not charged to the system either, whatever is in flight.
        with excused(True), unwatched():
            yield
    except _SystemRaised as raised:
        raise raised.error from raised.error.__cause__
    except (EnvironmentProblem, UntrainableError):
        raise
    except Exception as error:
        raise JudgeFailed(error, traceback.format_exc()) from error


class AskedEngine:
    """A rank's engine as the judge sees it: what it may ask, and who answers for the asking."""

    def __init__(self, engine: Engine, *, excused: Excused) -> None:
        self._engine = complete(engine)
        self._excused = excused

    def params(self) -> dict[str, Tensor]:
        """Full working params on this rank."""
        return {name: param.detach() for name, param in self._params().items()}

    def module_buffers(self) -> dict[str, Tensor]:
        """Buffers of the module, such as the scales of fp8 params."""
        return self._ask(lambda: dict(self._engine.module.named_buffers()))

    def scales(self, names: Collection[str]) -> dict[str, Tensor | None]:
        """Scales of params in fp8: buffers of the module, as the workload says; None for none."""
        buffers = self.module_buffers() if names else {}
        return {name: buffers.get(name + SCALE_SUFFIX) for name in names}

    def module_tensors(self) -> dict[str, Tensor]:
        """Params and buffers of the module as it is now, whatever they are for."""
        named = self._ask(
            lambda: (
                dict(self._engine.module.named_parameters())
                | dict(self._engine.module.named_buffers())
            )
        )
        return {name: tensor.detach() for name, tensor in named.items()}

    def parts(self) -> Sequence[OwnedPart]:
        """What this rank owns of the optimizer."""
        return self._ask(lambda: list(self._engine.parts()))

    def settings(self) -> Settings | None:
        """What it steps with; None where it does not tell it."""
        return self._ask(self._engine.settings)

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Where gradient buffers hold a nonzero they must not."""
        return self._ask(lambda: self._engine.stray_gradients(padding_only=padding_only))

    def gradients(self) -> dict[str, Tensor]:
        """What the full working params have in `.grad`."""
        return {
            name: param.grad.detach()
            for name, param in self._params().items()
            if param.grad is not None
        }

    def _params(self) -> dict[str, Tensor]:
        return self._ask(lambda: dict(self._engine.params()))

    @property
    def untold(self) -> frozenset[str]:
        """What it does not tell, in words."""
        return self._engine.untold

    def stray_padding(self) -> str:
        """Where padding of params and masters is not zero; empty where it is not told."""
        return self._ask(self._engine.stray_padding)

    @property
    def tells_costs(self) -> bool:
        """Whether it declares that the closed forms of its stage hold."""
        return self._engine.costed is not None

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes that the rank holds; empty where it is not told."""
        return self._ask(self._engine.held_bytes)

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        with self._excused(False):
            try:
                return question()
            except Exception as error:
                raise _SystemRaised(error) from error
