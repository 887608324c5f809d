"""Sharded programs as tests/fuzz_sharding.py draws them: a fixed set of them, and what it found."""

import hypothesis
import pytest
from fuzz_sharding import DERIVATIVES, OPS, SETTINGS, Program, bounded, check, programs

# Half a minute on one core, together.
EXAMPLES = {"value": 4, "jvp": 3, "grad": 5, "second": 3}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("op", OPS)
def test_programs(op, derivative):
    search = hypothesis.given(programs([op], [derivative]))(bounded(check))
    seed = 10 * OPS.index(op) + DERIVATIVES.index(derivative)
    hypothesis.settings(SETTINGS, max_examples=EXAMPLES[derivative])(
        hypothesis.seed(seed)(search)
    )()


CUT_ROWS = {"shape": (4, 1), "spec": ("d", ""), "before": (("slice", 0, 0, 3, 1),)}
CUT_COLUMNS = {"shape": (1, 4), "spec": ("", "d"), "before": (("slice", 1, 0, 3, 1),)}
FOUND = [
    Program("softmax", **CUT_COLUMNS, options={"axis": 1}),
    Program(
        "batch_norm",
        **CUT_ROWS,
        options={"axis": 1, "epsilon": 0.25},
        after=(("slice", 0, 1, 3, 1),),
    ),
    Program(
        "layer_norm",
        shape=(4, 2),
        spec=("d", ""),
        before=(("slice", 0, 0, 3, 1),),
        options={"axis": (1,), "epsilon": 0.25},
        arrays={"scale": ("whole", (1,))},
        derivative="grad",
    ),
    Program(
        "layer_norm",
        shape=(4, 2),
        spec=("d", ""),
        mesh=(4,),
        before=(("split", 0, 2),),
        options={"axis": (2,), "epsilon": 0.25},
    ),
]


@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_found(program):
    check(program)
