"""Where a collective was called: the innermost frame that is not torch's nor the simulator's."""

from __future__ import annotations

import contextlib
import sys
from os.path import dirname
from types import CodeType

import torch

_HERE = dirname(__file__)
_TORCH = dirname(torch.__file__)
_CONTEXTLIB = contextlib.__file__
"""Leaving torch's `_coalescing_manager` calls from there."""
_inside: dict[CodeType, bool] = {}


def _is_inside(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith((_HERE, _TORCH, "<")) or name == _CONTEXTLIB


def call_site() -> tuple[str, int]:
    """File and line of the program's own call; `("", 0)` where every frame is library code."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        inside = _inside.get(code)
        if inside is None:
            inside = _inside[code] = _is_inside(code)
        if not inside:
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def here() -> str:
    """The call site as `file:line`."""
    file, line = call_site()
    return f"{file}:{line}"


def raising_site(error: BaseException) -> tuple[str, int]:
    """File and line of the program's own call that raised `error`; as `call_site` otherwise."""
    site, traceback = ("", 0), error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_inside(code):
            site = code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return site
