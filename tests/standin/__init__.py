"""The stand-in device: an accelerator without hardware, for tests of what would run on a GPU.

It is registered under torch's key for devices of others, PrivateUse1, as `standin`; there are two
of it, `standin:0` and `standin:1` (more with STANDIN_DEVICES). Its memory is the CPU's, and the
CPU's kernels compute on it. What it shares with CUDA is what a program can get wrong without a GPU:

- Tensors of two devices do not mix, and where CUDA takes a tensor of the CPU it does: one without
  dimensions in pointwise operations, and indices within brackets.
- A division by a number, or by a tensor without dimensions of the CPU, is a product with the
  rounded reciprocal, in fp32 for 16-bit values. `torch._foreach_div` divides truly, as on CUDA.
- Its addresses are multiples of 512 where an allocation begins, and no addresses of the process:
  the CPU that touches one ends with a segmentation fault. Fresh memory holds NaNs.
- It draws random numbers from generators of its own.
- Streams: what is issued to a stream other than the default one and only writes tensors that are
  there already is done when somebody waits for it, and not before: by `synchronize`, an event, a
  `wait_stream`, or an operation of the same stream that gives a new tensor. What is copied to
  pinned memory with `non_blocking` lands when the stream, an event behind it, or the device is
  synchronised, on the default stream, too; what is copied from there is read when the stream's next
  operation is issued. An event or a stream that is asked whether it is done says no once, and then
  is done.
- Autograd has a thread for each of it, and optimizers choose `foreach` by themselves.

What is not CUDA's about it:

- Bits: products, sums, roots and all that is not a division by a number are the CPU's. It says
  nothing of cuBLAS, of TF32, of FMA, of atomic additions or of how kernels split a sum; rounding
  modes of a division (`floor`, `trunc`) are the CPU's, too.
- Operations of the default stream are done when they are issued, and so are those of other streams
  that give new tensors: a wait that is missing shows only where it is for an operation in place or
  with `out=`, or for a copy. What is freed while a stream uses it stays until it is used.
- `module.to` makes new params; to CUDA it moves them in place. So it is with all devices of others.
- Memory is never short, and nothing is slow. There are no graphs, no fused optimizers, no autocast
  kernels, no peer access to be turned on, and no NCCL.
- Refusals have CUDA's meaning and torch's general words, not always CUDA's words.

Where it is known, zero_sim's NCCL is `tests.backends.standin_nccl` on it, so that all around NCCL
is run with its memory: gloo moves copies of it, and every rank adds round NCCL's ring by itself.

`load()` registers it in this process, for good: so tests that need it run in a process of their
own. `python -m tests.standin COMMAND...` runs a command where every process knows the device from
the start of torch on, as it would with the package of a hardware vendor.
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
"""Tells torch by an entry point, as a vendor's package does, to load the device."""


def load() -> None:
    """Register the device in this process; built before, where it has not been."""
    import torch

    from tests.standin import build, device

    if hasattr(torch, NAME):
        return
    path = build.build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device)
    torch.ops.load_library(path)
    torch.utils.generate_methods_for_privateuse1_backend()
    # torch is not whole yet, and a process that only uses torch need not import zero_sim.
    sys.meta_path.insert(0, _WithNccl())


class _WithNccl(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Has the stand-in for NCCL installed once zero_sim knows of transports."""

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
    """This process's environment, with the device for all that is started in it."""
    paths = [str(ROOT), str(_PACKAGE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
