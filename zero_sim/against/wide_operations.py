"""Dispatch modes that run a rank's operations in float64, or add rounding noise."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_sim.against.hidden import ADDITIONS
from zero_sim.against.native_dtypes import WIDE, native, note, stored, thread, widened
from zero_sim.against.noise import Noise
from zero_sim.against.points import tensors_in
from zero_sim.sim.dispatch import has_own_dispatch, is_fake, pop_mode, push_mode

# Factories without random draws, so they can create float64 directly.
_FACTORIES_WITHOUT_DRAWS = frozenset(
    {
        "empty", "zeros", "ones", "full", "empty_strided", "arange", "linspace", "eye",
        "scalar_tensor",
    }
)  # fmt: skip
# Factories of unfilled memory.
_UNFILLED = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
# Operations that autocast runs in its dtype.
_BY_AUTOCAST = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "addmv", "mv",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
    }
)  # fmt: skip
# Operations that move values or round them on purpose. They have no rounding error.
_COPIES = frozenset(
    {
        "clone", "copy_", "_to_copy", "detach", "cat", "stack", "embedding", "index", "gather",
        "index_select", "neg", "constant_pad_nd", "set_", "where", "masked_fill", "clamp", "abs",
        "maximum", "minimum", "tril", "triu", "_foreach_copy_", "roll", "flip", "unbind", "sort",
        "topk", "max", "min", "amax", "amin", "relu", "threshold_backward", "repeat",
        "slice_backward", "select_backward", "new_zeros", "new_empty", "zeros_like", "ones_like",
        "empty_like", "full_like", "zero_", "fill_", "normal_", "uniform_", "bernoulli_",
        "_local_scalar_dense", "resize_", "lift_fresh", "index_put_", "scatter_", "scatter",
        "masked_select", "split_with_sizes_copy", "_chunk_cat", "_foreach_zero_", "take",
        "nll_loss_forward", "contiguous", "expand_copy", "sign", "round", "floor", "ceil",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Facts from an operator's schema."""

    name: str
    is_fresh: bool
    """True if results have their own memory."""
    takes_dtype: bool
    is_factory: bool
    """True if it takes no tensors."""
    is_list: bool
    """True for `_foreach` operators, which return lists."""
    is_exact: bool


@functools.cache
def plan_of(func: Any) -> Plan:
    """Return facts about an operator."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    aliases = any(each.alias_info is not None for each in schema.returns)
    takes_tensor = any("Tensor" in str(each.type) for each in schema.arguments)
    return Plan(
        name=name,
        is_fresh=not aliases and bool(schema.returns),
        takes_dtype=any(each.name == "dtype" for each in schema.arguments),
        is_factory=not takes_tensor,
        is_list=any(str(each.type) == "List[Tensor]" for each in schema.returns),
        is_exact=func.namespace != "aten" or func.is_view or name in _COPIES,
    )


class RankMode(TorchDispatchMode):
    """Dispatch mode on one rank's own stack of modes."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        # Not the base class's method, because it sets flags of the whole process.
        push_mode(self)
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        pop_mode()


