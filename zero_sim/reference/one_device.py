"""The same training on one device that processes the data once.

In mathematics, ranks with equal data have a mean gradient equal to that of a single rank, and so
has their sum if each loss is divided by N. In floating point, a sum of N equal numbers is N times
the number only if every partial sum is representable. This holds for two ranks, for four, and for
other powers of two if pairs are added.
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
    """The same model and data on one rank, with a mean loss and no division of gradients.

    Args:
        scenario: The case of all ranks.
        device: Device of its module, such as `cpu`.
    """

    def __init__(self, scenario: Scenario, *, device: str) -> None:
        # No division and no replicas, because nothing is summed over ranks.
        alone = replace(
            scenario,
            world=replace(scenario.world, size=1),
            topology=TopologySpec(),
            data=replace(scenario.data, loss="mean"),
            system=replace(scenario.system, divide="none", redundancy=1),
        )
        self._ranks = Ranks(alone, workload=on_device(build_workload(alone), device))

    def set_address(self, addresses: Addresses) -> None:
        """Lay every param in memory as on a given rank.

        Args:
            addresses: Address of each param; see [Note: addresses].
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

        Call it while `isolated`.

        Args:
            step: Optimizer step, from 0.
            masters: Masters before the step, fp32 by param.
            scales: fp8 scales, by param.
            scale: Factor of the loss; None without loss scaling.
        """
        # Written anew each step: this device has no optimizer, and follows the reference's masters.
        self._ranks.write(masters, scales=scales)
        return self._ranks.replay(step, scale=scale).brought()[0]
