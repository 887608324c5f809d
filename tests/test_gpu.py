"""On an NVIDIA GPU: which kernels there are, CUDA graphs, streams, the same bits each time, two GPUs.

Files without "gpu" in their name run on the default device, so on a GPU machine they test the CUDA kernels too. Of what
they lack there, files with "gpu" have each dispatch boundary, and sizes of which a CPU would take too long.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import processes
import pytest
import test_batch_norm
import test_norm
from gpu_cases import rand
from meshes import GPUS

import jaxnorm
from bench import cases

pytestmark = pytest.mark.gpu


def test_kernels_are_registered():
    cuda = next(m for m in jaxnorm.status().modules if m.platform == "cuda")
    assert cuda.available, cuda.reason


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "relu", "add_relu", *cases.NORMS])
def test_same_bits_every_time(op):
    x = rand((513, 4095), "bfloat16")
    function = getattr(jaxnorm, op)

    @jax.jit
    def f(x):
        second = {"add_relu": x}.get(op, x[0] if op in cases.NORMS else None)
        args = (x,) if second is None else (x, second)
        y, pullback = jax.vjp(function, *args)
        return y, *pullback(x)

    first = f(x)
    for _ in range(3):
        for a, b in zip(f(x), first, strict=True):
            assert bool(jnp.all(a == b))


def test_concurrent_streams():
    """Many programs in flight from several threads: no kernel has state of its own."""
    xs = [rand((64, 1000 + 7 * i), "float32", i) for i in range(8)]
    f = jax.jit(lambda x: jaxnorm.softmax(jaxnorm.relu(x)))
    expected = [np.asarray(f(x)) for x in xs]
    wrong = []

    def work(i):
        for _ in range(50):
            if not np.array_equal(np.asarray(f(xs[i])), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_calls_are_captured_in_a_cuda_graph(tmp_path):
    """The compiled program holds a command buffer with the calls in it; its results are right."""
    flags = (
        f"--xla_dump_to={tmp_path} --xla_gpu_enable_command_buffer=+CUSTOM_CALL "
        "--xla_gpu_graph_min_graph_size=1"
    )
    result = processes.run("graph", tmp_path, env={"JAX_PLATFORMS": "cuda", "XLA_FLAGS": flags})
    assert result["error"] < 1e-5
    assert result["few_rows_alike"]
    assert result["gradients_alike"]
    assert result["thunks"], "no thunk dump: look for the name of the file in this XLA version"
    assert set(result["captured"]) == {
        "jaxnorm_softmax_fwd",
        "jaxnorm_softmax_bwd",
        "jaxnorm_relu_fwd",
        "jaxnorm_relu_bwd",
        "jaxnorm_norm_fwd",
        "jaxnorm_norm_bwd",
        "jaxnorm_batch_norm_fwd",  # the merged calls are named after their second primitive
        "jaxnorm_batch_norm_dx",
        "jaxnorm_cross_entropy_fwd",
        "jaxnorm_cross_entropy_bwd",
    }


# Programs for both are tested by test_sharding.py and test_cross_entropy.py.
@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_kernels_on_the_second_gpu():
    """Launch settings are per device, not per process."""
    for columns in (100, 5000, 40000, 200000):
        for gpu in GPUS[:2]:
            x = jax.device_put(rand((4, columns), "float32"), gpu)
            oracle.assert_close(jaxnorm.softmax(x), oracle.softmax(x), "float32", jax.nn.softmax(x))
            for op in cases.NORMS:
                test_norm.check(op, x, "float32")
            test_batch_norm.check(x.reshape(2, 2, columns), axis=1, parameters="float32", relu=True)