class WideOperations(RankMode):
    """Dispatch mode that runs one rank's operations in float64.

    Args:
        noise_seed: Seed of rounding noise; None for no noise.
        fill: Value for memory before the script fills it. Such memory is often zero by chance.
            If the script reads it, runs with different fills differ.
        counts: Returns True during the script's forwards and backwards. Other operations depend on
            torch's caches, so they are not counted.
        added: Receives name and result of each operation in `ADDITIONS`.
    """

    def __init__(
        self,
        *,
        noise_seed: int | None = None,
        fill: float = 0.0,
        counts: Callable[[], bool],
        added: Callable[[str, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._fill = fill
        self._noise = None if noise_seed is None else Noise(noise_seed)
        self._counts = counts
        self._added = added
        self._taken = hashlib.blake2b(digest_size=16)
        self.operation_count = 0

    def __enter__(self) -> Self:
        thread.active = True
        return super().__enter__()

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        thread.active = False
        super().__exit__(exc_type, exc_val, exc_tb)

    @property
    def digest(self) -> str:
        """Hash of all operations so far, in order."""
        return self._taken.hexdigest()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not thread.active or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        # Fake tensors have no values. DTensor and similar classes call again with their parts.
        for each in types:
            if is_fake(each):
                return func(*args, **kwargs)
            if has_own_dispatch(each):
                return NotImplemented
        plan = plan_of(func)
        if self._counts():
            self.operation_count += 1
            self._taken.update(plan.name.encode())
        # Off, because the operation itself needs stored dtypes.
        thread.active = False
        try:
            special = _SPECIAL.get(plan.name)
            if special is not None:
                return special(func, args, kwargs)
            result = self._run(func, plan, args, kwargs)
            # A script that computes with unfilled memory shows this value in its results.
            if plan.name in _UNFILLED and stored(result) in _STORED and not result.is_meta:
                result.fill_(self._fill)
            # Rounding changes results, so add noise after the operation.
            if self._noise is not None and not plan.is_exact:
                self._noise.move(result)
            if self._added is not None and plan.name in ADDITIONS:
                # In-place list operations return nothing, so their first argument is the result.
                self._added(plan.name, args[0] if result is None else result)
            return result
        finally:
            thread.active = True

    def _run(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Views and in-place operations keep their storage and so its record.
        if not plan.is_fresh:
            if plan.takes_dtype and kwargs.get("dtype") in WIDE:
                kwargs = {**kwargs, "dtype": WIDE[kwargs["dtype"]]}
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype")
        # Meta tensors have no values, and a factory without a dtype argument cannot be widened.
        if _is_meta(kwargs.get("device")) or (plan.is_factory and not plan.takes_dtype):
            return func(*args, **kwargs)
        if plan.is_factory:
            return _made(func, plan, args, kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        stays_meta = not kwargs.get("device") and all(_is_meta(each.device) for each in tensors)
        if tensors and stays_meta:
            return func(*args, **kwargs)
        # C++ code may have created inputs in a narrow dtype.
        if any(map(_is_narrow, tensors)):
            args = tuple(_stored_wide(each) for each in args)
        if dtype in WIDE:
            kwargs = {**kwargs, "dtype": WIDE[dtype]}
        elif dtype is None:
            dtype = _promoted(tensors, plan)
        result = func(*args, **kwargs)
        if any(map(_is_narrow, tensors_in((result,)))):
            # An operation on integers: round 1 / 3 to float64, not to float32.
            if plan.takes_dtype:
                kwargs = {**kwargs, "dtype": torch.float64}
            else:
                args = tuple(_as_float64(each) for each in args)
                dtype = torch.get_default_dtype()
            result = func(*args, **kwargs)
        # Entry by entry, because a list may mix dtypes.
        if plan.is_list and isinstance(result, (list, tuple)):
            firsts = next((each for each in args if isinstance(each, (list, tuple))), ())
            for each, like in zip(result, firsts, strict=False):
                _note_fresh(each, native(like) if isinstance(like, Tensor) else dtype)
        else:
            for each in tensors_in((result,)):
                _note_fresh(each, dtype)
        return result


class NativeNoise(RankMode):
    """Dispatch mode that adds rounding noise to one rank's operations in native dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._noise = Noise(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in types:
            if has_own_dispatch(each) and not is_fake(each):
                return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and not any(map(is_fake, types)):
            plan = plan_of(func)
            if not plan.is_exact and not plan.is_factory:
                self._noise.move(result)
        return result


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _made(func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a factory so that it draws the same numbers as in the script's own dtype."""
    dtype = kwargs.get("dtype")
    if plan.name in _FACTORIES_WITHOUT_DRAWS and dtype in WIDE:
        result = func(*args, **{**kwargs, "dtype": WIDE[dtype]})
        note(result, dtype)
        return result
    result = func(*args, **kwargs)
    if _is_narrow(result):
        made = stored(result)
        # Draw narrow, then widen, because a float64 draw takes other numbers from the generator.
        wide = torch.empty_strided(result.shape, result.stride(), dtype=WIDE[made])
        if plan.name not in ("empty", "empty_strided"):
            wide.copy_(result)
        note(wide, made)
        return wide
    _note_fresh(result, dtype)
    return result


def _promoted(tensors: list[Tensor], plan: Plan) -> torch.dtype | None:
    """Return a result's dtype as torch promotes it: tensors with dimensions before scalars."""
    # Autocast is disabled, so choose its dtype here.
    if thread.autocast and thread.autocast[-1] is not None and plan.name in _BY_AUTOCAST:
        return thread.autocast[-1]
    dtype: torch.dtype | None = None
    for with_dims in (True, False):
        for each in tensors:
            kind = native(each)
            if not (kind.is_floating_point or kind.is_complex) or bool(each.dim()) is not with_dims:
                continue
            dtype = kind if dtype is None else torch.promote_types(dtype, kind)
        if dtype is not None:
            return dtype
    return None


def _note_fresh(value: Any, dtype: torch.dtype | None) -> None:
    if dtype is None or not isinstance(value, Tensor) or stored(value) not in _STORED:
        return
    if value.device.type == "meta" or value.layout not in (torch.strided, torch.sparse_coo):
        return
    # A complex result of float dtypes, or the reverse, as from `abs` or `view_as_complex`.
    if stored(value) is torch.complex128 and dtype in _FLOATS:
        dtype = torch.complex64 if dtype is not torch.float64 else torch.complex128
    elif stored(value) is torch.float64 and dtype.is_complex:
        dtype = torch.float32 if dtype is torch.complex64 else torch.float64
    note(value, dtype)


_STORED = (torch.float64, torch.complex128)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _is_narrow(value: Any) -> bool:
    """Return True for a tensor that C++ code created in a narrow dtype."""
    return isinstance(value, Tensor) and stored(value) in WIDE and not value.is_meta


def _stored_wide(value: Any) -> Any:
    if _is_narrow(value):
        return value.to(WIDE[stored(value)])
    if isinstance(value, (list, tuple)):
        return type(value)(map(_stored_wide, value))
    return value


def _as_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.dtype.is_floating_point:
        return value.to(torch.float64)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_float64, value))
    return value


def _lift_fresh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Widen a tensor of Python numbers, because C++ code creates it in a narrow dtype."""
    result = func(*args, **kwargs)
    return widened(result) if _is_narrow(result) else result


def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set a tensor to other memory, and record its dtype for that memory."""
    dtype = native(args[0])
    result = func(*args, **kwargs)
    if dtype in WIDE and result.device.type != "meta":
        note(result, dtype)
    return result


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace the gradient scaler's check, whose kernel requires a float32 flag."""
    grads, found_nonfinite, factor = args
    for grad in grads:
        if not bool(torch.isfinite(grad).all()):
            found_nonfinite.fill_(1.0)
        grad.mul_(factor.to(grad.device))


def _update_scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    # Like torch's kernel: shrink after an overflow, grow after `interval` steps without one.
    scale, tracker, found_nonfinite, growth, backoff, interval = args
    if bool(found_nonfinite):
        scale.mul_(backoff)
        tracker.zero_()
    elif int(tracker) + 1 == interval:
        scale.mul_(growth)
        tracker.zero_()
    else:
        tracker.add_(1)
    return scale


_SPECIAL = {
    "lift_fresh": _lift_fresh,
    "set_": _set,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_amp_update_scale_": _update_scale,
}
