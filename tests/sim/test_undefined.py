"""One scratch tensor as several outputs of a collective: legal, but undefined until overwritten."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim.in_flight_buffers import UndefinedMemory
from zero_sim.sim.inflight.poison import poisoned

SETTINGS = [
    {"timing": timing, "races": races}
    for timing in ("eager", "lazy", "hostile")
    for races in (False, True)
]


def of_rank(rank, *, elems=2):
    return torch.full((elems,), float(rank))


def all_gather(rank, scratch):
    """Gather rank 0's value; the others go to the scratch."""
    kept = torch.empty(2)
    dist.all_gather([kept, scratch, scratch], of_rank(rank))
    return kept


def gather(rank, scratch):
    kept = torch.empty(2)
    outputs = [kept, scratch, scratch] if rank == 0 else None
    dist.gather(of_rank(rank), outputs)
    return kept if rank == 0 else of_rank(0)


def all_to_all(rank, scratch):
    kept = torch.empty(2)
    dist.all_to_all([kept, scratch, scratch], [of_rank(rank) for _ in range(3)])
    return kept


def all_gather_coalesced(rank, scratch):
    kept = torch.empty(2)
    group = dist.group.WORLD
    group.allgather_coalesced([[kept], [scratch], [scratch]], [of_rank(rank)]).wait()
    return kept


def coalesced_into_tensors(rank, scratch):
    kept, both = torch.empty(6), torch.empty(6)
    with dist._coalescing_manager():
        dist.all_gather_single(kept, of_rank(rank))
        dist.all_gather_single(both, of_rank(rank))
        dist.all_gather_single(both, of_rank(rank))
    scratch.copy_(both[:2])
    return kept[:2]


def coalesced_scatters(rank, scratch):
    kept = torch.empty(2)
    with dist._coalescing_manager():
        dist.reduce_scatter_single(kept, torch.zeros(6))
        dist.reduce_scatter_single(scratch, torch.ones(6))
        dist.reduce_scatter_single(scratch, torch.ones(6))
    return kept


LEGAL = [all_gather, gather, all_to_all, all_gather_coalesced, coalesced_scatters]


class TestUnreadOutputs:
    """Outputs that share a scratch tensor are legal as long as it is not read."""

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize("call", LEGAL)
    def test_unread_shared_outputs_are_legal(self, world_of, call, settings):
        def program(rank):
            return call(rank, torch.empty(2)).tolist()

        assert world_of(3, **settings).run(program) == [[0.0, 0.0]] * 3

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize("elems", [(2, 2, 2), (3, 2, 2)], ids=["even", "uneven"])
    def test_padding_of_an_optimizer_with_unsharded_params_is_legal(
        self, world_of, settings, elems
    ):
        """A rank at a padded position also passes the scratch as input."""

        def program(rank):
            param = of_rank(rank + 7, elems=elems[0])
            padded = [param] + [torch.empty(2)] * 2
            dist.all_gather(padded, padded[rank])
            return param.tolist()

        assert world_of(3, **settings).run(program) == [[7.0] * elems[0]] * 3

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    def test_even_outputs_may_overwrite_their_input(self, world_of, settings):
        def program(rank):
            value = of_rank(rank)
            outputs = [value] * 3 if rank else [torch.empty(2) for _ in range(3)]
            dist.all_gather(outputs, value)
            return None if rank else [each[0].item() for each in outputs]

        assert world_of(3, **settings).run(program)[0] == [0.0, 1.0, 2.0]

    def test_uneven_outputs_that_overwrite_their_input_lose_it(self, world_of):
        def program(rank):
            value = of_rank(rank)
            scratch = [torch.empty(3), value, value]
            others = [torch.empty(3), torch.empty(2), torch.empty(2)]
            outputs = scratch if rank == 1 else others
            dist.all_gather(outputs, value if rank else torch.ones(3))
            return [bool(poisoned(each).any()) for each in outputs]

        lost_at_1 = [False, True, False]
        assert world_of(3).run(program) == [lost_at_1, [False, True, True], lost_at_1]

    def test_last_output_wins_if_not_strict(self, world_of):
        def program(rank):
            scratch = torch.empty(2)
            all_gather(rank, scratch)
            return scratch.tolist()

        for settings in SETTINGS:
            assert world_of(3, strict=False, **settings).run(program) == [[2.0, 2.0]] * 3

    def test_input_at_another_position_is_refused(self, world_of, violation_of):
        def program(rank):
            scratch = torch.empty(2)
            outputs = [scratch, scratch, torch.empty(2)]
            dist.all_gather(outputs, scratch if rank == 2 else of_rank(rank))

        text = str(violation_of(world_of(3), program, "aliasing"))
        assert "input 0" in text
        assert "NCCL would read what it has overwritten" in text

    def test_input_in_place_in_repeated_gathers_is_refused(self, world_of, violation_of):
        def program(rank):
            flat = torch.ones(4)
            with dist._coalescing_manager():
                dist.all_gather_single(flat, flat[2 * rank :][:2])
                dist.all_gather_single(flat, torch.ones(2))

        violation_of(world_of(2), program, "aliasing")

    def test_output_in_place_in_repeated_scatters_is_refused(self, world_of, violation_of):
        def program(rank):
            flat = torch.ones(4)
            part = flat[2 * rank :][:2]
            with dist._coalescing_manager():
                dist.reduce_scatter_single(part, flat)
                dist.reduce_scatter_single(part, torch.ones(4))

        violation_of(world_of(2), program, "aliasing")

    def test_partly_overlapping_outputs_are_refused(self, world_of, violation_of):
        def program(rank):
            flat = torch.ones(3)
            dist.all_gather([flat[:2], flat[1:]], torch.ones(2))

        text = str(violation_of(world_of(2), program, "aliasing"))
        assert "output 1 shares 4 bytes with output 0" in text
        assert "NCCL would write both, in any order" in text


