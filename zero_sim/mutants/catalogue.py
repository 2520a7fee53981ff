"""All mutants, and public bugs that cannot exist in our system."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from zero_sim.errors import UsageError
from zero_sim.mutants import (
    buckets,
    checkpoints,
    costs,
    gathers,
    layout,
    lifetimes,
    partitions,
    places,
    reductions,
    residual,
    rules,
    sending,
    shards,
    updates,
    whole_params,
    wrapping,
)
from zero_sim.mutants.records import CLASSES, Mutant
from zero_sim.scenario.suggest import did_you_mean


def _in(module: ModuleType) -> list[Mutant]:
    return [member for member in vars(module).values() if isinstance(member, Mutant)]


MUTANTS: tuple[Mutant, ...] = tuple(
    one
    for module in (
        layout,
        buckets,
        lifetimes,
        updates,
        checkpoints,
        costs,
        reductions,
        gathers,
        shards,
        places,
        partitions,
        whole_params,
        sending,
        wrapping,
        residual,
        rules,
    )
    for one in _in(module)
)
"""All mutants, with unique ids."""

IMPOSSIBLE = {
    "M01": "params have no padding here; the stride of padded buckets is broken instead",
    "M13": "a param that does not fit opens a bucket and is never dropped; it is omitted instead",
    "M17": "a bucket's length is that of its params; with stage 0 a tail is sent along",
    "M19": "autograd reports a param once per backward; its bucket is reduced once per name",
    "M21": "a tied param has one position; its gradient is counted once per name",
    "M25": "frozen params are in no buffer; masters are kept for them",
    "M47": "buckets are reduced in place; a staging buffer is inserted",
    "M53": "gradients and params share no memory; gradients are not zeroed during a gather",
    "M55": "one optimizer steps both kinds; an element of an expert's gradient is overwritten",
    "M59": "only training runs a forward; waiting for all params drops the handles",
    "M71": "padding is never measured; it is added to the count of zeros",
    "M85": "torch keeps a counter for each param; it is advanced once per bucket",
    "M93": "pieces are named by param and span, not by offset; they are rolled by the padding",
    "M95": "the manifest lists the content of each file; pieces are joined in string order",
    "M99": "working params are not saved; they lag behind the masters after a load",
    "M105": "0-D state is stored beside the tensors; it is expanded to the shard's length at load",
    "M107": "gradients of one program arrive in one order; ranks differ by the params they use",
    "M113": "stage 1 keeps unsharded gradients by design; their fp32 copies are kept",
}
"""Reasons why our design rules out a listed bug, with the mutant's fault instead, by mutant id."""


def find_mutants(
    ids: Sequence[str] = (), *, kind: str | None = None, core: bool = False
) -> tuple[Mutant, ...]:
    """Select mutants; by default all.

    Args:
        ids: Ids to select.
        kind: Class to select, such as `NORM`.
        core: True to select only core mutants.

    Raises:
        UsageError: An id or the class is unknown.
    """
    known = {mutant.id for mutant in MUTANTS}
    unknown = [wanted for wanted in ids if wanted not in known]
    if unknown:
        raise UsageError(
            f"expected ids of mutants, such as {min(known)} or {max(known)}, got "
            f"{', '.join(map(repr, unknown))}.{did_you_mean(unknown[0], sorted(known))}"
        )
    if kind is not None and kind not in CLASSES:
        raise UsageError(f"expected a class, one of {', '.join(CLASSES)}; got {kind!r}.")
    return tuple(
        mutant
        for mutant in MUTANTS
        if (not ids or mutant.id in ids)
        and (kind is None or mutant.kind == kind)
        and (mutant.core or not core)
    )
