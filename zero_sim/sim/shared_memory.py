"""Exact overlap of two tensors' memory, for any shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the half-open range of addresses from a tensor's first to its last byte.

    Empty for tensors without elements, or with a layout without strides.
    """
    try:
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            return start, start + tensor.nbytes
        # With gaps, the last element in memory is at the end of every dim.
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
    except RuntimeError:
        # Sparse tensors have neither a data pointer nor strides.
        return 0, 0
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def shared_elems(given: Tensor, other: Tensor) -> tuple[int, int] | None:
    """Find the elements of `given` that share memory with `other`. Any strides and dtypes.

    Returns:
        Half-open range of `given`'s elements in row-major order, from the first to the last element
        that shares a byte with `other`. Elements between them may share none. None without overlap.
    """
    start, stop = extent(given)
    other_start, other_stop = extent(other)
    first, last = max(start, other_start), min(stop, other_stop)
    if first >= last:
        return None
    elem_bytes = given.element_size()
    # Without gaps, elements follow from addresses. Round the stop up.
    if given.is_contiguous() and other.is_contiguous():
        return (first - start) // elem_bytes, -((start - last) // elem_bytes)
    starts, run_bytes = _runs(given.shape, given.stride(), given)
    # The order of `other`'s elements does not matter, so sort by stride to get the fewest runs.
    dims = sorted(zip(other.stride(), other.shape, strict=True), reverse=True)
    # Stride 0 (expanded dims) repeats the same memory.
    dims = [(stride, size) for stride, size in dims if stride]
    theirs, their_bytes = _runs([size for _, size in dims], [stride for stride, _ in dims], other)
    theirs.sort()
    # All their runs have equal length. So among their runs that overlap a run of ours, the last
    # reaches farthest, and the first starts earliest.
    reach = np.searchsorted(theirs, starts + run_bytes, side="left") - 1
    hit = (reach >= 0) & (theirs[reach] + their_bytes > starts)
    touched = np.flatnonzero(hit)
    if not touched.size:
        return None
    i, j = int(touched[0]), int(touched[-1])
    # The first and the last of our runs may overlap in part, so cut both to elements.
    begin = theirs[np.searchsorted(theirs, starts[i] - their_bytes, side="right")]
    into = max(int(begin - starts[i]), 0) // elem_bytes
    end = min(int(theirs[reach[j]] + their_bytes - starts[j]), run_bytes)
    run_elems = run_bytes // elem_bytes
    return i * run_elems + into, j * run_elems - (-end // elem_bytes)


def _runs(shape: Sequence[int], strides: Sequence[int], tensor: Tensor) -> tuple[np.ndarray, int]:
    """Return the start addresses of gapless runs, in row-major order, and their size in bytes."""
    elem_bytes = tensor.element_size()
    dims = list(zip(shape, strides, strict=True))
    # Inner dims without gaps make a single run.
    run_elems = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == run_elems):
        run_elems *= dims.pop()[0]
    starts = np.array([tensor.data_ptr()], dtype=np.int64)
    # Row-major: an outer dim varies slower than inner dims.
    for size, stride in dims:
        steps = np.arange(size, dtype=np.int64) * (stride * elem_bytes)
        starts = (starts[:, None] + steps).reshape(-1)
    return starts, run_elems * elem_bytes
