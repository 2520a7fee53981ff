"""Calculators of memory and traffic, from the command line."""

import json
from pathlib import Path

import pytest

from tests.cli.ended import assert_ended

SCENARIO = """
schema = 1
[model]
name = "transformer-260"
dtype = "bf16"
[optimizer]
name = "adam"
"""
MODULE = """
from torch import nn

tiny = nn.Linear(3, 4)


def make():
    return nn.Linear(10**6, 10**6, bias=False)


nothing = 3
"""
TRAINED = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4))


made = make()


def batch(generator, rows):
    return torch.randn(rows, 3, generator=generator), torch.zeros(rows, 4)


def loss(model, x, y):
    return (model(x) - y).square().mean()
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("case.toml").write_text(SCENARIO)
    Path("sized_models.py").write_text(MODULE)
    Path("trained_models.py").write_text(TRAINED)


def told(invoke, *words):
    done = invoke(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


COUNTED = ("--params", "7e9", "--ranks", "8")


def test_memory_of_a_number_of_params(invoke):
    found = told(invoke, "memory", *COUNTED, "--stage", "1")
    held = found["bytes_per_rank"]
    assert held.pop("total") == sum(held.values()) == found["total"] == 38_500_000_000


@pytest.mark.parametrize("number", ["7e9", "7b", "7_000_000_000", "7.0e9", "7000m"])
def test_large_numbers_have_several_notations(invoke, number):
    found = told(invoke, "memory", "--params", number, "--ranks", "8", "--stage", "1")
    assert found["total"] == 38_500_000_000


@pytest.mark.parametrize("number", ["0", "-1", "7.5", "many", "1e99", "nan", "7,000"])
def test_invalid_number_of_params_is_refused(invoke, number):
    done = invoke("memory", "--params", number, "--ranks", "8")
    assert_ended(done, 2, "expected a whole number of 1 to")


def test_comma_separates_ranks_and_underscore_groups_digits(invoke):
    words = ("memory", "--params", "7e9", "--ranks", "2,1_024", "--ranks", "8", "--stage", "1")
    assert [row["ranks"] for row in told(invoke, *words)["rows"]] == [2, 1024, 8]


def test_each_number_of_ranks_and_infinity_have_a_column(invoke):
    text = invoke("memory", "--ranks", "2,4,8,64,1024").output
    lines = [line.split() for line in text.splitlines()]
    for row in (
        "stage 1 160.00 100.00 70.00 55.00 41.88 40.12 40.00 GB",
        "1.6x 2.286x 2.909x 3.821x 3.988x 4x less",
        "1.778x 2.909x 4.267x 7.211x 7.946x 8x less",
        "2x 4x 8x 64x 1,024x N x less",
        "fp32, moments alone 160.00 120.00 100.00 90.00 81.25 80.08 80.00 GB",
        "25.0% 37.5% 43.8% 49.2% 50.0% 50.0% saved",
    ):
        assert row.split() in lines


def test_limits_are_in_json(invoke):
    limits = told(invoke, "memory", "--ranks", "2,4", "--stage", "2")["limits"]
    assert [row["name"] for row in limits] == ["stage 2", "fp32, moments alone"]
    assert (limits[0]["bytes_by_ranks"]["4"], limits[0]["limit"]) == (55 * 10**9, 20 * 10**9)


DEEPSPEED = ("--reduce-buffer-elems", "5e8", "--gather-chunk-elems", "5e8")


def test_default_buffer_of_deepspeed_is_a_gigabyte_in_16_bits(invoke):
    """It has 5e8 elements and, at stage 2, contains all unsharded gradients."""
    words = ("--stage", "1", "--stage", "2", *DEEPSPEED, "--offload-state")
    rows = told(invoke, "memory", *COUNTED, *words)["rows"]
    totals = [row["bytes_per_rank"]["total"] for row in rows]
    assert totals == [38_500_000_000, 26_250_000_000]
    assert [row["on_cpu"] for row in rows] == [10_500_000_000] * 2
    assert [row["within_step"]["backward"]["whole_gradients"] for row in rows] == [10**9] * 2


def test_reduce_buffers_and_chunks_do_not_change_traffic(invoke):
    plain = told(invoke, "traffic", *COUNTED, "--stage", "1")
    chunked = told(invoke, "traffic", *COUNTED, "--stage", "1", *DEEPSPEED)
    assert plain["total"] == chunked["total"]
    # 14 buffers with one call each, and 14 chunks, instead of one sum and one gather.
    assert chunked["rows"][0]["calls"] > plain["rows"][0]["calls"]


def test_param_group_buffers_and_offloaded_state_are_measured(invoke):
    words = ("--stage", "2", "--reduce-buffer-elems", "4", "--buffers-by", "param-group")
    Path("grouped.toml").write_text(f'{SCENARIO}groups = [{{ match = "weight", lr = 0.1 }}]')
    done = invoke("memory", "grouped.toml", *words, "--offload-state", "--measure")
    assert_ended(done, 0, "on the CPU")


def test_memory_table_has_gb_and_gib(invoke):
    text = invoke("memory", *COUNTED).output
    assert "in GB (10^9 bytes)" in text
    row = next(line for line in text.splitlines() if line.startswith("7,000,000,000 params      1"))
    assert row.split()[-6:] == ["38.50", "35.86", "65.6%", "60.7%", "42.00", "step"]


def test_savings_against_stage_0_and_one_device_differ(invoke):
    """10 MLP layers of hidden size 4096 on 4 ranks; they differ by the gradient buffer."""
    words = ("--params", "1_342_382_080", "--ranks", "4", "--stage", "1")
    found = told(invoke, "memory", *words)
    row, gib = found["rows"][0], 2**30
    assert f"{found['total'] / gib:.2f}" == "8.75"
    assert [f"{each['total'] / gib:.2f}" for each in found["single_device"].values()] == [
        "17.50", "20.00",
    ]  # fmt: skip
    assert (f"{row['saved']:.1%}", f"{row['saved_of_one_device']:.1%}") == ("56.2%", "50.0%")


def test_memory_of_a_scenario(invoke):
    found = told(invoke, "memory", "case.toml")
    assert found["total"] == 2600
    assert [row["model"] for row in found["rows"]] == ["case"]


def test_scenario_is_computed_in_other_stages(invoke):
    rows = told(invoke, "memory", "case.toml", "--stage", "0", "--stage", "1")["rows"]
    assert [row["bytes_per_rank"]["total"] for row in rows] == [4160, 2600]


def test_module_is_built_without_memory(invoke):
    found = told(invoke, "memory", "sized_models:make", "--ranks", "1000", "--stage", "3")
    # fp32 params and gradients, masters and two moments: 20 bytes each.
    assert found["total"] == 20 * 10**12 // 1000


def test_existing_module_is_accepted(invoke):
    assert told(invoke, "memory", "sized_models:tiny", "--stage", "0")["total"] == 16 * 20


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sized_models:nothing", "to be an nn.Module"),
        ("sized_models:tinny", "Did you mean 'tiny'?"),
        ("no_such_module:x", "expected an importable module before the colon"),
    ],
)
def test_unknown_module_is_refused(invoke, name, said):
    assert_ended(invoke("memory", name), 2, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected --params, or a scenario file"),
        (("case.toml", "--params", "7"), "got both"),
        (("--params", "7"), "expected --ranks with --params"),
        (("case.toml", "--dtype", "bf16"), "expected --dtype with --params only"),
        (("--params", "7", "--ranks", "8", "--redundancy", "3"), "divides the 8 ranks"),
        ((*COUNTED, "--optimizer", "lion"), "expected --optimizer to be one of adamw"),
        ((*COUNTED, "--curve"), "no --ranks with --curve"),
        (("--params", "1e12", "--ranks", "8", "--bucket-elems", "1"), "at most 100,000 buckets"),
        (("absent.toml",), "got nothing at this path"),
    ],
)
def test_conflicting_options_are_refused(invoke, words, said):
    done = invoke("memory", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_traffic_is_listed_by_kind_and_link(invoke):
    found = told(invoke, "traffic", *COUNTED, "--stage", "1")
    sent = found["bytes_sent_per_rank"]
    each = 2 * 7 * 10**9 * 7 // 8
    assert sent["reduce_scatter"] == sent["all_gather"] == {"nvlink": each, "nic": 0}
    assert sent["total"] == {"nvlink": 2 * each + 42, "nic": 0}
    assert found["total"] == 2 * each + 42


def test_traffic_uses_the_links_of_a_topology_file(invoke):
    Path("links.toml").write_text("ranks_per_node = 2\nbetween = 'cable'\ncards = 1\n")
    sent = told(invoke, "traffic", *COUNTED, "--stage", "1", "--topology", "links.toml")
    each = 2 * 7 * 10**9 * 7 // 8
    assert sent["bytes_sent_per_rank"]["all_gather"] == {"nvlink": each // 2, "cable": each // 2}


def test_invalid_topology_file_is_refused(invoke):
    Path("links.toml").write_text("ring = 3\nspeed = 1\ncards = 0\n")
    done = invoke("traffic", *COUNTED, "--topology", "links.toml")
    assert_ended(done, 2, "links.toml: 3 problems")


def test_curve_has_a_row_for_each_number_of_ranks(invoke):
    text = invoke("memory", "--params", "7e9", "--curve", "--stage", "3").output
    assert text.count("█") > 20
    assert "16,384" in text


def test_measured_scenario_equals_its_closed_form(invoke):
    found = told(invoke, "memory", "case.toml", "--measure")
    (run,) = found["measured"]
    assert run["differences"] == []
    assert [rank["bytes"]["masters"] for rank in run["ranks"]] == [520, 520]
    text = invoke("memory", "case.toml", "--measure").output
    assert "Closed forms and ledgers are equal on all ranks" in text


def test_measured_traffic_of_a_number_of_params(invoke):
    words = ("--params", "1000", "--ranks", "4", "--stage", "1", "--bucket-elems", "400")
    found = told(invoke, "traffic", *words, "--measure")
    (run,) = found["measured"]
    assert run["ranks"][3]["bytes_sent"] == {
        kind: links for kind, links in found["bytes_sent_per_rank"].items() if kind != "total"
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sized_models:tiny",), "with --measure, got no batch. Write batch(generator, rows)"),
        (("case.toml", "--no-masters"), "without --no-masters"),
        (("--params", "1e4", "--curve"), "expected --measure without --curve"),
        (("case.toml", "--ranks", "5000"), "world.size: expected an integer"),
    ],
)
def test_unmeasurable_case_is_refused(invoke, words, said):
    done = invoke("memory", *words, "--measure")
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_case_too_large_for_memory_is_refused(invoke):
    done = invoke("memory", "--params", "7e12", "--ranks", "8", "--stage", "1", "--measure")
    assert_ended(done, 4, "expected a run that fits into")


@pytest.mark.parametrize("name", ["make", "made"])
def test_module_is_measured_with_its_batch_and_loss(invoke, name):
    found = told(invoke, "memory", f"trained_models:{name}", "--ranks", "2", "--measure")
    (run,) = found["measured"]
    assert run["differences"] == []
    # 3 x 8 + 8 + 8 x 4 + 4 params in fp32.
    assert [rank["bytes"]["params"] for rank in run["ranks"]] == [4 * 68] * 2
