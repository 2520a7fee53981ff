"""Common mistakes, recognized in params alone."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.judge.newcomer import Newcomer, sgd_of_spec
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.reference.stepping import torch_defaults
from zero_sim.reference.whole_params import TextbookOptimizer, move_by_lamb, move_by_muon
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    ParamGroupSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

CASE = Scenario(
    schema=1,
    name="mistake",
    model=ModelSpec(name="params", shapes=((3,), (6, 4))),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=0),
    run=RunSpec(steps=2, micro_batches=3),
)
SGD = replace(CASE, optimizer=OptimizerSpec(name="sgd", lr=0.5))
ONE_RANK = replace(SGD, world=WorldSpec(size=1))


@pytest.fixture(scope="module")
def found():
    with WorldPool() as pool:

        def first_finding(target, case):
            result = run_case(case, pool=pool, target=target)
            assert result.verdict == "fail", result
            return result.findings[0]

        yield first_finding


def own_grad(grad, group):
    return grad


def makes(cls, **settings):
    """Return a factory of a torch optimizer with these settings and torch's defaults."""
    return lambda params, spec: cls(params.values(), **settings, foreach=False)


class TestSettings:
    """Settings that an engine ignored."""

    def test_default_of_torch_is_named(self, found):
        finding = found(Newcomer(optimizer=makes(torch.optim.AdamW, lr=1e-3)), CASE)
        assert finding.message == (
            "the working param differs: the system took the step with torch's default "
            "weight_decay 0.01 in place of 0.0"
        )
        assert "scenario.optimizer" in finding.detail
        assert "declare" not in finding.detail

    def test_settings_of_the_reference_are_printed(self, found):
        finding = found(Newcomer(optimizer=makes(torch.optim.AdamW, lr=1e-3)), CASE)
        assert (
            "reference: AdamW lr 0.001 betas (0.9, 0.999) eps 1e-08 weight_decay 0.0 amsgrad False"
        ) in finding.detail.splitlines()

    def test_several_defaults_are_named(self, found):
        case = replace(CASE, optimizer=OptimizerSpec(lr=0.02, betas=(0.5, 0.9)))
        finding = found(Newcomer(optimizer=makes(torch.optim.AdamW)), case)
        assert "torch's default lr 0.001 in place of 0.02" in finding.message
        assert "weight_decay 0.01" in finding.message

    def test_default_that_shows_in_a_later_step_is_named(self, found):
        """bf16 hides a small decay at first, while masters differ from the first step on."""
        model = replace(CASE.model, dtype="bf16")
        case = replace(CASE, model=model, run=RunSpec(steps=6))
        finding = found(Newcomer(optimizer=fp32_masters), case)
        assert finding.step > 0
        assert "default weight_decay 0.01" in finding.message

    def test_ignored_warm_up_is_named(self, found):
        case = replace(CASE, optimizer=OptimizerSpec(warmup_steps=4))
        finding = found(Newcomer(reads_lr_factor=False), case)
        assert "with a constant lr in place of a warm-up" in finding.message
        assert "reference: AdamW lr 0.00025" in finding.detail

    def test_ignored_groups_are_named(self, found):
        groups = (ParamGroupSpec(match="p1", lr=0.25),)
        case = replace(CASE, optimizer=OptimizerSpec(groups=groups))
        finding = found(Newcomer(), case)
        assert "with the same settings for all params in place of groups" in finding.message
        assert "reference: AdamW lr 0.25" in finding.detail

    @pytest.mark.parametrize(
        ("name", "option", "default"),
        [
            ("adamw", "weight_decay", 0.01),
            ("rmsprop", "lr", 0.01),
            ("adagrad", "eps", 1e-10),
            ("adadelta", "lr", 1.0),
            ("muon", "momentum", 0.95),
            ("sgd", "momentum", 0),
        ],
    )
    def test_torch_defaults_match_torch(self, name, option, default):
        assert torch_defaults(name)[option] == default

    def test_optimizer_that_torch_lacks_has_no_defaults(self):
        assert torch_defaults("lamb") == {}


def fp32_masters(params, spec):
    """AdamW with torch's decay on fp32 masters of narrow params."""
    return _Masters(params)


class _Masters:
    def __init__(self, params):
        self.params = list(params.values())
        self.masters = [torch.nn.Parameter(each.detach().float()) for each in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, foreach=False)

    def step(self):
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad = param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.copy_(master)


