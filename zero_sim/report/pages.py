"""Self-contained HTML pages: no font, no external resource, scripts only by their hash.

Values in a page may come from strangers, so templates escape them and print control characters as
text, because these could hide content. `Markup` is not escaped again: only templates create it.
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
        template: File in `templates/`.
        values: Variables of the template.
    """
    found = _environment().get_template(template, globals={"asset": asset})
    return Markup(found.render(values))


def asset(name: str) -> Markup:
    """Return one of our style sheets or scripts, without escaping."""
    return Markup(_read(name))


def write_page(path: Path, page: str) -> None:
    """Write a page; an existing file is replaced.

    Raises:
        UsageError: The file cannot be written.
        EnvironmentProblem: The disk is full.
    """
    try:
        # Names may contain lone surrogates, which UTF-8 cannot encode.
        write_whole(path, page.encode(errors="replace"))
    except OSError as error:
        raise unwritten("a page", path, error) from None


@functools.cache
def _environment() -> jinja2.Environment:
    # Strict, so that a missing variable is an error and not an empty place on the page.
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        finalize=_spelled_out,
        undefined=jinja2.StrictUndefined,
    )


def _spelled_out(value: object) -> str:
    return value if isinstance(value, Markup) else printable(str(value), lines=True)


def _source(name: str) -> str:
    # Browsers show a line break between inline elements as a blank. As a comment of jinja2, it is
    # removed, and errors still name the right line.
    return "{#\n#}".join(line.strip() for line in _read(name).splitlines())


def _read(name: str) -> str:
    return resources.files("zero_sim.report").joinpath("templates", name).read_text("utf-8")
