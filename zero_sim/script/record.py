"""Record of a script run: ending, rank 0's output, and digests at named points."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch.distributed.tensor import DTensor

from zero_sim.errors import UsageError
from zero_sim.script.settings import Settings
from zero_sim.sim import WorldFailure, unwatched
from zero_sim.sim.callsite import site_of

# 128 bits, so that tensors do not collide by accident.
_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A rank's visit to a named point."""

    name: str
    visit: int
    """Number of the rank's earlier visits to this point."""
    site: str
    """Call site, `file:line`."""
    digests: Mapping[str, bytes]
    """Hashes of the values at the point, by name."""

    @property
    def title(self) -> str:
        """Name and visit, for reports."""
        return f"{self.name!r}, visit {self.visit}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScriptRun:
    """A run of a script."""

    seed: int
    failure: WorldFailure | None
    """Failure that ended the run; None if every rank finished."""
    ending: str
    """Description of the ending, without stacks and other details that differ between equal runs.
    """
    output: tuple[str, ...]
    """Rank 0's lines on standard output."""
    points: tuple[tuple[Point, ...], ...]
    """Visits by rank, in order of time."""
    collective_count: int
    settings: Settings
    """Settings of the last attempt, which may differ from the user's, for example `cuda_is_cpu`."""
    started: tuple[int, ...] = ()
    """Sizes of the worlds that the script started itself."""


@dataclass(slots=True)
class PointRecorder:
    """Recorder of a rank's visits to named points."""

    points: list[Point] = field(default_factory=list)
    _visits: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, things: tuple[object, ...], *, file: str, line: int) -> None:
        """Record a visit: hash the rank's values."""
        visit = self._visits.get(name, 0)
        self._visits[name] = visit + 1
        # An optimizer does not know its params' names, so take them from modules in the same call.
        names = {
            id(param): path
            for thing in things
            if isinstance(thing, torch.nn.Module)
            for path, param in thing.named_parameters()
        }
        digests: dict[str, bytes] = {}
        several = len(things) > 1
        # Unwatched, because these reads are no data race of the script.
        with torch.no_grad(), unwatched():
            for index, thing in enumerate(things):
                for path, value in _values(thing, names, path=""):
                    key = path or f"value {index}"
                    # Two modules may have params with the same name.
                    if several and key in digests:
                        key = f"{key} of argument {index}"
                    digests[key] = _digest(value)
        self.points.append(Point(name=name, visit=visit, site=site_of(file, line), digests=digests))


