"""Times jaxnorm against other implementations: `python -m bench OP`."""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence

from bench.cases import DEFAULT_DIRECTIONS, DIRECTIONS, DTYPES, OPS, Case, select
from bench.options import add_timing, peers_of, some_of


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
      0; 1 when jaxnorm itself failed in some case; 2 when the arguments name nothing to time.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["fuse"]:
        from bench import fuse

        return fuse.main(argv[1:])
    options = _parse(argv)
    if options.list:
        for case in _cases(options):
            print(f"{case.op:<12} {case.label}")
        return 0
    if {"torch", "torch.compile", "liger", "quack"} & set(options.peers):
        # Two libraries share the GPU; the data itself is passed over without a copy.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

    # Imported late: `--help` and `--list` need no JAX, and the line above has to come first.
    from bench import timing
    from jaxnorm._measure import display, timer

    rich = display.require_rich()
    console = rich.console()
    cases = _cases(options)
    if not cases:
        named = f" with {options.filter} in its name" if options.filter else ""
        print(f"no case of {options.op} in --cases {options.cases}{named}", file=sys.stderr)
        return 2

    copy = timer.copy_rate(options.clock)
    head = timing.header(options.clock, copy)
    records: list[dict] = []
    work = [(case, d) for case in cases for d in _directions(case, options)]
    try:
        with rich.progress() as progress:
            task = progress.add_task("", total=len(work))
            for case, direction in work:
                progress.update(task, description=f"{case.op} {case.label} {direction}")
                start = time.perf_counter()
                new = list(_measure(case, direction, options, head))
                records += new
                progress.advance(task)
                if progress.disable:
                    print(_line(new, time.perf_counter() - start), file=sys.stderr, flush=True)
                if options.json:
                    timing.write_json(options.json, {"header": head, "records": records})
    except KeyboardInterrupt:
        print("stopped; what was measured so far follows", file=sys.stderr)

    for op in dict.fromkeys(r["op"] for r in records):
        console.print(_table(rich, [r for r in records if r["op"] == op], head, options))
    if options.plot:
        from bench import roofline

        roofline.plot({"header": head, "records": records}, options.plot)
        console.print(f"wrote {options.plot}")
    ours = [r for r in records if r["implementation"] == options.implementation]
    return int(any(r["error"] for r in ours))


