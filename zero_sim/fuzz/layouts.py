"""Drawn layouts without cases, for tests that need thousands.

[Note: one draw per layout]
Planning a layout takes as long as two or three Hypothesis draws, so drawing each value separately
would take ten times as long as the plan. So a layout is drawn at once as a byte string: four bytes
for the policy and two per param. Byte strings shrink to fewer params and lower bytes, so every
table below begins with the simplest value.
"""

from __future__ import annotations

from hypothesis import strategies as st

from zero_sim.layout import BufferPlan, LayoutPolicy, ParamSpec, plan_buffers

Layout = tuple[list[ParamSpec], LayoutPolicy, tuple[BufferPlan, ...]]

PARAMS_MAX = 8
_POLICY_BYTES = 4
_PARAM_BYTES = 2
_SIZES = (1, 0, *range(2, 41), 63, 64, 65, 1000)
# Dimensions after the first; None for a scalar.
_COLUMNS: tuple[tuple[int, ...] | None, ...] = ((), (), (), (1,), (2,), (3,), (0,), None)
_KINDS = ("dense", "dense", "expert")
_DTYPES = ("fp32", "bf16")
_SHARD_COUNTS = (1, 2, 3, 4, 5, 6, 7, 12, 64)
_PARTITIONS = ("padded", "padded", "padded", "uneven", "one-owner", "rows")
_ALIGN_ELEMS = (1, 2, 3, 8, 128)
_ALIGN_BYTES = (1, 1, 2, 6, 16, 256)
_ORDERS = ("registration", "reverse")


def layouts(*, params_max: int = PARAMS_MAX) -> st.SearchStrategy[Layout]:
    """Return a strategy of layouts: params, policy and planned buffers.

    Args:
        params_max: Maximum number of params, at least 1.
    """
    least, most = (_POLICY_BYTES + _PARAM_BYTES * params for params in (1, params_max))
    return st.binary(min_size=least, max_size=most).map(_unpacked)


def _unpacked(drawn: bytes) -> Layout:
    policy_bytes, param_bytes = drawn[:_POLICY_BYTES], drawn[_POLICY_BYTES:]
    # Not strict: an odd last byte is ignored.
    pairs = zip(param_bytes[::2], param_bytes[1::2], strict=False)
    specs = [_param(index, *pair) for index, pair in enumerate(pairs)]
    shards, elems, others, bucket = policy_bytes
    # This byte contains two values: the quotient is the alignment, the remainder the partition.
    elems, partition = divmod(elems, len(_PARTITIONS))
    others, order = divmod(others, len(_ORDERS))
    # Only padded shards can be aligned, and `rows` needs a bucket per param.
    padded = _PARTITIONS[partition] == "padded"
    policy = LayoutPolicy(
        shard_count=_SHARD_COUNTS[shards % len(_SHARD_COUNTS)],
        align_elems=_ALIGN_ELEMS[elems % len(_ALIGN_ELEMS)] if padded else 1,
        align_bytes=_ALIGN_BYTES[others % len(_ALIGN_BYTES)] if padded else 1,
        bucket_elems=1 if _PARTITIONS[partition] == "rows" else _bucket(bucket, specs),
        param_order=_ORDERS[order],
        partition=_PARTITIONS[partition],
    )
    return specs, policy, plan_buffers(specs, policy=policy)


def _param(index: int, others: int, size: int) -> ParamSpec:
    others, dtype = divmod(others, len(_DTYPES))
    others, kind = divmod(others, len(_KINDS))
    columns = _COLUMNS[others % len(_COLUMNS)]
    return ParamSpec(
        name=f"p{index}",
        shape=() if columns is None else (_SIZES[size % len(_SIZES)], *columns),
        dtype=_DTYPES[dtype],
        kind=_KINDS[kind],
    )


def _bucket(drawn: int, specs: list[ParamSpec]) -> int | None:
    """Return a bucket size: None, small, or an exact fit for the first few params."""
    number, form = divmod(drawn, 3)
    if form == 0:
        return None
    if form == 1:
        return number + 1
    first = specs[: number % len(specs) + 1]
    return max(1, sum(spec.numel for spec in first))
