"""Constructors of findings, used by checks.

Several functions return a *template*: a finding with its coordinates, but without values. The
judge then compares, and fills it in by `differing`, `outside` or `missing`.
"""

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
"""Elements to keep of a differing tensor: enough to show a pattern, not a whole model."""


def loss(step: int, rank: int, micro: int) -> Finding:
    """Return a template for a training loss."""
    return Finding(
        check=Check.EQUALITY_LOSS,
        message=f"the loss of micro-batch {micro} differs",
        step=step,
        phase=Phase.FORWARD,
        rank=rank,
    )


def evaluated_loss(step: int, rank: int) -> Finding:
    """Return a template for a loss under `no_grad`."""
    message = (
        "the loss of a forward under no_grad differs from the loss of micro-batch 0, which has "
        "the same params and batch"
    )
    return replace(loss(step, rank, 0), message=message)


_COMPARED = {
    Check.EQUALITY_LOAD: (Phase.LOAD, "{key} differs from the checkpoint"),
    # `owned` fills in `{key}`.
    Check.EQUALITY_PARAMS: (Phase.GATHER, "the working param differs"),
    Check.EQUALITY_GRAD: (Phase.REDUCE, "the reduced gradient differs"),
    Check.EQUALITY_SCALE: (Phase.WRITE_BACK, "the scale of the fp8 param differs"),
    Check.EQUALITY_NORM: (Phase.NORM, "the norm of the gradient differs"),
    Check.EQUALITY_MASTER: (Phase.OPTIMIZER, "the fp32 master differs"),
    Check.EQUALITY_STATE: (Phase.OPTIMIZER, "optimizer state {key!r} differs"),
    Check.INVARIANT_ONE_DEVICE: (
        Phase.REDUCE,
        "the gradient of ranks with the same data differs from the gradient on one device",
    ),
    Check.INVARIANT_CAST: (Phase.WRITE_BACK, "the working param differs from its cast master"),
}
"""Phase and message of each check that compares a tensor."""


def _compared(check: Check, step: int, rank: int, param: str | None = None) -> Finding:
    phase, message = _COMPARED[check]
    is_whole = check in (Check.EQUALITY_PARAMS, Check.EQUALITY_GRAD)
    # Whole tensors start at element 0. Other templates get an offset later, or have none.
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
"""Template for a working param."""
gradient = partial(_compared, Check.EQUALITY_GRAD)
"""Template for a param's whole reduced gradient."""
scale = partial(_compared, Check.EQUALITY_SCALE)
"""Template for an fp8 param's scale."""
norm = partial(_compared, Check.EQUALITY_NORM)
"""Template for the gradient norm."""

_CHECKS = {
    "loss_scale": Check.EQUALITY_LOSS_SCALE,
    "norm": Check.EQUALITY_NORM,
    "skipped": Check.EQUALITY_SKIPPED,
    "zeros": Check.EQUALITY_ZEROS,
}
"""Checks of the values in a step's report."""


def misreported(name: str, step: int, rank: int, *, expected: object, got: object) -> Finding:
    """Return a finding for a wrong value in the engine's report of a step."""
    return Finding(
        check=_CHECKS[name],
        step=step,
        phase=Phase.NORM,
        rank=rank,
        message=f"the step's {name}: expected {expected!r}, got {got!r}",
        manner=_manner_said(expected, got),
    )


