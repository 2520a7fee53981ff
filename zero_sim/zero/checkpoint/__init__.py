"""Checkpoints that any layout can continue from, bit for bit.

`save` and `load` are collectives over the ranks that train. On the disk a checkpoint is a folder: a
JSON manifest, and beside it files of tensors, in spans that are named by param. Nothing is pickled.
"""

from __future__ import annotations

from zero_sim.errors import CheckpointError
from zero_sim.zero.checkpoint.load import load
from zero_sim.zero.checkpoint.manifest import Form, Manifest
from zero_sim.zero.checkpoint.save import SaveHandle, save, save_async

__all__ = ["CheckpointError", "Form", "Manifest", "SaveHandle", "load", "save", "save_async"]
