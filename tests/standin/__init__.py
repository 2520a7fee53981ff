"""The stand-in device: an accelerator without hardware, for tests of code that would run on a GPU.

It is registered as `standin` under PrivateUse1, torch's key for third-party devices. There are two
devices, `standin:0` and `standin:1` (more with STANDIN_DEVICES). Memory and kernels are the CPU's.

It behaves like CUDA in everything that a program can get wrong without a GPU:

- Tensors of two devices do not mix. CPU tensors are accepted only if CUDA accepts them: without
  dimensions in pointwise operations, and as indices within brackets.
- Division by a number, or by a CPU tensor without dimensions, multiplies by the rounded
  reciprocal, in fp32 for 16-bit values. `torch._foreach_div` divides exactly, as on CUDA.
- Allocations begin at multiples of 512. Addresses are outside the process, so the CPU gets a
  segmentation fault if it touches one. Fresh memory holds NaNs.
- Each device has its own random generators.
- Streams: on a stream other than the default, an operation that only writes existing tensors runs
  when something waits for it: `synchronize`, an event, `wait_stream`, or an operation of the same
  stream that returns a new tensor.
- Pinned memory: a `non_blocking` copy to it lands when its stream, a later event or the device is
  synchronised, on the default stream too. A copy from it reads when the stream's next operation is
  issued.
- The first query of a pending event or stream returns False, all later ones True.
- Autograd has a thread per device, and optimizers choose `foreach` by default.

It differs from CUDA in these points:

- Bits: everything but division by a number gives the CPU's bits. Nothing follows for cuBLAS, TF32,
  FMA, atomic additions or the splitting of sums in kernels. Rounding modes of a division (`floor`,
  `trunc`) are the CPU's, too.
- Operations of the default stream run when they are issued, and so do operations of other streams
  that return new tensors. So a missing wait shows only for an operation in place, one with `out=`,
  or a copy. Memory that is freed while a stream uses it stays until it was used.
- `module.to` makes new params, as for all third-party devices; CUDA moves them in place.
- Memory is never short, and nothing is slow. There are no graphs, no fused optimizers, no autocast
  kernels, no peer access to enable, and no NCCL.
- Refusals have CUDA's meaning, but torch's general words.

In processes that load the device, `tests.backends.standin_nccl` replaces zero_sim's NCCL, so that
all code around NCCL runs with device memory: gloo moves copies of it, and every rank adds in the
order of NCCL's ring by itself.

`load()` registers the device in this process permanently, so tests that need it run in separate
processes. `python -m tests.standin COMMAND...` runs a command whose processes all load the device
together with torch, as with a hardware vendor's package.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "standin"
ROOT = Path(__file__).parents[2]
_PACKAGE = Path(__file__).with_name("installed")
"""Folder with an entry point by which torch loads the device, as with a vendor's package."""


def load() -> None:
    """Register the device in this process, and build it first if necessary."""
    import torch

    from tests.standin import build, device

    if hasattr(torch, NAME):
        return
    path = build.build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device)
    torch.ops.load_library(path)
    torch.utils.generate_methods_for_privateuse1_backend()
    # Import zero_sim later: torch is only partly loaded, and the process may never use zero_sim.
    sys.meta_path.insert(0, _WithNccl())


class _WithNccl(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that installs the stand-in for NCCL after zero_sim's transports."""

    _AFTER = "zero_sim.backends.transports"

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._AFTER or self._loader is not None:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from tests.backends import standin_nccl

        standin_nccl.install(NAME)


def environment() -> dict[str, str]:
    """Return this process's environment, extended so that child processes load the device."""
    paths = [str(ROOT), str(_PACKAGE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
