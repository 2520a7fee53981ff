"""Containers that `torch.save` puts around one tensor: its bytes are found, nothing is unpickled.

A container is a zip archive without compression. What its pickle says of the tensor, dtype, shape
and strides, is known from the manifest: pieces are flat and dense. So only the entry with the bytes
is looked up, in the archive's directory, and read where it lies.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from typing import Final

from zero_sim.errors import CheckpointError

AROUND_BYTES_MAX: Final = 1 << 16
"""More than `torch.save` adds to a tensor: its directory, one small pickle, alignment."""

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
"""Of an entry in a zip archive: the magic, and how long its name and its extra field are."""
_MAGIC: Final = b"PK\x03\x04"


class Window:
    """A part of a file in memory, as a file of its own.

    Args:
        data: The file.
        start: First byte of the part.
        stop: First byte after it.
    """

    def __init__(self, data: bytes | mmap.mmap, *, start: int, stop: int) -> None:
        self._data = data
        self._start = start
        self._size_bytes = stop - start
        self._at = 0

    def seekable(self) -> bool:
        """Whether `seek` works, as of any file object."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move; `whence` as of any file object.

        Raises:
            ValueError: If that lies before the first byte.
        """
        at = offset + (0, self._at, self._size_bytes)[whence]
        if at < 0:
            raise ValueError(f"byte {at}")
        self._at = at
        return at

    def read(self, size_bytes: int = -1) -> bytes:
        """Return the next bytes, fewer at the end."""
        stop = self._size_bytes
        if size_bytes >= 0:
            stop = min(stop, self._at + size_bytes)
        start, self._at = self._at, max(self._at, stop)
        return bytes(self._data[self._start + start : self._start + stop])


def find_bytes(
    data: bytes | mmap.mmap, *, start: int, stop: int, size_bytes: int, where: str
) -> int:
    """Return where the bytes of the one tensor in a container begin, counted in its file.

    Args:
        data: The file.
        start: First byte of the container.
        stop: First byte after it.
        size_bytes: How long the tensor is.
        where: Path of the file, for messages.

    Raises:
        CheckpointError: If these are not the bytes of a container with one tensor of this size.
    """
    window = Window(data, start=start, stop=stop)
    try:
        with zipfile.ZipFile(window) as archive:  # pyrefly: ignore[no-matching-overload]
            entries = archive.infolist()
        names = {entry.filename for entry in entries}
        tensors = [entry for entry in entries if "data" in entry.filename.split("/")[-2:-1]]
        if len(tensors) != 1 or len(names) != len(entries):
            raise ValueError(f"{len(tensors)} tensors, {len(names)} names of {len(entries)}")
        (tensor,) = tensors
        sizes = (tensor.file_size, tensor.compress_size)
        if tensor.compress_type != zipfile.ZIP_STORED or sizes != (size_bytes, size_bytes):
            raise ValueError(f"{sizes[0]} bytes in {sizes[1]}")
        if min(entry.header_offset for entry in entries):
            raise ValueError("something before the archive")
        window.seek(tensor.header_offset)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
        first = window.tell() + name_bytes + extra_bytes
        if magic != _MAGIC or first + size_bytes > stop - start:
            raise ValueError(f"{magic!r} and bytes [{first}, {first + size_bytes})")
    except (
        zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, ValueError, OverflowError,
        LookupError, struct.error,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"expected a container of torch.save around {size_bytes} bytes in bytes "
            f"[{start}, {stop}) of {where}, got {error}."
        ) from error
    return start + first
