"""Ranks that save or load together: they tell each other records, and fail together or not at all.

Records travel as JSON in tensors of bytes. torch's own collectives of objects would pickle them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.errors import CheckpointError
from zero_sim.zero.collectives import all_gather, size_and_rank

T = TypeVar("T")

_MESSAGE_BYTES_MAX = 4000


class Team:
    """The ranks of a group, one of which is this one.

    Args:
        group: All ranks that take part.
        device: Where the group's collectives expect tensors.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size, self.rank = size_and_rank(group)

    def attempt(self, action: Callable[[], T], *, what: str) -> T:
        """Do something on this rank, and fail on every rank if it failed on any.

        Args:
            action: Must not communicate: a rank that fails would leave the others waiting.
            what: What failed, for the message.

        Raises:
            CheckpointError: On every rank alike, naming the ranks and what each of them raised.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as raised:  # noqa: BLE001  (raised again below, on all ranks)
            error = raised
        self.agree(error, what=what)
        return result  # pyrefly: ignore [bad-return]

    def agree(self, error: Exception | None, *, what: str) -> None:
        """Raise on every rank if any has an error.

        Raises:
            CheckpointError: As `attempt`.
        """
        messages = [mine.decode(errors="replace") for mine in self._all_gather(_encode(error))]
        failed = {rank: message for rank, message in enumerate(messages) if message}
        if not failed:
            return
        if len(failed) == self.size and len(set(messages)) == 1:
            raise CheckpointError(f"{what}: {messages[0]}") from error
        by_message: dict[str, list[int]] = {}
        for rank, message in failed.items():
            by_message.setdefault(message, []).append(rank)
        lines = [f"{_name_ranks(ranks)}: {message}" for message, ranks in by_message.items()]
        raise CheckpointError(f"{what}: " + "\n".join(lines)) from error

    def gather(self, record: Any) -> list[Any] | None:
        """Return every rank's record in rank order on rank 0, and None elsewhere."""
        data = json.dumps(record).encode()
        lengths = self._all_gather_lengths(len(data))
        mine = _to_tensor(data, length=max(lengths)).to(self.device)
        rows = None
        if self.rank == 0:
            rows = [torch.empty_like(mine) for _ in lengths]
        dist.gather(mine, rows, group=self.group, group_dst=0)
        if rows is None:
            return None
        pairs = zip(rows, lengths, strict=True)
        return [json.loads(_to_bytes(row[:length])) for row, length in pairs]

    def broadcast(self, record: Any) -> Any:
        """Return rank 0's record on every rank; what others pass does not matter."""
        data = json.dumps(record).encode() if self.rank == 0 else b""
        return json.loads(self.broadcast_bytes(data))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        dist.broadcast(length, group=self.group, group_src=0)
        count = int(length)
        if self.rank == 0:
            content = _to_tensor(data, length=count).to(self.device)
        else:
            content = torch.empty(count, dtype=torch.uint8, device=self.device)
        if count:
            dist.broadcast(content, group=self.group, group_src=0)
        return _to_bytes(content)

    def send_to_first(self, tensor: Tensor) -> None:
        """Send a 1D tensor to rank 0, which calls `receive`."""
        dist.send(tensor, group=self.group, group_dst=0)

    def receive(self, tensor: Tensor, *, rank: int) -> None:
        """Fill a 1D tensor with what a rank sends to this one, rank 0."""
        dist.recv(tensor, group=self.group, group_src=rank)

    def _all_gather(self, data: bytes) -> list[bytes]:
        lengths = self._all_gather_lengths(len(data))
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        mine = _to_tensor(data, length=longest).to(self.device)
        rows = torch.empty(self.size * longest, dtype=torch.uint8, device=self.device)
        all_gather(rows, mine, group=self.group)
        pairs = zip(rows.view(self.size, longest), lengths, strict=True)
        return [_to_bytes(row[:length]) for row, length in pairs]

    def _all_gather_lengths(self, length: int) -> list[int]:
        mine = torch.tensor([length], dtype=torch.int64, device=self.device)
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.device)
        all_gather(lengths, mine, group=self.group)
        return lengths.tolist()


def _encode(error: Exception | None) -> bytes:
    if error is None:
        return b""
    text = str(error)
    if not isinstance(error, CheckpointError):
        text = f"{type(error).__name__}: {text}"
    return text.encode()[:_MESSAGE_BYTES_MAX]


def _to_tensor(data: bytes, *, length: int) -> Tensor:
    padded = bytearray(data.ljust(length, b"\0"))
    # frombuffer refuses an empty buffer.
    return torch.frombuffer(padded, dtype=torch.uint8) if padded else torch.empty(0).byte()


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
