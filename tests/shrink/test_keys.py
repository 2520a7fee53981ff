"""Keys that identify a finding, and findings that may be shrunk."""

import pytest
import torch

from zero_sim.findings.records import (
    BufferMap,
    CaseResult,
    Evidence,
    Finding,
    MappedBucket,
    MappedShard,
)
from zero_sim.shrink import BEYOND_VALUES, Key, how_far_apart, key_of, may_become, may_shrink


def result(verdict="fail", strip=None, message="m", **finding):
    found = (Finding(message=message, **finding),) if finding else ()
    return CaseResult(id="x", verdict=verdict, seconds=0.0, findings=found, strip=strip)


def strip(*differ, buckets=2, shards=2, shard_elems=4, padding=()):
    """Return a buffer of some buckets with some shards each."""
    of_bucket = shards * shard_elems
    places = [(bucket, shard) for bucket in range(buckets) for shard in range(shards)]
    return BufferMap(
        check="a", buffer=0, elems=buckets * of_bucket, start=0, stop=buckets * of_bucket,
        buckets=tuple(
            MappedBucket(index=i, start=i * of_bucket, stop=(i + 1) * of_bucket)
            for i in range(buckets)
        ),
        shards=tuple(
            MappedShard(
                index=shard, bucket=bucket, ranks=(shard,),
                start=bucket * of_bucket + shard * shard_elems,
                stop=bucket * of_bucket + (shard + 1) * shard_elems,
            )
            for bucket, shard in places
        ),
        pieces=(), padding=padding, unowned=(), differ=differ, differ_cut=False, differ_ranks=(0,),
    )  # fmt: skip


def test_two_values_of_one_finding_have_one_key():
    one = result(check="a", phase="p", manner="values", rank=1, param="0.weight", expected="1")
    other = result(check="a", phase="p", manner="values", rank=2, param="1.bias", step=3)
    assert key_of(one) == key_of(other) == Key("a", "p", "dense", "values", "")


def test_distance_is_relative_to_the_largest_value():
    """So cancellation to nearly zero is not a large difference."""
    sides = torch.tensor([4.0, 1e-9]), torch.tensor([3.0, 3e-9])
    evidence = Evidence(start=0, expected=sides[0], got=sides[1])
    assert how_far_apart(result(check="a", evidence=evidence)) == 0.25


def test_other_differences_are_beyond_any_distance_of_values():
    nothing, nan = torch.ones(1), torch.tensor([float("nan")])
    evidence = Evidence(start=0, expected=nothing, got=nan)
    assert how_far_apart(result(check="world.deadlock")) == BEYOND_VALUES
    assert how_far_apart(result(check="a", evidence=evidence)) == BEYOND_VALUES


def test_experts_are_another_kind():
    one = result(check="a", phase="p", param="experts.0.weight")
    assert key_of(one).kind == "expert"


def test_another_manner_is_another_finding():
    assert key_of(result(check="a", manner="zeros")) != key_of(result(check="a", manner="sign"))


def test_inconclusive_result_has_no_key():
    assert key_of(result("inconclusive", check="guard.x")) is None


def test_refused_case_has_a_key():
    assert key_of(result("error")) == Key("refused")


def test_key_of_an_earlier_version_has_fewer_parts():
    assert Key.from_list(["a", "p", "dense"]) == Key("a", "p", "dense", "", "")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("elements [0, 3) of 7 belong to no rank", "elements [2, 9) of 11 belong to no rank"),
        (
            "data race on rank 1: aten::add_ at /home/me/a.py:12 reads elements [0, 4)",
            "data race on rank 3: aten::add_ at /tmp/a.py:12 reads elements [3, 9)",
        ),
        (
            "all_reduce #3 of group 'grid0' (ranks 0 2) was never waited for",
            "all_reduce #11 of group world was never waited for",
        ),
        ("rank 0 raised KeyError: 'p0'", "rank 2 raised KeyError: 'p14'"),
    ],
)
def test_key_ignores_numbers_and_paths_in_a_message(one, other):
    assert key_of(result(check="w", message=one)) == key_of(result(check="w", message=other))


def test_two_messages_of_one_check_are_two_findings():
    messages = "rank 0 raised KeyError: 'p0'", "rank 0 raised IndexError: list index out of range"
    one, other = (key_of(result(check="world.rank-failed", message=text)) for text in messages)
    assert one != other


@pytest.mark.parametrize(
    ("differ", "place"),
    [
        ([(0, 16)], ""),
        ([(8, 16)], "last bucket"),
        ([(0, 7)], "first bucket"),
        ([(4, 8), (12, 16)], "last shard"),
        ([(3, 4), (7, 8)], "shard end"),
        ([(4, 5)], "shard start"),
        ([(2, 7), (9, 12)], ""),
    ],
)
def test_common_place_of_all_differences(differ, place):
    assert key_of(result(check="a", strip=strip(*differ))).place == place


def test_end_of_a_shard_is_before_its_padding():
    found = strip((2, 3), (13, 14), buckets=1, shard_elems=8, padding=((3, 8), (14, 16)))
    assert key_of(result(check="a", strip=found)).place == "shard end"


def test_buffer_of_one_part_has_no_place():
    assert key_of(result(check="a", strip=strip((0, 1), buckets=1, shards=1, shard_elems=1))) == (
        "a", "", "", "m", "",
    )  # fmt: skip


def test_strip_of_another_check_is_ignored():
    assert key_of(result(check="b", strip=strip((8, 16)))).place == ""


class TestBecoming:
    """Findings that a finding may become in a smaller case."""

    def test_last_bucket_may_become_the_only_one(self):
        key = key_of(result(check="a", strip=strip((8, 16))))
        assert may_become(key, result(check="a", strip=strip((0, 8), buckets=1)))

    def test_last_bucket_may_not_become_the_first_of_two(self):
        key = key_of(result(check="a", strip=strip((8, 16))))
        assert not may_become(key, result(check="a", strip=strip((0, 8))))

    def test_passed_case_has_no_finding(self):
        assert not may_become(key_of(result(check="a")), result("pass"))


@pytest.mark.parametrize(("check", "may"), [("equality.grad", True), ("expect.accuracy", False)])
def test_findings_may_shrink_but_expectations_may_not(check, may):
    assert may_shrink(Key(check)) is may
