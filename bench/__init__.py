"""Measures jaxnorm against XLA and other libraries: `python -m bench`."""

import pathlib
import sys

# Last on the path: ./jaxnorm, which has no compiled modules, must not hide the installed package.
_ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != _ROOT] + [str(_ROOT)]
