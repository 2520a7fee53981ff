"""Memory uses of tensor operations, per argument, derived from their schemas."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch

from zero_sim.sim import dispatch

Effect = Literal["read", "write", "update", "view", "statistics"]
"""`update`: reads and writes, such as `add_`. `view`: reads unless the result shares the argument's
memory. `statistics`: writes while training, otherwise reads."""


class Use(NamedTuple):
    """A tensor argument, or list of tensors, with its use."""

    index: int
    """Position in the schema. A call may pass the argument by name instead."""
    name: str
    effect: Effect


_METADATA_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "_has_compatible_shallow_copy_type",
        "_version",
        "dense_dim",
        "dim",
        "empty_like",
        "full_like",
        "is_coalesced",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_leaf",
        "is_neg",
        "is_pinned",
        "is_same_size",
        "is_signed",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "numel",
        "ones_like",
        "output_nr",
        "rand_like",
        "randint_like",
        "randn_like",
        "record_stream",
        "requires_grad_",
        "result_type",
        "retain_grad",
        "retains_grad",
        "set_data",
        "size",
        "sparse_dim",
        "storage_offset",
        "stride",
        "sym_is_contiguous",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
        "zeros_like",
    )
)
"""Operations that only use sizes and dtypes, which their schemas do not show."""

_TEMPLATES = {
    "aten::expand_as": "other",
    "aten::reshape_as": "other",
    "aten::to": "other",
    "aten::type_as": "other",
    "aten::view_as": "other",
}
"""Arguments that only provide sizes and dtypes."""

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Collectives lend their arguments, which does not count as an access by the program."""

_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in (
        "_foreach_copy",
        "_foreach_zero",
        "bernoulli",
        "cauchy",
        "copy",
        "exponential",
        "fill",
        "geometric",
        "index_copy",
        "index_fill",
        "index_put",
        "_index_put_impl",
        "log_normal",
        "masked_fill",
        "masked_scatter",
        "normal",
        "put",
        "random",
        "resize",
        "scatter",
        "uniform",
        "zero",
    )
)
"""Operations that write all elements in place, or some, without reading them."""

_UNDECLARED: dict[str, dict[str, Effect]] = {
    "aten::native_batch_norm": {"running_mean": "statistics", "running_var": "statistics"},
    "aten::batch_norm_update_stats": {"running_mean": "write", "running_var": "write"},
    "fsdp::all_gather_copy_in": {"all_gather_output": "write"},
}
"""Arguments that the operation writes although its schema does not declare this."""


@functools.cache
def uses_of(operation: Any) -> tuple[Use, ...]:
    """Return an operation's uses of its tensor arguments; empty if it touches no data.

    Higher-order operators have no uses.
    """
    schema = dispatch.schema_of(operation)
    if schema is None:
        return ()
    name = schema.name
    # In-place views, such as transpose_, only write sizes and strides.
    if name in _METADATA_ONLY or torch.Tag.inplace_view in operation.tags:
        return ()
    if name.partition("::")[0] in _COLLECTIVE_NAMESPACES:
        return ()
    undeclared = _UNDECLARED.get(name, {})
    return tuple(
        Use(index, argument.name, undeclared.get(argument.name) or _effect(name, argument))
        for index, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type) and _TEMPLATES.get(name) != argument.name
    )


def _effect(name: str, argument: Any) -> Effect:
    # Alias info marks arguments that the result may share, or that the operation writes.
    if argument.alias_info is None:
        return "read"
    if not argument.alias_info.is_write:
        return "view"
    # Operations with `out=` never read the output. Their names do not end in an underscore.
    return "update" if name.endswith("_") and name not in _OVERWRITING else "write"


def is_training(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return the argument `training`, which decides if `statistics` are written."""
    for index, argument in enumerate(dispatch.schema_of(operation).arguments):
        if argument.name == "training":
            # Optional arguments can be missing or passed by name.
            return bool(args[index] if index < len(args) else kwargs.get("training"))
    return False
