"""Matrix of a file: its cases and their ids."""

import pytest

from zero_sim.errors import ScenarioError
from zero_sim.scenario.load import parse_cases

HEAD = 'schema = 1\n[model]\nname = "mlp"\n[matrix]\n'
PARAMS = HEAD.replace("mlp", "params")


def cases(matrix, head=HEAD):
    """Return the cases of a file with this matrix."""
    return parse_cases(head + matrix, source="toy.toml", stem="toy")


def lines_of(matrix):
    """Return the problems of a file with this matrix."""
    with pytest.raises(ScenarioError) as caught:
        cases(matrix)
    return [str(problem) for problem in caught.value.problems]


class TestIds:
    """Ids are typed by users and compared in CI, so they must not change."""

    def test_product_keeps_the_order_of_the_file(self):
        found = cases('"world.size" = [2, 3]\n"model.dtype" = ["bf16", "fp32"]\n')
        assert [scenario.name for scenario in found] == [
            "toy/size=2,dtype=bf16",
            "toy/size=2,dtype=fp32",
            "toy/size=3,dtype=bf16",
            "toy/size=3,dtype=fp32",
        ]

    def test_values_reach_the_scenario(self):
        assert [scenario.world.size for scenario in cases('"world.size" = [1, 5]\n')] == [1, 5]

    def test_colliding_names_are_written_out(self):
        found = cases('"model.name" = ["mlp"]\n"optimizer.name" = ["sgd"]\n"run.seed" = [1]\n')
        assert found[0].name == "toy/model.name=mlp,optimizer.name=sgd,seed=1"

    @pytest.mark.parametrize(
        ("line", "label"),
        [
            ('"optimizer.lr" = [1e-3]', "lr=0.001"),
            ('"optimizer.foreach" = [true]', "foreach=true"),
            ('"optimizer.betas" = [[0.9, 0.99]]', "betas=0.9x0.99"),
            ('"model.hidden" = [16]', "hidden=16"),
            ('optimizer = [{ name = "sgd", momentum = 0.9 }]', "optimizer=name:sgd+momentum:0.9"),
        ],
    )
    def test_value_in_an_id(self, line, label):
        assert cases(line)[0].name == f"toy/{label}"

    def test_shapes_in_an_id(self):
        found = cases('"model.shapes" = [[[1], [2, 3]], [[]], []]', PARAMS)
        assert [scenario.name for scenario in found] == [
            "toy/shapes=1+2x3",
            "toy/shapes=scalar",
            "toy/shapes=none",
        ]

    def test_long_values_are_named_by_their_index(self):
        shapes = [[index] for index in range(100, 130)]
        assert cases(f'"model.shapes" = [[[1]], {shapes}]', PARAMS)[1].name == "toy/shapes=#1"

    def test_unquoted_keys_mean_the_same(self):
        """TOML reads them as nested tables, but they mean a path."""
        assert cases("world.size = [1, 2]") == cases('"world.size" = [1, 2]')


class TestTables:
    def test_table_overrides_fields_of_the_file(self):
        head = 'schema = 1\n[model]\nname = "mlp"\n[optimizer]\nlr = 0.5\n[matrix]\n'
        adamw, sgd = cases('optimizer = [{}, { name = "sgd", momentum = 0.9 }]', head)
        assert (adamw.optimizer.name, adamw.optimizer.lr) == ("adamw", 0.5)
        assert (sgd.optimizer.name, sgd.optimizer.lr) == ("sgd", 0.5)

    def test_table_missing_from_the_file_is_created(self):
        (found,) = cases('"data.nan" = [{ step = 1, rank = 0 }]')
        assert found.data.nan is not None
        assert found.data.nan.step == 1


class TestProblems:
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('"world.sise" = [1]', "matrix.world.sise: unknown field. Did you mean `world.size`?"),
            ("size = [1]", "matrix.size: unknown field. Did you mean `world.size`?"),
            (
                '"world.size" = 3',
                "matrix.world.size: expected a list of values, got 3 (integer). "
                "Write [3] for one value.",
            ),
            (
                '"world.size" = []',
                "matrix.world.size: expected at least one value, got an empty list. "
                "Remove the line, or list the values to try.",
            ),
            (
                '"world.size" = [2, 3, 2]',
                "matrix.world.size: expected different values, got 2 2 times. "
                "Remove the repetition, because case ids must differ.",
            ),
            (
                "name = ['a', 'b']",
                "matrix.name: `name` must be the same for all cases of a file. "
                "Remove it from the matrix.",
            ),
            (
                '"run.seed" = [1]\nrun = [{ steps = 2 }]',
                "matrix.run.seed: `run` varies as a whole already. "
                "Vary either `run` or `run.seed`.",
            ),
            (
                '"world.size" = [0, 2]',
                "world.size: expected an integer at least 1 and at most 4096, got 0 (integer) "
                "(in case toy/size=0). Try 1.",
            ),
            (
                '"run.seed" = [' + ", ".join(map(str, range(10_001))) + "]",
                "matrix: expected at most 10,000 cases, got 10,001. Split the file or drop values.",
            ),
        ],
    )
    def test_message_of_a_mistake(self, line, said):
        assert lines_of(line) == [said]

    def test_matrix_must_be_a_table(self):
        with pytest.raises(ScenarioError, match="matrix: expected a table of lists, got 3"):
            parse_cases('schema = 1\nmatrix = 3\nmodel = { name = "mlp" }', source="", stem="a")

    def test_mistake_of_many_cases_names_a_few(self):
        (line,) = lines_of('"world.size" = [0, 2]\n"run.seed" = [1, 2, 3, 4, 5]')
        assert (
            "(in cases toy/size=0,seed=1, toy/size=0,seed=2, toy/size=0,seed=3 and 2 more)" in line
        )

    def test_mistake_of_all_cases_is_reported_without_the_matrix(self):
        head = 'schema = 1\n[model]\nname = "mlp"\n[run]\nsteps = 0\n[matrix]\n'
        with pytest.raises(ScenarioError) as caught:
            cases('"world.size" = [1, 2]', head)
        assert [str(problem) for problem in caught.value.problems] == [
            "run.steps: expected an integer at least 1 and at most 1000000, got 0 (integer). Try 1."
        ]

    def test_wrong_axis_does_not_hide_the_rest(self):
        paths = [
            line.split(":")[0] for line in lines_of('"world.sise" = [1]\n"run.steps" = [0, 1]')
        ]
        assert paths == ["matrix.world.sise", "run.steps"]
