"""torch's installed tests pass on simulated ranks as recorded."""

import pytest
import torch

from tests.pytorch_suites.outcomes import PASS, read_record
from tests.pytorch_suites.running import run_suite
from tests.pytorch_suites.suites import INSTALLED, Suite

RECORD = read_record()
RECORDED = RECORD.suites[INSTALLED]


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECORD.torch.partition("+")[0],
    reason="the record is of another version of torch",
)
@pytest.mark.parametrize("timing", ["eager", "hostile"])
def test_outcomes_on_simulated_ranks_match_the_record(timing):
    """All tests run in one process, because importing torch's test tools takes seconds."""
    expected = {
        test: getattr(outcome, timing)
        for test, outcome in RECORDED.items()
        if outcome.baseline == PASS
    }
    told = run_suite(Suite(INSTALLED), timing, expected, limit_seconds=600)
    assert told.import_error == ""
    different = [
        f"{test}: expected {outcome}, got {told.outcomes[test]}\n{told.details[test]}"
        for test, outcome in expected.items()
        if told.outcomes[test] != outcome
    ]
    assert "\n".join(different) == ""
