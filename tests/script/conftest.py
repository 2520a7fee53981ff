"""Scripts that are written to a folder and run on a world in this process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_sim.against.watch import ScriptWatch
from zero_sim.script.launch import Launcher, Settings
from zero_sim.script.program import read_script
from zero_sim.script.record import ScriptRun

PROGRAMS = Path(__file__).parent / "programs"
Launch = Callable[..., ScriptRun]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Function that runs a script, given as text or by name, in a new folder with other files."""

    def run(
        source: str = "",
        *arguments: str,
        program: str = "",
        module: str = "",
        ranks: int = 2,
        seed: int = 0,
        files: dict[str, str] | None = None,
        **settings: object,
    ) -> ScriptRun:
        monkeypatch.chdir(tmp_path)
        for name, text in {"train.py": source, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        name = module or (str(PROGRAMS / program) if program else "train.py")
        script = read_script(name, is_module=bool(module), arguments=arguments)
        given = Settings(ranks_per_node=ranks, **settings)
        watch = ScriptWatch()
        with Launcher(script, given, guest=watch) as launcher, watch.watching():
            done = launcher.run(seed=seed)
        assert not watch.replicas.findings, watch.replicas.finding
        assert not watch.replicas.warnings, watch.replicas.warning
        return done

    return run
