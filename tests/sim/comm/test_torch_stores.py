"""torch stores that a rank creates itself: a wait in a store lets other ranks run."""

import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import Deadlock, World
from zero_sim.sim.comm import torch_stores

SECOND = timedelta(seconds=1)
KINDS = ("hash", "file", "tcp", "prefix")


@pytest.fixture(params=KINDS)
def shared_store(request, tmp_path):
    """Function that opens a store of one kind, shared by two ranks."""
    shared = dist.HashStore()
    tcp = dist.TCPStore("localhost", 0, None, True) if request.param == "tcp" else None

    def open_store():
        if request.param == "file":
            return dist.FileStore(str(tmp_path / "store"), 2)
        if tcp is not None:
            return dist.TCPStore("localhost", tcp.port, None, False)
        return dist.PrefixStore("a", shared) if request.param == "prefix" else shared

    return open_store


def test_get_waits_until_another_rank_sets_the_key(world_of, shared_store):
    def program(rank):
        store = shared_store()
        if rank == 0:
            return store.get("key")
        store.set("key", "value")
        return b"set"

    assert world_of(2).run(program) == [b"value", b"set"]


def test_wait_for_several_keys_ends_with_the_last_key(world_of, shared_store):
    order = []

    def program(rank):
        store = shared_store()
        if rank == 0:
            store.wait(["a", "b"])
            order.append("waited")
            return store.multi_get(["a", "b"])
        store.set("a", "1")
        dist.barrier(dist.new_group([1], use_local_synchronization=True))
        order.append("sets b")
        store.multi_set(["b"], ["2"])
        return None

    assert world_of(2).run(program)[0] == [b"1", b"2"]
    assert order == ["sets b", "waited"]


def test_store_barrier_waits_for_all_ranks(world_of, shared_store):
    came = []

    def program(rank):
        store = shared_store()
        came.append(rank)
        store.barrier("here", 2)
        return len(came)

    assert world_of(2).run(program) == [2, 2]


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.check(["key"]),
        lambda store: store.add("count", 0) == 1,
        lambda store: store.compare_set("key", "value", "taken") == b"taken",
    ],
)
def test_polling_a_store_lets_other_ranks_run(world_of, shared_store, ask):
    def program(rank):
        store = shared_store()
        if rank == 0:
            while not ask(store):
                pass
        else:
            store.add("count", 1)
            store.set("key", "value")

    world_of(2).run(program)


@pytest.mark.parametrize(
    ("get", "said"),
    [
        (lambda store: store.get("key"), "waits for key 'key' of a .*Store at "),
        (
            lambda store: [None for _ in iter(lambda: store.check(["key"]), True)],
            "polls key 'key' of a .*Store at",
        ),
    ],
    ids=["waits", "asks in a loop"],
)
def test_wait_for_a_key_that_is_never_set_is_a_deadlock(world_of, shared_store, get, said):
    def program(rank):
        if rank == 0:
            get(shared_store())

    with pytest.raises(Deadlock, match=f"rank 0: {said}"):
        world_of(2).run(program)


def test_queue_pop_waits_for_another_ranks_push(world_of):
    store = dist.HashStore()

    def program(rank):
        if rank == 2:
            store.queue_push("queue", "first")
            store.queue_push("queue", "second")
            return b""
        return store.queue_pop("queue")

    assert sorted(world_of(3).run(program)) == [b"", b"first", b"second"]


def test_wait_times_out_after_its_stores_timeout(world_of, shared_store):
    def program(rank):
        store = shared_store()
        store.set_timeout(SECOND)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"wait timeout after 1000ms, keys: /?key"):
                store.get("key")
            with pytest.raises(RuntimeError, match=r"wait timeout after 2000ms, keys: /?key"):
                store.wait(["key"], 2 * SECOND)
            with pytest.raises(RuntimeError, match=r"wait timeout after 1000ms, keys: /?here"):
                store.barrier("here", 2)

    world_of(2).run(program)


def test_tcp_store_and_its_clients_wait_for_each_other(world_of):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def program(rank):
        # Rank 0 comes first and finds no server.
        store = dist.TCPStore("localhost", port, 2, is_master=rank == 1)
        kept.append(store)
        store.set(str(rank), "here")
        return store.get(str(1 - rank))

    kept = []  # A rank that ends would close its store.
    assert world_of(2).run(program) == [b"here", b"here"]


def test_a_tcp_store_times_out_without_its_clients(world_of):
    def program(rank):
        if rank:
            return
        with pytest.raises(
            dist.DistStoreError, match=r"1 seconds waiting for clients. 1/2 clients"
        ):
            dist.TCPStore("localhost", 0, 2, True, SECOND)
        with pytest.raises(dist.DistNetworkError, match="timed out after 1000ms while trying"):
            dist.TCPStore("localhost", 1, 2, False, SECOND)

    world_of(2).run(program)


def test_a_ranks_own_thread_may_end_its_wait(world_of):
    store = dist.HashStore()

    def program(rank):
        go = threading.Event()
        setter = threading.Thread(target=lambda: (go.wait(), store.set(f"key{rank}", "value")))
        setter.start()
        go.set()
        value = store.get(f"key{rank}")
        setter.join()
        return value

    assert world_of(2).run(program) == [b"value", b"value"]


def test_a_store_written_in_python_has_torchs_own_methods(world_of):
    class OwnStore(dist.Store):
        def get(self, key):
            return b"mine"

    def program(rank):
        store = OwnStore()
        with pytest.raises(RuntimeError, match="Not implemented"):
            store.append("key", "value")
        return dist.PrefixStore("a", store).get("key")

    assert world_of(1).run(program) == [b"mine"]


def test_listening_check_does_not_connect(world_of):
    with socket.create_server(("localhost", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        assert torch_stores._is_listening(port)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not torch_stores._is_listening(port)


def test_closing_the_last_world_restores_torchs_methods():
    kinds = (dist.TCPStore, dist.FileStore, dist.HashStore, dist.PrefixStore)
    before = [set(vars(kind)) for kind in kinds]
    connect = dist.TCPStore.__init__
    with World(1):
        pass
    assert [set(vars(kind)) for kind in kinds] == before
    assert dist.TCPStore.__init__ == connect


def test_group_can_be_created_with_a_torch_store(world_of, tmp_path):
    def program(rank):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        store.set(f"{rank}", "done")
        store.wait(["0", "1"])
        return total.item()

    assert world_of(2).run(program) == [2.0, 2.0]
