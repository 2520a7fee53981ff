"""Proof that a change of text changed no code.

    python -m tests.same_code BASE      compare this package with commit BASE

Syntax trees must be equal apart from docstrings, strings under fields, comments and the words of
messages. A message is a string that contains a space; an f-string must still format the same
values, in any order. Prints the differences and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "zero_sim"


class _WithoutText(ast.NodeTransformer):
    """Remove docstrings and replace the words of messages by a mark."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_message = isinstance(node.value, str) and " " in node.value
        return ast.Constant("<message>") if is_message else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        values = [part for part in node.values if not isinstance(part, ast.Constant)]
        inner = [self.generic_visit(value) for value in values]
        if any(" " in text for text in texts):
            # A reworded message may reorder its values.
            return ast.JoinedStr([ast.Constant("<message>"), *sorted(inner, key=ast.dump)])
        return ast.JoinedStr(node.values)


def code_of(source: str) -> list[str]:
    """Return the dump of each top-level statement, without text."""
    tree = _WithoutText().visit(ast.parse(source))
    return [ast.dump(statement) for statement in tree.body]


def changed_modules(base: str) -> dict[str, str]:
    """Return the modules whose code differs from `base`, each with the first difference."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", base, PACKAGE],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    before = {path for path in listed if path.endswith(".py")}
    here = {str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).rglob("*.py")}
    differs = dict.fromkeys(before ^ here, "only on one side")
    for path in sorted(before & here):
        old = subprocess.run(
            ["git", "show", f"{base}:{path}"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        new = (ROOT / path).read_text()
        if old == new:
            continue
        old_code, new_code = code_of(old), code_of(new)
        if old_code != new_code:
            differs[path] = _first_difference(old_code, new_code)
    return differs


def _first_difference(old: list[str], new: list[str]) -> str:
    """Return the surroundings of the first difference of two lists of dumps."""
    for one, other in zip(old, new, strict=False):
        if one != other:
            at = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)),
            )
            return f"{one[max(0, at - 60) : at + 60]!r} became {other[max(0, at - 60) : at + 60]!r}"
    return f"{len(old)} statements became {len(new)}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    differs = changed_modules(sys.argv[1])
    for path, where in differs.items():
        print(f"{path}: {where}")
    print(f"{len(differs)} modules differ in code")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
