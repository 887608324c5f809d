"""The launcher on a GPU, with kernels that say what they were launched with."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from launches import SCALE, call, like, numbers, ranks, reverse, run, scale, sums
from meshes import GPUS

import jaxnorm
from jaxnorm import _launch
from jaxnorm._rows import launcher

pytestmark = pytest.mark.gpu


def test_status():
    status = jaxnorm.status()
    assert status.modules[1].available, status.modules[1].reason
    assert re.search(r"cuda  kernels compiled .*, NVRTC 1\d\.\d+; \d x ", repr(status))


def test_gpus():
    found = launcher.gpus()
    assert launcher.no_gpu() == ""
    for gpu, device in zip(found, GPUS, strict=True):
        assert gpu.name == device.device_kind
        assert gpu.architecture == int(device.compute_capability.replace(".", ""))
        assert gpu.multiprocessors == device.core_count
        assert gpu.shared_bytes >= 99 * 1024


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 1000, 100_001])
def test_rows(rows):
    x = numbers(rows, 64)
    np.testing.assert_array_equal(jax.jit(scale)(x), x * 2)
    np.testing.assert_array_equal(scale(x), x * 2)


def test_in_place():
    x = numbers(1000, 64)
    aliased = jax.ffi.ffi_call("jaxnorm_launch", like(x), input_output_aliases={0: 0})
    f = jax.jit(lambda x: aliased(x, **call().attributes), donate_argnums=0)
    np.testing.assert_array_equal(f(x + 0), x * 2)


def test_shared_memory():
    """160 KB; another call of the same kernel may ask for less in between."""
    most = min(160 * 1024, launcher.gpus()[0].shared_bytes)
    x = numbers(70, most // 4)
    np.testing.assert_array_equal(reverse(x, most), x[:, ::-1])
    small = numbers(70, 14_000)
    np.testing.assert_array_equal(reverse(small, 96 * 1024), small[:, ::-1])
    np.testing.assert_array_equal(reverse(small, 56_000), small[:, ::-1])
    np.testing.assert_array_equal(reverse(small + 1, 96 * 1024), (small + 1)[:, ::-1])


clusters = pytest.mark.skipif(
    any(gpu.architecture < 90 for gpu in launcher.gpus()), reason="clusters are for sm_90 and later"
)


@clusters
@pytest.mark.parametrize("cluster", [2, 4, 8, 16])
def test_clusters(cluster):
    if cluster > 8 and launcher.gpus()[0].architecture == 120:
        pytest.skip("sm_120 has clusters of 8 blocks")
    expected = np.tile(cluster * 1000 + np.arange(cluster), (6, 1))
    np.testing.assert_array_equal(ranks(6, cluster), expected)


CHUNKS = """
extern "C" __global__ void jaxnorm_row_program(int* y, long long rows, int chunks, int d0) {
  if (threadIdx.x == 0 && blockIdx.x == 0) { y[0] = chunks; y[1] = gridDim.x; }
}
"""


def chunks(**changes):
    made = call(
        CHUNKS, blocks=100_000, rows_per_tile=1, sizes=((-1, 1_000_000, 1),), arguments=(0,),
        **changes,
    )  # fmt: skip
    return np.asarray(jax.jit(lambda: run(made, jax.ShapeDtypeStruct((2,), jnp.int32)))())


def test_persistent_blocks_fill_the_device():
    gpu = launcher.gpus()[0]
    for threads in (64, 256, 1024):
        count, blocks = chunks(threads=threads)
        assert count == blocks
        assert count % gpu.multiprocessors == 0
        assert gpu.multiprocessors <= count <= gpu.multiprocessors * (2048 // threads)
    count, _ = chunks(shared_bytes=gpu.shared_bytes)
    assert count == gpu.multiprocessors


@clusters
def test_persistent_clusters_fill_the_device():
    gpu = launcher.gpus()[0]
    count, blocks = chunks(shared_bytes=gpu.shared_bytes, cluster=4)
    assert blocks == 4 * count
    # Not all multiprocessors make whole clusters.
    assert gpu.multiprocessors // 2 < blocks <= gpu.multiprocessors


@pytest.mark.parametrize("group_dims", [0, 1])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 7), (32, 100), (1000, 5), (2, 20_000), (0, 5), (5, 0), (0, 0)]
)
def test_sums_over_rows(group_dims, shape):
    x = numbers(*shape, 64)
    expected = x.sum(1) if group_dims else x.sum((0, 1))[None]
    np.testing.assert_array_equal(sums(x, group_dims), expected)
    # A plan with a multiple has that many blocks for each group.
    blocks = max(50, 7 * shape[0]) if group_dims else 50
    np.testing.assert_array_equal(sums(x, group_dims, blocks=blocks, multiple=7), expected)


@pytest.mark.parametrize("rows", [2**16 + 1, 2**17 + 3])
def test_more_elements_than_32_bits(rows):
    source = """
