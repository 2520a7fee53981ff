"""Sum whose terms share a gradient tensor."""

from itertools import islice

from tests.in_place_hooks import InPlaceHooks
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.judging import run_case
from zero_sim.workloads import build_workload


def test_terms_share_the_gradient_tensor(make_scenario):
    """The gradients share memory, which a hook may change."""
    workload = build_workload(make_scenario("positional", hidden=2))
    module, seen = workload.build(), []
    module.position.register_hook(lambda grad: grad.fill_(1.0))
    module.weight.register_hook(seen.append)
    batch = workload.batch(step=0, rank=0, micro=0)
    workload.loss(module, batch).backward()
    assert seen[0].equal(batch.inputs)


def test_engine_with_in_place_hooks_is_found():
    """50 cases of any model suffice; the first failure is much earlier."""
    target = InPlaceHooks()
    cases = islice(draws(drawn_cases(target), seed="3"), 50)
    results = (run_case(case, target=target) for case in cases)
    failed = next(result for result in results if result.verdict == "fail")
    assert failed.findings[0].param == "weight"
