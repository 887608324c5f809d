"""Options that `python -m bench` and `python -m bench fuse` have in common."""

import argparse
from collections.abc import Sequence


def add_timing(
    parser: argparse.ArgumentParser, *, calls: int, rounds: int, budget: float, plot: str
) -> None:
    """Adds how to time, and what becomes of the results.

    Args:
      parser: gets the options.
      calls: the default of --calls.
      rounds: the default of --rounds.
      budget: the default of --budget, in seconds.
      plot: what --plot does.
    """
    parser.add_argument(
        "--calls", type=int, default=calls, help=f"calls timed on a GPU (default: {calls})"
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="turns they are spread over on a GPU"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=budget,
        help=f"seconds per timing on a CPU (default: {budget})",
    )
    parser.add_argument(
        "--clock", choices=("auto", "trace", "wall"), default="auto", help="how to time"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results, after every case")
    parser.add_argument("--plot", metavar="FILE", help=plot)
    parser.add_argument("--list", action="store_true", help="print the cases and stop")


def peers_of(parser: argparse.ArgumentParser, text: str, known: Sequence[str]) -> list[str]:
    """The names in the text of --peers; "none" is none of them."""
    return [p for p in some_of(parser, "peers", text, (*known, "none")) if p != "none"]


def some_of(
    parser: argparse.ArgumentParser, name: str, text: str, known: Sequence[str]
) -> list[str]:
    """The names in the text of an option, which commas part. An unknown one ends the program with a message."""
    given = [x for x in text.split(",") if x]
    for value in given:
        if value not in known:
            parser.error(f"--{name} must name some of {', '.join(known)}, got {value}")
    return given
