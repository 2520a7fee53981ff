"""Turns what a check saw into the record that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from zero_sim.findings.compare import find_difference, places_of, spans_of, unequal
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.ratio import Ratio, find_ratio, ratio_in_words
from zero_sim.findings.records import Evidence, Finding
from zero_sim.reference import Interval
from zero_sim.scenario.checks import Check
from zero_sim.targets import Place

EVIDENCE_ELEMS_MAX = 1024
"""Elements kept of a tensor that differs: enough to see a pattern, never a whole model."""


def loss(step: int, rank: int, micro: int) -> Finding:
    """A loss, before it is compared."""
    return Finding(
        check=Check.EQUALITY_LOSS,
        message=f"the loss of micro-batch {micro} differs",
        step=step,
        phase=Phase.FORWARD,
        rank=rank,
    )


def evaluated_loss(step: int, rank: int) -> Finding:
    """A loss under `no_grad`, before it is compared."""
    message = (
        "a forward under no_grad has another loss than the forward of micro-batch 0, "
        "which has the same params and the same batch"
    )
    return replace(loss(step, rank, 0), message=message)


_COMPARED = {
    Check.EQUALITY_LOAD: (Phase.LOAD, "{key} is not what was saved"),
    Check.EQUALITY_PARAMS: (Phase.GATHER, "the working param differs"),
    Check.EQUALITY_GRAD: (Phase.REDUCE, "the reduced gradient differs"),
    Check.EQUALITY_SCALE: (Phase.WRITE_BACK, "the scale of the fp8 param differs"),
    Check.EQUALITY_NORM: (Phase.NORM, "the norm of the gradient differs"),
    Check.EQUALITY_MASTER: (Phase.OPTIMIZER, "the fp32 master differs"),
    Check.EQUALITY_STATE: (Phase.OPTIMIZER, "optimizer state {key!r} differs"),
    Check.INVARIANT_ONE_DEVICE: (
        Phase.REDUCE,
        "ranks that all saw the same data do not have the gradient of one device",
    ),
    Check.INVARIANT_CAST: (Phase.WRITE_BACK, "the working param is not its master, cast"),
}
"""Phase and message of each check of what a rank has."""


def _compared(check: Check, step: int, rank: int, param: str | None = None) -> Finding:
    phase, message = _COMPARED[check]
    is_whole = check in (Check.EQUALITY_PARAMS, Check.EQUALITY_GRAD)
    return Finding(
        check=check,
        message=message,
        step=step,
        phase=phase,
        rank=rank,
        param=param,
        offset_in_param=0 if is_whole else None,
    )


param = partial(_compared, Check.EQUALITY_PARAMS)
"""A working param, before it is compared."""
gradient = partial(_compared, Check.EQUALITY_GRAD)
"""The reduced gradient of a whole param, before it is compared."""
scale = partial(_compared, Check.EQUALITY_SCALE)
"""The scale of a param in fp8, before it is compared."""
norm = partial(_compared, Check.EQUALITY_NORM)
"""The norm of the gradient, before it is compared."""

_SAID = {
    "loss_scale": Check.EQUALITY_LOSS_SCALE,
    "norm": Check.EQUALITY_NORM,
    "skipped": Check.EQUALITY_SKIPPED,
    "zeros": Check.EQUALITY_ZEROS,
}
"""What checks each thing that an engine says of a step."""


def misreported(name: str, step: int, rank: int, *, expected: object, got: object) -> Finding:
    """Something that the engine says of the step is not so."""
    return Finding(
        check=_SAID[name],
        step=step,
        phase=Phase.NORM,
        rank=rank,
        message=f"the step's {name}: expected {expected!r}, got {got!r}",
        manner=_manner_said(expected, got),
    )


def wrongly_raised(step: int, rank: int, *, raised: str) -> Finding:
    """A step that raised without a cause, or returned with one."""
    message = (
        f"step() raised though every gradient is finite: {raised}"
        if raised
        else "step() returned though a gradient is not finite, and the target declares "
        "nonfinite = 'raises'"
    )
    return Finding(
        check=Check.EQUALITY_SKIPPED,
        step=step,
        phase=Phase.NORM,
        rank=rank,
        message=message,
        manner=_manner_said(not raised, bool(raised)),
    )


def misreported_range(
    name: str, step: int, rank: int, *, ends: tuple[float, float], got: float
) -> Finding:
    """Something that the engine says of the step does not lie where it must."""
    low, high = ends
    return Finding(
        check=_SAID[name],
        step=step,
        phase=Phase.NORM,
        rank=rank,
        message=f"the step's {name}: expected {low!r} to {high!r}, whatever the order of addition, "
        f"got {got!r}",
        manner="smaller" if got < low else "larger" if got > high else "values",
    )


def missing(at: Finding, message: str) -> Finding:
    """A finding for what one side has and the other has not.

    Args:
        at: Of what, before it is compared.
        message: Who has it not.
    """
    return replace(at, message=message, manner=_behind(at.manner, "missing"))


def owned(check: Check, key: str, step: int, rank: int, place: Place) -> Finding:
    """Something a rank owns, before it is compared; offsets are of the part's first element."""
    phase, message = _COMPARED[check]
    return Finding(
        check=check,
        message=message.format(key=key),
        step=step,
        phase=phase,
        rank=rank,
        param=place.param,
        offset_in_param=place.start,
        flat_offset=place.flat_start,
        bucket=place.bucket,
        shard=place.shard,
        shard_start=place.shard_start,
        shard_stop=place.shard_stop,
        manner=key,
    )


