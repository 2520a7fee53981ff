"""Commands doctor and bench, and usage errors of all commands."""

import json
import sys
import types
from pathlib import Path

import pytest

import zero_sim
from zero_sim import doctor
from zero_sim.report.records import Measurement

CASE = str(Path(__file__).parents[2] / "scenarios" / "smoke" / "mlp.toml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runn"], "Did you mean 'run'?"),
        (["run", "--verbos", "x"], "(Did you mean one of: '--cover', '--verbose'?)"),
        (["run", "--backend", "mpi", "x"], "'mpi' is not one of 'sim', 'gloo', 'nccl'"),
        (["run", "--native", CASE], "expected --native with --backend gloo or nccl"),
        (["run", "--backend", "gloo", "--device", "cuda", CASE], "--device with --backend sim"),
        (["run", "--backend", "gloo", "--trace", "x", CASE], "--trace with --backend sim"),
        (["run", "--stall-seconds", "nan", CASE], "'--stall-seconds': expected a number, got nan"),
        (["torchrun", "--stall-seconds", "nan", "x.py"], "expected a number, got nan"),
        (["fuzz", "--seconds", "nan"], "'--seconds': expected a number, got nan"),
        (["shrink", "--seconds", "nan", CASE], "'--seconds': expected a number, got nan"),
        (["run", "--order", "lineal", CASE], "got 'lineal'. Choose linear, "),
        (["replay", "abc", "--name", "x"], "expected --name with --freeze, got it alone"),
        (["replay", "abc", "--folder", "x"], "expected --folder with --freeze, got it alone"),
        (["replay", "abc", "--force"], "expected --force with --freeze, got it alone"),
        (["doctor", "--gpu-report", "x"], "expected --gpu-report with --gpu, got it alone"),
        (["doctor", "--step", "x"], "expected --step with --gpu, got it alone"),
        (["doctor", "--package", "x"], "expected --package with --target, got it alone"),
        (["doctor", "--target", "torch-ddp", "--json"], "expected --target without --json"),
        (["fingerprint", "a.json", "--case", "x"], "expected --case with a scenario file"),
        (["fingerprint", "one.toml", "--rank", "9"], "expected --rank to be below the "),
    ],
)
def test_usage_error_is_refused_with_a_remedy(invoke, arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_version_is_printed(invoke):
    assert invoke("--version").output == f"zero-sim, version {zero_sim.__version__}\n"


def test_help_lists_the_commands(invoke):
    out = invoke("--help").stdout
    assert all(
        f"\n  {name} " in out for name in ("run", "replay", "export", "schema", "doctor", "bench")
    )


class TestDoctor:
    def test_environment_is_listed(self, invoke):
        facts = {
            fact["name"]: fact for fact in json.loads(invoke("doctor", "--json").stdout)["facts"]
        }
        assert facts["torch"]["ok"]
        assert {"python", "cpu threads", "run: backend sim", "run: model digits"} <= set(facts)
        assert "cpu kernels" in invoke("doctor").stdout

    def test_missing_torch_fails_every_backend(self, invoke, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        result = invoke("doctor")
        assert result.exit_code == 4
        assert "install the CPU build of torch" in result.stdout
        assert "NO  run: backend sim" in result.stdout

    def test_missing_scikit_learn_fails_only_digits(self, monkeypatch):
        """A missing extra is no fault of the machine."""
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        facts = {fact.name: fact for fact in doctor.examine()}
        assert 'pip install "zero-sim[digits]"' in facts["run: model digits"].note
        assert not facts["run: model digits"].required

    def test_old_torch_is_named(self):
        assert doctor._version("2.9.1+cpu") < doctor.TORCH_LEAST <= doctor._version("2.11.0a0")


ROW = Measurement(name="all_reduce", value=0.5, unit="ms", goal=1.0, ok=True)


class TestBench:
    @pytest.fixture(autouse=True)
    def bench(self, monkeypatch):
        """Replace the benchmark by one that takes no time."""
        module = types.ModuleType("zero_sim.bench")
        monkeypatch.setattr(module, "run_benchmarks", lambda only: [ROW], raising=False)
        monkeypatch.setitem(sys.modules, "zero_sim.bench", module)

    def test_measurements_are_printed_as_a_table(self, invoke):
        assert invoke("bench").stdout == "ok  all_reduce  0.5 ms  goal at most 1 ms\n"

    def test_json(self, invoke):
        assert json.loads(invoke("bench", "--json").stdout)["measurements"] == [
            {"name": "all_reduce", "value": 0.5, "unit": "ms", "goal": 1.0, "ok": True}
            | {"at_least": False}
        ]


def test_device_without_a_gpu_is_refused(invoke, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke("run", CASE, "--device", "cuda")
    assert result.exit_code == 4
    assert "expected a GPU that torch" in result.stderr


@pytest.mark.parametrize(
    ("nccl", "gpus", "environment", "said"),
    [
        ((2, 30, 7), 0, {}, "needs a GPU"),
        ((2, 29, 7), 1, {}, "needs NCCL 2.30 or newer, have 2.29.7"),
        ((), 1, {}, "have none"),
        ((2, 30, 7), 1, {}, "set NCCL_MULTI_RANK_GPU_ENABLE=1"),
        ((2, 30, 7), 1, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "experimental"),
    ],
)
def test_shared_gpu_needs_nccl_and_a_variable(nccl, gpus, environment, said):
    fact = doctor.shared_gpu_fact(nccl=nccl, gpu_count=gpus, environment=environment)
    assert said in fact.note
    assert fact.ok == (said == "experimental")