def _values(thing: object, names: Mapping[int, str], *, path: str) -> Iterator[tuple[str, object]]:
    """Yield each leaf value in a thing, with its name."""
    if isinstance(thing, torch.nn.Module):
        for name, param in thing.named_parameters():
            yield name, param
            if param.grad is not None:
                yield f"{name}.grad", param.grad
        yield from thing.named_buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        params = [param for group in thing.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            name = names.get(id(param), f"param {index}")
            yield from _values(thing.state.get(param, {}), names, path=f"optimizer {name}")
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _values(value, names, path=f"{path}.{key}" if path else str(key))
    elif isinstance(thing, (list, tuple)):
        for index, value in enumerate(thing):
            yield from _values(value, names, path=f"{path}[{index}]")
    else:
        yield path, thing


def _digest(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        # repr is exact for floats and distinguishes -0.0 from 0.0.
        digest.update(repr(value).encode())
    else:
        raise UsageError(
            "expected checkpoint_here to get modules, optimizers, tensors, numbers, and dicts, "
            f"lists and tuples of these, got {type(value).__qualname__}. Omit it, or convert it."
        )
    return digest.digest()


def _add_tensor(digest: hashlib.blake2b, tensor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if local.layout is not torch.strided:
        local = local.to_dense()
    digest.update(f"{local.dtype} {tuple(local.shape)} ".encode())
    # FSDP frees unsharded params' memory, but keeps their shapes.
    if local.is_meta or not local.untyped_storage().nbytes():
        return
    # View as [bytes], because numpy has no bf16.
    local = local.cpu().contiguous().reshape(-1)
    digest.update(local.view(torch.uint8).numpy().tobytes())


# Maximum number of ranks to list.
_RANKS_MAX = 16


def first_difference(
    first: ScriptRun, other: ScriptRun, *, ignored: re.Pattern[str] | None = None
) -> str:
    """Describe the first difference between two runs; empty if they are equal.

    Points are compared before endings and output, because they are nearest to the cause. If several
    ranks differ, their earliest point counts.

    Args:
        first: Reference run.
        other: Other run.
        ignored: Pattern for lines of rank 0 to skip.
    """
    return (
        _of_points(first, other)
        or _of_endings(first, other)
        or _of_output(*(_compared(run, ignored) for run in (first, other)))
    )


def _of_points(first: ScriptRun, other: ScriptRun) -> str:
    longest = max(len(points) for points in (*first.points, *other.points))
    for index in range(longest):
        differing = [
            (rank, a, b)
            for rank, (a, b) in enumerate(
                zip(_nth(first.points, index), _nth(other.points, index), strict=True)
            )
            # If a run failed, missing points are a consequence, and the ending is reported instead.
            if not _same(a, b)
            and not (a is None and first.failure)
            and not (b is None and other.failure)
        ]
        if differing:
            rank, a, b = differing[0]
            ranks = [rank for rank, _, _ in differing]
            return _describe(rank, a, b, ranks=ranks, seeds=(first.seed, other.seed))
    return ""


def _nth(points: Sequence[Sequence[Point]], index: int) -> list[Point | None]:
    return [of_rank[index] if index < len(of_rank) else None for of_rank in points]


def _same(a: Point | None, b: Point | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.name, a.visit, a.digests) == (b.name, b.visit, b.digests)


def _describe(
    rank: int, a: Point | None, b: Point | None, *, ranks: Sequence[int], seeds: tuple[int, int]
) -> str:
    point = a or b
    assert point is not None
    if a is None or b is None:
        only = seeds[0] if b is None else seeds[1]
        return f"only with seed {only}, rank {rank} reached point {point.title}, at {point.site}"
    if (a.name, a.visit) != (b.name, b.visit):
        return (
            f"rank {rank} reached point {a.title}, at {a.site}, with seed {seeds[0]}, and point "
            f"{b.title}, at {b.site}, with seed {seeds[1]}"
        )
    keys = [key for key in {**a.digests, **b.digests} if a.digests.get(key) != b.digests.get(key)]
    lines = [f"at point {a.title}, at {a.site}, rank {rank} differs in {keys[0]}"]
    for seed, point in zip(seeds, (a, b), strict=True):
        digest = point.digests.get(keys[0])
        lines.append(f"  seed {seed}: {'not there' if digest is None else digest.hex()}")
    others = len(keys) - 1
    if others:
        shown = ", ".join(keys[1:4]) + (", ..." if others > 3 else "")
        lines.append(f"  and in {others} of {len(a.digests)} other values: {shown}")
    if len(ranks) > 1:
        shown = ", ".join(map(str, ranks[:_RANKS_MAX])) + (", ..." if ranks[_RANKS_MAX:] else "")
        lines.append(f"  on ranks {shown}")
    return "\n".join(lines)


def _of_endings(first: ScriptRun, other: ScriptRun) -> str:
    if first.ending == other.ending:
        return ""
    return (
        f"the runs ended differently\n  seed {first.seed}: {first.ending}\n"
        f"  seed {other.seed}: {other.ending}"
    )


def _compared(run: ScriptRun, ignored: re.Pattern[str] | None) -> tuple[int, list[tuple[int, str]]]:
    """Return the run's seed and the numbered lines of rank 0 to compare."""
    # Number lines before skipping any, so that the numbers match the output.
    lines = enumerate(run.output, start=1)
    return run.seed, [each for each in lines if ignored is None or not ignored.search(each[1])]


def _of_output(
    first: tuple[int, list[tuple[int, str]]], other: tuple[int, list[tuple[int, str]]]
) -> str:
    nothing = 0, "(none)"
    for a, b in zip_longest(first[1], other[1], fillvalue=nothing):
        if a[1] != b[1]:
            return (
                f"line {a[0] or b[0]} of rank 0's output differs\n"
                f"  seed {first[0]}: {a[1]}\n  seed {other[0]}: {b[1]}"
            )
    return ""
