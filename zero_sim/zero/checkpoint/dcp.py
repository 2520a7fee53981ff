"""The same content as a checkpoint of `torch.distributed.checkpoint` (DCP).

Each tensor is known to DCP's planners as flat, of the param's number of elements, under
`master/NAME` or `state.KEY/NAME`, cut where the ranks cut it; any DCP reader can take it into other
cuts. What is no elementwise tensor stays in the manifest, which also holds checksums of DCP's own
files; they are compared before DCP opens one.

DCP itself pickles: its `.metadata` file, and the container that `torch.save` puts around each
tensor, which it reads back with `weights_only=True`.

[Note: without DCP's planning]
`torch.distributed.checkpoint.save` lets ranks tell each other, in a dozen collectives of pickled
objects, what each of them holds. That has been agreed on before: here every rank hands its own
part to DCP's writer, and rank 0 writes the index of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan as WritePlan,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from zero_sim.errors import CheckpointError
from zero_sim.layout import Span
from zero_sim.zero.checkpoint.agreed import SavePlan
from zero_sim.zero.checkpoint.manifest import FileRecord, Manifest, build_file
from zero_sim.zero.checkpoint.snapshot import MASTER, name_state
from zero_sim.zero.checkpoint.tensorfile import hash_file
from zero_sim.zero.checkpoint.values import find_dtype

INDEX_NAME: Final = ".metadata"
"""DCP's index of what lies where."""


class FlatShards:
    """Spans of one flat tensor, in the form in which DCP's planners ask for them.

    No dataclass: DCP would take those apart.

    Args:
        numel: Elements of the whole tensor.
        parts: The spans, 1D each, by first element.
    """

    __slots__ = ("numel", "parts")

    def __init__(self, numel: int, parts: Mapping[int, Tensor]) -> None:
        self.numel = numel
        self.parts = parts

    def size(self) -> torch.Size:
        """Size of the whole tensor, which the load planner compares."""
        return torch.Size([self.numel])

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """Return one item to write for each span."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([start])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_build_chunk(start, part.numel()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for start, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the spans that are to be read."""
        return [_build_chunk(start, part.numel()) for start, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the span that begins at an offset."""
        assert index.offset is not None
        return self.parts[index.offset[0]]


class _SavePlanner(torch_dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        # The default asks only tensors for their shards.
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(torch_dcp.DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The default walks the dict and puts None for whatever class it does not know.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _Place(NamedTuple):
    """Where DCP put a span of a tensor."""

    fqn: str
    start: int
    numel: int
    file: str
    offset: int
    size_bytes: int


def write_own(plan: SavePlan) -> dict[str, Any]:
    """Let DCP write the pieces that are this rank's to write; no collective.

    Returns:
        For `conclude`: where each piece lies, and records of the files.
    """
    spans = (
        (piece.param, name, piece.span, tensor)
        for piece in plan.pieces.values()
        for name, tensor in piece.tensors.items()
    )
    state = _build_state(spans, numels=plan.numels)
    items = [item for fqn, held in state.items() for item in held.__create_write_items__(fqn, held)]
    if not items:
        return {"places": [], "files": []}
    planner = _SavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state)
    writer = _open_writer(plan)
    rank = plan.team.rank
    # The writer names a rank's file by the place of its plan among all.
    own = writer.prepare_global_plan([WritePlan([])] * rank + [WritePlan(items)])[rank]
    places = []
    for result in writer.write_data(own, planner).wait():
        fqn, offset, stored = result.index.fqn, result.index.offset, result.storage_data
        assert offset is not None
        numel = state[fqn].parts[offset[0]].numel()
        places.append(
            _Place(fqn, offset[0], numel, stored.relative_path, stored.offset, stored.length)
        )
    names = dict.fromkeys(place.file for place in places)
    return {"places": places, "files": [_record(plan.folder.saving / name) for name in names]}


def conclude(plan: SavePlan, written: Sequence[dict[str, Any]]) -> list[FileRecord]:
    """Let DCP write its index of what all ranks wrote, on rank 0.

    Args:
        plan: The save.
        written: What `write_own` returned on every rank.

    Returns:
        Records of all of DCP's files.
    """
    dtypes = {f"{MASTER}/{param.name}": torch.float32 for param in plan.params}
    for param in plan.params:
        for entry in param.state:
            if entry.dtype is not None:
                dtypes[f"{name_state(entry.key)}/{param.name}"] = find_dtype(entry.dtype)
    numels = plan.numels
    index: dict[str, TensorStorageMetadata] = {}
    results: list[WriteResult] = []
    for place in (_Place(*place) for own in written for place in own["places"]):
        if place.fqn not in index:
            size = torch.Size([numels[place.fqn.partition("/")[2]]])
            properties = TensorProperties(dtype=dtypes[place.fqn])
            index[place.fqn] = TensorStorageMetadata(properties=properties, size=size, chunks=[])
        chunks = index[place.fqn].chunks
        where = MetadataIndex(place.fqn, torch.Size([place.start]), len(chunks))
        chunks.append(_build_chunk(place.start, place.numel))
        stored = _StorageInfo(place.file, place.offset, place.size_bytes)
        results.append(
            WriteResult(index=where, size_in_bytes=place.size_bytes, storage_data=stored)
        )
    _open_writer(plan).finish(Metadata(dict(index)), [results])
    records = [build_file(record) for own in written for record in own["files"]]
    return [_record(plan.folder.saving / INDEX_NAME), *records]


def _open_writer(plan: SavePlan) -> torch_dcp.FileSystemWriter:
    return torch_dcp.FileSystemWriter(plan.folder.saving)


def _record(path: Path) -> FileRecord:
    return FileRecord(name=path.name, size_bytes=path.stat().st_size, sha256=hash_file(path))


def list_spans(folder: Path) -> dict[tuple[str, str], list[Span]]:
    """Return what a DCP checkpoint holds, by param and tensor.

    Raises:
        CheckpointError: If it holds something that `write` did not write.
    """
    spans: dict[tuple[str, str], list[Span]] = {}
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    for fqn, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"Expected only tensors in {folder} but got {fqn!r}.")
        tensor, _, param = fqn.partition("/")
        spans[param, tensor] = [
            Span(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in stored.chunks
        ]
    return spans


def read(
    folder: Path, wanted: Mapping[tuple[str, str, Span], Tensor], *, manifest: Manifest
) -> None:
    """Fill tensors with spans; on this rank alone, without collectives.

    Args:
        folder: The checkpoint.
        wanted: 1D tensors by param, tensor and span.
        manifest: Its manifest.
    """
    numels = {param.name: torch.Size(param.shape).numel() for param in manifest.params}
    spans = ((param, name, span, output) for (param, name, span), output in wanted.items())
    reader, planner = torch_dcp.FileSystemReader(folder), _LoadPlanner(flatten_state_dict=False)
    index = reader.read_metadata()
    reader.set_up_storage_reader(index, is_coordinator=True)
    planner.set_up_planner(_build_state(spans, numels=numels), index, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


def _build_state(
    spans: Iterable[tuple[str, str, Span, Tensor]], *, numels: Mapping[str, int]
) -> dict[str, Any]:
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for param, name, span, tensor in spans:
        parts.setdefault((param, name), {})[span.start] = tensor.detach()
    return {
        f"{name}/{param}": FlatShards(numels[param], held) for (param, name), held in parts.items()
    }


def _build_chunk(start: int, numel: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([numel]))
