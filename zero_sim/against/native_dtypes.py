"""Native dtypes of a script that runs in float64: each tensor reports the dtype it was made with.

Rounding hides faults. If clipping removes a wrong factor, a float32 gradient only changes by its
rounding, but a float64 gradient by 2^29 times its rounding. So all float tensors are stored as
float64, while `tensor.dtype`, byte sizes and casts behave as with the script's own dtypes.

[Note: the native dtype belongs to the storage]
Views share a storage and, apart from `view(dtype)`, a dtype. So the native dtype is recorded per
storage, and views, in-place operations and autograd's copies need no bookkeeping. A float64 storage
without a record is natively float64.

[Note: casts copy where they natively would]
`grad.float()` copies a bfloat16 gradient, but returns a float32 gradient itself. With one stored
dtype, both would return the same tensor. Code that reduces the copy in place would then change the
gradient, so `to` and similar casts compare native dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zero_sim.errors import UnsupportedByFloat64
from zero_sim.sim.dispatch import has_own_dispatch

WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
"""Stored dtype of each native dtype."""
_WIDE = frozenset(WIDE.values())
# A complex tensor's real view, and the reverse.
_OF_PARTS = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
# The original getter, because Tensor.dtype is patched.
_stored_dtype = torch._C.TensorBase.dtype.__get__  # pyrefly: ignore [missing-attribute]


class _Thread(threading.local):
    """A thread's state."""

    # True while the thread runs a script in float64.
    active = False
    # Dtypes of open autocast contexts, the innermost last; None for a disabled one.
    autocast: tuple[torch.dtype | None, ...] = ()


thread = _Thread()
# Native dtype by storage address, if narrower than the stored dtype.
_noted: dict[int, torch.dtype] = {}

# These modules move data for the simulator, so they see stored dtypes.
_HARNESS = ("zero_sim.sim", "zero_sim.against", "zero_sim.script", "zero_sim.replicas")


def _is_harness(depth: int = 2) -> bool:
    """Return True if the caller moves data for the simulator, and so needs stored dtypes."""
    return sys._getframe(depth).f_globals.get("__name__", "").startswith(_HARNESS)


def _is_torch() -> bool:
    """Return True if torch is the caller, for example to fill buffers of bytes."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("torch.")


def _shows_native() -> bool:
    return thread.active and not _is_harness(3)


def stored(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's memory."""
    return _stored_dtype(tensor)


def note(tensor: Tensor, dtype: torch.dtype) -> None:
    """Record the native dtype of a storage, given a plain tensor in float64 or complex128."""
    if tensor.layout is torch.sparse_coo:
        # A COO tensor has no storage of its own.
        tensor = tensor._values()
    # Address of the C++ object. All Python objects for this storage share it.
    key = tensor.untyped_storage()._cdata
    if dtype in WIDE:
        _noted[key] = dtype
    else:
        # Addresses are reused, so a wide dtype must remove an older record.
        _noted.pop(key, None)


def native(tensor: Tensor) -> torch.dtype:
    """Return a tensor's dtype as it would be without this module."""
    dtype = _stored_dtype(tensor)
    # Subclasses such as DTensor report the dtype of their inner tensor, which is native already.
    if dtype in _WIDE and not has_own_dispatch(type(tensor)) and tensor.device.type != "meta":
        if tensor.layout is not torch.strided:
            if tensor.layout is not torch.sparse_coo:
                return dtype
            tensor = tensor._values()
        noted = _noted.get(tensor.untyped_storage()._cdata, dtype)
        if noted.is_complex is not dtype.is_complex:
            return _OF_PARTS[noted]  # A result of `view_as_real` or `view_as_complex`.
        return noted
    return dtype


def forget() -> None:
    """Forget all storages, at the end of a run."""
    _noted.clear()


@contextlib.contextmanager
def stored_dtypes() -> Iterator[None]:
    """Show and create stored dtypes in this thread."""
    was, thread.active = thread.active, False
    try:
        yield
    finally:
        thread.active = was


