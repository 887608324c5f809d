"""What `python -m jaxnorm` and `bench/` print and draw, with rich and matplotlib if installed."""

import importlib
import os
import sys
import types

EXTRA = "jaxnorm[bench]"

# One colour per implementation, told apart in greyscale and with any colour vision (Okabe and Ito's
# palette).
COLOURS = {
    "jaxnorm": "#0072B2",
    "kernel": "#0072B2",
    "xla": "#E69F00",
    "torch": "#D55E00",
    "torch.compile": "#CC79A7",
    "liger": "#009E73",
    "quack": "#56B4E9",
}
NAMES = {"jaxnorm": "jaxnorm", "kernel": "jaxnorm kernels", "xla": "XLA", "torch": "PyTorch"}
INK = "#333333"


class MissingExtra(SystemExit):
    """A library of the extra is not installed; the message says how to get it."""

    def __init__(self, library: str):
        super().__init__(f"{library} is not installed. Install it with: pip install '{EXTRA}'")


def _import(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise MissingExtra(name.partition(".")[0]) from None


# ---- terminal ----


class Rich:
    """The parts of rich that are used, imported when asked for."""

    def __init__(self):
        _import("rich")

    def console(self, stderr: bool = False):
        from rich.console import Console

        console = Console(stderr=stderr, highlight=False)
        if not console.is_terminal:  # a file or a pipe has no width, and 80 would cut the tables
            console = Console(
                stderr=stderr, highlight=False, width=int(os.environ.get("COLUMNS", 150))
            )
        return console

    def table(self, title: str = "", **options):
        from rich import box
        from rich.table import Table

        style = {"title_style": "bold", "title_justify": "left", "caption_style": "dim"}
        return Table(title=title, box=box.SIMPLE_HEAD, **style, **options)

    def progress(self):
        """A progress bar on stderr; disabled where stderr is no terminal."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            BarColumn(30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        console = self.console(stderr=True)
        return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def group(self, *renderables):
        from rich.console import Group

        return Group(*renderables)


def require_rich() -> Rich:
    """Rich, or a message that names the extra."""
    return Rich()


def duration(seconds: float) -> str:
    """Three digits and a unit.

    >>> duration(7.4e-6), duration(1.161e-4), duration(0.0123)
    ('7.40 µs', '116 µs', '12.3 ms')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def rate(bytes_per_second: float) -> str:
    """Three digits and a unit.

    >>> rate(4.19e12), rate(2.61e10)
    ('4.19 TB/s', '26.1 GB/s')
    """
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= size * 0.9995:
            return f"{_three_digits(bytes_per_second / size)} {unit}"
    return f"{bytes_per_second:.0f} B/s"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def ratio_text(ratio: float, spread: float) -> str:
    """A ratio with its spread, coloured when it differs from 1 by more than that."""
    text = f"{ratio:.2f}x ±{spread:.0%}" if spread < 1 else f"{ratio:.2f}x ±>99%"
    if ratio > 1 + spread:
        return f"[green]{text}[/green]"
    return f"[red]{text}[/red]" if ratio < 1 - spread else text


def ratio_cell(record: dict | None) -> str:
    """The cell of a peer in a table of ratios."""
    if record is None:
        return ""
    if record["error"]:
        return (
            "[dim]-[/dim]"
            if record["error"].startswith(("skipped", "not installed"))
            else "[yellow]error[/yellow]"
        )
    if "ratio" not in record:
        return duration(record["seconds"])
    return ratio_text(record["ratio"], record["ratio_spread"])


# ---- plots ----


def require_pyplot():
    """matplotlib.pyplot, drawing to files, or a message that names the extra."""
    _import("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def name_of(implementation: str) -> str:
    return NAMES.get(implementation, implementation)


def colour_of(implementation: str) -> str:
    return COLOURS.get(implementation, "#777777")


def style(axes, title: str) -> None:
    """The look that all plots share: a left title, no box, a faint grid behind the data."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9, which="both")
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure, path: str) -> None:
    """Writes the figure in the format that the file's name asks for."""
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
    except ValueError as error:  # an unknown suffix
        print(f"cannot write {path}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
