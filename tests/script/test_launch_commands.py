"""Scripts that launch ranks by torchrun or similar commands."""

import pytest

from zero_sim.errors import UsageError
from zero_sim.script.launch_commands import torchrun_arguments


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --nproc_per_node=2 a.py -x 1", "--nproc_per_node=2 a.py -x 1"),
        ("/usr/bin/python3 -u -m torch.distributed.run a.py", "a.py"),
        ("python -m torch.distributed.launch --use_env a.py", "a.py"),
        ("accelerate launch --multi_gpu --num-processes 2 a.py -x", "--nproc-per-node 2 a.py -x"),
        (
            "python -m accelerate.commands.launch --num_processes=2 --main_process_port 1 -m a",
            "--nproc-per-node 2 -m a",
        ),
        ("python a.py torchrun", None),
        ("ls -m torch.distributed.run", None),
        ("torchrun a.py | tee log", None),
        ("", None),
    ],
)
def test_launch_commands_are_recognized(command, expected):
    words = None if expected is None else expected.split()
    assert torchrun_arguments(command, shell=True) == words
    if "|" not in command:
        assert torchrun_arguments(command.split()) == words


def test_accelerate_with_other_options_is_refused():
    with pytest.raises(UsageError, match="got --mixed_precision"):
        torchrun_arguments(["accelerate", "launch", "--mixed_precision", "bf16", "a.py"])


INNER = {
    "inner.py": "import sys, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "dist.barrier()\nprint('inner', dist.get_world_size(), sys.argv[1:])\n"
    "sys.exit(int(sys.argv[1]))\n"
}


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("subprocess.run(['torchrun', '--nproc-per-node', '3', 'inner.py', '{}']).returncode", 1),
        ("os.system('python -m torch.distributed.run --nproc_per_node=3 inner.py {}') // 256", 0),
    ],
)
def test_launched_ranks_run_in_one_process(launch, capfd, call, status):
    run = launch(f"import os, subprocess\nprint({call.format(status)})", files=INNER, ranks=1)
    assert run.output == (str(status),), run.ending
    out, err = capfd.readouterr()
    assert f"[rank 2]: inner 3 ['{status}']" in out
    assert "runs as `zero-sim torchrun`, in its own process." in err


def test_other_commands_are_run_unchanged(launch):
    run = launch("import subprocess\nprint(subprocess.check_output('echo 5', shell=True))")
    assert run.output == ("b'5\\n'",)