def differing(
    at: Finding,
    expected: Tensor,
    got: Tensor,
    *,
    hint: str = "",
    explain: Callable[[Ratio | None], str] = lambda ratio: "",
) -> Finding:
    """Fill in the first element that differs, its values and how many more there are.

    Args:
        at: The finding, of the first element that was compared.
        expected: Any shape.
        got: What came.
        hint: What is known of it besides; said where no one factor explains it.
        explain: Gives the cause of a factor, as in `3 x the mean: ...`; empty if there is none.
    """
    if expected.dtype != got.dtype or expected.numel() != got.numel():
        return replace(
            at,
            message=f"{at.message}: expected {expected.numel()} elements of {expected.dtype}, "
            f"got {got.numel()} of {got.dtype}",
            manner=_behind(at.manner, "shape"),
            evidence=_evidence(0, expected, got),
        )
    difference = find_difference(expected, got)
    assert difference is not None, "same_bits and find_difference must agree"
    first = difference.first
    return replace(
        at,
        # One number has many factors: that it is known to be another one tells more.
        message=_with_cause(
            at.message,
            None if hint and not expected.dim() else find_ratio(expected, got),
            hint=hint,
            explain=explain,
        ),
        offset_in_param=None if at.offset_in_param is None else at.offset_in_param + first,
        flat_offset=None if at.flat_offset is None else at.flat_offset + first,
        expected=_hex(difference.expected) + _byte(expected, first),
        got=_hex(difference.got) + _byte(got, first),
        expected_value=repr(difference.expected),
        got_value=repr(difference.got),
        ulp=difference.ulp,
        differ_count=difference.differ_count,
        compared_count=difference.compared_count,
        differ_spans=_moved(difference.spans, by=at.offset_in_param or 0),
        manner=_behind(at.manner, manner_of(expected, got)),
        evidence=_evidence(first, expected, got),
    )


def _with_cause(
    message: str, ratio: Ratio | None, *, hint: str, explain: Callable[[Ratio | None], str]
) -> str:
    if cause := explain(ratio):
        return f"{message.removesuffix(' differs')} is {cause}"
    return ": ".join(filter(None, [message, ratio_in_words(ratio) or hint]))


def outside(
    at: Finding, interval: Interval, inside: Tensor, got: Tensor, *, cause: str = ""
) -> Finding:
    """Fill in the first element that no order of addition gives.

    Args:
        at: The finding, of the part's first element.
        interval: 1D: what is owed of the part.
        inside: 1D, bool: which elements lie within it.
        got: 1D.
        cause: Of a factor, as `explain` of `differing` gives it.
    """
    stray = ~inside
    first = int(stray.nonzero()[0])
    low, high = float(interval.low[first]), float(interval.high[first])
    is_one = low == high
    middle = ((interval.low + interval.high) / 2).to(got.dtype)
    orders = "every order of addition gives" if is_one else "any order of addition can give"
    return replace(
        at,
        message=f"{at.message.removesuffix(' differs')} is {cause}"
        if cause
        else f"{at.message} from what {orders}",
        offset_in_param=None if at.offset_in_param is None else at.offset_in_param + first,
        flat_offset=None if at.flat_offset is None else at.flat_offset + first,
        expected=_hex(low) if is_one else f"[{_hex(low)}, {_hex(high)}]",
        got=_hex(got[first].item()),
        expected_value=repr(low) if is_one else f"{low!r} to {high!r}",
        got_value=repr(got[first].item()),
        differ_count=int(stray.sum()),
        compared_count=stray.numel(),
        differ_spans=_moved(spans_of(stray), by=at.offset_in_param or 0),
        manner="values" if bool(got[stray].isfinite().all()) else "nonfinite",
        evidence=_evidence(first, middle, got),
    )


def _moved(spans: Sequence[tuple[int, int]], *, by: int) -> tuple[tuple[int, int], ...]:
    return tuple((start + by, stop + by) for start, stop in spans)


