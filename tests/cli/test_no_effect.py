"""Options that would have no effect are refused: what they need is named."""

import pytest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "abc", "--name", "x"], "expected --name with --freeze, got it alone"),
        (["replay", "abc", "--folder", "x"], "expected --folder with --freeze, got it alone"),
        (["replay", "abc", "--force"], "expected --force with --freeze, got it alone"),
        (["doctor", "--gpu-report", "x"], "expected --gpu-report with --gpu, got it alone"),
        (["doctor", "--step", "x"], "expected --step with --gpu, got it alone"),
        (["doctor", "--package", "x"], "expected --package with --target, got it alone"),
        (["fingerprint", "a.json", "--case", "x"], "expected --case with a scenario file"),
        (["fingerprint", "one.toml", "--rank", "9"], "expected --rank to be below the "),
    ],
)
def test_it_is_a_usage_error(invoke, words, said):
    done = invoke(*words)
    assert done.exit_code == 2
    assert said in done.stderr
