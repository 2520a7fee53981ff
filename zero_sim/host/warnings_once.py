"""Warnings from the code under test, each shown once for all cases and processes.

`warnings.catch_warnings`, which torch and other libraries use, makes Python forget shown warnings,
so thousands of cases would repeat the same warning. If `-W` or `PYTHONWARNINGS` is set, Python's
own behaviour stays.
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

# Environment variable with a folder, which has an empty file for each shown warning.
_CLAIMS = "ZERO_SIM_WARNED"


@contextlib.contextmanager
def showing_warnings_once() -> Iterator[None]:
    """Show each warning once, in this process and all processes that it starts."""
    # Keep the user's own filters, and do nothing if a parent process has done this already.
    if sys.warnoptions or _CLAIMS in os.environ:
        yield
        return
    folder = Path(tempfile.gettempdir(), f"zero-sim-warned-{os.getpid()}-{secrets.token_hex(4)}")
    # In the environment, for started processes.
    before, os.environ[_CLAIMS] = warnings.showwarning, str(folder)
    show_warnings_once()
    try:
        yield
    finally:
        warnings.showwarning = before
        del os.environ[_CLAIMS]
        shutil.rmtree(folder, ignore_errors=True)


def show_warnings_once() -> None:
    """In a started process, suppress warnings that a related process has already shown."""
    folder = os.environ.get(_CLAIMS)
    if folder is not None:
        warnings.showwarning = _once(warnings.showwarning, Path(folder))


def _once(show: Callable[..., None], folder: Path) -> Callable[..., None]:
    seen: set[str] = set()

    def show_once(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any
    ) -> None:
        # Without the text, which may contain a tensor's name or a number.
        place = f"{category.__name__} {filename} {lineno}"
        key = hashlib.sha256(place.encode(errors="replace")).hexdigest()[:32]
        if key in seen:
            return
        seen.add(key)
        try:
            # Exclusive creation succeeds in only one of several processes.
            folder.mkdir(exist_ok=True)
            os.close(os.open(folder / key, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:
            pass  # On a full disk, each process shows the warning once.
        show(message, category, filename, lineno, *rest)

    return show_once