extern "C" __global__ void jaxnorm_row_program(const char* x, char* y, long long rows, int chunks, int d0) {
  for (long long row = blockIdx.x; row < rows; row += chunks)
    for (int c = threadIdx.x; c < 32768; c += blockDim.x) y[row * 32768 + c] = x[row * 32768 + c] + 1;
}
"""
    made = call(source, rows_per_tile=1, blocks=2000)
    x = jnp.zeros((rows, 32768), jnp.int8).at[-1, -1].set(5)
    y = jax.jit(lambda x: run(made, like(x), x))(x)
    assert bool(jnp.all(y[:-1] == 1))
    assert bool(jnp.all(y[-1] == x[-1] + 1))


def test_two_programs_share_a_kernel():
    """One source, several executables and sizes."""
    for rows in (5, 50):
        for _ in range(2):
            x = numbers(rows, 64, seed=rows)
            np.testing.assert_array_equal(jax.jit(lambda x: scale(scale(x)) + 1)(x), x * 4 + 1)


def test_threads_compile_and_run():
    wrong = []

    def work(i):
        source = SCALE.replace("* 2;", f"* {2 + i % 4};") + "\n" * (i % 2)
        f = jax.jit(lambda x: run(call(source), like(x), x))
        x = numbers(100 + i, 64, seed=i)
        for _ in range(20):
            if not np.array_equal(f(x), x * (2 + i % 4)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_captured_in_a_cuda_graph(tmp_path):
    """Scale, 160 KB of shared memory, clusters and sums; results are right in each run."""
    flags = (
        f"--xla_dump_to={tmp_path} --xla_gpu_enable_command_buffer=+CUSTOM_CALL "
        "--xla_gpu_graph_min_graph_size=1"
    )
    environment = {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": flags}
    result = processes.run("row_program_graph", tmp_path, env=environment)
    assert result["right"] == [True] * 20
    assert result["captured"] == 6


ERRORS = {
    "syntax": (call(SCALE.replace("* 2", "* undeclared")), 'identifier "undeclared" is undefined'),
    "name": (
        call(SCALE.replace("jaxnorm_row_program", "other")),
        "the kernel jaxnorm_row_program: named symbol",
    ),
    "finish": (
        call(finish=(1, 1)),
        "the kernel jaxnorm_row_program_finish: named symbol not found",
    ),
    "shared": (call(shared_bytes=1 << 20), "does not fit .*: 1048576 bytes of shared memory"),
    "threads": (call(threads=2000), "threads must be from 1 to 1024, got 2000"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_when_compiled(kind):
    made, message = ERRORS[kind]
    x = numbers(10, 64)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(lambda x: run(made, like(x), x)).lower(x).compile()
    np.testing.assert_array_equal(jax.jit(scale)(x), x * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(arguments=(0, 5)), "buffer 5 is asked for, the call has 2"),
        (dict(sizes=((0, 2, 1),)), "dimension 2 of buffer 0 is asked for, it has 2"),
        (dict(sizes=((0, 0, 3),)), "a dimension of 10 is no multiple of 3"),
    ],
)
@pytest.mark.parametrize("calls", [1, 6])
def test_errors_when_run(changes, message, calls):
    """Six calls are captured in a graph."""
    x = numbers(10, 64)

    def f(x):
        for _ in range(calls):
            x = run(call(**changes), like(x), x)
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(f)(x))
    np.testing.assert_array_equal(jax.jit(scale)(x), x * 2)


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_two_gpus():
    for gpu in reversed(GPUS[:2]):
        x = jax.device_put(numbers(1000, 64), gpu)
        f = jax.jit(scale)
        assert f(x).devices() == {gpu}
        np.testing.assert_array_equal(f(x), x * 2)
        big = jax.device_put(numbers(70, 20_000), gpu)
        np.testing.assert_array_equal(reverse(big, 80_000), big[:, ::-1])
        y = jax.device_put(numbers(3, 1000, 64), gpu)
        np.testing.assert_array_equal(sums(y, 1), y.sum(1))


FIXED = """
struct Place { float* to; int count; float value; };
extern "C" __global__ void fill(const Place place, unsigned long long* tag, unsigned long long own) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < place.count) place.to[i] = place.value;
  if (i == 0) *tag = own;
}
extern "C" __global__ void add(const float* x, float* y, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] += x[i];
}
"""


@pytest.mark.parametrize("cooperative", [False, True])
def test_fixed_launches(cooperative):
    """A structure with an address inside a buffer, a tag, and a launch that begins early."""
    fill = _launch.Launch(
        "fill",
        (3, 1, 1),
        (128, 1, 1),
        (
            _launch.packed(_launch.Pointer(1, 64 * 4), ("i", 320), ("f", 2.5)),
            (_launch.pointer(2),),
            (_launch.TAG,),
        ),
        shared_bytes=50_000,
        cooperative=cooperative,
    )
    add = _launch.Launch(
        "add",
        (6, 1, 1),
        (64, 1, 1),
        ((_launch.pointer(0, 64 * 4),), (_launch.pointer(1, 64 * 4),), (_launch.number(320),)),
        early=True,
    )
    x = numbers(384)
    attributes = _launch.attributes("pair", FIXED, [fill, add], (4 * 384, 4 * 384, 16))
    results = (like(x), jax.ShapeDtypeStruct((4,), jnp.uint32))
    f = jax.jit(lambda x: jax.ffi.ffi_call(_launch.TARGET, results)(x, **attributes))
    tags = set()
    for _ in range(3):
        y, tag = f(x)
        np.testing.assert_array_equal(y[64:], x[64:] + 2.5)
        low, high = np.asarray(tag)[:2].tolist()
        assert low % 2**16 == 0
        tags.add((low, high))
    assert len(tags) == 3
    wrong = _launch.attributes("pair", FIXED, [fill, add], (4 * 384, 4 * 385, 16))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="buffer 1 has 1536 bytes, its plan is for"
    ):
        jax.block_until_ready(jax.ffi.ffi_call(_launch.TARGET, results)(x, **wrong))


def test_more_blocks_than_run_at_once():
    gpu = launcher.gpus()[0]
    blocks = gpu.multiprocessors + 1
    alone = _launch.Launch(
        "jaxnorm_row_program", (blocks, 1, 1), (64, 1, 1), (), gpu.shared_bytes, cooperative=True
    )
    source = 'extern "C" __global__ void jaxnorm_row_program() {}'
    attributes = _launch.attributes("many", source, [alone])
    x = numbers(4)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{blocks} blocks must run at once"):
        jax.ffi.ffi_call(_launch.TARGET, like(x))(x, **attributes)
