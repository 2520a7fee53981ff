"""Files written tensor by tensor, in the format of the safetensors library."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from zero_sim.checkpoint.entries import Entry
from zero_sim.checkpoint.manifest import Manifest, ModuleRecord, PieceRecord, WorldRecord
from zero_sim.checkpoint.tensorfile import TensorFileReader, TensorFileWriter, check_file
from zero_sim.errors import CheckpointError
from zero_sim.layout import Span

DTYPES = ("bool", "uint8", "bfloat16", "float16", "int64", "float32", "float64", "int32")


@pytest.fixture
def tensors():
    """Tensors of every width, an empty, a 0D and a non-contiguous one."""
    made = {f"{name}!": torch.ones(3, dtype=getattr(torch, name)) for name in DTYPES}
    made["empty"] = torch.zeros(0, 4)
    made["scalar"] = torch.tensor(2.5)
    made["turned"] = torch.arange(6.0).view(2, 3).t()
    return made


def write(path, tensors):
    entries = {}
    for name, tensor in tensors.items():
        piece = PieceRecord(key=name, param=name, tensor="buffer", start=0, stop=tensor.numel())
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[Entry(piece=piece, shape=tuple(tensor.shape), dtype=dtype)] = tensor
    writer = TensorFileWriter(path, entries=list(entries))
    for entry in writer.entries:
        writer.write(entries[entry])
    return writer.finish()


def test_safetensors_library_reads_the_file(tmp_path, tensors):
    """All dtypes and shapes, in logical order."""
    write(tmp_path / "f", tensors)
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_record_matches_the_file(tmp_path, tensors):
    record = write(tmp_path / "f", tensors)
    assert check_file(tmp_path / "f", record=record) is None
    assert record.size_bytes == (tmp_path / "f").stat().st_size


def test_file_without_tensors_is_readable(tmp_path):
    write(tmp_path / "f", {})
    assert load_file(tmp_path / "f") == {}


def read(path, record, tensors, name, span):
    """Read a span, with a manifest that contains this one file."""
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    manifest = Manifest(
        form="sharded",
        world=WorldRecord(world_size=1, torch="2.13.0"),
        params=(),
        module=tuple(
            ModuleRecord(name=name, kind="buffer", shape=tuple(t.shape), dtype=dtypes[name])
            for name, t in tensors.items()
        ),
        optimizer="",
        groups=(),
        loss_scaler=None,
        files=(record,),
    )
    output = torch.zeros(span.numel, dtype=tensors[name].dtype)
    with TensorFileReader(path.parent, manifest=manifest) as reader:
        reader.read(output, param=name, tensor="buffer", span=span)
    return output


def test_every_span_is_read_back(tmp_path, tensors):
    """In all dtypes and shapes, empty spans included."""
    file = tmp_path / "module.safetensors"
    record = write(file, tensors)
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        for start in range(flat.numel() + 1):
            for stop in range(start, flat.numel() + 1):
                got = read(file, record, tensors, name, Span(start, stop))
                assert torch.equal(got, flat[start:stop]), (name, start, stop)


DAMAGES = {
    "empty": lambda content: b"",
    "no header": lambda content: content[:5],
    "no JSON": lambda content: content[:8] + b"?" + content[9:],
    "a list": lambda content: (2).to_bytes(8, "little") + b"[]" + content,
    "a long header": lambda content: (1 << 62).to_bytes(8, "little") + content[8:],
    "another tensor": lambda content: content.replace(b'"a"', b'"b"'),
    "another dtype": lambda content: content.replace(b'"F32"', b'"F99"'),
    "another width": lambda content: content.replace(b'"F32"', b'"F64"'),
    "another type": lambda content: content.replace(b'"F32"', b'"I32"'),
    "another shape": lambda content: content.replace(b"[4]", b"[3]"),
    "cut off": lambda content: content[:-1],
    "negative": lambda content: content.replace(b"[0,16]", b"[-6,8]"),
    "names twice": lambda content: content.replace(b"{", b'{"__metadata__":{},', 1),
    "nested": lambda content: content[:8] + b"[" * (len(content) - 24) + content[-16:],
    "spaces": lambda content: content[:-17] + b"\t" + content[-16:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_file_that_differs_from_the_manifest_is_refused(tmp_path, damage):
    """Even with a valid checksum; the message names the file."""
    path = tmp_path / "f"
    tensors = {"a": torch.arange(4.0)}
    record = write(path, tensors)
    damaged = DAMAGES[damage](path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    begins = r".*/f to start with the header of the 1 tensors.*"
    said = f"expected ({begins}|1 tensors in .*/f), got"
    with pytest.raises(CheckpointError, match=said):
        read(path, record, tensors, "a", Span(0, 4))


def test_bool_bytes_other_than_0_and_1_are_refused(tmp_path):
    """torch would accept any byte and compute with it."""
    path = tmp_path / "f"
    tensors = {"a": torch.tensor([True, False])}
    record = write(path, tensors)
    path.write_bytes(path.read_bytes()[:-1] + b"\2")
    with pytest.raises(CheckpointError, match="expected bytes of 0 and 1 for 'a'"):
        read(path, record, tensors, "a", Span(0, 2))
