"""Files that the safetensors library reads, written tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from zero_sim.zero.checkpoint.manifest import PieceRecord
from zero_sim.zero.checkpoint.tensorfile import Entry, TensorFileWriter, check_file

DTYPES = ("bool", "uint8", "bfloat16", "float16", "int64", "float32", "float64", "int32")


@pytest.fixture
def tensors():
    """Of every width, empty, 0D and not contiguous."""
    made = {f"{name}!": torch.ones(3, dtype=getattr(torch, name)) for name in DTYPES}
    made["empty"] = torch.zeros(0, 4)
    made["scalar"] = torch.tensor(2.5)
    made["turned"] = torch.arange(6.0).view(2, 3).t()
    return made


def write(path, tensors):
    entries = {}
    for name, tensor in tensors.items():
        piece = PieceRecord(key=name, param=name, tensor="t", start=0, stop=tensor.numel())
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[Entry(piece=piece, shape=tuple(tensor.shape), dtype=dtype)] = tensor
    writer = TensorFileWriter(path, entries=list(entries))
    for entry in writer.entries:
        writer.write(entries[entry])
    return writer.finish()


def test_the_library_reads_it(tmp_path, tensors):
    """All dtypes and shapes, in logical order."""
    write(tmp_path / "f", tensors)
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_the_record_is_that_of_the_file(tmp_path, tensors):
    """Size and checksum, taken while writing."""
    record = write(tmp_path / "f", tensors)
    assert check_file(tmp_path / "f", record=record) is None
    assert record.size_bytes == (tmp_path / "f").stat().st_size


def test_a_file_without_tensors(tmp_path):
    """Is a file."""
    write(tmp_path / "f", {})
    assert load_file(tmp_path / "f") == {}
