"""JSON Schemas of commands' `--json` output, derived from the records.

Every output contains `VERSION` as `schema`. Raise it if a field is removed or changes its meaning,
but not for a new field.
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
    "description": "Exit status of the command; see its --help.",
}


def output_schema(command: str) -> Node:
    """Return the JSON Schema of a command's `--json` output.

    Args:
        command: One of `COMMANDS`.
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
    """Add the schema version to a command's output."""
    return {"schema": VERSION, **value}


def _run() -> Node:
    problem = dict.fromkeys(("source", "path", "message", "suggestion"), _TEXT)
    case = object_of(
        {
            **record_schema(CaseResult)["properties"],
            "source": _described(_TEXT, "The scenario file."),
            "reproduce": _described(_TEXT, "Command that runs only this case."),
            "bundle": _described(_or_null(_TEXT), "Bundle id; null if there is none."),
        }
    )
    return {
        "cases": list_of(case),
        "problems": _described(list_of(object_of(problem)), "Problems in scenario files."),
        "seconds": _SECONDS,
        "interrupted": _FLAG,
        "not_run": _described(_COUNT, "Cases not run because of an interrupt."),
        "left_out": _described(_COUNTS, "Skipped cases by reason."),
        "exit_status": _STATUS,
    }


def _replay() -> Node:
    finding = record_schema(Finding)
    return {
        "id": _TEXT,
        "outcome": {"enum": ["fixed", "failed", "error"]},
        "same": _described(_FLAG, "True if the bundle has the same first finding."),
        "same_events": _described(_or_null(_FLAG), "Null if unknown, as for real processes."),
        "then": finding,
        "now": _or_null(finding),
        "differences": list_of(_TEXT),
        "result": record_schema(CaseResult),
        "exit_status": _STATUS,
        "frozen": _or_null(_TEXT),
        "replay": _described(_TEXT, "Command that repeats the replay."),
    }


def _explain() -> Node:
    # For a bundle, its finding too; null if a check is explained.
    return {
        **record_schema(Explanation)["properties"],
        "bundle": _or_null(_TEXT),
        "finding": _or_null(record_schema(Finding)),
        "strip": _or_null(record_schema(BufferMap)),
    }


def _shrink() -> Node:
    # Imported here, because it imports torch, which most schemas do not need.
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
        "stopped": {"enum": ["cases", "seconds", "interrupt", None]},
        "bundle": _or_null(_TEXT),
        "result": record_schema(CaseResult),
        "exit_status": _STATUS,
        "replay": _or_null(_TEXT),
        "reproduce": _or_null(_TEXT),
    }


def _fuzz() -> Node:
    # Written by hand, because `CampaignTotals.as_dict` selects and renames fields.
    texts = ("check", "phase", "kind", "manner", "place", "message", "bundle", "size", "scenario")
    finding = dict.fromkeys(texts, _TEXT) | {"seed": _COUNT, "case": _COUNT}
    counts = ("cases", "earlier_cases", "batches")
    again = ("bundle", "reason")
    outcome: Node = {"enum": ["fixed", "fails", "fails-otherwise", "unknown"]}
    lost = object_of({"index": _COUNT, "seed": _COUNT, "why": _TEXT})
    return {
        **dict.fromkeys(counts, _COUNT),
        "busy_seconds": _SECONDS,
        "verdicts": _COUNTS,
        "params_only": _described(
            _COUNT, "Passes without an averaged gradient or optimizer state compared."
        ),
        "failing_cases": _described(_COUNTS, "Failing cases by key of the finding."),
        "inconclusive_cases": _described(_COUNTS, "Inconclusive cases by check."),
        "unobserved": _described(_COUNTS, "Cases by quantity that the target does not report."),
        "taken": _described(
            list_of(_TEXT), "Rules that were inferred because the target declares none."
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
            "Findings of earlier runs, judged again.",
        ),
        "interrupted": _FLAG,
        "unkept": _described(
            _or_null(_TEXT), "Reason why results could not be saved, which ended the campaign."
        ),
        "futile": _described(_TEXT, "Reason why further cases are useless; empty if they are not."),
        "seconds": _SECONDS,
        "device": _described(_TEXT, "Device of the ranks and the reference."),
        "corpus": _TEXT,
        "shards": _COUNT,
        "shards_missing": _described(
            list_of(_COUNT), "With --join: numbers of shards without a file, from 1."
        ),
        "exit_status": _STATUS,
    }