def widened(tensor: Tensor) -> Tensor:
    """Widen a narrow tensor to a recorded float64 copy; return other tensors unchanged."""
    dtype = _stored_dtype(tensor)
    if dtype not in WIDE or has_own_dispatch(type(tensor)) or tensor.device.type == "meta":
        return tensor
    if tensor.layout is not torch.strided:
        raise UnsupportedByFloat64(f"a {tensor.layout} tensor of {dtype}")
    wide = _to(tensor.detach(), WIDE[dtype])
    note(wide, dtype)
    return wide.requires_grad_(tensor.requires_grad)


def widened_tree(value: Any) -> Any:
    """Widen the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(widened(value.data), value.requires_grad)
    if type(value) is Tensor:
        return widened(value)
    if isinstance(value, dict):
        # In place, because the dict's owner may keep it.
        for key in list(value):
            value[key] = widened_tree(value[key])
        return value
    if type(value) in (list, tuple):
        return type(value)(map(widened_tree, value))
    return value


_to = Tensor.to


def _noted_if_wide(value: Any, dtype: torch.dtype) -> Any:
    """Record loaded float64 tensors as `dtype`, because an earlier run in float64 wrote them."""
    if isinstance(value, Tensor):
        if _stored_dtype(value) is torch.float64 and not has_own_dispatch(type(value)):
            note(value, dtype)
    elif isinstance(value, dict):
        for each in value.values():
            _noted_if_wide(each, dtype)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _noted_if_wide(each, dtype)
    return value


def _requested_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype requested by the arguments of `Tensor.to`; None if there is none."""
    dtype = kwargs.get("dtype")
    for each in args[:2]:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, Tensor):
            dtype = native(each)
    other = kwargs.get("other")
    return native(other) if isinstance(other, Tensor) else dtype


