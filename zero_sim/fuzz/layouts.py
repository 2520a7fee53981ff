"""Layouts without a case around them, drawn by the thousand.

[Note: one draw a layout]
Planning a layout takes Hypothesis's time for two or three draws, and a value a draw takes ten times
as long as the plan. So all of a layout is drawn at once, as a string of bytes: four of the policy
and two of each param. It shrinks as such a string does, to fewer params and to lower bytes; every
table below begins with what is simplest.
"""

from __future__ import annotations

from hypothesis import strategies as st

from zero_sim.layout import BufferPlan, LayoutPolicy, ParamSpec, plan_buffers

Layout = tuple[list[ParamSpec], LayoutPolicy, tuple[BufferPlan, ...]]

PARAMS_MAX = 8
_POLICY_BYTES = 4
_PARAM_BYTES = 2
_SIZES = (1, 0, *range(2, 41), 63, 64, 65, 1000)
_COLUMNS: tuple[tuple[int, ...] | None, ...] = ((), (), (), (1,), (2,), (3,), (0,), None)
"""What follows the first dimension; None for a scalar."""
_KINDS = ("dense", "dense", "expert")
_DTYPES = ("fp32", "bf16")
_SHARD_COUNTS = (1, 2, 3, 4, 5, 6, 7, 12, 64)
_PARTITIONS = ("padded", "padded", "padded", "uneven", "one-owner", "rows")
_ALIGN_ELEMS = (1, 2, 3, 8, 128)
_ALIGN_BYTES = (1, 1, 2, 6, 16, 256)
_ORDERS = ("registration", "reverse")


def layouts(*, params_max: int = PARAMS_MAX) -> st.SearchStrategy[Layout]:
    """Params, a policy, and the buffers planned for both; buckets often fit a few params exactly.

    Args:
        params_max: Most params, of at least one.
    """
    least, most = (_POLICY_BYTES + _PARAM_BYTES * params for params in (1, params_max))
    return st.binary(min_size=least, max_size=most).map(_unpacked)


def _unpacked(drawn: bytes) -> Layout:
    policy_bytes, param_bytes = drawn[:_POLICY_BYTES], drawn[_POLICY_BYTES:]
    pairs = zip(param_bytes[::2], param_bytes[1::2], strict=False)
    specs = [_param(index, *pair) for index, pair in enumerate(pairs)]
    shards, elems, others, bucket = policy_bytes
    elems, partition = divmod(elems, len(_PARTITIONS))
    others, order = divmod(others, len(_ORDERS))
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
    number, form = divmod(drawn, 3)
    if form == 0:
        return None
    if form == 1:
        return number + 1
    first = specs[: number % len(specs) + 1]
    return max(1, sum(spec.numel for spec in first))
