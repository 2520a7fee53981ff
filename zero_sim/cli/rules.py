"""The command `zero-sim rules`: find a target's declaration by running small cases."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from zero_sim.cli.parts import echo_report, json_option, stdout_for
from zero_sim.cli.session import progress
from zero_sim.host.packages import packages_needed
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.rules.report import FoundRules

EXIT_WRONG = 1
# Maximum columns of a comment.
_WIDTH = 88


@click.command()
@click.option(
    "--target",
    required=True,
    metavar="NAME|MODULE:NAME",
    help="System to examine: a registered name, or module:name to import.",
)
@json_option
@click.pass_context
def rules(ctx: click.Context, target: str, as_json: bool) -> None:
    """Find the arithmetic of a target and print its declaration.

    Runs small cases and repeats each with the rules that would make it pass, until the target's
    rules are known. If no case can determine a rule, the rule is listed with the reason and keeps
    the declared value.

    Exit status: 0 all cases agree with the target's declaration; 1 they contradict it, or ranks
    compute a value that no known rule gives, or no optimizer, model, dtype, stage or order passes;
    2 the usage is wrong, or no known rule makes a plain case on one rank pass; 4 this machine
    cannot run it.

    \b
    Examples:
      zero-sim rules --target torch-ddp
      zero-sim rules --target engine:MyTarget
    """
    with packages_needed():
        from zero_sim.rules.found import find_rules
        from zero_sim.targets import import_target
    system = import_target(target)
    with stdout_for(as_json=as_json), progress(f"rules of {target}"):
        found = find_rules(system)
    status = EXIT_WRONG if found.contradicted or found.alarms else 0
    if as_json:
        echo_report({**found.as_dict(), "exit_status": status})
    else:
        click.echo(printable("\n".join(_lines(found)), lines=True))
    ctx.exit(status)


def _lines(found: FoundRules) -> Iterator[str]:
    # The warning comes first, because the lines below are Python that invites pasting.
    if found.alarms:
        yield "# DO NOT DECLARE THIS: something is wrong, see the end"
    yield f"# found by {found.cases} runs of small cases"
    yield "from zero_sim.targets import Capabilities, Numerics"
    yield ""
    yield from _record("capabilities", "Capabilities", found.capabilities, notes={})
    yield from _record("numerics", "Numerics", found.numerics, notes=found.undivided)
    if found.unclear:
        yield ""
        yield "Could not be determined:"
        yield from (f"  {each}" for each in found.unclear)
    if found.left_out:
        yield ""
        yield "Not supported, with the reason:"
        yield from (f"  {what}: {why}" for what, why in found.left_out.items())
    if found.limits:
        yield ""
        yield "Limits on the sizes of cases, to be declared in `refuses`:"
        for why, cases in found.limits.items():
            shown = ", ".join(map(repr, cases[:3])) + (", ..." if len(cases) > 3 else "")
            yield f"  {why}: {shown}"
    if found.contradicted:
        yield ""
        yield "Different from the declaration:"
        yield from (f"  {each}" for each in found.contradicted)
    if found.alarms:
        yield ""
        yield "WRONG, so declare nothing of the above:"
        yield from (f"  {each}" for each in found.alarms)


def _record(
    name: str, record: str, fields: Mapping[str, object], *, notes: Mapping[str, str]
) -> Iterator[str]:
    """Yield a record as Python, with notes as comments above their fields."""
    if not fields:
        yield f"{name} = {record}()"
        return
    yield f"{name} = {record}("
    for field, value in fields.items():
        # A comment above the field survives pasting.
        yield from textwrap.wrap(
            notes.get(field, ""), _WIDTH, initial_indent="    # ", subsequent_indent="    # "
        )
        yield f"    {field}={value!r},"
    yield ")"
