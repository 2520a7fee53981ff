"""What the command line lets a user put in the place of what scenarios say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast, get_args

from zero_sim.errors import UsageError

if TYPE_CHECKING:
    from zero_sim.scenario.spec import OrderName


def known_order(order: str | None) -> OrderName | None:
    """The order of that name, if one is asked for.

    Raises:
        UsageError: There is none; lists those there are.
    """
    from zero_sim.scenario.spec import OrderName

    known = get_args(OrderName)
    if order is not None and order not in known:
        raise UsageError(f"expected --order to be one of {', '.join(known)}; got {order!r}.")
    return cast("OrderName | None", order)


def chosen_options(*, backend: str, order: str | None, native: bool, device: str) -> list[str]:
    """What has to be said again to run a case in the same way."""
    options = [] if backend == "sim" else ["--backend", backend]
    if order is not None:
        options += ["--order", order]
    if device != "cpu":
        options += ["--device", device]
    return [*options, "--native"] if native else options


def check_options(*, backend: str, native: bool, device: str, traced: bool, imported: bool) -> None:
    """Check that options go together.

    Raises:
        UsageError: They do not.
    """
    if backend == "sim" and native:
        raise UsageError("expected --native with --backend gloo or nccl, got --backend sim.")
    if backend != "sim" and device != "cpu":
        raise UsageError(
            f"expected --device with --backend sim, got --backend {backend}: gloo computes on the "
            "CPU, nccl on the GPU of each rank."
        )
    if backend != "sim" and imported:
        raise UsageError(
            f"expected a registered --target with --backend {backend}, got one to be imported, "
            "which only the simulated world does."
        )
    if backend != "sim" and traced:
        raise UsageError(
            f"expected --trace with --backend sim, got --backend {backend}: only the simulated "
            "world records events."
        )


def left_out_lines(counts: Mapping[str, int]) -> list[str]:
    """A line for each reason why cases were left out.

    Args:
        counts: Number of cases, by reason.
    """
    return [
        f"{count} case{'' if count == 1 else 's'} left out: {reason}"
        for reason, count in sorted(counts.items())
    ]
