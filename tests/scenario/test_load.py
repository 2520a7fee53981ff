"""Loading of scenario files, and messages about bad ones."""

from operator import attrgetter

import pytest

from tests.odd_files import make_odd
from zero_sim.errors import ScenarioError, UsageError
from zero_sim.scenario import Scenario
from zero_sim.scenario.load import FILE_BYTES_MAX, load_cases, load_scenario, parse_cases

GOOD = 'schema = 1\n[model]\nname = "mlp"\n'
PARAMS = 'schema = 1\n[model]\nname = "params"\n'
TYPICAL_MISTAKES = """
schema = 2
nam = "x"
[model]
name = "mpl"
hidden = "32"
blocks = 3.0
dtype = 16
[data]
nan = { step = 9 }
rows = 2020-01-01
[world]
size = 0
order = "rnig"
[system]
stage = 4
bucket_elms = 12
lr = 3
align_elems = 99999999999999999999
[optimizer]
betas = [0.9]
momentum = 0.9
lr = inf
foreach = "true"
[run]
steps = true
"""


def lines_of(text):
    """Return the messages of all problems in a text."""
    with pytest.raises(ScenarioError) as caught:
        parse_cases(text, source="case.toml", stem="case")
    return [str(problem) for problem in caught.value.problems]


def only_line(text):
    """Return the message of the only problem in a text."""
    (line,) = lines_of(text)
    return line


class TestGoodFiles:
    def test_defaults_equal_those_of_the_records(self):
        (scenario,) = parse_cases(GOOD, source="case.toml", stem="case")
        assert scenario == Scenario(schema=1, name="case", model=scenario.model)

    @pytest.mark.parametrize(
        ("text", "path", "value"),
        [
            (f'name = "mine"\n{GOOD}', "name", "mine"),
            (f"{GOOD}[optimizer]\nlr = 1\n", "optimizer.lr", 1.0),
            (f"{PARAMS}shapes = [[2, 3], [], [0]]\n", "model.shapes", ((2, 3), (), (0,))),
            # Accepted here, because the engine reports that there are no params.
            (f"{PARAMS}shapes = []\n", "model.shapes", ()),
            # Some editors start a file with a byte order mark.
            (f"\ufeff{GOOD}", "model.name", "mlp"),
        ],
        ids=["name", "integer for a number", "arrays", "empty array", "byte order mark"],
    )
    def test_written_value_is_read(self, text, path, value):
        (scenario,) = parse_cases(text, source="case.toml", stem="case")
        assert attrgetter(path)(scenario) == value


