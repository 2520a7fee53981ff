"""Overlap of communication with computation in a case that leaves it open."""

from __future__ import annotations

from zero_sim.scenario.spec import SystemSpec


def overlaps_grads(system: SystemSpec) -> bool:
    """Whether gradients are reduced under backward; of its own accord wherever buckets are cut."""
    return _has_buckets(system) if system.overlap_grads is None else system.overlap_grads


def overlaps_params(system: SystemSpec) -> bool:
    """Whether params are gathered under forward; of its own accord with buckets.

    Only where all params are gathered after a step, stages 1 and 2, and not in chunks.
    """
    if system.overlap_params is None:
        in_chunks = system.gather_chunk_elems is not None
        return _has_buckets(system) and system.stage in (1, 2) and not in_chunks
    return system.overlap_params


def _has_buckets(system: SystemSpec) -> bool:
    # With one bucket a buffer there is next to nothing to overlap, and hooks only cost time.
    return system.bucket_elems is not None