def _evidence(first: int, expected: Tensor, got: Tensor) -> Evidence:
    start = max(0, first - EVIDENCE_ELEMS_MAX // 2)
    stop = start + EVIDENCE_ELEMS_MAX
    # Views of live state, which the next step overwrites; and results travel, but devices do not.
    sides = (tensor.detach().reshape(-1)[start:stop] for tensor in (expected, got))
    kept = (side.to("cpu", copy=True) for side in sides)
    return Evidence(start=start, expected=next(kept), got=next(kept))


def _manner_said(expected: object, got: object) -> str:
    """How something that is said of a step differs from what is so."""
    if got is None:
        return "missing"
    numbers = all(isinstance(each, int | float) for each in (expected, got))
    if isinstance(got, bool) or not numbers:
        return str(got).lower()
    return "smaller" if got < expected else "larger"  # pyrefly: ignore


def _behind(key: str, manner: str) -> str:
    """A manner behind the key of what differs, if it has one."""
    return f"{key} {manner}".strip()


def _hex(value: float) -> str:
    return float(value).hex()


def _byte(values: Tensor, index: int) -> str:
    """The byte of an fp8 number, which is what travels and what tells the two formats apart."""
    if not values.is_floating_point() or values.element_size() != 1:
        return ""
    return f" = byte {int(values.reshape(-1)[index].view(torch.uint8)):#04x}"


def with_index(finding: Finding, shapes: dict[str, tuple[int, ...]]) -> Finding:
    """Add the index in the param's own shape, where only the flat offset is known."""
    if finding.index is not None or finding.param not in shapes or finding.offset_in_param is None:
        return finding
    shape = shapes[finding.param]
    numel = torch.Size(shape).numel()
    if finding.offset_in_param >= numel:
        return finding
    index = torch.unravel_index(torch.tensor(finding.offset_in_param), shape) if shape else ()
    return replace(finding, index=tuple(int(i) for i in index))


Manner = Literal[
    "shape", "missing", "nonfinite", "finite", "zeros", "nonzeros", "sign", "one-ulp",
    "smaller", "larger", "moved", "values",
]  # fmt: skip
"""`shape`: of another dtype or number of elements; `missing`: one side has nothing. Of elements
that differ, the first that is true: `nonfinite` where one is NaN or infinite and should not be,
`finite` the other way round; all of them `zeros`, or `nonzeros` where zeros belong; all `sign`: the
other sign; all `one-ulp` away; all `smaller` or `larger` by one factor; all `moved`: what belongs
elsewhere in the tensor; else `values`."""

_FACTOR_MAX = 4096
"""Of one element alone anything is a factor: a whole number up to this, or one divided by it."""


def manner_of(expected: Tensor, got: Tensor) -> Manner:
    """The manner in which two tensors differ, which do.

    Args:
        expected: Of any shape and dtype.
        got: What came in its place.
    """
    if expected.dtype != got.dtype or expected.numel() != got.numel():
        return "shape"
    expected, got = expected.detach().reshape(-1), got.detach().reshape(-1)
    differs = unequal(expected, got)
    if not expected.is_floating_point():
        return _of_values(expected[differs].double(), got[differs].double(), expected, eps=0.0)
    wanted, came = expected[differs].double(), got[differs].double()
    if not bool(wanted.isfinite().all()):
        return "finite" if bool(came.isfinite().all()) else "nonfinite"
    if not bool(came.isfinite().all()):
        return "nonfinite"
    apart = (places_of(expected[differs]) - places_of(got[differs])).abs()
    is_near = bool((apart <= 1).all())
    return _of_values(
        wanted, came, expected.double(), eps=torch.finfo(expected.dtype).eps, is_near=is_near
    )


def _of_values(
    wanted: Tensor, came: Tensor, expected: Tensor, *, eps: float, is_near: bool = False
) -> Manner:
    """The manner of finite elements that differ, in fp64; `eps` of the dtype that they had."""
    if not bool(came.any()):
        return "zeros"
    if not bool(wanted.any()):
        return "nonzeros"
    if torch.equal(wanted, -came):
        return "sign"
    if is_near:
        return "one-ulp"
    factor = _factor(wanted, came, eps=eps)
    if factor is not None:
        return "smaller" if abs(factor) < 1 else "larger"
    if wanted.numel() > 1 and bool(torch.isin(came, expected[expected != 0]).all()):
        return "moved"
    return "values"


def _factor(wanted: Tensor, came: Tensor, *, eps: float) -> float | None:
    """By what all elements are multiplied, rounded twice at most; None where by several factors."""
    if not bool(wanted.all()):
        return None
    # The largest is the one whose rounding says least.
    largest = int(wanted.abs().argmax())
    factor = float(came[largest] / wanted[largest])
    inverse = 1 / factor if factor else 0.0
    nearest = float(round(inverse)) if abs(factor) < 1 else float(round(factor))
    exact = (1 / nearest if nearest else 0.0) if abs(factor) < 1 else nearest
    is_whole = 1 < abs(nearest) <= _FACTOR_MAX and abs(factor - exact) <= 2 * eps * abs(factor)
    if not is_whole and wanted.unique().numel() < 2:
        return None
    factor = exact if is_whole else factor
    off = (came - factor * wanted).abs()
    return factor if bool((off <= 2 * eps * (factor * wanted).abs()).all()) else None
