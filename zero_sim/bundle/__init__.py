"""Bundles: folders of JSON and safetensors with a failed case, to inspect and replay anywhere."""

from zero_sim.bundle.freeze import freeze, frozen_path
from zero_sim.bundle.read import find_bundle, find_bundles, read_bundle
from zero_sim.bundle.records import Bundle, Environment, Ran, bundle_id
from zero_sim.bundle.replay import Replayed, replay_bundle
from zero_sim.bundle.write import write_bundle

__all__ = [
    "Bundle",
    "Environment",
    "Ran",
    "Replayed",
    "bundle_id",
    "find_bundle",
    "find_bundles",
    "freeze",
    "frozen_path",
    "read_bundle",
    "replay_bundle",
    "write_bundle",
]
