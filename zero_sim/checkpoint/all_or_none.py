"""Ranks that save or load together: they exchange records, and either all fail or none does.

Records travel as JSON in byte tensors, because torch's object collectives would pickle them.

[Note: frames]
A collective costs more than the few bytes of most messages, so the length is not sent separately.
A message starts in a frame of fixed size, after its length. If it does not fit, a second collective
sends the rest. If an action fails, its error replaces the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.checkpoint.manifest import take_apart
from zero_sim.errors import CheckpointError
from zero_sim.zero.collectives import all_gather, size_and_rank

T = TypeVar("T")

# Longer errors are cut.
_MESSAGE_BYTES_MAX = 4000
# Small, because every rank receives a frame from every rank.
_FRAME_TO_ALL_BYTES = 1 << 10
_FRAME_TO_FIRST_BYTES = 1 << 13
_FRAME_FROM_FIRST_BYTES = 1 << 14
_LENGTH_BYTES = 8

# First byte of a message: its kind. `_MORE` requests the rest of messages longer than a frame.
_RECORD, _ERROR, _MORE = b"r", b"e", b"m"


class Coordinator:
    """A group's ranks, seen from this rank.

    Args:
        group: All participating ranks.
        device: Device for tensors in the group's collectives.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size, self.rank = size_and_rank(group)

    def attempt(self, action: Callable[[], T], *, what: str) -> T:
        """Run an action on this rank, and fail on every rank if it fails on any.

        The action must not communicate, because a failing rank would leave others waiting. The
        error message begins with `what`.

        Raises:
            CheckpointError: On every rank alike, with the error of each failed rank.
        """
        # The result stays on this rank; only success or failure is exchanged.
        kept: list[T] = []
        self._exchange(lambda: kept.append(action()), what=what)
        return kept[0]

    def share(self, action: Callable[[], Any], *, what: str) -> list[Any]:
        """Run an action like `attempt`. Return all ranks' results in rank order, on every rank.

        Raises:
            CheckpointError: See `attempt`.
        """
        return [json.loads(message[1:]) for message in self._exchange(action, what=what)]

    def gather_and_decide(
        self, action: Callable[[], Any], decide: Callable[[list[Any]], Any], *, what: str
    ) -> Any:
        """Run an action like `attempt`. Return rank 0's decision on all ranks' results.

        If the action communicates, it must complete all of its calls even if it fails. `decide`
        gets the results in rank order, unless a rank failed.

        Raises:
            CheckpointError: See `attempt`. Also if `decide` failed.
        """
        # 1. Every rank sends a frame to rank 0. Other ranks get no frames.
        mine, error = _try(action)
        frames, sent = self._gather(_frame(mine, _FRAME_TO_FIRST_BYTES))
        answer = b""
        rest_bytes = max(map(_count_rest, frames), default=0)
        # 2. If a message is longer than a frame, request the rest.
        if rest_bytes:
            # The longest rest on any rank, because a gather needs equal lengths.
            answer = _MORE + str(rest_bytes).encode()
        elif frames:
            answer, error = _answer(list(map(_unframe, frames)), decide, error=error)
        answer = self._broadcast(answer)
        sent.wait()
        # 3. All ranks get the request, so all of them send the rest, padded to the longest.
        if answer[:1] == _MORE:
            # Zeros fill up shorter rests. Lengths in the frames show where messages end.
            rest = mine[_FRAME_TO_FIRST_BYTES - _LENGTH_BYTES :]
            rests, sent = self._gather(rest.ljust(int(answer[1:]), b"\0"))
            answer = b""
            if rests:
                messages = [_unframe(a + b) for a, b in zip(frames, rests, strict=True)]
                answer, error = _answer(messages, decide, error=error)
            answer = self._broadcast(answer)
            sent.wait()
        return json.loads(_open(answer, what=what, error=error))

    def share_first(self, action: Callable[[], bytes], *, what: str) -> bytes:
        """Return the bytes of rank 0's action on every rank, and fail on every rank if it fails.

        Raises:
            CheckpointError: On every rank alike.
        """
        message, error = b"", None
        if self.rank == 0:
            try:
                message = _RECORD + action()
            except Exception as raised:  # noqa: BLE001  (raised again below, on all ranks)
                failed = {0: _describe(raised)}
                message, error = _ERROR + _list_failures(failed, size=self.size), raised
        return _open(self._broadcast(message), what=what, error=error)

    def _exchange(self, action: Callable[[], Any], *, what: str) -> list[bytes]:
        mine, error = _try(action)
        frames = self._all_gather(_frame(mine, _FRAME_TO_ALL_BYTES))
        rest_bytes = max(map(_count_rest, frames))
        # Every rank has all frames, so all agree on a second collective and its length.
        if rest_bytes:
            rest = mine[_FRAME_TO_ALL_BYTES - _LENGTH_BYTES :]
            rests = self._all_gather(rest.ljust(rest_bytes, b"\0"))
            frames = [a + b for a, b in zip(frames, rests, strict=True)]
        messages = list(map(_unframe, frames))
        failed = _find_failed(messages)
        if failed:
            failure = _ERROR + _list_failures(failed, size=self.size)
            _open(failure, what=what, error=error)
        return messages

    def _all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, of equal length, on every rank."""
        # [ranks * bytes], uint8: one row per rank.
        rows = torch.empty(self.size * len(data), dtype=torch.uint8, device=self.device)
        all_gather(rows, _to_tensor(data, device=self.device), group=self.group)
        return _cut(_to_bytes(rows), len(data))

    def _gather(self, data: bytes) -> tuple[list[bytes], dist.Work]:
        """Return every rank's bytes, of equal length, on rank 0, and an empty list elsewhere.

        Also returns the handle of the send. Wait for it after rank 0's answer, because until then
        other ranks have nothing else to wait for.
        """
        rows = torch.empty(0, dtype=torch.uint8, device=self.device)
        parts = None
        if self.rank == 0:
            rows = rows.new_empty(self.size * len(data))
            parts = list(rows.split(len(data)))
        mine = _to_tensor(data, device=self.device)
        work = dist.gather(mine, parts, group=self.group, group_dst=0, async_op=True)
        assert work is not None
        if self.rank == 0:
            work.wait()
        return _cut(_to_bytes(rows), len(data)), work

    def _broadcast(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        # Other ranks pass zeros of the same length, which the broadcast overwrites.
        frame = _to_tensor(_frame(data, _FRAME_FROM_FIRST_BYTES), device=self.device)
        dist.broadcast(frame, group=self.group, group_src=0)
        received = _to_bytes(frame)
        rest_bytes = _count_rest(received)
        if rest_bytes:
            rest = data[_FRAME_FROM_FIRST_BYTES - _LENGTH_BYTES :].ljust(rest_bytes, b"\0")
            content = _to_tensor(rest, device=self.device)
            dist.broadcast(content, group=self.group, group_src=0)
            received += _to_bytes(content)
        return _unframe(received)


def _try(action: Callable[[], Any]) -> tuple[bytes, Exception | None]:
    """Return an action's result or error as a message, and the raised error."""
    try:
        return _RECORD + json.dumps(action(), default=take_apart).encode(), None
    except Exception as error:  # noqa: BLE001  (raised again by `_open`, on all ranks)
        return _ERROR + _describe(error), error


