"""Figures of the code base: size by room, shapes of classes and functions, prose, smallest case.

    python -m tests.house           print today's figures
    python -m tests.house --lower   write figures that fell to budgets.json, and new ones

`test_budgets.py` fails if a figure rises above `budgets.json`. To raise one, edit the file in a
separate commit that gives the reason.
"""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
import subprocess
import sys
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zero_sim"
BUDGETS = Path(__file__).with_name("budgets.json")
ROAD_SCENARIO, ROAD_DTYPE = ROOT / "scenarios/smoke/mlp.toml", "bf16"

ATTRIBUTES_GOAL, FIELDS_GOAL, PARAMETERS_GOAL = 12, 16, 8
PUBLIC_RECORDS = {"World", "SystemSpec", "Finding", "Place"}
"""Exempt records: their fields are TOML keys, JSON fields and public keywords."""
HEADLESS = {
    "What", "Whether", "How", "Of", "By", "As", "Where", "With", "In", "That", "Which", "Those",
}  # fmt: skip
SPEECH = {
    "tell", "tells", "told", "say", "says", "said",
    "ask", "asks", "asked", "hear", "hears", "heard",
}  # fmt: skip
WATCHED_WORDS = ("what", "of", "that", "one", "where", "whether")
"""Words that replace a missing noun; comparable libraries use `what` a tenth as often."""


