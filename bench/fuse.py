"""Times row programs under `jaxnorm.fuse` against XLA and PyTorch: `python -m bench fuse`.

The programs are those of `bench/row_programs.py`. On a GPU they have the sizes that users have, on a
CPU those of the tests, and there `fuse` runs the plain program.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from bench.options import add_timing, peers_of, some_of
from bench.row_programs import COLUMNS, DIRECTIONS, MAIN, TAGS, RowProgram, select

PEERS = ("xla", "torch", "torch.compile")

# Programs that are compiled at the same time, before the first of them is timed: nothing else runs
# while a clock does.
CHUNK = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
      0; 1 when jaxnorm itself failed in some case; 2 when the arguments name nothing to time.
    """
    options = _parse(argv)
    try:
        cases = select(options.only, None if options.cases == "all" else options.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not cases:
        print(f"none of {', '.join(options.only)} is in --cases {options.cases}", file=sys.stderr)
        return 2
    if options.list:
        for case in cases:
            print(f"{case.name:<28} {'x'.join(map(str, case.sizes))}")
        return 0
    if {"torch", "torch.compile"} & set(options.peers):
        # Two libraries share the GPU; the data itself is passed over without a copy.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

    with tempfile.TemporaryDirectory() as cache:
        # What was compiled in another run is no compile time of this one.
        os.environ["JAXNORM_CACHE_DIR"] = cache
        return _run(cases, options)


def _run(cases: Sequence[RowProgram], options) -> int:
    # Imported late: `--help` and `--list` need no JAX, and the variables above have to come first.
    from bench import timing
    from jaxnorm._measure import display, timer

    rich = display.require_rich()
    console = rich.console()
    copy = timer.copy_rate(options.clock)
    head = timing.header(options.clock, copy)
    on_gpu = head["platform"] == "gpu"
    options.small = options.small or not on_gpu
    if not on_gpu:
        print("no GPU: small sizes, and fuse runs the plain program", file=sys.stderr)
    records: list[dict] = []
    sources: list[tuple[dict, str]] = []
    total = sum(len(_directions(case, options)) for case in cases)
    try:
        with rich.progress() as progress:
            task = progress.add_task("", total=total)
            for begin in range(0, len(cases), CHUNK):
                chunk = cases[begin : begin + CHUNK]
                progress.update(task, description=f"compiling {chunk[0].name} to {chunk[-1].name}")
                programs = _compile(chunk, options)
                for case in chunk:
                    data = _data(case, options)
                    for direction in _directions(case, options):
                        progress.update(task, description=f"{case.name} {direction}")
                        start = time.perf_counter()
                        new = list(_measure(case, direction, data, programs, options, head))
                        records += new
                        progress.advance(task)
                        if progress.disable:
                            line = _line(new, time.perf_counter() - start)
                            print(line, file=sys.stderr, flush=True)
                        if options.json:
                            timing.write_json(options.json, {"header": head, "records": records})
                    data = None
                for program in programs.values():
                    sources += () if isinstance(program, str) else program[1]
                programs.clear()
    except KeyboardInterrupt:
        print("stopped; what was measured so far follows", file=sys.stderr)

    _time_cache(sources)
    if options.json:
        timing.write_json(options.json, {"header": head, "records": records})
    if records:
        console.print(table(rich, records, head, options.peers))
        for line in compile_lines(records):
            console.print(line)
    if options.plot:
        plot({"header": head, "records": records}, options.plot)
        console.print(f"wrote {options.plot}")
    return int(any(r["error"] for r in records if r["implementation"] == "jaxnorm"))


def _parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench fuse",
        description="Time row programs under jaxnorm.fuse, in one process and on one device.",
    )
    parser.add_argument(
        "--cases",
        choices=("all", *TAGS),
        default="all",
        help="each program, three programs over row lengths, or all (default: all)",
    )
    parser.add_argument(
        "--only", default="", metavar="NAME,...", help="only programs of these names or families"
    )
    parser.add_argument(
        "--directions",
        default=",".join(DIRECTIONS),
        metavar="D,...",
        help=f"some of {', '.join(DIRECTIONS)} (default: all)",
    )
    parser.add_argument(
        "--peers",
        default="xla",
        metavar="P,...",
        help=f"some of {', '.join(PEERS)}, or none (default: xla)",
    )
    parser.add_argument(
        "--small", action="store_true", help="sizes of the tests, on a GPU too; on a CPU always"
    )
    add_timing(parser, calls=20, rounds=2, budget=0.2, plot="draw fractions of the copy rate")
    options = parser.parse_args(argv)
    options.only = [name for name in options.only.split(",") if name]
    options.peers = peers_of(parser, options.peers, PEERS)
    options.directions = some_of(parser, "directions", options.directions, DIRECTIONS)
    return options


