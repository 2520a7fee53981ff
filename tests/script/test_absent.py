"""Scripts that need GPUs, kernel packages or the compiler."""

import importlib.util

import pytest
import torch

JOIN = "import torch, torch.distributed as dist\ndist.init_process_group()\n"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")


@without_gpu
@pytest.mark.parametrize(
    "source",
    [
        f"{JOIN}torch.ones(2).cuda()",
        f"{JOIN}torch.ones(2, device='cuda')",
        f"{JOIN}assert torch.cuda.is_available()",
        f"{JOIN}0 % torch.cuda.device_count()",
        f"{JOIN}if not torch.cuda.is_available(): raise SystemExit('needs a GPU')",
        f"import torch\nif torch.cuda.device_count() < 2: print('too few GPUs')\nelse:\n    {JOIN}"
        "    dist.barrier()".replace("\ndist.init", "\n    dist.init"),
    ],
)
def test_script_that_fails_without_gpu_is_rerun_with_simulated_gpus(launch, capfd, source):
    run = launch(source)
    assert run.failure is None, run.ending
    assert run.settings.cuda_is_cpu
    assert "train.py needs GPUs, and there are none." in capfd.readouterr().err


@without_gpu
def test_script_that_starts_one_rank_per_gpu_gets_simulated_gpus(launch):
    run = launch(
        "import torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(rank, count):\n"
        "    dist.init_process_group('nccl', 'tcp://localhost:1', rank=rank, world_size=count)\n"
        "    torch.cuda.set_device(rank)\n"
        "    print(torch.cuda.current_device(), torch.ones(1, device=rank).item())\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())\n",
        ranks=3,
    )
    assert (run.started, run.output) == ((3,), ("0 1.0",)), run.ending


@without_gpu
def test_script_that_runs_without_gpu_is_not_rerun(launch):
    run = launch(f"{JOIN}print('cuda' if torch.cuda.is_available() else 'cpu')\ndist.barrier()")
    assert run.output == ("cpu",)
    assert not run.settings.cuda_is_cpu


@without_gpu
def test_script_that_reports_the_number_of_gpus_is_not_rerun(launch):
    run = launch("import torch\nprint(f'training with {torch.cuda.device_count()} GPUs')")
    assert not run.settings.cuda_is_cpu


@without_gpu
def test_unrelated_failure_is_not_rerun_with_gpus(launch):
    run = launch(f"{JOIN}torch.cuda.is_available()\n1 // 0")
    assert not run.settings.cuda_is_cpu


KERNEL = """
import triton
import triton.language as tl
from flash_attn.flash_attn_interface import flash_attn_func
@triton.autotune(configs=[triton.Config({"SIZE": 2}, num_warps=3)], key=["n"])
@triton.jit
def add_one(x, n: tl.constexpr):
    tl.store(x, tl.load(x) + 1)
"""


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("triton", "flash_attn")),
    reason="needs an environment without these packages",
)
class TestKernels:
    """Kernel packages that are not installed."""

    def test_missing_kernel_packages_can_be_imported(self, launch, capfd):
        run = launch(f"{KERNEL}{JOIN}dist.barrier()")
        assert run.failure is None, run.ending
        assert "imports kernels that are not installed" in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            ("add_one[(1,)](1, 2)", "add_one"),
            ("flash_attn_func(1, 2, 3)", "flash_attn.flash_attn_interface.flash_attn_func"),
        ],
    )
    def test_missing_kernel_fails_by_name_when_called(self, launch, call, name):
        run = launch(f"{KERNEL}{JOIN}{call}")
        assert f"kernel {name!r}" in run.ending

    def test_script_that_handles_missing_kernels_is_unchanged(self, launch):
        run = launch(
            f"{JOIN}try:\n    import triton\nexcept ImportError:\n    print('none')\n"
            "from torch.utils._triton import has_triton_package\nassert not has_triton_package()"
        )
        assert run.output == ("none",), run.ending


def test_torch_compile_is_off(launch, capfd):
    run = launch(
        f"{JOIN}@torch.compile(mode='max-autotune')\ndef double(x):\n    return x * 2\n"
        "model = torch.compile(torch.nn.Linear(2, 2))\n"
        "model.compile()\n"
        "assert model._orig_mod(torch.ones(2)).equal(model(torch.ones(2)))\n"
        "assert list(model.state_dict()) == ['weight', 'bias']\n"
        "print(double(torch.ones(1)).item())"
    )
    assert run.output == ("2.0",), run.ending
    assert capfd.readouterr().err.count("torch.compile is off") == 1
