"""Options that replace what scenarios say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import click

from zero_sim.errors import UsageError

ANY_ORDER = "any"
"""Instead of an order's name: one that the judge is not told."""
_OWN_ORDERS = {"sim": "random-tree", "gloo": "gloo", "nccl": "nccl-ring"}
"""The order that each backend then adds in, or is said to."""


own_options = click.option(
    "--option",
    "said",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the target's own, whatever the case says; several times for several.",
)


def parse_own_options(said: Sequence[str]) -> dict[str, str]:
    """What `--option` says, by name.

    Raises:
        UsageError: One has no name, or no value.
    """
    parsed: dict[str, str] = {}
    for each in said:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise UsageError(
                f"expected --option NAME=VALUE, got {each!r}. Try --option {name or 'NAME'}=VALUE."
            )
        parsed[name] = value
    return parsed


def own_options_again(said: Mapping[str, str]) -> list[str]:
    """What has to be said again to set the same options."""
    return [word for name, value in said.items() for word in ("--option", f"{name}={value}")]


def chosen_world(order: str | None, *, backend: str) -> Mapping[str, Any]:
    """The fields of `world` that `--order` puts in the place of what scenarios say.

    Args:
        order: The name of an order, or `any`; None where it was not given.
        backend: What carries the collectives.

    Raises:
        UsageError: There is no such order; lists those there are.
    """
    from zero_sim.scenario.spec import OrderName

    known = get_args(OrderName)
    if order is None:
        return {}
    if order == ANY_ORDER:
        return {"order": _OWN_ORDERS[backend], "order_known": False}
    if order not in known:
        names = ", ".join((*known, ANY_ORDER))
        raise UsageError(f"expected --order to be one of {names}; got {order!r}.")
    return {"order": order}


def chosen_options(*, backend: str, order: str | None, native: bool, device: str) -> list[str]:
    """What has to be said again to run a case in the same way."""
    options = [] if backend == "sim" else ["--backend", backend]
    if order is not None:
        options += ["--order", order]
    if device != "cpu":
        options += ["--device", device]
    return [*options, "--native"] if native else options


def check_options(*, backend: str, native: bool, device: str, traced: bool, jobs: int = 1) -> None:
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
    if backend != "sim" and traced:
        raise UsageError(
            f"expected --trace with --backend sim, got --backend {backend}: only the simulated "
            "world records events."
        )
    if backend != "sim" and jobs > 1:
        raise UsageError(
            f"expected --jobs with --backend sim, got --backend {backend}: there each rank is a "
            "process already."
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
