"""Process-wide state that a script reads or changes is private to its rank."""

import logging
import os
import sys

BEGIN = """
import os, sys
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
"""
JOIN = BEGIN + "dist.init_process_group()\n"


def test_environment_is_that_of_torchrun(launch, capsys):
    run = launch(
        """
        import os
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        print(*[os.environ[name] for name in names], os.getenv("MASTER_ADDR"))
        """,
        ranks=2,
        nodes=2,
    )
    assert run.failure is None
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0]: 0 0 0 4 2 localhost",
        "[rank 1]: 1 1 0 4 2 localhost",
        "[rank 2]: 2 0 1 4 2 localhost",
        "[rank 3]: 3 1 1 4 2 localhost",
    ]
    assert "RANK" not in os.environ


def test_state_that_a_rank_sets_is_hidden_from_other_ranks(launch, capsys):
    before = {"argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "print": print}
    run = launch(
        JOIN
        + """
import builtins, logging, subprocess
os.environ["MINE"] = str(rank)
sys.argv.append(f"--rank{rank}")
os.mkdir(f"folder{rank}")
os.chdir(f"folder{rank}")
plain = print
if rank:
    builtins.print = lambda *words: plain("not master:", *words)
logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s",
                    stream=sys.stdout)
dist.barrier()
print(os.environ["MINE"], sys.argv, os.path.basename(os.getcwd()))
logging.getLogger("some.where").info("told by rank 0 alone")
sys.stdout.flush()
said = subprocess.run(["sh", "-c", "echo $RANK $MINE"], capture_output=True, text=True).stdout
print("a program sees", said.strip())
""",
        "--steps",
    )
    assert run.failure is None, run.failure
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("[rank 0]")] == [
        "[rank 0]: 0 ['train.py', '--steps', '--rank0'] folder0",
        "[rank 0]: told by rank 0 alone",
        "[rank 0]: a program sees 0 0",
    ]
    assert "not master: 1 ['train.py', '--steps', '--rank1'] folder1" in out
    assert out.count("told by") == 1
    after = {"argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "print": print}
    assert before.keys() == after.keys()
    assert all(after[key] is before[key] for key in ("argv", "path", "print"))
    assert "MINE" not in os.environ
    assert "some.where" not in logging.root.manager.loggerDict


def test_globals_of_the_scripts_modules_are_rank_local(launch):
    run = launch(
        JOIN
        + """
import mesh
from pkg import state
mesh.setup()
state.calls.append(rank)
dist.barrier()
x = torch.ones(2) * (rank + 1)
dist.all_reduce(x, group=mesh.GROUP)
def late():
    from pkg.deep import where
    return where()
assert state.calls == [rank], state.calls
assert late() is state
assert sys.modules["pkg.state"] is state
print(x.tolist())
""",
        files={
            "mesh.py": """
                import torch.distributed as dist
                GROUP = None
                def setup():
                    global GROUP
                    GROUP = dist.new_group([0, 1])
            """,
            "pkg/__init__.py": "",
            "pkg/state.py": "calls = []",
            "pkg/deep.py": "from . import state\ndef where():\n    return state\n",
        },
    )
    assert run.failure is None, run.failure
    assert run.output == ("[3.0, 3.0]",)
    assert not {"mesh", "pkg", "pkg.state"} & sys.modules.keys()


def test_rank_may_wait_during_an_import(launch):
    run = launch(
        JOIN + "import meets\nprint(meets.total)",
        files={
            "meets.py": """
                import torch
                import torch.distributed as dist
                total = torch.ones(1)
                dist.all_reduce(total)
                total = total.item()
            """
        },
        stall_seconds=20,
    )
    assert run.failure is None, run.failure
    assert run.output == ("2.0",)


def test_only_named_packages_are_rank_local(launch, tmp_path, monkeypatch):
    for name in ("ours", "theirs"):
        (tmp_path / "site-packages" / name).mkdir(parents=True)
        (tmp_path / "site-packages" / name / "__init__.py").write_text("seen = []\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    try:
        run = launch(
            JOIN
            + """
import ours, theirs
ours.seen.append(rank)
theirs.seen.append(rank)
dist.barrier()
print(ours.seen, sorted(theirs.seen))
""",
            packages=("ours",),
        )
    finally:
        del sys.modules["theirs"]
    assert run.failure is None, run.failure
    assert run.output == ("[0] [0, 1]",)


def test_module_is_run_by_name_like_python_m(launch):
    run = launch(
        "",
        "--lr",
        "3",
        module="pkg.train",
        files={
            "pkg/__init__.py": "",
            "pkg/model.py": "width = 3",
            "pkg/train.py": """
                import os, sys
                from .model import width
                print(__name__, __package__, width, os.path.basename(sys.argv[0]), sys.argv[1:])
            """,
        },
    )
    assert run.failure is None, run.failure
    assert run.output == ("__main__ pkg 3 train.py ['--lr', '3']",)


def test_main_is_the_script(launch):
    run = launch(
        JOIN
        + """
import dataclasses, inspect, pickle
@dataclasses.dataclass
class Config:
    rank: int
dist.barrier()
assert sys.modules["__main__"].Config is Config
again = pickle.loads(pickle.dumps(Config(rank)))
assert type(again) is Config and again.rank == rank
torch.save(Config(rank), f"config{rank}.pt")
assert type(torch.load(f"config{rank}.pt", weights_only=False)) is Config
seen = [None, None]
dist.all_gather_object(seen, Config(rank))
assert seen == [Config(0), Config(1)]
assert "rank: int" in inspect.getsource(Config)
print(__name__, os.path.basename(__file__), __spec__)
"""
    )
    assert run.failure is None, run.failure
    assert run.output == ("__main__ train.py None",)


def test_exit_handlers_run_when_the_rank_ends(launch):
    run = launch(
        JOIN
        + """
import atexit, signal
atexit.register(dist.destroy_process_group)
atexit.register(print, "first")
before = signal.signal(signal.SIGTERM, print)
assert signal.getsignal(signal.SIGTERM) is print
dist.barrier()
sys.exit(0)
"""
    )
    assert run.failure is None, run.failure
    assert run.output == ("first",)


def test_no_group_exists_until_the_script_creates_it(launch):
    run = launch(
        BEGIN
        + """
assert dist.is_torchelastic_launched()
before = dist.is_initialized()
dist.init_process_group("gloo")
print(before, dist.is_initialized(), dist.get_backend())
try:
    dist.init_process_group("gloo")
except ValueError as error:
    print(error)
dist.destroy_process_group()
print(dist.is_initialized())
"""
    )
    assert run.failure is None, run.failure
    assert run.output == (
        "False True gloo",
        "trying to initialize the default process group twice!",
        "False",
    )


def test_rank_or_world_size_of_another_rank_is_refused(launch):
    run = launch(BEGIN + "dist.init_process_group('gloo', rank=0, world_size=2)\n")
    assert run.ending.startswith("rank 1 raised ValueError at train.py:6: expected rank=1 in init_")
    run = launch(BEGIN + "dist.init_process_group('gloo', rank=rank, world_size=1)\n")
    assert "expected world_size=2 in init_process_group" in run.ending


def test_mesh_creates_the_default_group(launch):
    run = launch(
        BEGIN
        + """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2,))
print(dist.is_initialized(), mesh.get_local_rank())
"""
    )
    assert run.failure is None, run.failure
    assert run.output == ("True 0",)


def test_random_numbers_depend_on_seed_and_rank(launch, capsys):
    source = """
    import random
    import torch
    print(torch.rand(1).item(), random.random())
    """
    drawn = [launch(source, seed=seed).output for seed in (0, 5, 5)]
    assert drawn[0] != drawn[1] == drawn[2]
    ranks = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert ranks[0] != ranks[1]


def test_custom_operators_are_rank_local(launch, capsys):
    source = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
@torch.library.custom_op("zero_sim_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * (SCALE + 1)
@scaled.register_fake
def _(x):
    return torch.empty_like(x)
SCALE = 3 - dist.get_rank()
dist.barrier()
print(scaled(torch.ones(1)).item(), torch.ops.zero_sim_tests.scaled(torch.ones(1)).item())
"""
    for _ in range(2):
        run = launch(source)
        assert run.failure is None, run.failure
        lines = sorted(capsys.readouterr().out.splitlines())
        assert lines == ["[rank 0]: 4.0 4.0", "[rank 1]: 3.0 3.0"]


def test_library_defined_by_each_rank_is_an_error(launch):
    run = launch(
        BEGIN + "lib = torch.library.Library('zero_sim_tests_lib', 'DEF')\n"
        "dist.init_process_group()\ndist.barrier()\n"
    )
    assert "which can define a library only once. Use torch.library.custom_op" in run.failure.report


def test_packages_with_rank_state_are_rank_local(launch, monkeypatch, tmp_path):
    folder = tmp_path / "site-packages"
    (folder / "accelerate").mkdir(parents=True)
    (folder / "accelerate" / "__init__.py").write_text("state = {}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    run = launch("import accelerate\nassert not accelerate.state\naccelerate.state['rank'] = 1\n")
    assert run.failure is None
