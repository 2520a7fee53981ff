"""JSON Schemas of what commands print with `--json`, taken from the records themselves.

`VERSION` stands in every object under `schema`. It is raised where a field goes or changes its
meaning; new fields may come without that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero_sim.findings.records import BufferMap, CaseResult, Finding
from zero_sim.report.explain import Explanation
from zero_sim.report.records import Fact, Measurement, WorseRatio

VERSION = 3
DIALECT = "https://json-schema.org/draft/2020-12/schema"
Node = dict[str, object]

_TEXT: Node = {"type": "string"}
_COUNT: Node = {"type": "integer", "minimum": 0}
_SECONDS: Node = {"type": "number", "minimum": 0}
_FLAG: Node = {"type": "boolean"}
_NUMBER: Node = {"type": "number"}
_COUNTS: Node = {"type": "object", "additionalProperties": _COUNT}
_STATUS: Node = {
    "type": "integer",
    "description": "Exit status of the command; README says what each means.",
}


def output_schema(command: str) -> Node:
    """The JSON Schema of what a command prints with `--json`.

    Args:
        command: Its name, one of `COMMANDS`.
    """
    properties = {
        "schema": {"const": VERSION, "description": "Version of this schema."},
        **_COMMANDS[command](),
    }
    return {
        "$schema": DIALECT,
        "title": f"zero-sim {command} --json",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def versioned(value: Mapping[str, object]) -> dict[str, object]:
    """Add the version of the schema to the output of a command."""
    return {"schema": VERSION, **value}


def _run() -> Node:
    problem = dict.fromkeys(("source", "path", "message", "suggestion"), _TEXT)
    case = object_of(
        {
            **record_schema(CaseResult)["properties"],
            "source": _described(_TEXT, "The scenario file."),
            "reproduce": _described(_TEXT, "The command that runs this case alone."),
            "bundle": _described(_or_null(_TEXT), "Id of its bundle, where there is one."),
        }
    )
    return {
        "cases": list_of(case),
        "problems": _described(list_of(object_of(problem)), "What is wrong in scenario files."),
        "seconds": _SECONDS,
        "interrupted": _FLAG,
        "not_run": _described(_COUNT, "Cases that an interrupt left."),
        "left_out": _described(_COUNTS, "Cases that cannot be judged as asked, by the reason."),
        "exit_status": _STATUS,
    }


def _replay() -> Node:
    finding = record_schema(Finding)
    return {
        "id": _TEXT,
        "outcome": {"enum": ["fixed", "failed", "error"]},
        "same": _described(_FLAG, "Whether the first finding is the one in the bundle."),
        "same_events": _described(_or_null(_FLAG), "Null of real processes: it is not known."),
        "then": finding,
        "now": _or_null(finding),
        "differences": list_of(_TEXT),
        "result": record_schema(CaseResult),
        "exit_status": _STATUS,
        "frozen": _or_null(_TEXT),
        "replay": _described(_TEXT, "The command that repeats it."),
    }


def _explain() -> Node:
    return {
        **record_schema(Explanation)["properties"],
        "bundle": _or_null(_TEXT),
        "finding": _or_null(record_schema(Finding)),
        "strip": _or_null(record_schema(BufferMap)),
    }


def _shrink() -> Node:
    from zero_sim.shrink import Size

    size = record_schema(Size)
    return {
        "id": _TEXT,
        "before": size,
        "after": _or_null(size),
        "scenario": _described(_or_null(_TEXT), "The smallest case, as TOML."),
        "cases": _COUNT,
        "seconds": _SECONDS,
        "complete": _or_null(_FLAG),
        "stopped": {"enum": ["cases", "seconds", "asked", None]},
        "bundle": _or_null(_TEXT),
        "result": record_schema(CaseResult),
        "exit_status": _STATUS,
        "replay": _or_null(_TEXT),
        "reproduce": _or_null(_TEXT),
    }


def _fuzz() -> Node:
    texts = ("check", "phase", "kind", "manner", "place", "message", "bundle", "size", "scenario")
    finding = dict.fromkeys(texts, _TEXT) | {"seed": _COUNT, "case": _COUNT}
    counts = ("cases", "earlier_cases", "batches")
    again = ("bundle", "said")
    outcome: Node = {"enum": ["fixed", "fails", "fails-otherwise", "unknown"]}
    lost = object_of({"index": _COUNT, "seed": _COUNT, "why": _TEXT})
    return {
        **dict.fromkeys(counts, _COUNT),
        "busy_seconds": _SECONDS,
        "verdicts": _COUNTS,
        "params_only": _described(
            _COUNT, "Cases that pass with neither an averaged gradient nor optimizer state."
        ),
        "failing_cases": _described(_COUNTS, "Cases by the key of their finding."),
        "inconclusive_cases": _described(_COUNTS, "Cases by the check that says why."),
        "unobserved": _described(_COUNTS, "By what the target does not tell, cases without it."),
        "taken": _described(
            list_of(_TEXT), "Rules that were worked out because the target declares none."
        ),
        "findings": list_of(object_of(finding)),
        "coverage": _coverage(),
        "lost": list_of(lost),
        "rechecked": _described(
            list_of(
                object_of(
                    {"key": list_of(_TEXT), **dict.fromkeys(again, _TEXT), "outcome": outcome}
                )
            ),
            "What came of findings of earlier runs, judged again.",
        ),
        "interrupted": _FLAG,
        "unkept": _described(_or_null(_TEXT), "Why no more was kept, and so no more was run."),
        "futile": _described(_TEXT, "Why further cases would show nothing, or empty."),
        "seconds": _SECONDS,
        "device": _described(_TEXT, "Where ranks and reference computed."),
        "corpus": _TEXT,
        "shards": _COUNT,
        "shards_missing": _described(
            list_of(_COUNT), "With --join, those without a file, counted from 1."
        ),
        "exit_status": _STATUS,
    }


def _coverage() -> Node:
    share: Node = {"type": ["number", "null"]}
    ids: Node = {"type": "object", "additionalProperties": list_of(_TEXT)}
    always = {
        "cases": _described(_COUNT, "Those of which the features are known."),
        "features": _described(_COUNTS, "Cases by feature."),
        "pairs_met": _COUNT,
        "pairs_met_once": _COUNT,
        "new_pair_share": _described(share, "Likely share of further cases with a new pair."),
        "new_pairs_a_case": _described(share, "New pairs that the next case likely brings."),
        "pairs_left_min": _described(_or_null(_COUNT), "Likely least number of pairs to be met."),
    }
    on_demand = {
        "features_never": list_of(_TEXT),
        "pairs": _described(_COUNTS, "Cases by two features, joined by ` + `."),
        "pairs_never": _described(
            {"type": "object", "additionalProperties": {"type": "number"}},
            "In how many cases they would be if features were drawn each by itself.",
        ),
        "mutants": _described(_COUNT, "Those of which the smallest case is on record."),
        "mutants_by_feature": _described(ids, "Those in whose smallest case it is left."),
        "mutants_by_pair": ids,
    }
    with_all = object_of({**always, **on_demand})
    return {"anyOf": [object_of(always), _described(with_all, "With --coverage.")]}


def _mutants() -> Node:
    from zero_sim.mutants.records import Trial

    kills = object_of({"name": _TEXT, "killed": _COUNT, "of": _COUNT})
    return {
        "core": kills,
        "all": kills,
        "by_class": list_of(kills),
        "by_flag": list_of(kills),
        "cases_median": {"type": "number"},
        "cases_most": _COUNT,
        "seconds": _SECONDS,
        "trials": list_of(record_schema(Trial)),
        "exit_status": _STATUS,
    }


_WAY: dict[str, Node] = {
    "model": _TEXT,
    "params": _COUNT,
    "ranks": _COUNT,
    "stage": _COUNT,
    "redundancy": _COUNT,
    "bucket_elems": {"anyOf": [_COUNT, {"type": "null"}]},
}
"""Choices in each row of a calculator."""


def _memory() -> Node:
    held = _described(_COUNTS, "By category, and `total`: what a rank holds between two steps.")
    of_step: Node = {"type": "object", "additionalProperties": _COUNTS}
    row = object_of(
        {
            **_WAY,
            "bytes_per_rank": held,
            "on_cpu": _described(_COUNT, "Of the total, masters and state that are offloaded."),
            "within_step": _described(of_step, "What comes on top at most, by moment."),
            "peak": _COUNT,
            "peak_at": _TEXT,
            "saved": _described(_NUMBER, "Of the bytes of stage 0."),
            "saved_of_one_device": _described(_NUMBER, "Of one that frees gradients."),
        }
    )
    limit = object_of(
        {"name": _TEXT, "unsharded": _COUNT, "bytes_by_ranks": _COUNTS, "limit": _COUNT}
    )
    alone = object_of({"gradients_freed": _COUNTS, "gradients_kept": _COUNTS})
    return {
        "bytes_per_rank": _described(_COUNTS, "Of the first of `rows`."),
        "total": _described(_COUNT, "Likewise."),
        "rows": list_of(row),
        "single_device": _described(_or_null(alone), "One device without buffers."),
        "limits": _described(
            list_of(limit), "For several numbers of ranks with a number of params."
        ),
        "measured": _measured(),
    }


def _traffic() -> Node:
    from zero_sim.calculators.network import Network

    sent: Node = {"type": "object", "additionalProperties": _COUNTS}
    flow = object_of(
        {
            **dict.fromkeys(("kind", "group", "dtype"), _TEXT),
            **dict.fromkeys(("ranks", "calls", "messages", "contributed_bytes"), _COUNT),
            "sent_bytes": _COUNTS,
        }
    )
    row = object_of(
        {
            **_WAY,
            "bytes_sent_per_rank": _described(sent, "By kind and link, and `total` by link."),
            **dict.fromkeys(("total", "bytes_sent_per_card", "calls", "messages"), _COUNT),
            "flows": list_of(flow),
        }
    )
    return {
        "bytes_sent_per_rank": _described(sent, "Of the first of `rows`."),
        "total": _described(_COUNT, "Likewise."),
        "rows": list_of(row),
        "network": record_schema(Network),
        "measured": _measured(),
    }


def _measured() -> Node:
    sent: Node = {"type": "object", "additionalProperties": _COUNTS}
    rank = object_of(
        {
            **dict.fromkeys(("rank", "peak"), _COUNT),
            "bytes": _described(_COUNTS, "Between two steps, by category."),
            "peak_bytes": _COUNTS,
            "peak_at": _TEXT,
            "unreported": _described(
                list_of(_TEXT), "Categories that the system does not tell apart."
            ),
            "bytes_sent": _or_null(sent),
        }
    )
    run = object_of(
        {
            "step": _COUNT,
            "ranks": list_of(rank),
            "is_costed": _described(_FLAG, "Whether the system declares the closed forms."),
            "differences": _described(list_of(_TEXT), "What a run and closed forms say otherwise."),
        }
    )
    return _described(_or_null(list_of(run)), "With --measure: of each row the run.")


def _fingerprint() -> Node:
    size = object_of(dict.fromkeys(("bytes_min", "bytes_max", "calls"), _COUNT))
    found: dict[str, Node] = {
        "source": _described(_TEXT, "The file."),
        "stage": _described(_TEXT, "Empty if no grammar fits."),
        **dict.fromkeys(("why", "letters"), _TEXT),
        "steps": _NUMBER,
        **dict.fromkeys(("copies", "overlapping", "calls"), _COUNT),
        "odd": list_of(_TEXT),
        "sizes": _described(list_of(size), "Calls by the size of their messages."),
    }
    return {"fingerprints": _described(list_of(object_of(found)), "Of each file, by name.")}


def _rules() -> Node:
    fields: Node = {"type": "object", "additionalProperties": True}
    return {
        "target": _TEXT,
        "numerics": _described(fields, "Fields of Numerics that are not as by default."),
        "undivided": _described(
            {"type": "object", "additionalProperties": _TEXT},
            "By field of `numerics`: the number that the gradient is not divided by, and the "
            "remedy if this is not intended.",
        ),
        "capabilities": _described(fields, "Fields of Capabilities that are not as by default."),
        "unclear": _described(list_of(_TEXT), "What could not be determined, and why."),
        "left_out": _described(
            {"type": "object", "additionalProperties": _TEXT},
            "What the target cannot be asked for, and what came of asking.",
        ),
        "contradicted": _described(list_of(_TEXT), "What it declares otherwise."),
        "limits": _described(
            {"type": "object", "additionalProperties": list_of(_TEXT)},
            "By a check of its own by which it refuses sizes: names of the cases.",
        ),
        "alarms": _described(
            list_of(_TEXT),
            "What a right system has not, such as several ranks that no known rule fits: with any, "
            "what was found is not to be declared.",
        ),
        "cases": _described(_COUNT, "Runs that it took."),
        "exit_status": _STATUS,
    }


def _doctor() -> Node:
    return {"facts": list_of(record_schema(Fact))}


def _bench() -> Node:
    return {
        "measurements": list_of(record_schema(Measurement)),
        "worse": _described(list_of(record_schema(WorseRatio)), "Empty without --check."),
    }


_COMMANDS: Mapping[str, Callable[[], Node]] = {
    "run": _run,
    "replay": _replay,
    "explain": _explain,
    "fuzz": _fuzz,
    "shrink": _shrink,
    "mutants": _mutants,
    "memory": _memory,
    "traffic": _traffic,
    "fingerprint": _fingerprint,
    "rules": _rules,
    "doctor": _doctor,
    "bench": _bench,
}
COMMANDS = tuple(_COMMANDS)
"""Commands that have `--json`."""


def _described(node: Node, text: str) -> Node:
    return {**node, "description": text}


def _or_null(node: Node) -> Node:
    return {"anyOf": [node, {"type": "null"}]}


def list_of(node: Node) -> Node:
    """The schema of a list."""
    return {"type": "array", "items": node}


def object_of(properties: Mapping[str, Node]) -> Node:
    """The schema of a table with these fields and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


