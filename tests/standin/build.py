"""Build of the stand-in device's extension, cached for each source and torch version.

One call of the compiler, without ninja. Other processes wait at a lock until the first one is done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("standin.cpp")


def cache_folder() -> Path:
    """Return the folder in which torch keeps extensions built on demand."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "torch_extensions"


def library_path() -> Path:
    """Return the path of the built extension, even if it does not exist yet."""
    told = (SOURCE.read_bytes(), torch.__version__.encode(), torch.__file__.encode())
    key = hashlib.blake2b(b"\0".join(told), digest_size=8).hexdigest()
    return cache_folder() / "zero_sim_standin" / key / "standin.so"


def build() -> Path:
    """Build the extension if it does not exist, and return its path.

    Raises:
        RuntimeError: If there is no compiler, or it fails.
    """
    path = library_path()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError(
            "expected a C++ compiler for the stand-in device, got none: no g++ or c++ on PATH and "
            "no CXX. Try `apt-get install g++`."
        )
    unfinished = path.with_suffix(".unfinished")
    command = [
        *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in include_paths()),
        *(str(SOURCE), "-o", str(unfinished)),
        *(f"-L{folder}" for folder in library_paths()),
        *("-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"expected {SOURCE} to compile with torch {torch.__version__}, got exit status "
            f"{done.returncode} of {compiler}:\n{done.stderr[-4000:]}"
        )
    # Atomic, so that no process sees a partial file.
    unfinished.rename(path)
