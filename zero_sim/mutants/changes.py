"""Small changes of any Python code, found in its syntax tree: mutants that nobody had to think of.

Mutants that people write are what people think of, and those who wrote the checks think of what the
checks see. What is found here is blind: every comparison, number, bound, condition and call of a
module is changed once (DeMillo, Lipton, Sayward, "Hints on test data selection", 1978).

Left alone is what says nothing about numbers: what raises, and the condition for it; texts; the
`strict` of a zip; and everything within a `while`, where a small change is a loop without end.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_TEXT_MAX = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One small change of one function."""

    module: str
    function: str
    """Qualified name within the module."""
    line: int
    column: int
    end: tuple[int, int]
    """Line and column where what is changed ends."""
    kind: str
    """What is done to it; one of the names of `KINDS`."""
    before: str
    """What is changed, as source."""
    after: str
    """What becomes of it; empty where it is left out."""

    @property
    def id(self) -> str:
        """Unique among the changes of a source."""
        stop = ":".join(map(str, self.end))
        return f"{self.module}:{self.line}:{self.column}-{stop}:{self.kind}"

    def __str__(self) -> str:
        return f"{self.before!r} -> {self.after!r}" if self.after else f"without {self.before!r}"


_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}

_Made = Callable[[ast.AST], ast.AST | None]
"""Makes the changed node, of a node that it may use up; None where it does not fit."""


def _comparison(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    node.ops = [_COMPARISONS[type(node.ops[0])]()]
    return node


def _arithmetic(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    node.op = _OPERATORS[type(node.op)]()
    return node


def _and_or(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BoolOp):
        return None
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _not(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.UnaryOp) or not isinstance(node.op, ast.Not):
        return None
    return node.operand


def _constant(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int):
        return None
    value = node.value
    return ast.Constant(not value if isinstance(value, bool) else value + 1)


def _test_is(value: bool) -> _Made:
    def made(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.If | ast.IfExp):
            return None
        node.test = ast.Constant(value)
        return node

    return made


def _left_out(node: ast.AST) -> ast.AST | None:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_write = isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    )
    if not (is_call or is_write or isinstance(node, ast.AugAssign)):
        return None
    # Without its last `super()` a method is no closure any more, and cannot take its own place.
    calls_super = any(isinstance(part, ast.Name) and part.id == "super" for part in ast.walk(node))
    return None if calls_super else ast.Pass()


def _cut(lower: int | None, upper: int | None) -> _Made:
    def made(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.For):
            return None
        bounds = [None if bound is None else ast.Constant(bound) for bound in (lower, upper)]
        every = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
        node.iter = ast.Subscript(every, ast.Slice(*bounds), ast.Load())
        return node

    return made


def _bound(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Slice):
        return None
    for name in ("upper", "lower"):
        bound = getattr(node, name)
        if bound is not None:
            setattr(node, name, ast.BinOp(bound, ast.Add(), ast.Constant(1)))
            return node
    return None


def _twin(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id not in _TWINS:
        return None
    node.func = ast.Name(_TWINS[node.func.id], ast.Load())
    return node


def _loop_end(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Continue):
        return ast.Break()
    return ast.Continue() if isinstance(node, ast.Break) else None


KINDS: Mapping[str, _Made] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "and-or": _and_or,
    "not": _not,
    "constant": _constant,
    "always": _test_is(True),
    "never": _test_is(False),
    "left-out": _left_out,
    "first-missing": _cut(1, None),
    "last-missing": _cut(None, -1),
    "bound": _bound,
    "twin": _twin,
    "loop-end": _loop_end,
}
"""Every kind of change, by name."""


def find_changes(source: str, *, module: str) -> list[Change]:
    """Find every small change of the functions and methods of a module, in source order.

    Args:
        source: Its text.
        module: Its name.
    """
    found = []
    for name, function in _functions(ast.parse(source)):
        for node in _changeable(function):
            for kind, make in KINDS.items():
                changed = make(_copied(node))
                if changed is None:
                    continue
                found.append(
                    Change(
                        module=module,
                        function=name,
                        line=node.lineno,
                        column=node.col_offset,
                        end=(node.end_lineno or 0, node.end_col_offset or 0),
                        kind=kind,
                        before=_in_short(node),
                        after="" if isinstance(changed, ast.Pass) else _in_short(changed),
                    )
                )
    return found


def changed_tree(source: str, change: Change, *, marker: str) -> ast.Module:
    """Return the syntax tree of a source with one change made.

    Args:
        source: The text that the change was found in.
        change: It.
        marker: Name of a function that is called, without arguments, first thing in the changed
            function.
    """
    tree = ast.parse(source)
    function = dict(_functions(tree))[change.function]
    maker = _Maker(change)
    maker.visit(function)
    assert maker.is_made, change.id
    call = ast.Expr(ast.Call(ast.Name(marker, ast.Load()), [], []))
    function.body.insert(1 if ast.get_docstring(function) is not None else 0, call)
    return ast.fix_missing_locations(tree)


class _Maker(ast.NodeTransformer):
    """Makes one change."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self.is_made = False

    def visit(self, node: ast.AST) -> ast.AST:
        change = self._change
        if not self.is_made and _place_of(node) == (change.line, change.column, *change.end):
            changed = KINDS[change.kind](_copied(node))
            if changed is not None:
                self.is_made = True
                return ast.copy_location(changed, node)
        return self.generic_visit(node)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The outermost functions and the methods, by qualified name."""
    pending: list[tuple[str, ast.stmt]] = [("", statement) for statement in tree.body]
    for prefix, statement in pending:
        if isinstance(statement, ast.FunctionDef):
            yield prefix + statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            pending.extend((f"{prefix}{statement.name}.", inner) for inner in statement.body)


def _changeable(function: ast.FunctionDef) -> Iterator[ast.stmt | ast.expr]:
    """Every node in which a change may show in numbers."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        if _is_left_alone(node):
            continue
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        children = [
            child
            for field, child in _children(node)
            if field not in ("annotation", "returns", "decorator_list", "args")
            or isinstance(node, ast.Call)
        ]
        pending.extend(reversed(children))


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.While):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    # A check of what users give: valid cases pass it in any case.
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return all(isinstance(statement, ast.Raise) for statement in node.body)


def _copied(node: ast.AST) -> ast.AST:
    """A copy deep enough for a change: its own fields and lists."""
    copy = type(node)()
    for field, value in ast.iter_fields(node):
        setattr(copy, field, list(value) if isinstance(value, list) else value)
    return ast.copy_location(copy, node)


def _place_of(node: ast.AST) -> tuple[int, int, int, int] | None:
    if not isinstance(node, ast.stmt | ast.expr):
        return None
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _in_short(node: ast.AST) -> str:
    """Its source in a line; of a block the head."""
    line = ast.unparse(node).partition("\n")[0]
    return line if len(line) <= _TEXT_MAX else f"{line[: _TEXT_MAX - 3]}..."