_NOT_TOLD = ("evidence", "logs", "twin")
"""Tensors, event logs and cases, which are no JSON."""


def record_schema(cls: type) -> Any:
    """The schema of a record by pydantic, with the strings under its fields as descriptions."""
    from pydantic import ConfigDict, TypeAdapter

    # Types of fields in `_NOT_TOLD`. Their modules import them for type checkers only, and pydantic
    # looks here for names that a module lacks.
    Tensor = EventLog = Scenario = object  # noqa: F841
    # In a tuple, since pydantic refuses a config beside a record that could have its own.
    adapter = TypeAdapter(tuple[cls], config=ConfigDict(use_attribute_docstrings=True))
    defs = adapter.json_schema(mode="serialization")["$defs"]
    return _inlined(defs[cls.__name__], defs)


def _inlined(node: Any, defs: Mapping[str, Node]) -> Any:
    """A node of pydantic without references, and with all fields required as they are printed."""
    if isinstance(node, list):
        return [_inlined(each, defs) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        found = defs[node["$ref"].rpartition("/")[2]]
        return _inlined({**found, **{k: v for k, v in node.items() if k != "$ref"}}, defs)
    if "properties" in node:
        told = {k: v for k, v in node["properties"].items() if k not in _NOT_TOLD}
        fields = object_of({name: _inlined(field, defs) for name, field in told.items()})
        return {**fields, "description": node["description"]}
    return {k: _inlined(v, defs) for k, v in node.items() if k not in ("title", "default")}
