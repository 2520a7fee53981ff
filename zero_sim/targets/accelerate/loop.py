"""A model and an optimizer that accelerate has prepared, and the loop that its guides show.

[Note: losses]
`Accelerator.backward` divides each loss by the number of micro-batches, which is a division of each
gradient where that number is a power of two, and only there: elsewhere 1/3 goes through all of
backward. So the loss that it is given is multiplied by that number, and 1/n times n is 1 for each n
up to 40; with `mean_loss` it is given the loss as it is.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.torch.optim import plain_optimizer


class AccumulationLoop:
    """One rank's model and optimizer as `Accelerator.prepare` gives them, and how to train them.

    Args:
        module: The bare model.
        accelerator: This rank's.
        scenario: The case; `optimizer` and `run.micro_batches` are read.
        mean_loss: Whether losses are divided by the number of micro-batches.
    """

    def __init__(
        self, module: nn.Module, *, accelerator: Any, scenario: Scenario, mean_loss: bool
    ) -> None:
        away = next((p.device for p in module.parameters() if p.device.type != "cpu"), None)
        if away is not None:
            raise UsageError(
                "expected a model on the CPU, where accelerate would bring it, got one on "
                f"{away}. Try leaving out --device."
            )
        self._factor = 1 if mean_loss else scenario.run.micro_batches
        self._micro_batch = ExitStack()
        self.accelerator = accelerator
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.module, self.optimizer = self.accelerator.prepare(
            module, plain_optimizer(scenario.optimizer, trained)
        )

    def start_micro_batch(self) -> None:
        """Begin a block of `accumulate`, which counts, and reduces with the last one alone."""
        self._micro_batch.enter_context(self.accelerator.accumulate(self.module))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run backward, and but for the last micro-batch end its block."""
        self.accelerator.backward(loss * self._factor)
        if not last:
            # As the guides have it, after every micro-batch; both do nothing before the last one.
            self.optimizer.step()
            self.end_micro_batch()
            self.optimizer.zero_grad()

    def clip_by_norm(self, bound: float) -> Tensor:
        """Clip, and give the norm before."""
        return self.accelerator.clip_grad_norm_(self.module.parameters(), bound)

    def clip_by_value(self, bound: float) -> None:
        """Clip each element."""
        self.accelerator.clip_grad_value_(self.module.parameters(), bound)

    def end_micro_batch(self) -> None:
        """End the block of `accumulate`; of the last micro-batch behind the update."""
        self._micro_batch.close()