def _directions(case: RowProgram, options) -> list[str]:
    return [d for d in options.directions if d in case.directions]


def _sizes(case: RowProgram, options) -> tuple[int, ...]:
    return case.small if options.small else case.sizes


# ---- compiling ----


def _compile(chunk: Sequence[RowProgram], options) -> dict:
    """Compiled programs by case, direction and implementation; a failure is in its program's place."""
    from bench import row_peers, timing

    found = {}
    traced = {}
    for case in chunk:
        for direction in _directions(case, options):
            for name in ("jaxnorm", *[p for p in options.peers if p == "xla"]):
                key = (case.name, direction, name)
                try:
                    program = row_peers.trace(name, case, direction, _sizes(case, options))
                    figures = compile_figures(program) if name == "jaxnorm" else []
                    traced[key] = (program, figures)
                except Exception as error:
                    found[key] = timing.error_text(error)
    with concurrent.futures.ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        futures = {k: pool.submit(row_peers.compile_program, p) for k, (p, _) in traced.items()}
        for key, future in futures.items():
            try:
                found[key] = (*traced[key], future.result())
            except Exception as error:
                found[key] = timing.error_text(error)
    return found


def compile_figures(program) -> list[tuple[dict, str]]:
    """What it takes to compile each row program in a traced program, one after the other.

    Returns:
      For each call a dict and the source, none where nothing can be compiled. The dict has
      `plan_seconds` from the jaxpr to the source, `nvrtc_seconds` from there to the binary,
      `registers` and `spill_bytes` by kernel, and the launch.
    """
    from jaxnorm._rows import call, launcher

    if not launcher.gpus() or launcher.problem():
        return []
    device = call.device_here()
    found = []
    for closed in row_jaxprs(program.jitted.trace(*program.avals).jaxpr.jaxpr):
        start = time.perf_counter()
        made = call.row_call(closed, device)
        planned = time.perf_counter()
        compiled = launcher.compile(made.source, device.architecture)
        figures = {
            "plan_seconds": planned - start,
            # A program that another case compiled before takes no time of the compiler.
            "nvrtc_seconds": None if compiled.cached else compiled.seconds,
            "registers": dict(compiled.registers),
            "spill_bytes": dict(compiled.spill_bytes),
            "threads": made.threads,
            "shared_bytes": made.shared_bytes,
            "cluster": made.cluster,
            "rows_per_tile": made.rows_per_tile,
            "blocks": made.blocks,
            "architecture": device.architecture,
        }
        found.append((figures, made.source))
    return found


