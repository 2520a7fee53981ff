"""The same training on a single device that processes the data once.

If N ranks have equal data, their mean gradient equals a single rank's gradient in mathematics. So
does their sum if each loss is divided by N. In floating point, adding N equal numbers does not
always give N times the number, because partial sums round. It does for two ranks, for four, and for
larger powers of two if pairs are added.
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
    """The same model and data on one rank, with a mean loss and undivided gradients.

    Args:
        scenario: The case, with all its ranks.
        device: Module device, such as `cpu`.
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
        """Place every param in memory as on a given rank.

        Args:
            addresses: Memory layout of each param; see [Note: addresses].
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
        """Return a step's gradients by param, each ND, in the gradient dtype.

        Masters are fp32, from before the step. Call it inside `isolated()`.
        """
        # Rewrite the params each step, because this device has no optimizer of its own.
        self._ranks.write(masters, scales=scales)
        return self._ranks.replay(step, scale=scale).brought()[0]
