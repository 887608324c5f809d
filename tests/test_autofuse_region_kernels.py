"""autofuse: the kernels of row programs that it finds, run on the CPU, against the plain function."""

import jax
import pytest
import row_emulator
from autofuse_checks import assert_close
from autofuse_row_programs import defaults, grown  # noqa: F401
from test_autofuse_region_values import model, shaken

from jaxnorm._autofuse import region

pytestmark = pytest.mark.skipif(
    not row_emulator.supported(), reason="kernels run on the CPU with g++ on Linux alone"
)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The programs whose kernels ran. Row programs run as the emulator runs their kernels; nothing is jitted."""
    programs = row_emulator.launch_row_programs(monkeypatch, fallback=True)
    monkeypatch.setattr(region, "LEAST_GAIN", 0)
    with jax.disable_jit():
        yield programs


@pytest.mark.parametrize("name", ["llama", "dit", "vit", "mamba", "rl"])
def test_model(name, launched):
    loss, parameters, *batch = model(name)
    args = shaken(parameters), *batch
    expected = jax.value_and_grad(loss)(*args)
    # What joins gradients is found inside of grad in DiT alone.
    fused = jax.value_and_grad(grown(loss)) if name == "dit" else grown(jax.value_and_grad(loss))
    assert_close(fused(*args), expected, 5e-5)
    assert launched
