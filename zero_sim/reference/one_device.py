"""One device that sees the data of all ranks once: what ranks with the same data are said to equal.

That N ranks with the same data have in their mean, or in the sum of what comes of a loss divided by
N, the gradient of one of them, is true in mathematics. In floating point a sum of N equal numbers
is N times one of them only where every partial sum is a number of the dtype: with two ranks, with
four, and with other powers of two where pairs are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from zero_sim.reference.placement import Addresses
from zero_sim.reference.ranks import Ranks
from zero_sim.scenario.spec import Scenario, TopologySpec
from zero_sim.workloads import build_workload, on_device


class OneDevice:
    """The same model and data on one rank, whose loss is a mean and whose gradient is not divided.

    Args:
        scenario: The case of all ranks.
        device: Where its module is, such as `cpu`.
    """

    def __init__(self, scenario: Scenario, *, device: str) -> None:
        alone = replace(
            scenario,
            world=replace(scenario.world, size=1),
            topology=TopologySpec(),
            data=replace(scenario.data, loss="mean"),
            system=replace(scenario.system, divide="none", redundancy=1),
        )
        self._ranks = Ranks(alone, workload=on_device(build_workload(alone), device))

    def set_address(self, addresses: Addresses) -> None:
        """Lay every param in memory as a rank has it.

        Args:
            addresses: Of each param; see [Note: addresses].
        """
        self._ranks.set_addresses([addresses])

    def gradients(
        self,
        step: int,
        *,
        masters: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        scale: float | None,
    ) -> Mapping[str, Tensor]:
        """Return the gradients of a step by param, in the gradient's dtype, each ND.

        To be called while `isolated`.

        Args:
            step: Optimizer step, from 0.
            masters: What the step begins with, fp32 by param.
            scales: Of params in fp8.
            scale: What the loss is multiplied by; None for nothing.
        """
        self._ranks.write(masters, scales=scales)
        return self._ranks.replay(step, scale=scale).brought()[0]