def _parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Time jaxnorm against other implementations, in one process and on one device.",
        epilog="fuse in the place of OP times row programs, with options of its own. "
        "bench.compare (python -m) compares two --json files, bench.roofline plots one, "
        "bench.tables writes README's tables.",
    )
    parser.add_argument("op", metavar="OP", choices=("all", *OPS), help="all, " + ", ".join(OPS))
    parser.add_argument(
        "--cases",
        choices=("ci", "full", "widths"),
        default="ci",
        help="small shapes, the table for large GPUs, or hidden sizes and vocabularies of transformers (default: ci)",
    )
    parser.add_argument(
        "--filter", default="", metavar="TEXT", help="only cases whose name has TEXT"
    )
    parser.add_argument(
        "--directions",
        default="",
        metavar="D,...",
        help=f"some of {', '.join(DIRECTIONS)} (default: {','.join(DEFAULT_DIRECTIONS)}; of programs "
        "all that they have)",
    )
    parser.add_argument(
        "--peers",
        default="xla",
        metavar="P,...",
        help="xla, xla-y (a ReLU that keeps y), torch, torch.compile, liger, quack, or none "
        "(default: xla)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="replaces the dtype of every case")
    parser.add_argument(
        "--implementation",
        choices=("jaxnorm", "kernel"),
        default="jaxnorm",
        help="what is compared with the peers: jaxnorm's own choice, or its kernels always",
    )
    add_timing(parser, calls=30, rounds=3, budget=0.5, plot="write a roofline plot")
    options = parser.parse_args(argv)
    known = ("xla", "xla-y", "torch", "torch.compile", "liger", "quack", "jaxnorm", "kernel")
    options.peers = peers_of(parser, options.peers, known)
    options.directions = some_of(parser, "directions", options.directions, DIRECTIONS)
    return options


def _cases(options) -> list[Case]:
    found = select(options.op, options.cases, options.dtype)
    return [c for c in found if options.filter in f"{c.op} {c.label}"]


def _directions(case: Case, options) -> list[str]:
    if not options.directions:
        return list(case.default_directions)
    return [d for d in options.directions if d in case.directions]


def _measure(case: Case, direction: str, options, head: dict) -> Iterator[dict]:
    """One record per implementation; a failure is a record too."""
    from bench import peers, timing
    from jaxnorm._measure import timer

    names = list(dict.fromkeys([options.implementation, *options.peers]))
    errors: dict[str, str] = {}
    timings: dict[str, timer.Timing] = {}
    sizes: dict[str, dict] = {}
    copy = None
    cold = False
    try:
        data = timing.make_data(case, direction)
        data.wait()
        cold = data.cold
    except Exception as error:
        data, errors = None, {name: f"data: {timing.error_text(error)}" for name in names}

    if data is not None:
        together = timing.fits_together(case, data.sets, len(names))
        for group in [names] if together else [[name] for name in names]:
            workloads = {}
            for name in group:
                try:
                    prepared = peers.prepare(name, case, direction, data)
                    workloads[name] = prepared.workload
                    sizes[name] = {
                        "residual_bytes": prepared.residual_bytes,
                        "temporary_bytes": prepared.temporary_bytes,
                    }
                except peers.Unsupported as error:
                    errors[name] = f"skipped: {error}"
                except Exception as error:
                    errors[name] = timing.error_text(error)
                prepared = None
            if head["platform"] == "cpu" and copy is None:
                workloads["copy"] = timer.copy_workload(case.min_bytes(direction))
            found = timer.measure(
                workloads,
                calls=options.calls,
                rounds=options.rounds,
                budget=options.budget,
                clock=options.clock,
            )
            workloads.clear()
            for name, result in found.items():
                if isinstance(result, Exception):
                    errors[name] = timing.error_text(result)
                elif name == "copy":
                    copy = case.min_bytes(direction) / result.median
                else:
                    timings[name] = result
        del data
        peers.release()

    base = timings.get(options.implementation)
    for name in names:
        yield _record(
            case,
            direction,
            name,
            timings.get(name),
            base,
            error=errors.get(name),
            copy=copy or head["copy"]["bytes_per_second"],
            cold=cold,
            sizes=sizes.get(name, {}),
        )


def _record(case, direction, name, timed, base, *, error, copy, cold, sizes) -> dict:
    from bench import timing

    record = {
        **{f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name != "tags"},
        "case": case.label,
        "columns": case.columns,
        "direction": direction,
        "implementation": name,
        "min_bytes": case.min_bytes(direction),
        "copy_bytes_per_second": copy,
        "cold": cold,
        "residual_bytes": sizes.get("residual_bytes"),
        "temporary_bytes": sizes.get("temporary_bytes"),
        "error": error,
    }
    if timed is None:
        return record
    record |= timing.time_entries(timed, base)
    # A program's bytes are those of the operation in it, so its matrix products are left out where
    # they can be told apart, and there is no rate where they cannot. Elsewhere there are none,
    # whatever a library calls its kernels.
    products = timed.matmul_seconds if case.has_products else 0.0
    record |= {
        "kernels": timed.kernels,
        "matmul_seconds": products,
        "gap_seconds": timed.gap_seconds,
    }
    own = timed.median - products
    if own > 0 and (products > 0 or not case.has_products):
        record["bytes_per_second"] = case.min_bytes(direction) / own
        record["copy_fraction"] = record["bytes_per_second"] / copy
    return record


# ---- what people read ----


def _line(records: Sequence[dict], seconds: float) -> str:
    from jaxnorm._measure import display

    first = records[0]
    parts = [f"{first['op']} {first['case']} {first['direction']}:"]
    for r in records:
        shown = r["error"] or display.duration(r["seconds"])
        parts.append(f"{r['implementation']} {shown}")
    return " | ".join([parts[0] + " " + parts[1], *parts[2:]]) + f"  ({seconds:.1f} s)"


def _table(rich, records: Sequence[dict], head: dict, options):
    from jaxnorm._measure import display

    on_gpu = head["platform"] == "gpu"
    copy = head["copy"]["bytes_per_second"]
    ceiling = (
        f"copy {display.rate(copy)}" if on_gpu else "copy of the same size, in turn with the others"
    )
    clock = {"wall": "wall-clock", "trace": "kernel time"}
    table = rich.table(title=f"{records[0]['op']} on {head['device']}", caption_justify="left")
    table.caption = (
        f"{clock[head['clock']]}, medians; {ceiling}. "
        "Ratios: time of the other / time of ours; ± is half of their 95% interval."
    )
    if on_gpu and not all(r["cold"] for r in records):
        table.caption += " L2: the data may have been in the cache."
    table.add_column("case", overflow="fold", min_width=16)
    table.add_column("direction", no_wrap=True)
    for name in ("time", "bytes/s", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    for peer in options.peers:
        table.add_column(f"vs {peer}", justify="right", no_wrap=True)
    groups: dict[tuple, dict[str, dict]] = {}
    for r in records:
        groups.setdefault((r["case"], r["direction"]), {})[r["implementation"]] = r
    notes = []
    previous = None
    for (case, direction), found in groups.items():
        if previous not in (None, case):
            table.add_section()
        ours = found[options.implementation]
        cells = ["" if case == previous else case, direction.replace("_", " ")]
        previous = case
        if ours["error"]:
            cells += ["[red]failed[/red]", "", ""]
        else:
            cells.append(display.duration(ours["seconds"]))
            known = "bytes_per_second" in ours
            cells.append(display.rate(ours["bytes_per_second"]) if known else "")
            l2 = "" if ours["cold"] or not on_gpu else " L2"
            cells.append(f"{ours['copy_fraction']:.2f}{l2}" if known else "")
        cells += [display.ratio_cell(found.get(peer)) for peer in options.peers]
        table.add_row(*cells)
        notes += [
            f"{case} {direction}, {r['implementation']}: {r['error']}"
            for r in found.values()
            if r["error"]
        ]
    if not notes:
        return table
    # One line for each different complaint, not one for each case.
    complaints: dict[str, list[str]] = {}
    for note in notes:
        where, _, text = note.partition(": ")
        complaints.setdefault(f"{where.rpartition(', ')[2]}: {text}", []).append(where)
    lines = [f"{text} ({len(where)} of {len(groups)} rows)" for text, where in complaints.items()]
    return rich.group(table, *lines)


if __name__ == "__main__":
    sys.exit(main())