class TestGradients:
    """Gradients that lack terms, recognized in the stepped params."""

    @pytest.mark.parametrize("case", [SGD, ONE_RANK], ids=["ranks", "rank"])
    def test_last_micro_batch_alone_is_named(self, found, case):
        finding = found(Newcomer(optimizer=sgd_of_spec, accumulates=False), case)
        assert finding.message.endswith(
            "the system took the step by the gradient of the last micro-batch alone"
        )

    def test_unreduced_gradient_is_named(self, found):
        finding = found(Newcomer(optimizer=sgd_of_spec, reduce=own_grad), SGD)
        assert "the gradient of this rank alone, not reduced and not divided" in finding.message

    @pytest.mark.parametrize("case", [SGD, ONE_RANK], ids=["ranks", "rank"])
    def test_last_micro_batch_is_named_in_reported_gradients(self, found, case):
        target = Newcomer(optimizer=sgd_of_spec, accumulates=False, shows_grads=True)
        finding = found(target, case)
        assert finding.check == "equality.grad"
        assert finding.message.endswith("the value is the gradient of the last micro-batch alone")

    def test_one_rank_is_never_called_unreduced(self, found):
        def halved(grad, group):
            return grad / 7 * 3

        finding = found(Newcomer(optimizer=sgd_of_spec, reduce=halved, shows_grads=True), ONE_RANK)
        assert "not reduced" not in finding.message + finding.detail


class TestShards:
    """Optimizers of unsharded params, applied per shard."""

    @pytest.mark.parametrize("name", ["muon", "lamb"])
    def test_step_per_shard_is_named(self, found, name):
        spec = OptimizerSpec(name=name, lr=0.02, momentum=0.9 if name == "muon" else 0.0)
        case = replace(CASE, optimizer=spec, run=RunSpec(steps=1))
        finding = found(Newcomer(optimizer=shard_by_shard), case)
        words = {"muon": "each shard orthogonalised by itself", "lamb": "each shard scaled by its"}
        assert f"the system took the step with {words[name]}" in finding.message

    def test_missing_orthogonalisation_is_named(self, found):
        spec = OptimizerSpec(name="muon", lr=0.02, momentum=0.9)
        case = replace(CASE, optimizer=spec, run=RunSpec(steps=1))
        finding = found(Newcomer(optimizer=flat_muon), case)
        assert "the system took the step with no param orthogonalised" in finding.message

    def test_norm_of_one_shard_is_named(self, found):
        """Without reported parts; the last rank may have no rows."""
        case = replace(SGD, optimizer=replace(SGD.optimizer, clip_norm=100.0))
        finding = found(Newcomer(optimizer=sgd_of_spec, norm=norm_of_own_rows), case)
        assert finding.check == "equality.norm"
        assert "the value is the norm of this rank's shard alone" in finding.message
        assert "declare" not in finding.detail


class TestReportedShards:
    """The same mistakes in zero_sim's own system, which reports its shards."""

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            # A flat piece of a matrix is not orthogonalised.
            ("muon", "the system took the step with no param orthogonalised"),
            ("lamb", "the system took the step with each shard scaled by its own norms"),
        ],
    )
    def test_step_per_shard_is_named(self, judged, broken, name, said):
        broken("U02")
        spec = OptimizerSpec(name=name, lr=0.02, momentum=0.9 if name == "muon" else 0.0)
        result = judged(optimizer=spec, run=RunSpec(steps=1))
        assert result.findings[0].message.endswith(said)

    def test_norm_of_one_shard_is_named(self, judged, broken):
        broken("M69")
        (finding,) = (f for f in judged().findings if f.check == "equality.norm")
        assert "the norm of this rank's shard alone" in finding.message
        assert "declare" not in finding.detail


class _ByPieces:
    """Textbook optimizer on pieces of params."""

    def __init__(self, params, spec, cut):
        self.pairs = [(param, piece) for param in params.values() for piece in cut(param.detach())]
        self.cut, self.params = cut, list(params.values())
        settings = {"lr": spec.lr, "weight_decay": spec.weight_decay, "eps": spec.eps}
        settings |= {"momentum": spec.momentum, "nesterov": spec.nesterov, "betas": spec.betas}
        pieces = [piece for _, piece in self.pairs]
        move = {"muon": move_by_muon, "lamb": move_by_lamb}[spec.name]
        self.optimizer = TextbookOptimizer(move, [{"params": pieces, **settings}])

    def step(self):
        grads = [grad for param in self.params for grad in self.cut(param.grad)]
        for (_, piece), grad in zip(self.pairs, grads, strict=True):
            piece.grad = grad.contiguous()
        self.optimizer.step()


def shard_by_shard(params, spec):
    return _ByPieces(params, spec, lambda tensor: tensor.chunk(3))


def flat_muon(params, spec):
    return _ByPieces(params, spec, lambda tensor: [tensor.reshape(-1)])


def norm_of_own_rows(grads, group):
    own = [grad.chunk(group.size())[dist.get_rank(group)] for grad in grads.values()]
    return torch.cat([each.reshape(-1) for each in own]).double().norm().float()


def test_engine_without_a_mistake_passes():
    assert run_case(CASE, target=Newcomer()).verdict == "pass"
