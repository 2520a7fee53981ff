"""Self-contained HTML pages, without fonts or external resources; scripts run only by hash."""

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
        template: File in `templates/`.
        values: Template variables.
    """
    # Templates escape all values except `Markup`, so only this module creates `Markup`.
    found = _environment().get_template(template, globals={"asset": asset})
    return Markup(found.render(values))


def asset(name: str) -> Markup:
    """Return a style sheet or script of this package, without escaping."""
    return Markup(_read(name))


def write_page(path: Path, page: str) -> None:
    """Write a page; an existing file is replaced.

    Raises:
        UsageError: If the file cannot be written.
        EnvironmentProblem: If the disk is full.
    """
    try:
        # Names may contain lone surrogates, which UTF-8 cannot encode.
        write_whole(path, page.encode(errors="replace"))
    except OSError as error:
        raise unwritten("a page", path, error) from None


@functools.cache
def _environment() -> jinja2.Environment:
    # Strict, so that a missing variable raises instead of leaving a gap on the page.
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        finalize=_spelled_out,
        undefined=jinja2.StrictUndefined,
    )


def _spelled_out(value: object) -> str:
    # Values may come from strangers, and control characters could hide content, so print them as
    # text.
    return value if isinstance(value, Markup) else printable(str(value), lines=True)


def _source(name: str) -> str:
    # Browsers show a line break between inline elements as a blank. Put it into a jinja2 comment,
    # which is removed, so that errors still report the right line.
    return "{#\n#}".join(line.strip() for line in _read(name).splitlines())


def _read(name: str) -> str:
    return resources.files("zero_sim.report").joinpath("templates", name).read_text("utf-8")