def _coverage() -> Node:
    share: Node = {"type": ["number", "null"]}
    ids: Node = {"type": "object", "additionalProperties": list_of(_TEXT)}
    # A short form, and a long form for --coverage.
    always = {
        "cases": _described(_COUNT, "Cases with known features."),
        "features": _described(_COUNTS, "Cases by feature."),
        "pairs_met": _COUNT,
        "pairs_met_once": _COUNT,
        "new_pair_share": _described(share, "Estimated share of further cases with a new pair."),
        "new_pairs_a_case": _described(share, "Estimated number of new pairs in the next case."),
        "pairs_left_min": _described(
            _or_null(_COUNT), "Estimated lower bound for possible pairs not yet met."
        ),
    }
    on_demand = {
        "features_never": list_of(_TEXT),
        "pairs": _described(_COUNTS, "Cases by pair of features, joined by ` + `."),
        "pairs_never": _described(
            {"type": "object", "additionalProperties": {"type": "number"}},
            "Expected cases with pairs that were never met, if features were independent.",
        ),
        "mutants": _described(_COUNT, "Mutants with a recorded smallest case."),
        "mutants_by_feature": _described(ids, "Mutants whose smallest case has the feature."),
        "mutants_by_pair": ids,
    }
    with_all = object_of({**always, **on_demand})
    return {"anyOf": [object_of(always), _described(with_all, "With --coverage.")]}


def _mutants() -> Node:
    from zero_sim.mutants.records import HuntResult

    kills = object_of({"name": _TEXT, "killed": _COUNT, "of": _COUNT})
    return {
        "core": kills,
        "all": kills,
        "by_class": list_of(kills),
        "by_flag": list_of(kills),
        "cases_median": {"type": "number"},
        "cases_most": _COUNT,
        "seconds": _SECONDS,
        "trials": list_of(record_schema(HuntResult)),
        "exit_status": _STATUS,
    }


# Settings in each row of the calculators.
_WAY: dict[str, Node] = {
    "model": _TEXT,
    "params": _COUNT,
    "ranks": _COUNT,
    "stage": _COUNT,
    "redundancy": _COUNT,
    "bucket_elems": {"anyOf": [_COUNT, {"type": "null"}]},
}


