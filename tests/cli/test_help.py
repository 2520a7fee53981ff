import shlex

import pytest
from click.testing import CliRunner

from zero_sim.cli.main import GROUPS, main

COMMANDS = sorted(main.commands)


def help_of(*words):
    return CliRunner().invoke(main, [*words, "--help"], terminal_width=80).output


def examples_of(name):
    _, _, after = help_of(name).partition("Examples:\n")
    examples, _, _ = after.partition("\n\n")
    return [shlex.split(line) for line in examples.splitlines()]


def test_each_command_is_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_first_line_fits_80_columns(name):
    first = main.commands[name].help.splitlines()[0]
    assert any(line.strip() == f"{name}  {first}" or line.endswith(f"  {first}")
               for line in help_of().splitlines())  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_valid_commands(name):
    examples = examples_of(name)
    assert examples
    for program, command, *arguments in examples:
        assert (program, command) == ("zero-sim", name)
        if ">" in arguments:
            arguments = arguments[: arguments.index(">")]
        # Unknown options fail here. Files need not exist.
        main.commands[name].make_context(command, arguments)
