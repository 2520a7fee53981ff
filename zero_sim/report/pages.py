"""Pages that stand alone: no font and nothing from elsewhere; a script only by its hash.

The values in a page may come from anybody. Each is escaped on its way into a template, and control
characters, which could hide something, are spelled out. `Markup` is never escaped again: only a
template makes it.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from zero_sim.host.files import unwritten, write_whole
from zero_sim.untrusted import printable


def render(template: str, **values: object) -> Markup:
    """Fill in a template.

    Args:
        template: Its file in `templates/`.
        values: Its variables.
    """
    found = _environment().get_template(template, globals={"asset": asset})
    return Markup(found.render(values))


def asset(name: str) -> Markup:
    """Return a style sheet or a script of ours, which must not be escaped."""
    return Markup(_read(name))


def write_page(path: Path, page: str) -> None:
    """Write a page; replace the file if there is one.

    Raises:
        UsageError: It cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    try:
        write_whole(path, page.encode(errors="replace"))
    except OSError as error:
        raise unwritten("a page", path, error) from None


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        finalize=_spelled_out,
        undefined=jinja2.StrictUndefined,
    )


def _spelled_out(value: object) -> str:
    return value if isinstance(value, Markup) else printable(str(value), lines=True)


def _source(name: str) -> str:
    # A line break between inline elements would be seen as a blank. As a comment of jinja2 it is
    # not, and errors still name the right line.
    return "{#\n#}".join(line.strip() for line in _read(name).splitlines())


def _read(name: str) -> str:
    return resources.files("zero_sim.report").joinpath("templates", name).read_text("utf-8")
