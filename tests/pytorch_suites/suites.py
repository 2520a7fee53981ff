"""Suites of PyTorch, and loading of their tests."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INSTALLED = "test_distributed_spawn"
"""Suite whose tests torch installs, in `torch/testing/_internal/distributed`."""

WORLD_SIZE = 3
"""Ranks of the installed suite, as in PyTorch's CI with gloo."""

RANKS_FOR_GPUS = 4
"""Ranks of a suite that uses one rank per GPU."""

FOLDERS = (
    "_composable/fsdp",
    "_tensor",
    "tensor",
    "tensor/parallel",
    "algorithms",
    "checkpoint",
    "optim",
)
FILES = (
    "_composable/test_replicate.py",
    "test_c10d_gloo.py",
    "test_c10d_object_collectives.py",
    "test_c10d_pypg.py",
    "test_collective_utils.py",
    "test_device_mesh.py",
    "test_functional_api.py",
    "test_multi_threaded_pg.py",
    "test_store.py",
)
"""Suites of a checkout's folder `test/distributed`: all files of the folders, and files."""

LEFT_OUT = {
    "test_attention": "flash and efficient attention: needs GPUs",
    "test_dtensor_compile": "the compiler",
    "test_dtensor_ops": "a database of thousands of operations, none of which communicates",
    "test_experimental_ops": "needs GPUs",
    "test_fully_shard_compile": "the compiler",
    "test_fully_shard_overlap": "compares times on a GPU",
    "test_fully_shard_memory": "the allocator of a GPU",
    "test_fully_shard_logging": "reads the output of a process of its own",
    "test_xla_integration": "needs a TPU",
}
"""Files of the folders above that do not test communication on a CPU, with reasons."""

_FOR_GPUS = ("_composable.fsdp.", "checkpoint.test_state_dict")
_AS_ON_CPU = (
    ('"cuda"', '"cpu"'),
    ('"cuda:0"', '"cpu"'),
    (".cuda()", ".cpu()"),
    ("device_ids=[self.rank]", "device_ids=None"),
    ("torch.cuda.device_count()", str(RANKS_FOR_GPUS)),
    ("not TEST_CUDA", "False"),
)
"""Replacements in the source of suites written for GPUs, the same on all backends."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A file of tests."""

    name: str
    """Path below `test/distributed`, with dots."""
    path: Path | None = None
    """Path of the file; None for the installed suite."""

    @property
    def for_gpus(self) -> bool:
        """True if the suite was written for GPUs, and runs with a CPU in their place."""
        return self.name.startswith(_FOR_GPUS)

    @property
    def is_of_gloo(self) -> bool:
        """True if the suite tests gloo itself, with calls that NCCL refuses."""
        return self.name == "test_c10d_gloo"


def find_suites(source: Path | None) -> list[Suite]:
    """Find the installed suite, and those of a checkout of PyTorch's source.

    Args:
        source: Folder of the checkout; None for none.

    Raises:
        FileNotFoundError: The folder has no `test/distributed`.
    """
    found = [Suite(INSTALLED)]
    if source is None:
        return found
    root = source.resolve() / "test" / "distributed"
    if not root.is_dir():
        raise FileNotFoundError(
            f"expected a checkout of PyTorch's source, with a folder test/distributed, got {source}"
        )
    paths = [path for folder in FOLDERS for path in sorted((root / folder).glob("test_*.py"))]
    paths += [path for path in (root / file for file in FILES) if path.exists()]
    for path in paths:
        if path.stem not in LEFT_OUT:
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found.append(Suite(name, path))
    return found


def prepare_process() -> None:
    """Set the environment that suites expect. Call this before importing torch."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD_SIZE),
        TEMP_DIR=tempfile.gettempdir(),
        MASTER_ADDR="localhost",
        TORCH_SHOW_CPP_STACKTRACES="0",
        OMP_NUM_THREADS="1",
    )
    # torch's test tools read the arguments of the process.
    sys.argv = sys.argv[:1]


def load_tests(suite: Suite) -> dict[str, unittest.TestCase]:
    """Return the tests of a suite by name, each as `Class.test`."""
    module = _installed_module() if suite.path is None else _source_module(suite)
    sys.modules[module.__name__] = module
    # A suite's own loader expects to be run as the main script.
    vars(module).pop("load_tests", None)
    loaded = unittest.defaultTestLoader.loadTestsFromModule(module)
    return {test.id().removeprefix(f"{module.__name__}."): test for test in _each(loaded)}


def _each(tests: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from _each(test)
        else:
            yield test


def _installed_module() -> types.ModuleType:
    import torch
    from torch.testing._internal.distributed import distributed_test

    bases = (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase)

    def set_up(self: unittest.TestCase) -> None:
        super(case, self).setUp()
        self._spawn_processes()  # pyrefly: ignore
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()

    module = types.ModuleType(INSTALLED)
    body = {"setUp": set_up, "__module__": INSTALLED}
    case = type("TestDistBackendWithSpawn", bases, body)
    module.TestDistBackendWithSpawn = case  # pyrefly: ignore
    return module


def _source_module(suite: Suite) -> types.ModuleType:
    path = suite.path
    assert path is not None
    # Suites import modules next to them.
    tests = next(parent for parent in path.parents if parent.name == "test")
    sys.path[:0] = [str(path.parent), str(tests / "distributed"), str(tests)]
    if not suite.for_gpus:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    text = path.read_text()
    for word, instead in _AS_ON_CPU:
        text = text.replace(word, instead)
    exec(compile(text, str(path), "exec"), vars(module))
    return module
