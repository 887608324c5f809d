"""Draws achieved rates against row length: `python -m bench.roofline FILE.json -o FILE.png`.

A panel shows forward alone, or forward and backward in one program. Those of two programs are drawn where they are
asked for, or where a file has nothing else.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

from bench.cases import BATCH_NORMS, DIRECTIONS
from bench.timing import read_json
from jaxnorm._measure import display

_TITLES = {
    "forward_train": "forward for training",
    "together": "both in one program",
    "grad": "gradient",
}
_OTHER = "another dtype or axis, or with a mask or bias"


def plot(run: dict, path: str, x: str = "columns") -> None:
    """A panel for each operation (down) and direction (across), with the rate of a copy.

    Args:
      run: What `--json` writes.
      path: File to write; its suffix chooses the format.
      x: "columns" (length of the reduced axis) or "bytes" (least bytes that a call moves).
    """
    pyplot = display.require_pyplot()
    records = [r for r in run["records"] if r.get("bytes_per_second")]
    if not records:
        raise ValueError("the results hold no rate to draw")
    rows: dict[str, list[str]] = {}
    for r in records:
        directions = rows.setdefault(r["op"], [])
        if r["direction"] not in directions:
            directions.append(r["direction"])
    width = max(map(len, rows.values()))
    figure, grid = pyplot.subplots(
        len(rows),
        width,
        figsize=(max(4.3 * width, 6.5) + 0.3, 3.1 * len(rows) + 1.1),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    rates = [max(r["bytes_per_second"], r["copy_bytes_per_second"]) for r in records]
    unit, unit_name = (1e12, "TB/s") if max(rates) > 1e12 else (1e9, "GB/s")
    # On a CPU every case has the rate of a copy of its own size.
    own_copies = len({r["copy_bytes_per_second"] for r in records}) > 1
    copy_name = "copy of the same size (median)" if own_copies else "copy"
    handles: dict[str, object] = {}
    for row, (op, directions) in zip(grid, rows.items(), strict=True):
        for axes, direction in zip(row, directions, strict=False):
            chosen = [r for r in records if (r["op"], r["direction"]) == (op, direction)]
            _panel(axes, chosen, x, unit, copy_name, handles)
            display.style(axes, f"{op} {_TITLES.get(direction, direction)}")
            label = "bytes that must move" if x == "bytes" else "columns"
            axes.set_xlabel(label, color=display.INK, fontsize=9, labelpad=1)
        for axes in row[len(directions) :]:
            axes.set_visible(False)
        own = [r for r in records if r["op"] == op]
        _y_range(
            row[0],
            [r[k] / unit for r in own for k in ("bytes_per_second", "copy_bytes_per_second")],
        )
        row[0].set_ylabel(unit_name, color=display.INK)
    head = run["header"]
    versions = ", ".join(f"{k} {v}" for k, v in head["versions"].items() if k in ("jax", "torch"))
    figure.suptitle(
        f"{head['device']} ({versions})", x=0.01, ha="left", fontsize=11, color=display.INK
    )
    last = [name for name in (_OTHER,) if name in handles]
    names = [name for name in handles if name not in last] + last
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=len(names) if width > 1 else 2,
        frameon=False,
        fontsize=9,
    )
    display.save(figure, path)
    pyplot.close(figure)


def _x_of(record: dict, x: str) -> float:
    return record["columns"] if x == "columns" else record["min_bytes"]


def _panel(
    axes, records: Sequence[dict], x: str, unit: float, copy_name: str, handles: dict
) -> None:
    # Filled and joined: plain cases of the dtype that has most of them. Hollow: the others. Shapes of batch_norm are no
    # series.
    plain = [r["dtype"] for r in records if _is_plain(r)]
    main = statistics.mode(plain) if plain else None
    for depth, name in enumerate(dict.fromkeys(r["implementation"] for r in records)):
        own = sorted((r for r in records if r["implementation"] == name), key=lambda r: _x_of(r, x))
        joined = [r for r in own if _is_plain(r) and r["dtype"] == main]
        colour = display.colour_of(name)
        for points, filled in ((joined, True), ([r for r in own if r not in joined], False)):
            (line,) = axes.plot(
                [_x_of(r, x) for r in points],
                [r["bytes_per_second"] / unit for r in points],
                color=colour,
                marker="o",
                markersize=5,
                markerfacecolor=colour if filled else "white",
                linestyle="-" if filled and records[0]["op"] not in BATCH_NORMS else "",
                linewidth=1.8,
                zorder=10 - depth,
            )
            if filled:
                handles.setdefault(display.name_of(name), line)
            elif points and _OTHER not in handles:
                style = {
                    "color": "#777777",
                    "marker": "o",
                    "markerfacecolor": "white",
                    "linestyle": "",
                }
                handles[_OTHER] = type(line)([], [], markersize=5, **style)
    copies = [r["copy_bytes_per_second"] / unit for r in records]
    copy = axes.axhline(
        statistics.median(copies), color=display.INK, ls=(0, (4, 2)), lw=1.3, zorder=2
    )
    handles.setdefault(copy_name, copy)
    axes.set_xscale("log", base=2 if x == "columns" else 10)
    axes.set_yscale("log")
    _x_ticks(axes, x)


def _x_ticks(axes, x: str) -> None:
    from matplotlib import ticker

    def columns(value, _):
        for size, name in ((1 << 20, "M"), (1 << 10, "k")):
            if value >= size:
                return f"{value / size:g}{name}"
        return f"{value:g}"

    def size(value, _):
        return f"{value / 1e9:g} GB" if value >= 1e9 else f"{value / 1e6:g} MB"

    axes.xaxis.set_major_locator(
        ticker.LogLocator(base=2, numticks=9)
        if x == "columns"
        else ticker.LogLocator(subs=(1, 2, 5), numticks=9)
    )
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(columns if x == "columns" else size))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def _is_plain(record: dict) -> bool:
    last = len(record["shape"]) - 1
    no_operands = record["where_shape"] is None and record["bias_shape"] is None
    return (
        no_operands
        and not record["program"]
        and (record["op"] in BATCH_NORMS or record["axis"] in (-1, last))
    )


def _y_range(axes, values: Sequence[float]) -> None:
    """Ticks at 1, 2, 5: a log axis of less than two decades has too few by itself."""
    from matplotlib import ticker

    low, high = min(values) / 1.15, max(values) * 1.2
    axes.set_ylim(low, high)
    subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 3 else (1.0,)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.roofline", description=plot.__doc__.splitlines()[0]
    )
    parser.add_argument("file", metavar="FILE", help="written by python -m bench --json")
    parser.add_argument("-o", "--output", default="roofline.png", metavar="FILE")
    parser.add_argument("--x", choices=("columns", "bytes"), default="columns")
    parser.add_argument("--op", help="this operation only")
    parser.add_argument(
        "--directions",
        metavar="D,...",
        help="these only (default: all but forward_train and backward where there is together)",
    )
    options = parser.parse_args(argv)
    wanted = options.directions.split(",") if options.directions else []
    for direction in wanted:
        if direction not in DIRECTIONS:
            parser.error(f"--directions must name some of {', '.join(DIRECTIONS)}, got {direction}")
    run = read_json(options.file)
    found = {r["direction"] for r in run["records"]}
    split = {"forward_train", "backward"} if "together" in found else set()
    wanted = wanted or found - split
    run["records"] = [r for r in run["records"] if r["direction"] in wanted]
    if options.op:
        run["records"] = [r for r in run["records"] if r["op"] == options.op]
    plot(run, options.output, options.x)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