@functools.wraps(_to)
def _to_native(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Convert by native dtypes; see [Note: casts copy where they natively would]."""
    if not thread.active or _is_harness() or has_own_dispatch(type(self)):
        return _to(self, *args, **kwargs)
    return _to_by_native(self, *args, **kwargs)


def _to_by_native(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    wanted = _requested_dtype(args, kwargs)
    if wanted is None or self.device.type == "meta":
        return _to(self, *args, **kwargs)
    here = native(self)
    if wanted is here or _stored_dtype(self) in WIDE:
        # Only device and memory format may change.
        args = tuple(_as_stored(each, self) for each in args)
        kwargs = {key: _as_stored(each, self) for key, each in kwargs.items()}
        return _to(self, *args, **kwargs)
    if WIDE.get(wanted, wanted) is _stored_dtype(self):
        # New storage with its own record first, then device and memory format.
        moved = [each for each in args if not isinstance(each, (torch.dtype, Tensor))]
        moved = [each for each in moved if not isinstance(each, bool)]
        kwargs = {key: each for key, each in kwargs.items() if key not in ("dtype", "other")}
        kwargs.pop("copy", None)
        copy = torch.ops.aten._to_copy(self, dtype=wanted)
        return _to(copy, *moved, **kwargs) if moved or kwargs else copy
    return _to(self, *args, **kwargs)


def _as_stored(value: Any, tensor: Tensor) -> Any:
    if isinstance(value, torch.dtype):
        return _stored_dtype(tensor)
    return tensor if isinstance(value, Tensor) else value


def _cast(dtype: torch.dtype, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not thread.active or _is_harness():
            return original(self, *args, **kwargs)
        return _to_by_native(self, dtype, **kwargs)

    return call


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    names = {
        torch.float32: "torch.FloatTensor",
        torch.bfloat16: "torch.BFloat16Tensor",
        torch.float16: "torch.HalfTensor",
    }
    # `torch.FloatTensor` itself, too: its full name is the same.
    dtypes = {name: dtype for dtype, name in names.items()} | {"torch.DoubleTensor": torch.float64}

    @functools.wraps(original)
    def call(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not thread.active or _is_harness():
            return original(self, dtype, *args, **kwargs)
        if dtype is None:
            return names.get(native(self)) or original(self)
        name = dtype if isinstance(dtype, str) else None
        if name is None and isinstance(dtype, type):
            name = f"{dtype.__module__}.{dtype.__name__}"
        wanted = dtypes.get(name, dtype) if name else dtype
        if isinstance(wanted, torch.dtype):
            return _to_by_native(self, wanted)
        return original(self, dtype, *args, **kwargs)

    return call


def _item_bytes(self: Tensor) -> int:
    return native(self).itemsize if _shows_native() else _stored_dtype(self).itemsize


def _gradient(self: Tensor) -> Tensor | None:
    """Return the gradient with the native dtype of its tensor, as torch requires."""
    grad = _grad.__get__(self)
    if grad is not None and thread.active and not has_own_dispatch(type(grad)):
        dtype = native(self)
        if dtype in WIDE:
            note(grad, dtype)
    return grad


_grad: Any = torch._C.TensorBase.grad
_storage_class: Any = torch.UntypedStorage


def _bytes_ratio(storage: Any) -> int:
    dtype = _noted.get(storage._cdata)
    return 1 if dtype is None else WIDE[dtype].itemsize // dtype.itemsize


def _storage_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield patches of storage sizes, because libraries free and allocate native bytes."""
    nbytes, resize = _storage_class.nbytes, _storage_class.resize_

    def shown_nbytes(self: Any) -> int:
        return nbytes(self) // _bytes_ratio(self) if _shows_native() else nbytes(self)

    def resize_native(self: Any, size_bytes: int, /) -> Any:
        return resize(self, size_bytes * _bytes_ratio(self) if _shows_native() else size_bytes)

    # `size` too, because torch's own calls `nbytes` and would divide twice.
    yield _storage_class, "size", shown_nbytes
    yield _storage_class, "nbytes", shown_nbytes
    yield _storage_class, "resize_", resize_native


def _tensor_patches() -> Iterator[tuple[Any, str, Any]]:
    def shown(self: Tensor) -> torch.dtype:
        dtype = _stored_dtype(self)
        if dtype in _WIDE and thread.active and not _is_harness():
            return native(self)
        return dtype

    def set_dtype(self: Tensor, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        # C++ would compare a typed storage's dtype with the stored dtype.
        if thread.active and isinstance(source, torch.TypedStorage):
            source = source._untyped_storage
        return set_(self, *(() if source is None else (source,)), *args, **kwargs)

    def view(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = kwargs.get("dtype") or (args[0] if args else None)
        if isinstance(wanted, torch.dtype) and thread.active and not _is_harness():
            here = native(self)
            if wanted is here:
                return plain_view(self, _stored_dtype(self))
            if here is torch.uint8 and wanted in WIDE and not _is_torch():
                # Bytes from a file that are only read, as safetensors does.
                return widened(plain_view(self, wanted))
            if here in WIDE or wanted in WIDE:
                # Memory does not contain the bytes of such a view.
                raise UnsupportedByFloat64(f"Tensor.view({wanted}) of a {here} tensor")
        return plain_view(self, *args, **kwargs)

    def native_bytes(self: Tensor) -> int:
        item = native(self).itemsize if _shows_native() else _stored_dtype(self).itemsize
        return self.numel() * item

    set_, plain_view = Tensor.set_, Tensor.view
    set_grad = _grad.__set__
    # On the Python class, so C++ code still sees stored dtypes.
    yield Tensor, "dtype", property(shown)
    yield Tensor, "grad", property(_gradient, set_grad, _grad.__delete__)
    yield Tensor, "to", _to_native
    yield Tensor, "type", _type(Tensor.type)
    yield Tensor, "view", view
    yield Tensor, "set_", set_dtype
    yield Tensor, "element_size", _item_bytes
    yield Tensor, "itemsize", property(_item_bytes)
    yield Tensor, "nbytes", property(native_bytes)
    for name, dtype in (
        ("float", torch.float32),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("double", torch.float64),
    ):
        yield Tensor, name, _cast(dtype, getattr(Tensor, name))
    type_as = Tensor.type_as

    def as_other(self: Tensor, other: Tensor) -> Tensor:
        return _to_by_native(self, native(other)) if thread.active else type_as(self, other)

    yield Tensor, "type_as", as_other


def _module_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield a patch that widens params made in a library's own thread, outside our modes."""
    named = torch.nn.Module.named_parameters

    @functools.wraps(named)
    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, param in named(*args, **kwargs):
            if thread.active and _stored_dtype(param) in WIDE:
                with stored_dtypes():
                    wide = widened(param.detach())
                    if _stored_dtype(wide) not in WIDE:
                        param.data = wide
            yield name, param

    yield torch.nn.Module, "named_parameters", named_parameters


def _function_patches() -> Iterator[tuple[Any, str, Any]]:
    def lifted(
        original: Callable[..., Any], note_wide: Callable[[Any], Any] = lambda result: result
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not thread.active:
                return original(*args, **kwargs)
            with stored_dtypes():
                return widened_tree(note_wide(original(*args, **kwargs)))

        return call

    def loaded(result: Any) -> Any:
        return _noted_if_wide(result, torch.get_default_dtype())

    def saved(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with stored_dtypes():
                return original(*args, **kwargs)

        return call

    # These tensors share memory with numpy or a file, so they are copied to widen them.
    for name in ("from_numpy", "frombuffer", "from_dlpack"):
        yield torch, name, lifted(getattr(torch, name))
    # An earlier run may have stored narrower tensors in the file as float64.
    yield torch, "load", lifted(torch.load, loaded)
    yield torch, "save", saved(torch.save)

    def result_type(one: Any, other: Any) -> torch.dtype:
        if not thread.active:
            return plain_result_type(one, other)
        # A meta tensor has the native dtype and costs no memory.
        one, other = (
            torch.empty(each.shape, dtype=native(each), device="meta")
            if isinstance(each, Tensor)
            else each
            for each in (one, other)
        )
        return plain_result_type(one, other)

    plain_result_type = torch.result_type
    yield torch, "result_type", result_type

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        if thread.active and isinstance(data, Tensor):
            dtype = dtype or native(data)
            return _to_by_native(data, *(() if device is None else (device,)), dtype)
        result = plain_as_tensor(data, dtype=dtype, device=device)
        return widened(result) if thread.active else result

    plain_as_tensor = torch.as_tensor
    yield torch, "as_tensor", as_tensor
    yield from _autocast_patches()


def _autocast_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield patches that disable autocast, which rejects float64, and record its dtype."""
    autocast = torch.amp.autocast_mode.autocast
    init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__

    def start(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **rest: Any
    ) -> None:
        if not thread.active:
            init(self, device_type, dtype=dtype, enabled=enabled, **rest)
            return
        init(self, device_type, dtype=dtype, enabled=False, **rest)
        # `_promoted` gives results autocast's dtype.
        self._native_dtype = self.fast_dtype if enabled else None

    def enter_noted(self: Any) -> Any:
        thread.autocast = (*thread.autocast, getattr(self, "_native_dtype", None))
        return enter(self)

    def leave_noted(self: Any, *exception: Any) -> Any:
        thread.autocast = thread.autocast[:-1]
        return leave(self, *exception)

    yield autocast, "__init__", start
    yield autocast, "__enter__", enter_noted
    yield autocast, "__exit__", leave_noted


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install all patches. A thread shows native dtypes while `thread.active` is True."""
    with contextlib.ExitStack() as stack:
        for patches in (_storage_patches, _tensor_patches, _module_patches, _function_patches):
            for place, name, value in patches():
                stack.enter_context(mock.patch.object(place, name, value))
        try:
            yield
        finally:
            forget()