TYPICAL_MESSAGES = [
    "nam: unknown field. Did you mean `name`?",
    "schema: expected 1, the format that this version reads, got 2 (integer). "
    "Write schema = 1, or upgrade zero_sim if the file is for a newer one.",
    "model.name: expected one of 'mlp', 'params', 'transformer-260', 'digits', "
    "'unusual', 'moe', 'fp8', 'bit-hash', "
    "'ternary', 'tp-block', 'positional', 'gpt', 'multi-token', got 'mpl' (string). "
    'Did you mean "mlp"?',
    "model.hidden: expected an integer, got '32' (string). Write 32, without quotes.",
    "model.blocks: expected an integer, got 3.0 (float). Write 3.",
    "model.dtype: expected one of 'fp32', 'bf16', 'fp16', got 16 (integer). "
    "Leave it out for the default, 'fp32'.",
    "data.nan.rank: missing; expected an integer. Try rank = 0.",
    "data.rows: expected an integer, got 2020-01-01 (date or time). "
    "Leave it out for the default, 4.",
    "world.size: expected an integer at least 1 and at most 4096, got 0 (integer). Try 1.",
    "world.order: expected one of 'ring', 'linear', 'linear-fp32', 'tree', "
    "'gloo', 'nccl-ring', 'nccl-sym', 'random-tree', "
    "got 'rnig' (string). Did you mean \"ring\"?",
    "system.stage: expected one of 0, 1, 2, 3, got 4 (integer). Leave it out for the default, 1.",
    "system.bucket_elms: unknown field. Did you mean `bucket_elems`?",
    "system.lr: unknown field. `lr` belongs in [optimizer]; move it there.",
    "system.align_elems: expected an integer of at most 64 bits, "
    "got 99999999999999999999 (integer). Leave it out for the default, 1.",
    "optimizer.betas: expected an array of 2 numbers, got [0.9] (array of 1). "
    "Leave it out for the default, [0.9, 0.999].",
    "optimizer.momentum: only optimizers 'sgd', 'rmsprop', 'muon' and 'own' use it, got 0.9 "
    "(float) with optimizer.name = 'adamw'; 'adamw' uses lr, warmup_steps, betas, "
    "eps, weight_decay, amsgrad, foreach, groups, clip_norm, clip_value, loss_scale. "
    "Leave it out, or write optimizer.name = 'sgd'.",
    "optimizer.lr: expected a finite number more than 0 and at most "
    "3.4028234663852886e+38, got inf (float). Try 0.001.",
    "optimizer.foreach: expected true or false, got 'true' (string). Write true, without quotes.",
    "run.steps: expected an integer, got true (boolean). Leave it out for the default, 3.",
]
ONE_MISTAKE = {
    "a misspelt field is not also missing": (
        f"{PARAMS}shape = [[1]]\n",
        "model.shape: unknown field. Did you mean `shapes`?",
    ),
    "a field like no other: all of its table": (
        f"{GOOD}[run]\nxyzzy = 1\n",
        "run.xyzzy: unknown field. [run] takes `steps`, `micro_batches`, `own_micro_batches`, "
        "`evaluate`, `seed`, `stall_seconds`.",
    ),
    "the matrix, which is no field of a case": (
        f'{GOOD}[matirx]\n"run.seed" = [1]\n',
        "matirx: unknown field. Did you mean `matrix`?",
    ),
    "a scalar for a table": (
        "schema = 1\nmodel = 3\n",
        "model: expected a table, got 3 (integer). Write its fields under [model].",
    ),
    "a table for a scalar": (
        f"{GOOD}[world.size]\nranks = 2\n",
        "world.size: expected an integer, got {ranks = 2} (table). "
        "Leave it out for the default, 2.",
    ),
    "an element of an array": (
        f'{PARAMS}shapes = [[1], [2, "x"]]\n',
        "model.shapes[1][1]: expected an integer, got 'x' (string). "
        "Try shapes such as [[3], [2, 4]].",
    ),
    "flat shapes": (
        f"{PARAMS}shapes = [3]\n",
        "model.shapes[0]: expected an array of integers, got 3 (integer). "
        "Write it in brackets, as in [1, 2].",
    ),
    "a choice that may be left out": (
        f"{GOOD}[reload]\nstep = 1\nstage = 7\n",
        "reload.stage: expected one of 0, 1, 2, 3, got 7 (integer). Leave it out for none.",
    ),
}


class TestMessages:
    def test_all_mistakes_of_a_file_are_listed_word_for_word(self):
        assert sorted(lines_of(TYPICAL_MISTAKES)) == sorted(TYPICAL_MESSAGES)

    @pytest.mark.parametrize(("text", "line"), ONE_MISTAKE.values(), ids=ONE_MISTAKE)
    def test_one_mistake_is_one_message(self, text, line):
        assert only_line(text) == line

    def test_empty_file_misses_schema_and_model(self):
        assert lines_of("") == [
            "schema: missing; expected 1. Begin the file with schema = 1.",
            'model: missing; expected a table. Add [model] with name = "mlp".',
        ]

    @pytest.mark.parametrize("value", ["true", "1.0", '"1"'])
    def test_schema_must_be_an_integer(self, value):
        """Python accepts `True == 1 == 1.0`; the format does not."""
        assert only_line(f'schema = {value}\nmodel = {{ name = "mlp" }}').startswith(
            "schema: expected 1, got"
        )


