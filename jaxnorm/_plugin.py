"""Entry point of group `jax_plugins`: lets a deserialised export find its targets without `import jaxnorm`."""

from jaxnorm import _lib


def initialize() -> None:
    """Called by JAX before its first backend starts; importing `_lib` has registered the targets already."""
    assert _lib.TARGET_PREFIX
