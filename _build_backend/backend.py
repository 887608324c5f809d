"""scikit-build-core, which says how far the compiler has come.

On the terminal, for pip keeps to itself what a build prints; `make` asks for a file instead with JAXNORM_PROGRESS=PATH.
"""

import contextlib
import os
import re
import select
import sys
import threading
import time

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

_EVERY = 10.0  # seconds
_STEPS = re.compile(rb"^\[(\d+)/(\d+)\]", re.MULTILINE)  # how Ninja's lines begin


@contextlib.contextmanager
def _progress():
    try:
        shown = os.open(os.environ.get("JAXNORM_PROGRESS", "/dev/tty"), os.O_WRONLY | os.O_APPEND)
    except OSError:  # there is no terminal
        yield
        return
    printed, end = os.pipe()
    stdout = os.dup(1)
    sys.stdout.flush()
    os.dup2(end, 1)
    os.close(end)
    watch = threading.Thread(target=_watch, args=(printed, stdout, shown))
    watch.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        watch.join()
        for descriptor in (shown, printed, stdout):
            os.close(descriptor)


def _watch(printed, stdout, shown):
    """Passes on what is printed, and says now and then how many of Ninja's steps that makes."""
    # On a terminal, pip's spinner has left a character in the line.
    line = "\r{}\x1b[K\n" if os.isatty(shown) else "{}\n"
    start = time.monotonic()
    due, steps = start + _EVERY, None
    while True:
        wait = max(0.0, due - time.monotonic())
        if select.select([printed], [], [], wait)[0]:
            text = os.read(printed, 2**16)
            if not text:
                return
            os.write(stdout, text)
            steps = (_STEPS.findall(text) or [steps])[-1]
        if time.monotonic() >= due:
            due += _EVERY
            if steps:
                done, of = map(int, steps)
                seconds = time.monotonic() - start
                text = f"jaxnorm: {done} of {of} build steps done, {seconds:.0f} s"
                with contextlib.suppress(OSError):  # the terminal may be closed by now
                    os.write(shown, line.format(text).encode())


def build_wheel(*args, **kwargs):
    with _progress():
        return _build.build_wheel(*args, **kwargs)


def build_editable(*args, **kwargs):
    with _progress():
        return _build.build_editable(*args, **kwargs)