def wrongly_raised(step: int, rank: int, *, raised: str) -> Finding:
    """Return a finding for a step that raised without cause, or should have raised.

    Args:
        step: Counted from 0.
        rank: Group rank.
        raised: The exception as text; empty if the step returned.
    """
    message = (
        f"expected step() to return, because every gradient is finite, but it raised: {raised}"
        if raised
        else "expected step() to raise on a gradient that is not finite, because the target "
        "declares nonfinite = 'raises', but it returned"
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
    """Return a finding for a reported value outside its interval."""
    low, high = ends
    return Finding(
        check=_CHECKS[name],
        step=step,
        phase=Phase.NORM,
        rank=rank,
        message=f"the step's {name}: expected {low!r} to {high!r} for any order of addition, "
        f"got {got!r}",
        manner="smaller" if got < low else "larger" if got > high else "values",
    )


def missing(at: Finding, message: str) -> Finding:
    """Return a finding for a value that only one side has.

    Args:
        at: Template.
        message: Names the side that lacks the value.
    """
    return replace(at, message=message, manner=_behind(at.manner, "missing"))


def owned(check: Check, key: str, step: int, rank: int, place: Place) -> Finding:
    """Return a template for an owned place; offsets are those of its first element."""
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
    """Fill in the first differing element, its values, and the number of differences.

    Args:
        at: Template, with the offset of the first compared element.
        expected: Any shape.
        got: Tensor of the system.
        hint: Recognised value, used if no common factor explains the difference.
        explain: Takes the common factor, returns its cause: `3 x the mean: ...`, or empty.
    """
    if expected.dtype != got.dtype or expected.numel() != got.numel():
        # Not comparable element by element.
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
        # Any two numbers have a factor, so for a scalar prefer the recognised value.
        message=_with_cause(
            at.message,
            None if hint and not expected.dim() else find_ratio(expected, got),
            hint=hint,
            explain=explain,
        ),
        offset_in_param=None if at.offset_in_param is None else at.offset_in_param + first,
        flat_offset=None if at.flat_offset is None else at.flat_offset + first,
        # Hex floats are exact; the decimals below are easier to read.
        expected=_hex(difference.expected) + _byte(expected, first),
        got=_hex(difference.got) + _byte(got, first),
        # repr is the shortest decimal that round-trips.
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
    """Fill in the first element that no order of addition can produce.

    Args:
        at: Template, with the offset of the first compared element.
        interval: Bounds by element. # 1D
        inside: True for elements within the bounds. # 1D, bool
        got: # 1D
        cause: Cause of a common factor, as returned by `explain` in `differing`.
    """
    stray = ~inside
    first = int(stray.nonzero()[0])
    low, high = float(interval.low[first]), float(interval.high[first])
    # The sum is equal in every order, so the interval has a single value.
    is_one = low == high
    # Evidence needs an expected tensor.
    middle = ((interval.low + interval.high) / 2).to(got.dtype)
    orders = (
        "the value that any order of addition gives"
        if is_one
        else "all values that some order of addition gives"
    )
    return replace(
        at,
        message=f"{at.message.removesuffix(' differs')} is {cause}"
        if cause
        else f"{at.message} from {orders}",
        offset_in_param=None if at.offset_in_param is None else at.offset_in_param + first,
        flat_offset=None if at.flat_offset is None else at.flat_offset + first,
        expected=_hex(low) if is_one else f"[{_hex(low)}, {_hex(high)}]",
        got=_hex(got[first].item()),
        expected_value=repr(low) if is_one else f"{low!r} to {high!r}",
        got_value=repr(got[first].item()),
        differ_count=int(stray.sum()),
        compared_count=stray.numel(),
        differ_spans=_moved(spans_of(stray), by=at.offset_in_param or 0),
        # Only these two manners, because an interval has no sign or factor to compare with.
        manner="values" if bool(got[stray].isfinite().all()) else "nonfinite",
        evidence=_evidence(first, middle, got),
    )


def _moved(spans: Sequence[tuple[int, int]], *, by: int) -> tuple[tuple[int, int], ...]:
    return tuple((start + by, stop + by) for start, stop in spans)


def _evidence(first: int, expected: Tensor, got: Tensor) -> Evidence:
    # Center on the first difference.
    start = max(0, first - EVIDENCE_ELEMS_MAX // 2)
    stop = start + EVIDENCE_ELEMS_MAX
    # Copy, because views of live state change in the next step. To the CPU, because processes
    # without the device also receive results.
    sides = (tensor.detach().reshape(-1)[start:stop] for tensor in (expected, got))
    kept = (side.to("cpu", copy=True) for side in sides)
    return Evidence(start=start, expected=next(kept), got=next(kept))


def _manner_said(expected: object, got: object) -> str:
    """Return the manner in which a reported value differs."""
    if got is None:
        return "missing"
    numbers = all(isinstance(each, int | float) for each in (expected, got))
    # Flags and text have no order, so the value itself is the manner.
    if isinstance(got, bool) or not numbers:
        return str(got).lower()
    return "smaller" if got < expected else "larger"  # pyrefly: ignore


def _behind(key: str, manner: str) -> str:
    """Put the tensor's key, if it has one, before the manner."""
    return f"{key} {manner}".strip()


def _hex(value: float) -> str:
    return float(value).hex()


def _byte(values: Tensor, index: int) -> str:
    """Return an fp8 number's byte, because values alone do not show which fp8 format is used."""
    # Only fp8 dtypes are floating-point with one byte.
    if not values.is_floating_point() or values.element_size() != 1:
        return ""
    return f" = byte {int(values.reshape(-1)[index].view(torch.uint8)):#04x}"


def with_index(finding: Finding, shapes: dict[str, tuple[int, ...]]) -> Finding:
    """Add the index in the param's shape, if only the flat offset is known."""
    if finding.index is not None or finding.param not in shapes or finding.offset_in_param is None:
        return finding
    shape = shapes[finding.param]
    numel = torch.Size(shape).numel()
    if finding.offset_in_param >= numel:
        # An offset in padding has no index.
        return finding
    index = torch.unravel_index(torch.tensor(finding.offset_in_param), shape) if shape else ()
    return replace(finding, index=tuple(int(i) for i in index))


Manner = Literal[
    "shape", "missing", "nonfinite", "finite", "zeros", "nonzeros", "sign", "one-ulp",
    "smaller", "larger", "moved", "values",
]  # fmt: skip
"""Manner of a difference. The first that fits all differing elements:

    shape      different dtype or number of elements
    missing    only one side has a value
    finite     expected NaN or infinity, got finite values
    nonfinite  unexpected NaN or infinity
    zeros      got zero
    nonzeros   expected zero
    sign       opposite sign
    one-ulp    next representable value
    smaller    scaled down by a common factor
    larger     scaled up by a common factor
    moved      values from elsewhere in the tensor
    values     anything else
"""

_FACTOR_MAX = 4096
"""Largest factor n or 1/n accepted for a single element, because any two numbers have a factor."""


def manner_of(expected: Tensor, got: Tensor) -> Manner:
    """Return the manner in which two tensors differ.

    Args:
        expected: Any shape and dtype.
        got: Tensor of the system, different in at least one element.
    """
    if expected.dtype != got.dtype or expected.numel() != got.numel():
        return "shape"
    expected, got = expected.detach().reshape(-1), got.detach().reshape(-1)
    differs = unequal(expected, got)
    if not expected.is_floating_point():
        # Integers have no NaN and no rounding.
        return _of_values(expected[differs].double(), got[differs].double(), expected, eps=0.0)
    wanted, came = expected[differs].double(), got[differs].double()
    if not bool(wanted.isfinite().all()):
        return "finite" if bool(came.isfinite().all()) else "nonfinite"
    if not bool(came.isfinite().all()):
        return "nonfinite"
    # Distance in representable values, so it does not depend on the magnitude.
    apart = (places_of(expected[differs]) - places_of(got[differs])).abs()
    is_near = bool((apart <= 1).all())
    return _of_values(
        wanted, came, expected.double(), eps=torch.finfo(expected.dtype).eps, is_near=is_near
    )


def _of_values(
    wanted: Tensor, came: Tensor, expected: Tensor, *, eps: float, is_near: bool = False
) -> Manner:
    """Return the manner of finite differing elements, in fp64; `eps` belongs to their own dtype."""
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
    # Zeros and single elements would match by chance.
    if wanted.numel() > 1 and bool(torch.isin(came, expected[expected != 0]).all()):
        return "moved"
    return "values"


def _factor(wanted: Tensor, came: Tensor, *, eps: float) -> float | None:
    """Return the common factor of all elements, up to two roundings; None without one."""
    if not bool(wanted.all()):
        return None
    # The largest element has the smallest relative rounding.
    largest = int(wanted.abs().argmax())
    factor = float(came[largest] / wanted[largest])
    inverse = 1 / factor if factor else 0.0
    nearest = float(round(inverse)) if abs(factor) < 1 else float(round(factor))
    exact = (1 / nearest if nearest else 0.0) if abs(factor) < 1 else nearest
    # Any single value has some factor. Only n or 1/n is evidence without a second value.
    is_whole = 1 < abs(nearest) <= _FACTOR_MAX and abs(factor - exact) <= 2 * eps * abs(factor)
    if not is_whole and wanted.unique().numel() < 2:
        return None
    factor = exact if is_whole else factor
    # Allow for two roundings of each element.
    off = (came - factor * wanted).abs()
    return factor if bool((off <= 2 * eps * (factor * wanted).abs()).all()) else None
