"""Drawn DTensor programs, compared bit for bit between simulated ranks and gloo processes.

A program makes tensors on a mesh and takes a few steps: redistributions, operations, a backward.
After each step every rank notes a digest of its local tensor with shape and placements, or the
error that torch raised. Values are small integers, so sums are exact in any order. Values drawn
through DTensor are rounded before any reduction for the same reason.

`dtensor_programs.py COUNT [SEED]` compares COUNT programs and prints the differences.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import os
import random
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import ones as dtensor_ones
from torch.distributed.tensor import randn as dtensor_randn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zero_sim.backends.team import Teams
from zero_sim.sim import ContractViolation, Deadlock, World

MESHES = ((2,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 3), (2, 1, 2), (2, 2, 2))
BATCH = 100
_BATCHES_OF_TEAMS = 2 * len(MESHES)
TIMINGS = ("eager", "hostile")
JOB = "dtensor_programs:run_batch"
_SECONDS_MAX = 300.0
_EXTENTS = (0, 1, 2, 3, 4, 5, 7, 8)
_STEPS_MAX = 4


def draw_program(draws, mesh_dims):
    """Draw a program for a mesh of `mesh_dims` dimensions, as plain data."""
    start = [_draw_tensor(draws, mesh_dims) for _ in range(draws.choice((1, 1, 2)))]
    steps = [_draw_step(draws, mesh_dims) for _ in range(draws.randint(1, _STEPS_MAX))]
    return {"seed": draws.randrange(1 << 20), "start": start, "steps": steps}


def _draw_tensor(draws, mesh_dims):
    shape = [draws.choice(_EXTENTS) for _ in range(draws.choice((1, 2, 2, 3)))]
    make = draws.choice(("distribute", "distribute", "local", "local", "randn", "ones"))
    kinds = "RSS" if make != "local" else draws.choice(("RS", "RSP", "RSP", "RSM"))
    return {
        "make": make,
        "shape": shape,
        "placements": _draw_placements(draws, mesh_dims, len(shape), kinds),
        "dtype": draws.choice(("float32", "float32", "float64", "int64", "bfloat16")),
        "grad": draws.random() < 0.3,
    }


def _draw_placements(draws, mesh_dims, tensor_dims, kinds):
    letters = [draws.choice(kinds) for _ in range(mesh_dims)]
    dims = [draws.randrange(tensor_dims) for _ in range(mesh_dims)]
    if draws.random() < 0.6:
        dims = dims[:1] * mesh_dims  # Shards of shards have more kinds of uneven sizes.
    return [f"S{dim}" if each == "S" else each for each, dim in zip(letters, dims, strict=True)]


def _draw_step(draws, mesh_dims):
    name = draws.choice(
        (
            *("redistribute", "redistribute", "redistribute", "whole", "backward"),
            *("sum", "max", "mean", "matmul", "add", "mul", "relu", "transpose", "flatten"),
            *("softmax", "cat", "half", "uniform", "cumsum", "select", "layer_norm"),
        )
    )
    return {
        "name": name,
        "of": [draws.randrange(4), draws.randrange(4)],
        "dim": draws.randrange(3),
        "keep": draws.random() < 0.5,
        "placements": _draw_placements(draws, mesh_dims, 3, "RS" * 4 + "P"),
    }


def _placements(letters, tensor_dims):
    kinds = {"R": Replicate(), "P": Partial(), "M": Partial("max")}
    return [kinds.get(each) or Shard(int(each[1:]) % max(1, tensor_dims)) for each in letters]


def _make(spec, mesh, seed, rank):
    placements = _placements(spec["placements"], len(spec["shape"]))
    dtype, shape = getattr(torch, spec["dtype"]), spec["shape"]
    if spec["make"] == "ones":
        made = dtensor_ones(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    elif spec["make"] == "randn":
        dtype = dtype if dtype.is_floating_point else torch.float32
        made = dtensor_randn(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    elif spec["make"] == "distribute":
        made = distribute_tensor(_integers(shape, seed, dtype), mesh, placements)
    else:
        local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
        whole = torch.empty(shape, device="meta")
        made = DTensor.from_local(
            _integers(local_shape, seed + rank, dtype),
            mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return made.requires_grad_() if spec["grad"] and dtype.is_floating_point else made


def _integers(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)


def _take(step, made, mesh):
    """Take one step and return its result, which later steps may use if it is a DTensor."""
    first, second = (made[each % len(made)] for each in step["of"])
    dims = max(1, first.dim())
    dim, name = step["dim"] % dims, step["name"]
    if name == "redistribute":
        return first.redistribute(placements=_placements(step["placements"], first.dim()))
    if name == "whole":
        return first.full_tensor()
    if name == "backward":
        leaf = next(each for each in made if each.requires_grad and each.is_leaf)
        leaf.grad = None
        (leaf * first).sum().backward()
        return leaf.grad
    if name in ("add", "mul"):
        return getattr(first, name)(second if second.shape == first.shape else first)
    if name == "matmul":
        return first.transpose(-1, -2).matmul(first)
    if name in ("sum", "mean"):
        return getattr(first, name)(dim, keepdim=step["keep"]) if dim else getattr(first, name)()
    if name == "max":
        return first.amax(dim, keepdim=step["keep"])
    if name == "transpose":
        return first.transpose(0, dim)
    if name == "cat":
        return torch.cat([first, first], dim)
    if name == "half":
        return first.chunk(2, dim)[0]
    if name == "uniform":
        return torch.rand_like(first)
    if name == "select":
        return first.select(dim, 0)
    if name == "layer_norm":
        return torch.nn.functional.layer_norm(first, [first.shape[-1]])
    if name in ("softmax", "cumsum"):
        return getattr(first, name)(dim)
    if name == "flatten" and not first.numel():
        return first.clone()  # torch's sharding rules do not terminate for a view of no elements.
    return getattr(first, name)()


def run_program(program, mesh, rank, on_refusal):
    """Run a program on one rank and return a line for each tensor and step."""
    torch.manual_seed(program["seed"] + rank)
    seen, made = [], []
    for number, spec in enumerate(program["start"]):
        own_seed = program["seed"] + 64 * number
        act = functools.partial(_make, spec, mesh, own_seed, rank)
        seen.append(_noted(act, made, on_refusal))
    steps = program["steps"] if made else ()
    # In a loop, because each result is a possible input of the next steps.
    takes = (functools.partial(_take, step, made, mesh) for step in steps)
    seen += [_noted(take, made, on_refusal) for take in takes]
    return [*seen, *(_noted(tensor.full_tensor, made, on_refusal) for tensor in list(made))]


def _noted(act, made, on_refusal):
    try:
        result = act()
    except Exception as error:  # noqa: BLE001
        # Recorded, because torch must raise the same error on both sides.
        line = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        on_refusal(line)
        return line
    if isinstance(result, DTensor):
        made.append(result)
        placements, local = result.placements, result.to_local()
    else:
        placements, local = "plain", result
    if hasattr(local, "wait"):
        local = local.wait()
    content = torch.empty(local.shape, dtype=local.dtype)
    content.copy_(local.detach())
    content = content.view(-1).view(torch.uint8).numpy().tobytes()
    bits = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{tuple(result.shape)} {placements} {tuple(local.shape)} {local.dtype} {bits}"


def run_batch(payload, real_rank):
    """Run programs on one rank of a team of gloo workers."""
    _quiet()
    with real_rank.world(math.prod(payload["mesh"])):
        return run_programs(
            payload["programs"], payload["mesh"], real_rank.rank, on_each=real_rank.channel.alive
        )


def run_programs(programs, mesh_shape, rank, *, on_each=None, on_refusal=None):
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    seen = []
    for program in programs:
        seen.append(run_program(program, mesh, rank, on_refusal or (lambda line: None)))
        if on_each is not None:
            on_each()
    return seen


def _quiet():
    warnings.simplefilter("ignore")
    for name in (
        "torch.distributed.tensor._redistribute",
        "torch.distributed.tensor._collective_utils",
        "torch._subclasses.fake_tensor",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)


class Comparison:
    """Worlds and gloo workers, reused by all batches."""

    def __init__(self, teams):
        self._teams = teams
        self._worlds = {}
        self.hung = []
        """Mesh and program of each deadlocked program, which cannot be compared."""
        _quiet()

    def close(self):
        for world in self._worlds.values():
            world.close()

    def differences(self, mesh, programs, *, seed=0, timings=TIMINGS):
        """Return the differences between simulated ranks and gloo processes.

        A program deadlocks, on processes too, if torch refuses a step on only some ranks. Such
        programs are listed in `hung` and not compared.
        """
        simulated = {timing: {} for timing in timings}
        for timing in timings:
            self._simulate(mesh, programs, timing, seed, into=simulated[timing])
        compared = [
            index
            for index in range(len(programs))
            if all(index in seen for seen in simulated.values())
        ]
        chosen = [programs[index] for index in compared]
        payload = {"mesh": list(mesh), "programs": chosen}
        endings = self._teams.run(JOB, payload, size=math.prod(mesh), timeout_seconds=_SECONDS_MAX)
        bad = [ending for ending in endings if ending.how != "done"]
        if bad:
            return [f"gloo, mesh {mesh}: {bad}"]
        found = []
        for timing in timings:
            got = [simulated[timing][index] for index in compared]
            found += _compare(mesh, chosen, [each.result for each in endings], got, timing)
        return found

    def _simulate(self, mesh, programs, timing, seed, *, into):
        """Run all programs at once; if that fails, one by one to find the failing program."""
        size = math.prod(mesh)
        world = self._worlds.get(size)
        if world is None:
            world = self._worlds[size] = World(size, stall_seconds=_SECONDS_MAX)
        world.configure(order="gloo", timing=timing, seed=seed)
        try:
            by_rank = world.run(lambda rank: run_programs(programs, mesh, rank))
            into.update(enumerate(zip(*by_rank, strict=True)))
        except (Deadlock, ContractViolation):
            for index, program in enumerate(programs):
                self._simulate_one(world, mesh, index, program, into=into)

    def _simulate_one(self, world, mesh, index, program, *, into):
        refused = []
        try:
            by_rank = world.run(
                lambda rank: run_programs([program], mesh, rank, on_refusal=refused.append)
            )
            into[index] = [seen[0] for seen in by_rank]
        except (Deadlock, ContractViolation):
            # Without a refusal all ranks took the same steps, so the deadlock is a bug.
            if not refused:
                raise
            self.hung.append((mesh, program))


def _compare(mesh, programs, real, simulated, timing):
    found = []
    for index, program in enumerate(programs):
        for rank, theirs in enumerate(real):
            pairs = zip(simulated[index][rank], theirs[index], strict=True)
            for step, (a, b) in enumerate(pairs):
                if a != b:
                    found.append(
                        f"mesh {mesh}, {timing}, rank {rank}, line {step}:\n"
                        f"  World: {a}\n  gloo:  {b}\n  {program}"
                    )
                    break
    return found


def draw_batches(count, seed, *, batch=BATCH, meshes=MESHES):
    """Draw batches of programs, each batch for one mesh, `count` programs in total."""
    for number in range(math.ceil(count / batch)):
        draws = random.Random(f"{seed}/{number}")
        mesh = meshes[number % len(meshes)]
        size = min(batch, count - number * batch)
        yield mesh, [draw_program(draws, len(mesh)) for _ in range(size)]


def open_teams():
    """Return teams whose workers can import this module."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    if not paths[-1].startswith(str(here)):
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    preload = ("zero_sim.backends.worker", "dtensor_programs")
    return Teams(backend="gloo", preload=preload)


def main(count, seed):
    started, compared, hung, found = time.monotonic(), 0, 0, 0
    batches = enumerate(draw_batches(count, seed))
    # Replace workers regularly, because DTensor caches meshes whose groups keep gloo threads.
    while several := list(itertools.islice(batches, _BATCHES_OF_TEAMS)):
        with open_teams() as teams, contextlib.closing(Comparison(teams)) as comparison:
            for number, (mesh, programs) in several:
                hung_before = len(comparison.hung)
                for difference in comparison.differences(mesh, programs, seed=number):
                    found += 1
                    print(difference, flush=True)  # noqa: T201
                compared += len(programs)
                hung += len(comparison.hung) - hung_before
                print(  # noqa: T201
                    f"{compared} programs, {found} differences, {hung} that hang on both, "
                    f"{time.monotonic() - started:.0f} s",
                    flush=True,
                )
    return found


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), *(sys.argv[2:] or ["0"]))))
