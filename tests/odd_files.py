"""File system entries that are not regular files."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def make_odd(path: Path, kind: str) -> None:
    """Make a `fifo`, `socket`, `device` or `folder`, or a link to itself or to nothing."""
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nothing")
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            # Socket paths are limited to about 100 characters.
            here = os.open(path.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
