"""Ring all-reduce on 4 ranks: 6 iterations of sends and receives in the simulated world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.calculators.counted import counted_model
from zero_sim.calculators.network import Network, Ring
from zero_sim.calculators.traffic import traffic_of
from zero_sim.report import pages
from zero_sim.report.walks import Cell, Mark, Step, Table, Walk
from zero_sim.sim import World
from zero_sim.walkthrough import prose

# As many chunks as ranks, so that each rank completes a chunk.
RANKS, CHUNKS = 4, 4
# The slow-link example: 8 ranks on nodes of 2, with a divisible number of params.
_WORLD, _NODE, _PARAMS = 8, 2, 8 * 10**9
_RINGS: tuple[Ring, Ring] = ("across", "by-node")
# Multiples of 1/2, so that all sums are exact in fp32 and short in print.
START = ((1.0, 8), (2.0, 8), (1.5, 8), (2.5, 8))
"""First value and number of values on each rank; values increase by 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """A rank's send and receive, and its values after them."""

    sent: int
    """Index of the chunk sent to the next rank."""
    got: int
    """Index of the chunk received from the previous rank."""
    values: tuple[float, ...]


def values_of(rank: int) -> Tensor:
    """Return a rank's initial values."""
    first, count = START[rank]
    return first + torch.arange(float(count))


def run_ring() -> tuple[Sequence[Sequence[Iteration]], Sequence[Tensor]]:
    """Run both halves with messages, and an all-reduce in ring order for comparison.

    Returns:
        Iterations by rank, and each rank's all-reduce result.
    """

    def program(rank: int) -> tuple[list[Iteration], Tensor]:
        mine = values_of(rank)
        chunks = mine.view(CHUNKS, -1)  # [chunks, 2], a view: writing a chunk changes `mine`.
        reported: list[Iteration] = []
        for turn in range(2 * (RANKS - 1)):
            # Rank r first sends chunk r, then the chunk that it received last. The second half
            # starts with the chunk that the first half completed on this rank.
            sent = (rank - turn + (turn >= RANKS - 1) * RANKS) % CHUNKS
            got = (sent - 1) % CHUNKS
            coming = torch.empty_like(chunks[got])
            # Asynchronous, because if all ranks blocked in a send, none would receive.
            sending = dist.isend(chunks[sent].clone(), (rank + 1) % RANKS)
            dist.recv(coming, (rank - 1) % RANKS)
            assert sending is not None
            sending.wait()
            # First half: add the received chunk. Second half: keep the received sum.
            if turn < RANKS - 1:
                chunks[got] += coming
            else:
                chunks[got] = coming
            reported.append(Iteration(sent=sent, got=got, values=tuple(mine.tolist())))
        whole = values_of(rank)
        dist.all_reduce(whole)
        return reported, whole

    # The order in which the messages above add, so that the all-reduce gives the same bits.
    with World(RANKS, order="ring") as world:
        done = world.run(program)
    return [reported for reported, _ in done], [whole for _, whole in done]


def walk_ring() -> Walk:
    """Return the walkthrough."""
    iterations, wholes = run_ring()
    starts = [tuple(values_of(rank).tolist()) for rank in range(RANKS)]
    start = prose.step(
        "ring.start",
        [_table([list(map(Cell, _chunks(values))) for values in starts])],
        picture=pages.render("ring.html", labels=[""] * RANKS),
    )
    turns = [_iteration(iterations, turn) for turn in range(2 * (RANKS - 1))]
    end = [_division(iterations, wholes), _contrast(), _nodes()]
    return prose.walk("ring", [start, *turns, *end])


def _iteration(iterations: Sequence[Sequence[Iteration]], turn: int) -> Step:
    reducing = turn < RANKS - 1
    now = [reported[turn] for reported in iterations]
    rows: list[list[Cell]] = []
    for rank, each in enumerate(now):
        # Chunks received from iteration RANKS - 2 on are whole sums.
        finished = {each.got for each in iterations[rank][RANKS - 2 : turn + 1]}
        row = []
        for index, text in enumerate(_chunks(each.values)):
            # A chunk may be sent and whole at the same time. Then the last mark wins.
            mark: Mark = ""
            if index == each.sent:
                mark = "sent"
            if index in finished:
                mark = "done"
            if index == each.got and not (index in finished and turn == RANKS - 2):
                mark = "got"
            row.append(Cell(text, mark))
        rows.append(row)
    text = [
        f"Rank {rank} sends chunk {each.sent} to rank {(rank + 1) % RANKS}"
        + (", which adds it." if reducing else ", which keeps it.")
        for rank, each in enumerate(now)
    ]
    if turn == RANKS - 2:
        text.append(
            "Now each chunk is the whole sum on one rank: "
            + "; ".join(
                f"rank {rank} has chunk {each.got}, {_chunks(each.values)[each.got]}"
                for rank, each in enumerate(now)
            )
            + ". That is a reduce-scatter."
        )
    half = "Reduce-scatter" if reducing else "All-gather"
    number = turn + 1 if reducing else turn + 2 - RANKS
    return prose.step(
        "ring.iteration",
        [_table(rows, marked=True)],
        picture=pages.render("ring.html", labels=[f"chunk {each.sent}" for each in now]),
        more=text,
        half=half,
        number=number,
        count=RANKS - 1,
    )


