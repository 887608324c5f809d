"""autofuse: the cost table is what bench/results says."""

import json
import pathlib

import pytest

from jaxnorm._autofuse import costs
from jaxnorm._ops import OPERATIONS

RESULTS = pathlib.Path(__file__).parent.parent / "bench" / "results"


def measured(name):
    """(rule, forward, forward and backward) of each case: XLA's time divided by jaxnorm's, None where not measured."""
    times = {}
    for r in json.loads((RESULTS / name).read_text())["records"]:
        if not r["error"] and r["op"] != "program":
            operands = tuple(name for name in ("where", "bias") if r[f"{name}_shape"] is not None)
            axis = r["axis"] % len(r["shape"])
            case = r["op"], tuple(r["shape"]), axis, r["dtype"], operands, r["case"]
            directions = times.setdefault(case, {}).setdefault(r["direction"], {})
            directions[r["implementation"]] = r["seconds"]
    for (operation, shape, axis, dtype, operands, _), directions in times.items():
        if name.startswith("cpu") or dtype == ("float16" if "batch_norm" in name else "bfloat16"):

            def ratio(*names, directions=directions):
                found = [directions[n] for n in names if n in directions]
                if len(found) < len(names) or any(
                    len(f.keys() & {"xla", "jaxnorm"}) < 2 for f in found
                ):
                    return None
                return sum(f["xla"] for f in found) / sum(f["jaxnorm"] for f in found)

            train = "forward_train" if "forward_train" in directions else "forward"
            rule = OPERATIONS[operation].rule(shape, (axis,), operands)
            yield rule, ratio("forward"), ratio(train, "backward")


RULES = list({id(rule): rule for op in OPERATIONS.values() for rule in op.rules}.values())
FIGURES = [(rule, figures) for rule in RULES for figures in rule.figures]


@pytest.mark.parametrize(("rule", "figures"), FIGURES)
def test_cost_table_is_what_was_measured(rule, figures):
    """Its numbers are those in the files, and its verdicts follow from them."""
    found = [ratios for name in figures.source for r, *ratios in measured(name) if r is rule]
    for stated, ratios in zip(
        (figures.forward, figures.differentiated), zip(*found, strict=True), strict=True
    ):
        ratios = [r for r in ratios if r is not None]
        assert stated == ((round(min(ratios), 2), round(max(ratios), 2)) if ratios else None)
    if rule in OPERATIONS["relu"].rules:  # not a call unless it is differentiated
        assert figures.forward[0] > 0.95
    elif rule.verdict == costs.ALWAYS:
        assert figures.forward[0] > (1.2 if figures.device == "H200" else 1.04)
    elif figures.device == "H200":
        assert figures.forward[0] < 1.2
    if figures.differentiated is not None:
        assert figures.differentiated[0] > 1.1


def test_cost_of_cross_entropy():
    """The row has no numbers: that it pays is read from the file."""
    name = "h200-softmax_cross_entropy.json"
    ratios = [
        both
        for rule, _, both in measured(name)
        if rule in OPERATIONS["softmax_cross_entropy"].rules
    ]
    assert min(r for r in ratios if r is not None) > 1.1


def test_every_operation_has_a_cost():
    """On each device that it was measured on; every row is reached."""
    names = {f for _, figures in FIGURES for f in figures.source}
    rows = {id(rule) for name in names for rule, *_ in measured(name)}
    assert rows == {id(rule) for rule, _ in FIGURES}