def row_jaxprs(jaxpr) -> Iterator:
    """The closed jaxpr of each row program that is called in a jaxpr, in the order of the calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jaxnorm_row_program":
            yield equation.params["jaxpr"]
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from row_jaxprs(inner)


def _time_cache(sources: Sequence[tuple[dict, str]]) -> None:
    """Adds `cache_seconds` to the dicts: time from the disk cache, in a process that has compiled nothing."""
    if not sources:
        return
    asked = [(source, figures["architecture"]) for figures, source in sources]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for (figures, _), seconds in zip(sources, pool.apply(_from_disk, (asked,)), strict=True):
            figures["cache_seconds"] = seconds


def _from_disk(sources: Sequence[tuple[str, int]]) -> list[float | None]:
    """Seconds for each; None for what the disk does not have."""
    from jaxnorm._rows import launcher

    found, seen = [], set()
    for source, architecture in sources:
        start = time.perf_counter()
        compiled = launcher.compile(source, architecture)
        seconds = time.perf_counter() - start
        # The second time this process has it.
        found.append(seconds if compiled.cached and source not in seen else None)
        seen.add(source)
    return found


# ---- measuring ----


def _data(case: RowProgram, options):
    """The data of all directions, or what went wrong."""
    from bench import row_peers, timing

    try:
        data = row_peers.make_data(case, _directions(case, options), _sizes(case, options))
        data.wait()
    except Exception as error:
        return f"data: {timing.error_text(error)}"
    return data


def _measure(
    case: RowProgram, direction: str, data, programs: dict, options, head: dict
) -> Iterator[dict]:
    """One record per implementation; a failure is a record too."""
    from bench import peers, row_peers, timing
    from jaxnorm._measure import timer

    names = ["jaxnorm", *options.peers]
    sizes = _sizes(case, options)
    min_bytes = case.min_bytes(direction, sizes)
    failed = data if isinstance(data, str) else None
    found: dict[str, dict] = {name: {"error": failed} for name in names}
    workloads = {}
    for name in () if failed else names:
        try:
            if name in ("jaxnorm", "xla"):
                entry = programs[case.name, direction, name]
                if isinstance(entry, str):
                    found[name]["error"] = entry
                    continue
                program, figures, compiled = entry
                prepared = row_peers.prepare_jax(program, compiled, data)
                if figures:
                    found[name]["compile"] = [entry for entry, _ in figures]
            else:
                prepared = row_peers.prepare_torch(name, case, direction, data)
            workloads[name] = prepared.workload
            found[name] |= {
                "residual_bytes": prepared.residual_bytes,
                "temporary_bytes": prepared.temporary_bytes,
            }
        except Exception as error:
            found[name]["error"] = timing.error_text(error)
        prepared = None
    if head["platform"] == "cpu" and workloads:
        workloads["copy"] = timer.copy_workload(min_bytes)
    timings = timer.measure(
        workloads,
        calls=options.calls,
        rounds=options.rounds,
        budget=options.budget,
        clock=options.clock,
    )
    workloads.clear()
    peers.release()
    copy = head["copy"]["bytes_per_second"]
    own_copy = timings.pop("copy", None)
    if isinstance(own_copy, timer.Timing):
        copy = min_bytes / own_copy.median
    for name, timed in timings.items():
        if isinstance(timed, Exception):
            found[name]["error"] = timing.error_text(timed)
            continue
        found[name] |= timing.time_entries(timed, timings.get("jaxnorm"))
        found[name] |= {
            "kernels": timed.kernels,
            "gap_seconds": timed.gap_seconds,
            "bytes_per_second": min_bytes / timed.median,
            "copy_fraction": min_bytes / timed.median / copy,
        }
    for name in names:
        yield {
            "op": "fuse",
            "case": case.name,
            "family": case.family,
            "tag": case.tag,
            "shape": sizes,
            "columns": sizes[-1],
            "dtype": "bfloat16",
            "direction": direction,
            "implementation": name,
            "target": None if options.small else case.target(direction),
            "min_bytes": min_bytes,
            "copy_bytes_per_second": copy,
            "cold": not failed and data.cold,
            **found[name],
        }


# ---- what people read ----


def _line(records: Sequence[dict], seconds: float) -> str:
    from jaxnorm._measure import display

    shown = [
        f"{r['implementation']} {r['error'] or display.duration(r['seconds'])}"
        + ("" if r["error"] else f" {r['copy_fraction']:.2f}")
        for r in records
    ]
    first = records[0]
    return f"{first['case']} {first['direction']}: {' | '.join(shown)}  ({seconds:.1f} s)"


def table(rich, records: Sequence[dict], head: dict, peers: Sequence[str]):
    """A row for each program and direction."""
    from jaxnorm._measure import display

    on_gpu = head["platform"] == "gpu"
    clock = {"wall": "wall-clock", "trace": "kernel time"}[head["clock"]]
    copy = (
        f"copy {display.rate(head['copy']['bytes_per_second'])}"
        if on_gpu
        else "copy of the same size, in turn with the others; fuse runs the plain program"
    )
    result = rich.table(
        title=f"row programs, bfloat16, on {head['device']}",
        caption=f"{clock}, medians; {copy}. Ratios: time of the other / time of ours; ± is half of "
        "their 95% interval.",
        caption_justify="left",
    )
    result.add_column("program", no_wrap=True)
    result.add_column("direction", no_wrap=True)
    for name in ("time", "of copy", "wanted", "kernels", *[f"vs {peer}" for peer in peers]):
        result.add_column(name, justify="right", no_wrap=True)
    previous, notes = None, []
    for (case, direction), found in _grouped(records).items():
        if previous not in (None, case):
            result.add_section()
        ours = found["jaxnorm"]
        cells = ["" if case == previous else case, direction]
        previous = case
        if ours["error"]:
            cells += ["[red]failed[/red]", "", "", ""]
        else:
            fraction, target = ours["copy_fraction"], ours["target"]
            missed = target is not None and on_gpu and fraction < target
            shown = f"{fraction:.2f}" + ("" if ours["cold"] or not on_gpu else " L2")
            cells += [
                display.duration(ours["seconds"]),
                f"[red]{shown}[/red]" if missed else shown,
                "" if target is None else f"{target:.2f}",
                str(ours["kernels"] or ""),
            ]
        result.add_row(*cells, *(display.ratio_cell(found.get(peer)) for peer in peers))
        notes += [f"{case} {direction}, {n}: {r['error']}" for n, r in found.items() if r["error"]]
    return rich.group(result, *notes) if notes else result


def _grouped(records: Sequence[dict]) -> dict[tuple[str, str], dict[str, dict]]:
    """By program and direction, then by implementation."""
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for r in records:
        groups.setdefault((r["case"], r["direction"]), {})[r["implementation"]] = r
    return groups


def compile_lines(records: Sequence[dict]) -> list[str]:
    """Median and largest of what compiling took, where something was compiled."""
    calls = [c for r in records for c in r.get("compile", ())]
    lines = []
    for key, label, unit, size in (
        ("plan_seconds", "from the jaxpr to the source", "ms", 1e3),
        ("nvrtc_seconds", "NVRTC", "s", 1.0),
        ("cache_seconds", "from the disk cache", "ms", 1e3),
    ):
        values = [c[key] * size for c in calls if c.get(key) is not None]
        if values:
            lines.append(
                f"{label}: median {statistics.median(values):.2f} {unit}, largest "
                f"{max(values):.2f} {unit}, of {len(values)}"
            )
    return lines


def plot(run: dict, path: str) -> None:
    """Fractions of the copy rate: a panel for each direction, and below them one for each sweep.

    Args:
      run: What `--json` writes.
      path: File to write; its suffix chooses the format.
    """
    from jaxnorm._measure import display

    pyplot = display.require_pyplot()
    records = [r for r in run["records"] if r.get("copy_fraction")]
    if not records:
        raise ValueError("the results hold no rate to draw")
    directions = [d for d in DIRECTIONS if any(r["direction"] == d for r in records)]
    programs = [r["case"] for r in records if r["tag"] == MAIN]
    programs = list(dict.fromkeys(programs))[::-1]
    sweeps = list(dict.fromkeys(r["family"] for r in records if r["tag"] != MAIN))
    heights = [0.27 * len(programs) + 0.7] * bool(programs) + [2.6] * len(sweeps)
    figure, grid = pyplot.subplots(
        len(heights),
        len(directions),
        figsize=(3.9 * len(directions) + 1.6, sum(heights) + 0.9),
        squeeze=False,
        sharey="row",
        height_ratios=heights,
        layout="constrained",
    )
    handles: dict[str, object] = {}
    for row, family in zip(grid, [None] * bool(programs) + sweeps, strict=True):
        for axes, direction in zip(row, directions, strict=True):
            chosen = [r for r in records if r["direction"] == direction]
            if family is None:
                _programs_panel(axes, chosen, programs, handles)
                display.style(axes, direction)
                axes.set_xlabel("of the copy rate", color=display.INK, fontsize=9, labelpad=1)
            else:
                _sweep_panel(axes, sweep(chosen, family), handles)
                display.style(axes, f"{family} {direction}")
                axes.set_xlabel("columns", color=display.INK, fontsize=9, labelpad=1)
        if family is not None:
            row[0].set_ylabel("of the copy rate", color=display.INK)
    head = run["header"]
    versions = ", ".join(f"{k} {v}" for k, v in head["versions"].items() if k in ("jax", "torch"))
    figure.suptitle(
        f"row programs on {head['device']} ({versions})",
        x=0.01,
        ha="left",
        fontsize=11,
        color=display.INK,
    )
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
    display.save(figure, path)
    pyplot.close(figure)


def sweep(records: Sequence[dict], family: str) -> list[dict]:
    """Records of a sweep; where it lacks a length that the program's own case has, that one's."""
    found = {}
    # The last one with a key stays.
    for r in sorted(records, key=lambda r: r["tag"] != MAIN):
        if r["family"] == family and r["columns"] in COLUMNS:
            found[r["columns"], r["direction"], r["implementation"]] = r
    return list(found.values())


def _implementations(records: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(r["implementation"] for r in records))


def _programs_panel(axes, records: Sequence[dict], programs: Sequence[str], handles: dict) -> None:
    from jaxnorm._measure import display

    places = {name: place for place, name in enumerate(programs)}
    for depth, name in enumerate(_implementations(records)):
        own = [r for r in records if r["implementation"] == name and r["case"] in places]
        (dots,) = axes.plot(
            [r["copy_fraction"] for r in own],
            [places[r["case"]] for r in own],
            color=display.colour_of(name),
            marker="o",
            markersize=6,
            linestyle="",
            zorder=10 - depth,
        )
        handles.setdefault(display.name_of(name), dots)
    axes.axvline(1, color=display.INK, ls=(0, (4, 2)), lw=1.3, zorder=2)
    axes.set_xlim(0, max(1.1, *(r["copy_fraction"] * 1.05 for r in records)))
    axes.set_yticks(range(len(programs)), programs)
    axes.set_ylim(-0.6, len(programs) - 0.4)


def _sweep_panel(axes, records: Sequence[dict], handles: dict) -> None:
    from matplotlib import ticker

    from jaxnorm._measure import display

    for depth, name in enumerate(_implementations(records)):
        own = sorted(
            (r for r in records if r["implementation"] == name), key=lambda r: r["columns"]
        )
        (line,) = axes.plot(
            [r["columns"] for r in own],
            [r["copy_fraction"] for r in own],
            color=display.colour_of(name),
            marker="o",
            markersize=5,
            linewidth=1.8,
            zorder=10 - depth,
        )
        handles.setdefault(display.name_of(name), line)
    axes.axhline(1, color=display.INK, ls=(0, (4, 2)), lw=1.3, zorder=2)
    axes.set_ylim(0, max([1.1, *(r["copy_fraction"] * 1.05 for r in records)]))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticker.FixedLocator(COLUMNS[::2]))
    axes.xaxis.set_major_formatter(
        ticker.FuncFormatter(lambda v, _: f"{v / 1024:g}k" if v >= 1024 else f"{v:g}")
    )
    axes.xaxis.set_minor_locator(ticker.NullLocator())
