"""torch's compiler is not imported until it is needed, and is then the real one."""

import subprocess
import sys

import pytest

_STEPPED = """
import sys
import torch
from zero_sim.host.dynamo import defer_dynamo

defer_dynamo()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight])
weight.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
assert "torch._dynamo.eval_frame" not in sys.modules, "imported by a step"
"""


def _runs(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize(
    "asked",
    [
        "import torch._dynamo.utils as utils\nassert utils is torch._dynamo.utils\n"
        "assert utils.__spec__.origin == utils.__file__",
        "from torch._dynamo.utils import counters\n"
        "assert counters is sys.modules['torch._dynamo.utils'].counters",
        "assert torch.compile(lambda x: x + 1, backend='eager')(weight).tolist() == "
        "(weight + 1).tolist()",
        "assert torch._dynamo.config.cache_size_limit",
        "import torch.distributed.fsdp\nassert torch._dynamo.trace_rules.lookup",
    ],
    ids=["a module", "from a module", "compile", "a setting", "rules"],
)
def test_first_use_of_the_compiler_imports_it(asked):
    _runs(
        f"{_STEPPED}\n{asked}\n"
        "assert sys.modules['torch._dynamo'] is torch._dynamo\n"
        "assert torch._dynamo.__file__.endswith('__init__.py')\n"
        "assert len([each for each in sys.meta_path if 'zero_sim' in type(each).__module__]) == 0\n"
        "optimizer.step()"
    )


def test_function_disabled_before_import_stays_uncompiled():
    _runs(
        f"{_STEPPED}\n"
        "marked = torch._dynamo.disable(lambda x: torch.compiler.is_compiling())\n"
        "assert not marked(1)\n"
        "both = torch.compile(lambda x: (x + 1, marked(x)), backend='eager')\n"
        "assert both(weight)[1] is False"
    )


def test_imported_compiler_is_kept():
    _runs(
        "import torch._dynamo\nfrom zero_sim.host.dynamo import defer_dynamo\n"
        "there = torch._dynamo\ndefer_dynamo()\nassert torch._dynamo is there"
    )


def test_default_case_imports_no_compiler_fsdp_dtensor_or_sympy():
    _runs(
        "import sys\n"
        "from zero_sim import run_case\n"
        "from zero_sim.scenario.spec import ModelSpec, Scenario\n"
        "result = run_case(Scenario(schema=1, model=ModelSpec(name='mlp')))\n"
        "assert result.verdict == 'pass', result\n"
        "slow = {'torch._dynamo.eval_frame', 'sympy', 'torch.distributed.fsdp',\n"
        "        'torch.distributed.tensor'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