READS = {
    "clone": torch.clone,
    "in place": lambda x: x.add_(1.0),
    "a view": lambda x: x[1:].sum(),
    "other bytes": lambda x: x.view(torch.uint8).sum(),
    "a sum with another": lambda x: torch.ones(2) + x,
    "a copy elsewhere": lambda x: torch.ones(2).copy_(x),
    "of a part that was not overwritten": lambda x: (x[:1].fill_(1.0), x.sum()),
    "a list": lambda x: torch._foreach_add([torch.ones(2), x], 1.0),
}

DEFINITIONS = {
    "fill_": lambda x: x.fill_(1.0),
    "copy_": lambda x: x.copy_(torch.ones(2)),
    "two parts": lambda x: (x[:1].fill_(1.0), x[1:].fill_(1.0)),
    "out": lambda x: torch.add(torch.ones(2), 0.0, out=x),
    "a collective": lambda x: dist.broadcast(x.fill_(1.0) if dist.get_rank() == 0 else x, 0),
}


class TestReads:
    """The race detector refuses reads of undefined memory; without it, reads return poison."""

    @pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
    @pytest.mark.parametrize("read", READS)
    def test_reads_are_refused(self, world_of, violation_of, read, timing):
        def program(rank):
            scratch = torch.empty(2)
            all_gather(rank, scratch)
            READS[read](scratch)

        world = world_of(3, timing=timing, races=True)
        text = str(violation_of(world, program, "undefined-output"))
        assert "reads the output of all_gather_list #0 of group world, issued at" in text
        assert text.count("test_undefined.py:") >= 2

    def test_reads_after_a_coalesced_call_are_refused(self, world_of, violation_of):
        def program(rank):
            coalesced_into_tensors(rank, torch.empty(2))

        violation_of(world_of(3, races=True), program, "undefined-output")

    @pytest.mark.parametrize("definition", DEFINITIONS)
    def test_reads_are_legal_after_an_overwrite(self, world_of, definition):
        def program(rank):
            scratch = torch.empty(2)
            all_gather(rank, scratch)
            DEFINITIONS[definition](scratch)
            return scratch.tolist(), scratch.sum().item()

        assert world_of(3, races=True).run(program) == [([1.0, 1.0], 2.0)] * 3

    @pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
    @pytest.mark.parametrize("call", [*LEGAL, coalesced_into_tensors])
    def test_reads_return_poison_without_a_detector(self, world_of, call, timing):
        def program(rank):
            scratch = torch.zeros(2)
            call(rank, scratch)
            return (rank > 0 and call is gather) or bool(poisoned(scratch).all())

        assert world_of(3, timing=timing).run(program) == [True] * 3

    def test_reads_in_a_later_program_are_legal(self, world_of):
        world, scratch = world_of(3, races=True), [torch.empty(2) for _ in range(3)]
        world.run(lambda rank: all_gather(rank, scratch[rank]))
        world.run(lambda rank: scratch[rank].clone())


class TestUndefinedMemory:
    """The map works on bytes and does not keep memory alive."""

    def test_undefined_elements_are_found_for_any_strides(self):
        memory, flat = UndefinedMemory(), torch.zeros(6)
        memory.mark(flat.view(2, 3)[:, 1], origin="it")
        assert [memory.origin_of(flat[i : i + 1]) for i in range(6)] == [
            None, "it", None, None, "it", None,
        ]  # fmt: skip
        memory.define(flat[:3])
        assert memory.origin_of(flat[:4]) is None
        assert memory.origin_of(flat.view(2, 3).t()) == "it"
        memory.define(flat.view(torch.uint8)[16:20])
        assert not memory

    def test_freed_memory_is_forgotten(self):
        memory, tensor = UndefinedMemory(), torch.zeros(2)
        memory.mark(tensor, origin="it")
        assert memory
        del tensor
        assert not memory

    def test_resized_storage_is_forgotten(self):
        memory, tensor = UndefinedMemory(), torch.zeros(2)
        memory.mark(tensor, origin="it")
        tensor.untyped_storage().resize_(32)
        assert memory.origin_of(tensor) is None
        assert not memory

    def test_sparse_tensors_are_ignored(self):
        memory = UndefinedMemory()
        kept = torch.zeros(1)
        memory.mark(kept, origin="it")
        memory.define(torch.eye(2).to_sparse())
        assert memory.origin_of(torch.eye(2).to_sparse()) is None
