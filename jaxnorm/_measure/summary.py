"""Tables, plot and verdict of errors and times."""

import math
from collections.abc import Sequence

from jaxnorm._measure import display, timer
from jaxnorm._measure.errors import Check
from jaxnorm._measure.speed import Compared


def verdict_of(checks, timings, backend: str, status) -> tuple[bool, str]:
    """(whether everything passed, one line that says so)."""
    failed = [f"{c.op} {c.direction} {c.dtype}" for c in checks if not c.ok]
    broken = [f"{t.op} {t.direction} {t.shape}" for t in timings if t.message]
    timed = [t for t in timings if not t.message]
    speed = ""
    if timed:
        mean = math.exp(sum(math.log(t.ratio) for t in timed) / len(timed))
        count = f"{len(timed)} timing{'s' * (len(timed) > 1)}"
        speed = f"; {mean:.2f}x the speed of XLA (geometric mean of {count} on {backend})"
    platform = "cuda" if backend == "gpu" else backend
    module = next((m for m in status.modules if m.platform == platform), None)
    if module is None or not module.available:
        speed += f"; plain XLA formulas, no {platform} kernels"
    if failed or broken:
        parts = (
            [f"{len(failed)} of {len(checks)} checks failed ({', '.join(failed)})"]
            if failed
            else []
        )
        parts += [f"{len(broken)} timings failed ({', '.join(broken)})"] if broken else []
        return False, f"FAILED: {'; '.join(parts)}{speed}"
    return True, f"OK: {len(checks)} of {len(checks)} checks passed{speed}"


def check_table(rich, checks: Sequence[Check]):
    dtypes = list(dict.fromkeys(c.dtype for c in checks))
    table = rich.table(title="Largest error against float64", caption_justify="left")
    table.caption = f"Relative to the terms added up. Shapes: {', '.join(checks[0].shapes)}"
    table.add_column("operation")
    table.add_column("direction")
    for dtype in dtypes:
        table.add_column(dtype, justify="right")
    rows: dict[tuple[str, str], dict[str, Check]] = {}
    for c in checks:
        rows.setdefault((c.op, c.direction), {})[c.dtype] = c
    previous = None
    for (op, direction), found in rows.items():
        cells = []
        for dtype in dtypes:
            c = found[dtype]
            shown = "exact" if c.error == 0 else f"{c.error:.1e}"
            cells.append(f"[green]ok[/green] {shown}" if c.ok else f"[red]FAIL[/red] {shown}")
        table.add_row("" if op == previous else op, direction, *cells)
        previous = op
    return table


def time_table(rich, timings: Sequence[Compared]):
    clocks = {"wall": "Wall-clock", "trace": "Kernel time", "": "Time"}
    first = next((t for t in timings if not t.message), timings[0])
    dtype = timings[0].dtype
    table = rich.table(title=f"Time against jitted XLA, {dtype}", caption_justify="left")
    table.caption = (
        f"{clocks[first.clock.partition(' ')[0]]}, medians of alternating calls. "
        "Gradient: forward and backward in one jit. "
        "Of copy: against a plain read and write of as many bytes."
    )
    table.add_column("operation")
    table.add_column("shape")
    table.add_column("direction")
    for name in ("jaxnorm", "XLA", "XLA / jaxnorm", "bytes/s", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for t in timings:
        row = ["" if t.op == previous else t.op, t.shape, t.direction]
        previous = t.op
        if t.message:
            table.add_row(*row, "[red]failed[/red]", "", "", "", "")
            continue
        table.add_row(
            *row,
            display.duration(t.seconds),
            display.duration(t.xla_seconds),
            display.ratio_text(t.ratio, t.spread),
            display.rate(t.bytes / t.seconds),
            f"{t.bytes / t.seconds / t.copy_bytes_per_second:.2f}",
        )
    return table


def plot(timings: Sequence[Compared], path: str) -> None:
    """Achieved bytes per second, a pair of bars for each timing, and a copy of the same size."""
    pyplot = display.require_pyplot()
    timed = [t for t in timings if not t.message]
    unit = 1e12 if max((t.bytes / t.seconds for t in timed), default=0) > 1e12 else 1e9
    figure, axes = pyplot.subplots(
        figsize=(8, 1.3 + 0.55 * max(len(timed), 1)), layout="constrained"
    )
    height = 0.36
    for row, t in enumerate(timed):
        y = len(timed) - 1 - row
        pairs = (("jaxnorm", t.seconds, height / 2), ("xla", t.xla_seconds, -height / 2))
        for name, seconds, offset in pairs:
            value = t.bytes / seconds / unit
            label = display.name_of(name) if row == 0 else None
            colour = display.colour_of(name)
            axes.barh(y + offset, value, height, color=colour, label=label, zorder=2)
        axes.annotate(
            f"{t.ratio:.2f}x XLA",
            (t.bytes / t.seconds / unit, y + height / 2),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=display.INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            zorder=4,
        )
        copy = t.copy_bytes_per_second / unit
        label = "copy of the same size" if row == 0 else None
        axes.plot(
            [copy, copy],
            [y - 0.44, y + 0.44],
            color=display.INK,
            lw=1.6,
            ls=(0, (3, 1.5)),
            label=label,
            zorder=3,
        )
    names = [f"{t.op} {t.direction}\n{t.shape}" for t in timed]
    axes.set_yticks(range(len(timed) - 1, -1, -1), names)
    display.style(axes, f"Achieved rate, {timings[0].dtype}, {timer.device_name()}")
    axes.grid(False, axis="y")
    axes.margins(x=0.14, y=0.3 / max(len(timed), 1))
    axes.set_xlim(left=0)
    axes.set_xlabel("TB/s" if unit == 1e12 else "GB/s", color=display.INK)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith("copy"))
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    display.save(figure, path)
    pyplot.close(figure)
