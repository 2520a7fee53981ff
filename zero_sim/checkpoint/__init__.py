"""Checkpoints that any layout can continue from, bit for bit.

`save` and `load` are collectives over the ranks that train. On the disk a checkpoint is a folder: a
JSON manifest, and beside it files of tensors, in spans that are named by param.

[Note: read with distrust]
Checksums find damage; whoever alters a checkpoint on purpose puts them right. So nothing is
believed because of one, and nothing is unpickled. The manifest is checked value by value and as a
whole; names, sizes and headers of files follow from it, and files that are made otherwise are
refused before they are read. Whoever writes a checkpoint decides what is in it, of course: other
weights, another learning rate.

Each name below is loaded when it is first used: most runs neither save nor load.
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
