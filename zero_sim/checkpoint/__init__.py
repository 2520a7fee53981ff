"""Checkpoints that load into any layout, bit for bit.

`save` and `load` are collectives over the training ranks. A checkpoint is a folder with a JSON
manifest and tensor files. Files contain spans of params, named by param.

[Note: distrust]
Checksums detect damage, but an attacker can also write correct checksums. So a checksum makes no
value trusted, and nothing is unpickled. The manifest is checked value by value and as a whole. It
determines names, sizes and headers of all files, so other files are refused before they are read.
The author of a checkpoint still decides its content, such as weights or a learning rate.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_sim.checkpoint.loading import load
    from zero_sim.checkpoint.manifest import Form, Manifest
    from zero_sim.checkpoint.saving import SaveHandle, save, save_async
    from zero_sim.errors import CheckpointError

__all__ = ["CheckpointError", "Form", "Manifest", "SaveHandle", "load", "save", "save_async"]

# Imported on first use, because most runs neither save nor load.
_HOMES = {
    "CheckpointError": "zero_sim.errors",
    "Form": "zero_sim.checkpoint.manifest",
    "Manifest": "zero_sim.checkpoint.manifest",
    "SaveHandle": "zero_sim.checkpoint.saving",
    "load": "zero_sim.checkpoint.loading",
    "save": "zero_sim.checkpoint.saving",
    "save_async": "zero_sim.checkpoint.saving",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
