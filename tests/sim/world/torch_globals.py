"""Process-wide state that torch's code changes as it runs, found in its source.

This covers caches of functions, globals that a function sets or fills, and attributes of classes or
modules that other code sets. It omits state that a module only fills during its import.
"""

import ast
import importlib.util
from pathlib import Path

ROOT = Path(importlib.util.find_spec("torch").submodule_search_locations[0])

ROOMS = ("distributed",)
FILES = (
    "_subclasses/fake_tensor.py",
    "_tensor_str.py",
    "autograd/grad_mode.py",
    "autograd/graph.py",
    "autograd/profiler.py",
    "autograd/variable.py",
    "nn/modules/module.py",
    "nn/parallel/distributed.py",
    "nn/utils/parametrize.py",
    "nn/utils/stateless.py",
    "optim/optimizer.py",
    "overrides.py",
    "random.py",
    "utils/_device.py",
    "utils/_python_dispatch.py",
    "utils/checkpoint.py",
    "utils/hooks.py",
    "utils/module_tracker.py",
)
OTHER_PROGRAMS = ("rpc", "elastic", "launcher", "examples", "benchmarks", "nn/jit", "_tools")
"""Parts of torch.distributed that start processes or do not run on a rank."""

_CACHES = ("cache", "lru_cache", "cached")
_CHANGES = [
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "move_to_end",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "setdefault",
    "update",
]


def changing_state():
    """Return every such name as `module:name`, with the way it was found."""
    rooms = [ROOT / room for room in ROOMS]
    paths = [ROOT / file for file in FILES]
    for room in rooms:
        paths += sorted(room.rglob("*.py"))
    found = {}
    for path in paths:
        inside = path.relative_to(ROOT).as_posix()
        if not path.exists() or inside.startswith(
            tuple(f"distributed/{each}/" for each in OTHER_PROGRAMS)
        ):
            continue
        module = "torch." + inside.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        inside = state_in(ast.parse(path.read_text()))
        found |= {f"{module}:{name}": how for name, how in inside.items()}
    return found


def state_in(tree):
    """Return the names of one module's state, with the way each was found."""
    return _Reader(tree).found


def _dotted(node):
    """Return the dotted name `a.b.c` of an expression; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _last(node):
    return _dotted(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


class _Reader(ast.NodeVisitor):
    """Reader of one module."""

    def __init__(self, tree):
        self.found = {}
        self._scope = []
        self._globals = set()
        self._of_classes = {}
        self._note_names(tree.body, None)
        self._imported = set()
        self.visit(tree)

    def _note_names(self, body, class_name):
        names = self._globals if class_name is None else self._of_classes[class_name]
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._of_classes.setdefault(node.name, set())
                self._note_names(node.body, node.name)
                self._of_classes[node.name] -= _own_attributes(node)
            elif isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value):
                names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for field in ("body", "orelse", "finalbody"):
                    self._note_names(getattr(node, field, []), class_name)

    def _note(self, name, how):
        self.found[name] = how

    def visit_FunctionDef(self, node):
        if any(_last(decorator) in _CACHES for decorator in node.decorator_list):
            self._note(".".join([*self._scope, node.name]), "cache")
        self._visit_inside(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node):
        self._imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}

    visit_ImportFrom = visit_Import

    def visit_Global(self, node):
        for name in node.names if self._scope else ():
            self._note(name, "set")

    def visit_ClassDef(self, node):
        self._visit_inside(node)

    def _visit_inside(self, node):
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    def visit_Call(self, node):
        is_wrapped = node.args and not isinstance(node.args[0], ast.Constant)
        if _last(node) in _CACHES and is_wrapped:
            self._note(".".join([*self._scope, _dotted(node.args[0])]), "cache")
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            self._change(node.func.value)
        self.generic_visit(node)

    def visit_Assign(self, node):
        for target in node.targets:
            self._target(target)
        self.generic_visit(node)

    visit_Delete = visit_Assign

    def visit_AugAssign(self, node):
        self._target(node.target)
        self.generic_visit(node)

    def _target(self, target):
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._target(each)
        if isinstance(target, ast.Subscript):
            self._change(target.value)
        name = _dotted(target)
        if self._scope and "." in name:
            first, rest = name.split(".", 1)
            if first == "cls":
                self._note(f"{self._scope[0]}.{rest}", "set")
            elif first in self._of_classes or first in self._imported:
                self._note(name, "set")

    def _change(self, node):
        """Record state that a function fills or empties."""
        name = _dotted(node)
        first, _, rest = name.partition(".")
        if not self._scope or not name:
            return
        if name in self._globals:
            self._note(name, "filled")
        elif first in ("self", "cls") and rest in self._of_classes.get(self._scope[0], ()):
            self._note(f"{self._scope[0]}.{rest}", "filled")
        elif rest and rest in self._of_classes.get(first, ()):
            self._note(name, "filled")


def _own_attributes(node):
    """Return attributes that methods set on instances, whose class attributes are only defaults."""
    return {
        target.attr
        for inner in ast.walk(node)
        if isinstance(inner, (ast.Assign, ast.AnnAssign))
        for target in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
        if isinstance(target, ast.Attribute) and _dotted(target.value) == "self"
    }