def _memory() -> Node:
    held = _described(_COUNTS, "Resident bytes per rank between steps, by category and `total`.")
    of_step: Node = {"type": "object", "additionalProperties": _COUNTS}
    row = object_of(
        {
            **_WAY,
            "bytes_per_rank": held,
            "on_cpu": _described(_COUNT, "Bytes offloaded to the CPU, included in the total."),
            "within_step": _described(of_step, "Additional bytes within a step, by moment."),
            "peak": _COUNT,
            "peak_at": _TEXT,
            "saved": _described(_NUMBER, "Share saved, relative to stage 0."),
            "saved_of_one_device": _described(
                _NUMBER, "Share saved, relative to one device that frees gradients."
            ),
        }
    )
    limit = object_of(
        {"name": _TEXT, "unsharded": _COUNT, "bytes_by_ranks": _COUNTS, "limit": _COUNT}
    )
    alone = object_of({"gradients_freed": _COUNTS, "gradients_kept": _COUNTS})
    return {
        "bytes_per_rank": _described(_COUNTS, "Value of the first row."),
        "total": _described(_COUNT, "Value of the first row."),
        "rows": list_of(row),
        "single_device": _described(_or_null(alone), "One device without buffers."),
        "limits": _described(
            list_of(limit), "If a number of params and several numbers of ranks are given."
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
        "bytes_sent_per_rank": _described(sent, "Value of the first row."),
        "total": _described(_COUNT, "Value of the first row."),
        "rows": list_of(row),
        "network": record_schema(Network),
        "measured": _measured(),
    }


def _measured() -> Node:
    sent: Node = {"type": "object", "additionalProperties": _COUNTS}
    rank = object_of(
        {
            **dict.fromkeys(("rank", "peak"), _COUNT),
            "bytes": _described(_COUNTS, "Resident bytes between steps, by category."),
            "peak_bytes": _COUNTS,
            "peak_at": _TEXT,
            "unreported": _described(list_of(_TEXT), "Categories that the system does not report."),
            "bytes_sent": _or_null(sent),
        }
    )
    run = object_of(
        {
            "step": _COUNT,
            "ranks": list_of(rank),
            "is_costed": _described(_FLAG, "True if the system declares its costs."),
            "differences": _described(
                list_of(_TEXT), "Differences between the run and the closed forms."
            ),
        }
    )
    return _described(_or_null(list_of(run)), "With --measure: the run of each row.")


def _fingerprint() -> Node:
    size = object_of(dict.fromkeys(("bytes_min", "bytes_max", "calls"), _COUNT))
    found: dict[str, Node] = {
        "source": _described(_TEXT, "The file."),
        "stage": _described(_TEXT, "Empty if no grammar fits."),
        **dict.fromkeys(("why", "letters"), _TEXT),
        "steps": _NUMBER,
        **dict.fromkeys(("copies", "overlapping", "calls"), _COUNT),
        "odd": list_of(_TEXT),
        "sizes": _described(list_of(size), "Calls by message size."),
    }
    return {"fingerprints": _described(list_of(object_of(found)), "A fingerprint per file.")}


def _rules() -> Node:
    fields: Node = {"type": "object", "additionalProperties": True}
    return {
        "target": _TEXT,
        "numerics": _described(fields, "Non-default fields of Numerics."),
        "undivided": _described(
            {"type": "object", "additionalProperties": _TEXT},
            "By field of `numerics`: a divisor that the gradient lacks, and the remedy if this is "
            "not intended.",
        ),
        "capabilities": _described(fields, "Non-default fields of Capabilities."),
        "unclear": _described(list_of(_TEXT), "Rules that could not be determined, with reasons."),
        "left_out": _described(
            {"type": "object", "additionalProperties": _TEXT},
            "Settings that the target does not support, with reasons.",
        ),
        "contradicted": _described(list_of(_TEXT), "Contradictions to the target's declaration."),
        "limits": _described(
            {"type": "object", "additionalProperties": list_of(_TEXT)},
            "Names of refused cases, by the reason that the target's own size check gave.",
        ),
        "alarms": _described(
            list_of(_TEXT),
            "Signs of a bug, for example if no known rule fits several ranks. If there are any, do "
            "not declare these results.",
        ),
        "cases": _described(_COUNT, "Number of runs."),
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
    """Return the schema of a list."""
    return {"type": "array", "items": node}


def object_of(properties: Mapping[str, Node]) -> Node:
    """Return the schema of an object with exactly these fields."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


# Fields that `as_dict` omits: tensors, event logs and cases.
_NOT_REPORTED = ("evidence", "logs", "twin")


def record_schema(cls: type) -> Any:
    """Return the schema of a record, with its field docstrings as descriptions."""
    from pydantic import ConfigDict, TypeAdapter

    # Modules of records import these names for type checkers only. pydantic looks up missing names
    # in this frame.
    Tensor = EventLog = Scenario = object  # noqa: F841
    # In a tuple, because pydantic refuses a config for a type that can have its own config.
    adapter = TypeAdapter(tuple[cls], config=ConfigDict(use_attribute_docstrings=True))
    defs = adapter.json_schema(mode="serialization")["$defs"]
    return _inlined(defs[cls.__name__], defs)


def _inlined(node: Any, defs: Mapping[str, Node]) -> Any:
    """Resolve references in a pydantic node, and make all fields required."""
    # Fields with defaults are always printed, so consumers may rely on them.
    if isinstance(node, list):
        return [_inlined(each, defs) for each in node]
    if not isinstance(node, dict):
        return node
    # Inlined, so that a schema contains no references.
    if "$ref" in node:
        found = defs[node["$ref"].rpartition("/")[2]]
        return _inlined({**found, **{k: v for k, v in node.items() if k != "$ref"}}, defs)
    if "properties" in node:
        reported = {k: v for k, v in node["properties"].items() if k not in _NOT_REPORTED}
        fields = object_of({name: _inlined(field, defs) for name, field in reported.items()})
        return {**fields, "description": node["description"]}
    return {k: _inlined(v, defs) for k, v in node.items() if k not in ("title", "default")}
