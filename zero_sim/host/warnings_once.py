"""Warnings of the code under test: each is told once, however many cases and processes meet it.

Torch's and other libraries' own blocks of `warnings.catch_warnings` make Python forget what it
told, so that thousands of cases tell the same again and again. Who asks for warnings, with `-W` or
`PYTHONWARNINGS`, gets them as Python gives them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CLAIMS = "ZERO_SIM_WARNED"
"""Environment variable with a folder that has an empty file for each warning that was told."""


@contextlib.contextmanager
def telling_once() -> Iterator[None]:
    """Tell each warning once inside this block, in this process and those that it starts."""
    if sys.warnoptions or _CLAIMS in os.environ:
        yield
        return
    folder = Path(tempfile.gettempdir(), f"zero-sim-warned-{os.getpid()}-{secrets.token_hex(4)}")
    before, os.environ[_CLAIMS] = warnings.showwarning, str(folder)
    tell_once()
    try:
        yield
    finally:
        warnings.showwarning = before
        del os.environ[_CLAIMS]
        shutil.rmtree(folder, ignore_errors=True)


def tell_once() -> None:
    """Tell none, in a process that another one started, that was told in any of them."""
    folder = os.environ.get(_CLAIMS)
    if folder is not None:
        warnings.showwarning = _once(warnings.showwarning, Path(folder))


def _once(show: Callable[..., None], folder: Path) -> Callable[..., None]:
    seen: set[str] = set()

    def show_once(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any
    ) -> None:
        # Not the text, which may name a tensor or a number.
        place = f"{category.__name__} {filename} {lineno}"
        key = hashlib.sha256(place.encode(errors="replace")).hexdigest()[:32]
        if key in seen:
            return
        seen.add(key)
        try:
            folder.mkdir(exist_ok=True)
            os.close(os.open(folder / key, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:
            pass  # Without room it is told once a process.
        show(message, category, filename, lineno, *rest)

    return show_once
