"""One observed run of a script."""

import gc

from zero_sim.against.capture import RankCapture
from zero_sim.against.measure import Baseline
from zero_sim.against.runs import Side, Way, observe
from zero_sim.script.launch import Settings


def test_run_keeps_no_model(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    monkeypatch.chdir(tmp_path)
    alive = {id(each) for each in gc.get_objects() if type(each) is RankCapture}
    side = Side(settings=Settings(), name="train.py", is_module=False, arguments=())
    observed = observe(side, Way(sink=Baseline()), seed=0)
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is RankCapture]
    assert observed.script.failure is None
    assert not [each for each in left if id(each) not in alive]
