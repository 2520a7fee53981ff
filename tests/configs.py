"""Engine configurations from flat settings."""

from __future__ import annotations

from dataclasses import fields

from zero_sim.layout import LayoutPolicy
from zero_sim.zero import ZeroConfig

_LAYOUT = {field.name for field in fields(LayoutPolicy)}


def zero_config(**settings):
    """Return a configuration; settings of its layout are keyword arguments too."""
    layout = {name: settings.pop(name) for name in _LAYOUT & settings.keys()}
    if layout:
        settings["layout"] = LayoutPolicy(**{"bucket_elems": 40_000_000, **layout})
    return ZeroConfig(**settings)