def _division(iterations: Sequence[Sequence[Iteration]], wholes: Sequence[Tensor]) -> Step:
    sums = [reported[-1].values for reported in iterations]
    # Compare bits, because both add in the same order.
    same = all(values == tuple(whole.tolist()) for values, whole in zip(sums, wholes, strict=True))
    means = [tuple(value / RANKS for value in values) for values in sums]
    return prose.step(
        "ring.division",
        [_table([[Cell(text, "done") for text in _chunks(values)] for values in means])],
        same="yes" if same else "no, which is a bug in zero_sim",
    )


def _contrast() -> Step:
    elems = START[0][1]
    # In each of 2 (RANKS - 1) iterations, a rank sends a chunk with elems / RANKS elements.
    ring = 2 * elems * (RANKS - 1) // RANKS
    # Without a ring, rank 0 sends the sum to all others, or every rank sends its values to all.
    rows = [
        ["ring", f"{ring}", f"{ring}", f"{2 * (RANKS - 1)}"],
        ["rank 0 gathers, adds and sends", f"{elems * (RANKS - 1)}", f"{elems}", "2"],
        ["each sends all to all", f"{elems * (RANKS - 1)}", f"{elems * (RANKS - 1)}", "1"],
    ]
    return prose.step("ring.contrast", [prose.table("ring.contrast", rows)])


def _nodes() -> Step:
    """Return how K replicas reduce traffic on slow links, by closed forms."""
    # In units of P params, so divide bf16 bytes by 2 P.
    rows = []
    sent_slow: dict[tuple[int, Ring], float] = {}
    for replicas in (1, 2, 4):
        cells = [f"K = {replicas}, blocks of {_WORLD // replicas}"]
        model = counted_model(_PARAMS, dtype="bf16").with_choice(
            ranks=_WORLD, stage=1, redundancy=replicas
        )
        for ring in _RINGS:
            network = Network(ranks_per_node=_NODE, cards=1, ring=ring)
            traffic = traffic_of(model.laid_out(), scenario=model.scenario, rank=0, network=network)
            # Gradients and params only: control messages have other dtypes.
            flows = [flow for flow in traffic.flows if flow.dtype == "bfloat16"]
            slow = sum(flow.sent[network.between] for flow in flows)
            # The total does not depend on the ring, so show it once.
            if ring == _RINGS[0]:
                whole = sum(flow.total_sent for flow in flows)
                cells.append(f"{float(whole) / (2 * _PARAMS):g} P")
            sent_slow[replicas, ring] = float(slow) / (2 * _PARAMS)
            cells.append(f"{sent_slow[replicas, ring]:g} P")
        # fp32 master and Adam's two moments: 12 bytes per owned element, K / N of all elements.
        cells.append(f"{12 * replicas / _WORLD:g} P")
        rows.append(cells)
    table = prose.table("ring.nodes", rows)
    scattered, by_node = (1 - sent_slow[4, ring] / sent_slow[1, ring] for ring in _RINGS)
    return prose.step(
        "ring.nodes", [table], world=_WORLD, node=_NODE, scattered=scattered, by_node=by_node
    )


def _chunks(values: Sequence[float]) -> list[str]:
    size = len(values) // CHUNKS
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [f"[{', '.join(f'{value:g}' for value in part)}]" for part in parts]


def _table(rows: Sequence[Sequence[Cell]], *, marked: bool = False) -> Table:
    head = ("rank", *(f"chunk {index}" for index in range(CHUNKS)))
    named = [[f"rank {rank}", *row] for rank, row in enumerate(rows)]
    return prose.table("ring.iteration" if marked else "ring.start", named, head=head)