def read_modules() -> dict[Path, str]:
    """Return the source of every module of the package."""
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(path: Path) -> str:
    """Return the first folder of a module's path, or `(top)`."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "(top)"


def _docs(tree: ast.AST) -> Iterator[tuple[str, ast.Constant]]:
    """Yield docstrings and strings under fields, each with the kind of its owner."""
    kinds = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function"}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for index, child in enumerate(body if isinstance(body, list) else ()):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield kinds.get(type(node), "field") if index == 0 else "field", value


def _comments(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line number and text of each comment, and True if it has its own line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, token.line.lstrip().startswith("#")


def measure_size(modules: dict[Path, str]) -> dict[str, float]:
    """Count modules and lines, in total and by room."""
    figures: Counter[str] = Counter()
    for path, source in modules.items():
        lines = source.count("\n")
        figures["modules"] += 1
        figures["lines"] += lines
        figures[f"lines of {room_of(path)}"] += lines
    return dict(figures)


def measure_tests() -> int:
    """Count lines of tests, which have no budget because a fix must always bring its test."""
    files = (path for name in ("tests", "property_tests") for path in (ROOT / name).rglob("*.py"))
    return sum(path.read_text().count("\n") for path in files)


def measure_shape(modules: dict[Path, str]) -> dict[str, float]:
    """Count classes, records and functions that are too wide, and modules that know a setting."""
    attributes, fields, parameters = [0], [0], 0
    for path, source in modules.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name not in PUBLIC_RECORDS:
                attributes.append(len(_own_attributes(node)))
                if any("dataclass" in ast.dump(each) for each in node.decorator_list):
                    fields.append(sum(isinstance(each, ast.AnnAssign) for each in node.body))
            elif isinstance(node, ast.FunctionDef) and room_of(path) != "cli":
                parameters += len(_named_parameters(node)) > PARAMETERS_GOAL
    return {
        "most attributes of a class": max(attributes),
        f"classes above {ATTRIBUTES_GOAL} attributes": sum(n > ATTRIBUTES_GOAL for n in attributes),
        "most fields of a record": max(fields),
        f"records above {FIELDS_GOAL} fields": sum(n > FIELDS_GOAL for n in fields),
        f"functions above {PARAMETERS_GOAL} parameters": parameters,
        "modules that name a field of SystemSpec, median": _modules_of_a_field(modules),
    }


def _own_attributes(node: ast.ClassDef) -> set[str]:
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _named_parameters(node: ast.FunctionDef) -> list[str]:
    every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return [each.arg for each in every if each.arg not in ("self", "cls")]


def _modules_of_a_field(modules: dict[Path, str]) -> float:
    """Return the median number of modules that name a field in code or non-docstring strings."""
    (spec,) = (
        node
        for node in ast.walk(ast.parse(modules[PACKAGE / "scenario/spec.py"]))
        if isinstance(node, ast.ClassDef) and node.name == "SystemSpec"
    )
    names = {each.target.id for each in spec.body if isinstance(each, ast.AnnAssign)}
    naming: Counter[str] = Counter(dict.fromkeys(names, 0))
    for source in modules.values():
        tree = ast.parse(source)
        docs = {id(node) for _, node in _docs(tree)}
        words: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Name):
                words.add(node.id)
            elif isinstance(node, ast.keyword | ast.arg) and node.arg:
                words.add(node.arg)
            elif isinstance(node, ast.Constant) and id(node) not in docs:
                words.update(re.findall(r"\w+", str(node.value)))
        naming.update(names & words)
    return statistics.median(naming.values())


def measure_prose(modules: dict[Path, str]) -> dict[str, float]:
    """Count words that stand for missing nouns and verbs, headless docstrings, and comments."""
    words: Counter[str] = Counter()
    beginnings: dict[str, Counter[str]] = defaultdict(Counter)
    comment_lines = lines = 0
    for source in modules.values():
        lines += source.count("\n")
        texts = []
        for kind, node in _docs(ast.parse(source)):
            texts.append(node.value)
            beginnings[kind].update(re.findall(r"[A-Za-z]+", node.value)[:1])
        for _, text, is_alone in _comments(source):
            texts.append(text)
            comment_lines += is_alone
        for text in texts:
            words.update(re.findall(r"[a-z']+", text.lower()))
    count = words.total()
    figures = {f"'{word}' per 1,000 words": 1000 * words[word] / count for word in WATCHED_WORDS}
    figures["speech per 1,000 words"] = 1000 * sum(words[word] for word in SPEECH) / count
    for kind in ("class", "field", "function"):
        share = sum(beginnings[kind][word] for word in HEADLESS) / max(1, beginnings[kind].total())
        figures[f"headless docstrings of a {kind}, %"] = 100 * share
    figures["lines without a comment per 100 lines"] = 100 - 100 * comment_lines / lines
    return {name: round(value, 1) for name, value in figures.items()}


def measure_road() -> dict[str, float]:
    """Run the smallest case in a new process and count the modules it enters and imports."""
    command = [sys.executable, "-m", "tests.house", "--road"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _trace_road() -> dict[str, float]:
    """Count entered modules, moves between rooms and imported modules, in this process."""
    from zero_sim import load_scenario, run_case
    from zero_sim.scenario.load import load_cases

    names = [case.name for case in load_cases(ROAD_SCENARIO) if ROAD_DTYPE in case.name]
    case = load_scenario(ROAD_SCENARIO, case=names[0])
    run_case(case)  # warms imports and caches
    entered: set[str] = set()
    # By thread, because two run for a moment when the baton is passed.
    last: dict[int, str] = {}
    moves = 0

    def note(frame, event, _arg):
        nonlocal moves
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("zero_sim."):
            entered.add(module)
            room = module.split(".")[1]
            thread = threading.get_ident()
            moves += last.get(thread, room) != room
            last[thread] = room

    threading.setprofile(note)
    sys.setprofile(note)
    result = run_case(case)
    sys.setprofile(None)
    threading.setprofile(None)
    if result.verdict != "pass":
        sys.exit(f"expected {case.name} to pass, got {result.verdict}")
    files = {
        name: sys.modules[name].__file__ for name in sys.modules if name.startswith("zero_sim")
    }
    lines = {name: Path(file).read_text().count("\n") for name, file in files.items() if file}
    return {
        "modules imported by the smallest case": len(lines),
        "modules entered by the smallest case": len(entered),
        "lines of modules entered by the smallest case": sum(lines[name] for name in entered),
        "moves between rooms in the smallest case": moves,
    }


def measure_house() -> dict[str, float]:
    """Return every figure, by name."""
    modules = read_modules()
    return {
        **measure_size(modules),
        **measure_shape(modules),
        **measure_prose(modules),
        **measure_road(),
    }


def lower(budgets: dict[str, float], figures: dict[str, float]) -> dict[str, float]:
    """Return budgets without slack: the lower of budget and figure, without stale names."""
    return {name: min(value, budgets.get(name, value)) for name, value in figures.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["--road"]:
        print(json.dumps(_trace_road()))
    else:
        measured = measure_house()
        if sys.argv[1:] == ["--lower"]:
            known = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
            BUDGETS.write_text(json.dumps(lower(known, measured), indent=1) + "\n")
        for figure, number in measured.items():
            print(f"{number:10,.10g}  {figure}")
        print(f"{measure_tests():10,}  lines of tests")
