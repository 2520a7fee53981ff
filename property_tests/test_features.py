"""Every feature with every other: drawn combinations equal the reference, all state, every step.

Swarm testing: each case switches on a random subset of the features, since most real bugs need two
or three of them at once, and many hide behind others. Sizes lean towards the edges of a partition:
0, 1, N-1, N, N+1 elements and multiples of what shards are aligned to.
"""

from dataclasses import replace
from typing import get_args

from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from zero_sim.reference import POSITION_FREE
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import (
    DataSpec,
    FreezeSpec,
    GroupSpec,
    LossScaleSpec,
    ModelSpec,
    NanSpec,
    OptimizerSpec,
    OrderName,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.verify import run_case

OPTIMIZERS = [
    "adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta", "asgd",
    "rprop",
]  # fmt: skip
NO_FOREACH = ("nadam", "radam", "asgd")
RANKS_MAX = 6
MLP_PARAMS = ["0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias"]


def divisors(size):
    return [k for k in range(1, size + 1) if size % k == 0]


def edge_sizes(world_size, align_elems):
    unit = world_size * align_elems
    edges = {0, 1, world_size - 1, world_size, world_size + 1, unit - 1, unit, unit + 1}
    return st.sampled_from(sorted(edges)) | st.integers(0, 3 * unit)


@st.composite
def shapes(draw, world_size, align_elems):
    shape = st.one_of(
        edge_sizes(world_size, align_elems).map(lambda n: (n,)),
        st.just(()),
        st.tuples(st.integers(0, 4), st.integers(0, 4)),
    )
    drawn = draw(st.lists(shape, min_size=1, max_size=6))
    return (*drawn, (draw(st.integers(1, 5)),))


@st.composite
def models(draw, on, world_size, align_elems):
    dtype = draw(st.sampled_from(["fp32", "bf16"]))
    if on("experts"):
        return ModelSpec(
            name="moe", dtype=dtype, hidden=draw(st.integers(1, 4)),
            experts=draw(st.sampled_from([4, 6])),
        )  # fmt: skip
    if on("unusual"):
        return ModelSpec(name="unusual", dtype=dtype)
    exact = draw(st.sampled_from(["lattice", "bit-hash", "ternary"])) if on("exact") else None
    if exact == "ternary":
        return ModelSpec(name=exact, dtype=dtype, hidden=draw(st.integers(1, 9)))
    if exact or on("bare params"):
        drawn = draw(shapes(world_size, align_elems))
        return ModelSpec(name=exact or "params", dtype=dtype, shapes=drawn)
    freeze = ()
    if on("freeze"):
        start = draw(st.integers(0, 2))
        freeze = (FreezeSpec(param=draw(st.sampled_from(MLP_PARAMS)), start=start, stop=start + 1),)
    fp8_format = draw(st.sampled_from(["e4m3", "e5m2", "mixed"])) if on("fp8") else None
    return ModelSpec(
        name="mlp" if fp8_format is None else "fp8", fp8_format=fp8_format or "mixed",
        dtype=dtype, hidden=draw(st.integers(1, 5)), blocks=draw(st.integers(1, 2)),
        freeze=freeze,
    )  # fmt: skip


def shares(model, world_size):
    """Ways in which the experts of a model can be dealt to ranks."""
    return [
        ep
        for ep in divisors(world_size)
        if ep == 1 or (model.name == "moe" and model.experts % ep == 0)
    ]


@st.composite
def systems(draw, on, world_size, align_elems):
    """Settings for `world_size` ranks, those that hold the same experts."""
    stage = 0 if on("stage 0") else 1
    uneven = stage == 1 and align_elems == 1 and on("uneven")
    sync = "every" if on("sync every") else "last"
    divide = draw(st.sampled_from(["none", "pre", "post", "premul"])) if on("divide") else "post"
    counts = ["ranks", "micro-batches"]
    if sync == "last" or divide in ("none", "post"):
        counts.append("tokens")
    return SystemSpec(
        stage=stage,
        redundancy=draw(st.sampled_from(divisors(world_size))) if stage and on("redundancy") else 1,
        partition="uneven" if uneven else "padded",
        param_order="reverse" if on("reverse") else "registration",
        align_elems=align_elems,
        align_bytes=draw(st.sampled_from([1, 16, 128])) if align_elems > 1 else 1,
        bucket_elems=draw(st.integers(1, 60)) if on("buckets") else None,
        overlap_grads=on("overlap grads"),
        overlap_params=stage == 1 and on("overlap params"),
        sync=sync,
        divide=divide,
        divide_by=draw(st.sampled_from(counts)) if on("divide by") else "ranks",
        grad_dtype="fp32" if on("fp32 grads") else "param",
    )


@st.composite
def optimizers(draw, on, model):
    name = draw(st.sampled_from(OPTIMIZERS)) if on("any optimizer") else "adamw"
    clip = draw(st.sampled_from(["norm", "value"])) if on("clip") else None
    suffixes = ["bias", "weight"] if model.name in ("mlp", "fp8") else ["0", "1"]
    if model.name == "moe":
        suffixes = ["1.linear.weight", "bias"]
    groups = tuple(
        GroupSpec(match=suffix, lr=draw(st.none() | st.sampled_from([0.0, 0.01])))
        for suffix in (suffixes if on("groups") else [])
    )
    momentum = name in ("sgd", "rmsprop") and on("momentum")
    return OptimizerSpec(
        name=name,
        lr=draw(st.sampled_from([1e-3, 0.1])),
        momentum=0.9 if momentum else 0.0,
        nesterov=name == "sgd" and momentum and on("nesterov"),
        amsgrad=name in ("adam", "adamw") and on("amsgrad"),
        eps=1.0 if on("large eps") else 1e-8,
        weight_decay=0.1 if name != "rprop" and on("decay") else 0.0,
        foreach=name not in NO_FOREACH and on("foreach"),
        warmup_steps=3 if on("warmup") else 0,
        groups=groups,
        clip_norm=draw(st.sampled_from([1e-3, 0.1, 100.0])) if clip == "norm" else None,
        clip_value=1e-3 if clip == "value" else None,
        loss_scale=LossScaleSpec(initial=64.0) if on("loss scale") else None,
    )


@st.composite
def reloads(draw, on, steps, model, parts):
    size = draw(st.integers(1, RANKS_MAX // parts))
    ep = draw(st.sampled_from(shares(model, size)))
    return ReloadSpec(
        step=draw(st.integers(1, steps - 1)),
        form=draw(st.sampled_from(["sharded", "consolidated", "dcp"])),
        weights_only=on("weights only"),
        world_size=size * parts,
        ep=ep,
        redundancy=draw(st.sampled_from(divisors(size // ep))),
        stage=None,
        bucket_elems=draw(st.none() | st.integers(1, 60)),
    )


@st.composite
def topologies(draw, on):
    """Settings for any number of ranks that tp x pp divides, and without `ep`."""
    tp = draw(st.integers(2, 3)) if on("tp") else 1
    pp = 2 if on("pp") else 1
    endings = st.lists(st.sampled_from(["bias", "weight", "0", "router", "1"]), max_size=2)
    return TopologySpec(
        tp=tp,
        pp=pp,
        shared=tuple(draw(endings)) if tp > 1 else (),
        tied=tuple(draw(endings)) if pp > 1 else (),
        order=draw(st.sampled_from(["tp-cp-dp-pp", "pp-dp-cp-tp", "dp-tp-cp-pp"])),
    )


@st.composite
def scenarios(draw, reload=True):
    features = set()

    def on(feature):
        chosen = draw(st.integers(0, 3)) == 3
        if chosen:
            features.add(feature)
        return chosen

    topology = draw(topologies(on))
    parts = topology.tp * topology.pp
    # Of one part of the model.
    world_size = draw(st.integers(1, RANKS_MAX // parts))
    steps = draw(st.integers(2, 4))
    align_elems = draw(st.integers(1, 8)) if on("aligned") else 1
    model = draw(models(on, world_size, align_elems))
    ep = draw(st.sampled_from(shares(model, world_size)))
    system = draw(systems(on, world_size // ep, align_elems))
    scenario = Scenario(
        schema=1,
        name="drawn",
        model=model,
        data=DataSpec(
            rows=draw(st.integers(1, 3)),
            uneven_rows=on("uneven rows"),
            loss="sum" if model.name in ("mlp", "fp8", "params") and on("summed loss") else "mean",
        ),
        world=WorldSpec(
            size=world_size * parts,
            order=draw(st.sampled_from(get_args(OrderName))),
            schedule="random" if on("random schedule") else "round-robin",
        ),
        topology=replace(topology, ep=ep),
        system=system,
        optimizer=draw(optimizers(on, model)),
        run=RunSpec(
            steps=steps, micro_batches=draw(st.integers(1, 3)), seed=draw(st.integers(0, 10**6))
        ),
    )
    if scenario.optimizer.loss_scale is not None and on("overflow"):
        nan = NanSpec(
            step=draw(st.integers(0, steps - 1)), rank=draw(st.integers(0, world_size * parts - 1)),
            value=draw(st.sampled_from(["nan", "inf"])),
        )  # fmt: skip
        scenario = replace(scenario, data=replace(scenario.data, nan=nan))
    if reload and scenario.system.stage == 1 and on("reload"):
        scenario = replace(scenario, reload=draw(reloads(on, steps, model, parts)))
        nan = scenario.data.nan
        if nan is not None and nan.rank >= scenario.reload.world_size:
            scenario = replace(scenario, data=replace(scenario.data, nan=replace(nan, rank=0)))
    assert not check_scenario(scenario), check_scenario(scenario)
    for feature in sorted(features):
        event(feature)
    return scenario


def assert_not_wrong(scenario, pool):
    result = run_case(scenario, pool=pool)
    note(str(result))
    assert result.verdict in ("pass", "inconclusive")
    assert result.compared_elems > 0


@given(scenario=scenarios())
@settings(max_examples=400)
def test_the_system_equals_the_reference(pool, scenario):
    assert_not_wrong(scenario, pool)


@given(scenario=scenarios(reload=False), data=st.data())
@settings(max_examples=70)
def test_what_must_not_matter_does_not(pool, scenario, data):
    """Layout, overlap, schedule and foreach change no bit where the order does not depend on them.

    Both are compared with a reference that does not know these settings, so they are equal.
    """
    order = scenario.world.order if scenario.world.order in POSITION_FREE else "linear"
    system = replace(
        scenario.system,
        bucket_elems=data.draw(st.none() | st.integers(1, 60)),
        align_elems=1
        if scenario.system.partition == "uneven"
        else data.draw(st.sampled_from([1, 3, 8])),
        param_order=data.draw(st.sampled_from(["registration", "reverse"])),
        overlap_grads=data.draw(st.booleans()),
        overlap_params=scenario.system.stage == 1 and data.draw(st.booleans()),
    )
    other = replace(
        scenario,
        system=system,
        world=replace(scenario.world, order=order, schedule="random"),
        optimizer=replace(
            scenario.optimizer,
            foreach=scenario.optimizer.name not in NO_FOREACH and not scenario.optimizer.foreach,
        ),
    )
    assert_not_wrong(replace(scenario, world=replace(scenario.world, order=order)), pool)
    assert_not_wrong(other, pool)
