"""All mutants, and those of the list of public bugs that cannot exist here."""

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
"""Every mutant; ids are unique."""

IMPOSSIBLE = {
    "M01": "params have no padding of their own here; the stride of padded buckets is broken",
    "M13": "a param that does not fit opens a bucket and is never dropped; it is left out",
    "M17": "buckets are as long as what they hold; with stage 0 a tail is sent along",
    "M19": "autograd tells of a param once a backward; its bucket is reduced once a name",
    "M21": "a tied param has one place; its gradient is counted once a name",
    "M25": "frozen params are in no buffer; masters are kept for them",
    "M47": "buckets are reduced where they lie; a staging buffer is put in between",
    "M53": "gradients and params share no memory; they are not zeroed during a gather",
    "M55": "one optimizer steps both kinds; an element of an expert's gradient is overwritten",
    "M59": "nothing but training runs a forward; waiting for all params drops the handles",
    "M71": "padding is outside of what is measured; it is added to the count of zeros",
    "M85": "torch keeps a counter for each param; it is advanced once a bucket",
    "M93": "pieces are named by param and span, not by offset; they are rolled by the padding",
    "M95": "the manifest says what each file holds; pieces are joined in string order",
    "M99": "working params are not saved; they lag behind the masters after a load",
    "M105": "0D state is kept beside the tensors; it is made as long as the part at load",
    "M107": "gradients of one program come in one order; ranks differ by what they use",
    "M113": "stage 1 keeps whole gradients by design; their fp32 copies are kept",
}
"""Of listed bugs whose form this design rules out: why, and what the mutant does instead."""


def find_mutants(
    ids: Sequence[str] = (), *, kind: str | None = None, core: bool = False
) -> tuple[Mutant, ...]:
    """Return the mutants that are asked for; all where nothing is.

    Args:
        ids: Their ids.
        kind: Only those of a class.
        core: Only the core set.

    Raises:
        UsageError: If an id or class is not known; names those that are.
    """
    known = {mutant.id for mutant in MUTANTS}
    unknown = [wanted for wanted in ids if wanted not in known]
    if unknown:
        raise UsageError(
            f"expected ids of mutants, such as {min(known)} or {max(known)}, got "
            f"{', '.join(map(repr, unknown))}.{did_you_mean(unknown[0], sorted(known))}"
        )
    if kind is not None and kind not in CLASSES:
        raise UsageError(f"expected a class, one of {', '.join(CLASSES)}; got {kind!r}")
    return tuple(
        mutant
        for mutant in MUTANTS
        if (not ids or mutant.id in ids)
        and (kind is None or mutant.kind == kind)
        and (mutant.core or not core)
    )
