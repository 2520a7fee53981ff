"""Call site of a call, and the traceback of a failed world."""

import contextlib
import functools
import inspect
import traceback
import types

import pytest
import torch
import torch.distributed as dist
import typing_extensions

from zero_sim.sim import ContractViolation, DataRace, RankFailed
from zero_sim.sim.callsite import shown_file, site_of


def lines_of(program, marker):
    lines, first = inspect.getsourcelines(program)
    return [first + i for i, line in enumerate(lines) if line.rstrip().endswith(marker)]


def frames_of(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


class TestSites:
    """The site is the program's own line, however the call is wrapped."""

    @pytest.mark.parametrize("name", ["reduce_scatter_tensor", "all_gather_into_tensor"])
    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_deprecated_name_has_the_programs_line(self, world_of, name):
        # torch 2.13 wraps these with typing_extensions, whose frame is then the innermost one.
        def program(rank):
            small, large = torch.zeros(2), torch.zeros(4)
            pair = (small, large) if name == "reduce_scatter_tensor" else (large, small)
            getattr(dist, name)(*pair)  # here

        world = world_of(2)
        world.run(program)
        sites = {(record.file, record.line) for record in world.log.collectives}
        assert sites == {(__file__, *lines_of(program, "# here"))}

    def test_standard_wrappers_are_skipped(self, world_of):
        @typing_extensions.deprecated("old", category=None)
        def direct(tensor):
            dist.all_reduce(tensor)  # here

        def program(rank):
            tensor = torch.ones(1)
            direct(tensor)
            functools.singledispatch(dist.all_reduce)(tensor)  # here
            typing_extensions.deprecated("old", category=None)(dist.all_reduce)(tensor)  # here
            with contextlib.ExitStack() as stack:
                stack.callback(dist.all_reduce, tensor)
                stack.close()  # here

        world = world_of(1)
        world.run(program)
        expected = sorted(lines_of(direct, "# here") + lines_of(program, "# here"))
        calls = world.log.collectives
        assert {record.file for record in calls} == {__file__}
        assert sorted(record.line for record in calls) == expected

    def test_program_without_a_file_has_a_site(self, world_of):
        module = types.ModuleType("__main__")
        exec(
            "import torch.distributed as dist\ndef program(rank):\n    dist.barrier()\n",
            vars(module),
        )
        world = world_of(1)
        world.run(module.program)
        assert world.log.collectives[0].site == "<string>:3"

    def test_package_with_a_name_like_torch_is_not_skipped(self, world_of):
        path = torch.__file__.replace("/torch/", "/torchother/")
        names = {}
        exec(compile("def call(dist):\n    dist.barrier()\n", path, "exec"), names)
        world = world_of(1)
        world.run(lambda rank: names["call"](dist))
        assert (world.log.collectives[0].file, world.log.collectives[0].line) == (path, 2)

    def test_site_is_relative_to_the_working_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        below, beside = str(tmp_path / "pkg" / "train.py"), f"{tmp_path}-other/train.py"
        assert site_of(below, 8) == "pkg/train.py:8"
        assert shown_file(beside) == beside


class TestTracebacks:
    """A failed run shows the message and frames of the program, but no frames of the simulator."""

    def only_run_between(self, error):
        frames = frames_of(error)
        ours = [name for name in frames if "/zero_sim/" in name]
        assert [name.rpartition("/")[2] for name in ours] == ["world.py"], frames
        assert not [name for name in frames if "/torch/" in name]
        assert error.__suppress_context__
        assert error.__cause__ is getattr(error, "error", None)

    def test_race_ends_in_the_programs_frame(self, world_of):
        def program(rank):
            grads = torch.ones(4)
            work = dist.all_reduce(grads, async_op=True)
            grads.norm()
            work.wait()

        with pytest.raises(DataRace) as caught:
            world_of(2, races=True).run(program)
        self.only_run_between(caught.value)
        assert frames_of(caught.value)[-1] == __file__

    def test_contract_violation_hides_simulator_frames(self, world_of):
        with pytest.raises(ContractViolation) as caught:
            world_of(2).run(lambda rank: dist.all_reduce(torch.ones(2 + rank)))
        self.only_run_between(caught.value)

    def test_rank_error_is_shown_once_without_simulator_frames(self, world_of):
        def program(rank):
            torch.nn.functional.linear(torch.ones(3), torch.ones(2, 2))

        with pytest.raises(RankFailed) as caught:
            world_of(2).run(program)
        self.only_run_between(caught.value)
        assert isinstance(caught.value.error, RuntimeError)
        assert "in program" in caught.value.traceback_text
        assert "zero_sim/sim" not in caught.value.traceback_text
        printed = "".join(traceback.format_exception(caught.value))
        assert printed.count("in program") == 1