class TestUnreadableFiles:
    def test_syntax_error_has_line_and_column(self):
        assert only_line("schema = 1\nfoo bar\n") == (
            "(file): expected valid TOML, got an error at line 2, column 5: expected '=' after a "
            "key in a key/value pair. The line reads: foo bar"
        )

    def test_unclosed_bracket(self):
        line = only_line("schema = 1\na = [1,\n")
        assert "at the end of the file" in line
        assert "never closed" in line

    @pytest.mark.parametrize("text", ["a = " + "[" * 20_000, "a = 1" + "0" * 5000])
    def test_hostile_values_are_refused(self, text):
        assert "expected valid TOML" in only_line(text)

    @pytest.mark.parametrize(
        "text",
        [
            f"[{'.'.join('a' * 3000)}]\n",
            f"schema = 1\n[matrix]\n{'.'.join('a' * 3000)} = [1]\n",
            f"x = {'[' * 300}{']' * 300}\n",
            f"x = {'{a = ' * 100}1{'}' * 100}\n",
        ],
        ids=["dotted-table", "matrix", "arrays", "inline-tables"],
    )
    def test_deep_nesting_is_refused(self, text):
        """Deeper tables than the limit would exceed Python's recursion limit elsewhere."""
        assert "more than 32 tables or arrays within each other" in only_line(text)

    @pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "dangling", "device", "socket"])
    def test_irregular_file_is_refused(self, tmp_path, kind):
        """Refused before it is opened, because a pipe would block and a device would never end."""
        path = tmp_path / "case.toml"
        make_odd(path, kind)
        with pytest.raises(ScenarioError, match="expected a TOML file of at most") as caught:
            load_cases(path)
        said = dict.fromkeys(["loop", "dangling", "device"], "a link") | {"fifo": "a pipe"}
        assert said.get(kind, f"a {kind}") in str(caught.value)

    def test_line_of_a_broken_file_is_escaped(self):
        """It may contain terminal escapes."""
        line = only_line("schema = 1\nfoo \u202ebar = 1\n")
        assert line.isprintable()
        assert r"The line reads: foo \u202ebar = 1" in line

    def test_keys_are_escaped(self):
        """A key can be any string, and each message about it starts with it."""
        line = only_line('schema = 1\n"x\\nPASS  all\\u001b[2J" = 1\n[model]\nname = "mlp"\n')
        assert line.startswith(r"x\nPASS  all\x1b[2J: unknown field.")

    def test_missing_file(self, tmp_path):
        with pytest.raises(ScenarioError, match="got nothing at this path"):
            load_cases(tmp_path / "no.toml")

    def test_not_utf8(self, tmp_path):
        path = tmp_path / "latin.toml"
        path.write_bytes(b"# \xe9\n")
        with pytest.raises(ScenarioError, match="got byte 0xe9 at offset 2"):
            load_cases(path)

    def test_too_large(self, tmp_path):
        """For example, a log or a checkpoint given by mistake."""
        path = tmp_path / "big.toml"
        path.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
        with pytest.raises(ScenarioError, match="got: more than 1,048,576 bytes"):
            load_cases(path)

    def test_head_counts_the_problems(self):
        with pytest.raises(ScenarioError) as caught:
            parse_cases("", source="a/b.toml", stem="b")
        assert str(caught.value).splitlines()[0] == "a/b.toml: 2 problems"


class TestLoadScenario:
    def write(self, folder, text):
        """Write a scenario file; return its path."""
        path = folder / "case.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def test_only_case(self, tmp_path):
        assert load_scenario(self.write(tmp_path, GOOD)).name == "case"

    def test_case_of_a_matrix(self, tmp_path):
        path = self.write(tmp_path, f'{GOOD}[matrix]\n"world.size" = [1, 3]\n')
        assert load_scenario(path, case="case/size=3").world.size == 3

    @pytest.mark.parametrize("case", [None, "case/size=9"])
    def test_ambiguous_case_is_refused_with_all_names(self, tmp_path, case):
        path = self.write(tmp_path, f'{GOOD}[matrix]\n"world.size" = [1, 3]\n')
        with pytest.raises(UsageError, match="case/size=1, case/size=3"):
            load_scenario(path, case=case)


def test_unknown_field_of_a_fault_lists_the_fields_of_faults():
    text = 'schema = 1\n[model]\nname = "mlp"\n[[faults]]\nkind = "crash"\nrank = 0\n'
    with pytest.raises(ScenarioError) as raised:
        parse_cases(text + "step = 1\nlr = 0.1\n", source="x", stem="x")
    told = {problem.path: problem.suggestion for problem in raised.value.problems}
    assert told["faults[0].step"] == "Did you mean `call`?"
    assert told["faults[0].lr"].startswith("[faults[0]] takes `kind`, `rank`, `call`, ")
