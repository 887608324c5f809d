"""autofuse: the kernels of row programs that it finds, run on the CPU, against the plain function."""

import jax
import jax.numpy as jnp
import pytest
import row_emulator
from autofuse_checks import assert_close
from autofuse_row_programs import defaults, grown  # noqa: F401
from test_autofuse_region_values import model, shaken

from jaxnorm._autofuse import region
from jaxnorm._rows import primitive
from jaxnorm._rows.call import row_call
from jaxnorm._rows.plan import DEVICES

pytestmark = pytest.mark.skipif(
    not row_emulator.supported(), reason="kernels run on the CPU with g++ on Linux alone"
)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The programs whose kernels ran. Row programs run as the emulator runs their kernels; nothing is jitted."""
    programs = []

    def run(*operands, jaxpr):
        closed = primitive.typed(jaxpr, [jax.typeof(x) for x in operands])
        avals = [(a.shape, a.dtype) for a in closed.out_avals]
        call = row_call(closed, DEVICES[90])
        programs.append(closed)
        return [jnp.asarray(x) for x in row_emulator.run(call, operands, avals)]

    monkeypatch.setattr(primitive.row_program_p, "impl", run)
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
