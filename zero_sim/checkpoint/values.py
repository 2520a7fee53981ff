"""Python values and 0D tensors as JSON, bit for bit."""

from __future__ import annotations

import contextlib
import math
from typing import Annotated, Any, Final

import torch
from pydantic import AfterValidator
from torch import Tensor

from zero_sim.errors import CheckpointError
from zero_sim.untrusted import nests_too_deep
from zero_sim.untrusted_json import unfit

_TEXT_CHARS_MAX: Final = 1 << 12
# Nesting of lists in an optimizer's settings.
_DEPTH_MAX: Final = 8
_INTEGER_STOP: Final = 1 << 63

SAFETENSORS_DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Supported dtypes: torch's names and safetensors' names."""


def _is_text(text: str) -> bool:
    # Messages print names to terminals, so control characters and huge names are refused.
    return text.isprintable() and len(text) <= _TEXT_CHARS_MAX


def _check_text(text: str) -> str:
    if not _is_text(text):
        raise unfit(f"at most {_TEXT_CHARS_MAX} printable characters")
    return text


Text = Annotated[str, AfterValidator(_check_text)]


def name_dtype(dtype: torch.dtype) -> str:
    """Return torch's name for a dtype, without `torch.`.

    Raises:
        CheckpointError: If tensors of this dtype cannot be saved.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"expected a tensor of {', '.join(SAFETENSORS_DTYPES)}, got {dtype}.")
    return name


def find_dtype(name: str) -> torch.dtype:
    """Return the dtype for a name from `name_dtype`.

    Raises:
        CheckpointError: If the name is unknown.
    """
    if name not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"expected the name of a dtype, got {name!r}.")
    return getattr(torch, name)


def view_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in logical order, without a copy if contiguous on the CPU."""
    # 1D and contiguous. As bytes, because numpy has no bf16 or fp8.
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def encode_value(value: object) -> Any:
    """Return JSON for a number, string, None, 0D tensor, or a list or tuple of these.

    Raises:
        CheckpointError: If the value is anything else.
    """
    match value:
        case None | bool():
            return value
        case int() if -_INTEGER_STOP <= value < _INTEGER_STOP:
            return value
        case str() if _is_text(value):
            return value
        case float():
            # JSON has no inf or NaN. Other floats survive as their shortest decimal.
            return value if math.isfinite(value) else {"float": str(value)}
        case tuple():
            # Tagged, because JSON has no tuples.
            return {"tuple": [encode_value(item) for item in value]}
        case list():
            return [encode_value(item) for item in value]
        case Tensor() if value.dim() == 0:
            # The bits restore the tensor. The value is for readers of the file.
            bits = view_bytes(value).hex()
            return {"tensor": name_dtype(value.dtype), "bits": bits, "value": str(value.item())}
    raise CheckpointError(
        f"expected a 64-bit number, a short string, None, a 0D tensor or a list of these, got "
        f"{value!r} (type={type(value).__name__}). Remove it from the optimizer."
    )


def decode_value(encoded: Any) -> Any:
    """Return the original of an encoded value. Tensors are on the CPU.

    Raises:
        CheckpointError: If `encode_value` could not have returned it.
    """
    match encoded:
        case None | bool() | int() | float() | str():
            return encoded
        case list():
            return [decode_value(item) for item in encoded]
        case {"float": text}:
            return float(text)
        case {"tuple": items}:
            return tuple(decode_value(item) for item in items)
        case {"tensor": name, "bits": bits}:
            # 1D uint8, the bytes of one element.
            content = torch.frombuffer(bytearray.fromhex(bits), dtype=torch.uint8)
            # A bool tensor may only contain bytes 0 and 1.
            if name != "bool" or content.max() <= 1:
                return content.view(find_dtype(name)).reshape(())
    raise CheckpointError(f"expected an encoded value, got {encoded!r}.")


def check_encoded(encoded: Any) -> Any:
    """Return the argument if `encode_value` could have returned it. A validator for fields.

    Raises:
        PydanticCustomError: If it could not.
    """
    is_own = False
    # Encoding the decoded value must give the same JSON, because only one form is valid.
    if not nests_too_deep(encoded, most=_DEPTH_MAX):
        # If decoding fails, no save has written the value.
        with contextlib.suppress(CheckpointError, RuntimeError, TypeError, ValueError):
            is_own = encode_value(decode_value(encoded)) == encoded
    if not is_own:
        raise unfit("a number, text, true, false, null, or a list of those, as saves encode them")
    return encoded