def _answer(
    messages: list[bytes], decide: Callable[[list[Any]], Any], *, error: Exception | None
) -> tuple[bytes, Exception | None]:
    """Return rank 0's answer to all messages, with its own error if it failed."""
    failed = _find_failed(messages)
    if not failed:
        answer, error = _try(lambda: decide([json.loads(message[1:]) for message in messages]))
        if error is None:
            return answer, None
        failed = {0: answer[1:]}
    return _ERROR + _list_failures(failed, size=len(messages)), error


def _open(message: bytes, *, what: str, error: Exception | None) -> bytes:
    """Return the content of a message, or raise the error it contains."""
    if message[:1] == _ERROR:
        raise CheckpointError(f"{what}: {message[1:].decode(errors='replace')}") from error
    return message[1:]


def _find_failed(messages: list[bytes]) -> dict[int, bytes]:
    return {rank: text[1:] for rank, text in enumerate(messages) if text[:1] == _ERROR}


def _list_failures(failed: dict[int, bytes], *, size: int) -> bytes:
    """Return one text for all errors. Equal errors are listed once, with their ranks."""
    by_text: dict[bytes, list[int]] = {}
    for rank, text in failed.items():
        by_text.setdefault(text, []).append(rank)
    # If all ranks failed alike, list the error without ranks.
    if len(failed) == size and len(by_text) == 1:
        return next(iter(by_text))
    lines = [f"{_name_ranks(ranks)}: ".encode() + text for text, ranks in by_text.items()]
    return b"\n".join(lines)


def _describe(error: Exception) -> bytes:
    text = str(error)
    if not isinstance(error, CheckpointError):
        # Add the class, because the message alone may mean nothing: a KeyError's is the key.
        text = f"{type(error).__name__}: {text}"
    return text.encode(errors="backslashreplace")[:_MESSAGE_BYTES_MAX]


def _frame(data: bytes, size_bytes: int) -> bytes:
    """Return the first frame of a message; see [Note: frames]."""
    framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: size_bytes - _LENGTH_BYTES]
    return framed.ljust(size_bytes, b"\0")


def _count_rest(frame: bytes) -> int:
    """Return how many of its message's bytes a frame lacks."""
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    return max(0, length - (len(frame) - _LENGTH_BYTES))


def _unframe(frame: bytes) -> bytes:
    """Return the message in a frame and its continuation."""
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    return frame[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _cut(data: bytes, size_bytes: int) -> list[bytes]:
    return [data[start : start + size_bytes] for start in range(0, len(data), size_bytes)]


def _to_tensor(data: bytes, *, device: torch.device) -> Tensor:
    # A bytearray, because torch warns about read-only memory such as bytes.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _name_ranks(ranks: list[int]) -> str:
    # At most 8, so that messages stay readable.
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
