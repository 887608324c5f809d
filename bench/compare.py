"""Compares two result files: `python -m bench.compare OLD.json NEW.json`."""

import argparse
import math
import sys
from collections.abc import Sequence

from bench.timing import read_json
from jaxnorm._measure import display, timer

Key = tuple[str, str, str, str]


def index(run: dict) -> dict[Key, dict]:
    """Records by operation, case, direction and implementation."""
    return {(r["op"], r["case"], r["direction"], r["implementation"]): r for r in run["records"]}


def compare(old: dict, new: dict) -> list[dict]:
    """Pairs what both files hold.

    Returns:
      One dict per pair with `key`, `old` and `new` seconds, `ratio` (old / new: above 1 is faster
      now), `spread` of the ratio, and `verdict`: "faster" or "slower" beyond the spread, "same", or
      "error" where a file has no time.
    """
    before, after = index(old), index(new)
    rows = []
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        row = {"key": key, "old": a.get("seconds"), "new": b.get("seconds")}
        if row["old"] is None or row["new"] is None:
            row |= {"ratio": None, "spread": None, "verdict": "error"}
        else:
            ratio = row["old"] / row["new"]
            spread = timer.ratio_spread(a["spread"], b["spread"])
            beyond = abs(math.log(ratio)) > math.log1p(spread)
            verdict = ("faster" if ratio > 1 else "slower") if beyond else "same"
            row |= {"ratio": ratio, "spread": spread, "verdict": verdict}
        rows.append(row)
    order = {key: position for position, key in enumerate(after)}
    return sorted(rows, key=lambda row: order[row["key"]])


def only_in(first: dict, second: dict) -> list[Key]:
    """Keys of the first file that the second lacks."""
    return [key for key in index(first) if key not in index(second)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison.

    Returns:
      1 when something became slower by more than `--max-slowdown` and by more than its spread, else
      0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description="Compare two files of python -m bench --json."
    )
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument(
        "--implementation", default="jaxnorm", help="default: jaxnorm; all: every one"
    )
    parser.add_argument(
        "--max-slowdown", type=float, default=math.inf, metavar="1.1", help="fail above this"
    )
    parser.add_argument("--changed", action="store_true", help="only differences beyond the spread")
    options = parser.parse_args(argv)
    old, new = read_json(options.old), read_json(options.new)
    rich = display.require_rich()
    console = rich.console()
    rows = [r for r in compare(old, new) if options.implementation in ("all", r["key"][3])]

    for name, run in (("old", old), ("new", new)):
        head = run["header"]
        copy = display.rate(head["copy"]["bytes_per_second"])
        commit = (head["commit"] or "no commit")[:12]
        console.print(
            f"{name}  {head['device']}, {head['date']}, {commit}, copy {copy}", markup=False
        )
    if old["header"]["device"] != new["header"]["device"]:
        console.print("The devices differ: read the ratios accordingly.", style="yellow")

    table = rich.table()
    for column in ("operation", "case", "direction", "implementation"):
        table.add_column(column)
    for column in ("old", "new", "old / new", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if options.changed and row["verdict"] == "same":
            continue
        if row["verdict"] == "error":
            table.add_row(
                *row["key"],
                *(display.duration(row[k]) if row[k] else "-" for k in ("old", "new")),
                "",
                "error",
            )
            continue
        table.add_row(
            *row["key"],
            display.duration(row["old"]),
            display.duration(row["new"]),
            display.ratio_text(row["ratio"], row["spread"]),
            "" if row["verdict"] == "same" else row["verdict"],
        )
    console.print(table)
    for name, keys in (("old", only_in(old, new)), ("new", only_in(new, old))):
        if keys:
            console.print(f"{len(keys)} only in the {name} file")
    counts = {
        v: sum(r["verdict"] == v for r in rows) for v in ("faster", "slower", "same", "error")
    }
    ratios = [r["ratio"] for r in rows if r["ratio"]]
    if not ratios:
        console.print("nothing to compare")
        return 0
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    console.print(
        f"{mean:.3f}x (geometric mean of old / new over {len(ratios)}): "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    )
    slow = [r for r in rows if r["verdict"] == "slower" and 1 / r["ratio"] > options.max_slowdown]
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
