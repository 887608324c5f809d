"""The emulator of row programs' kernels, and machine.cuh's and functions.cuh's functions on it."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import launches
import ml_dtypes
import numpy as np
import pytest
import row_emulator
from row_emulator import EmulatorError

pytestmark = pytest.mark.skipif(not row_emulator.supported(), reason="needs Linux and g++")

MACHINE = "".join(path.read_text() for path in row_emulator.REPLACED)
PREFIX = MACHINE + (row_emulator.ROWS / "functions.cuh").read_text()
ORDERS = ("forward", "reverse", "random")
KINDS = ("char", "short", "int", "long long")


def make_call(kernels, **fields):
    return launches.call(PREFIX + kernels, **{"rows_per_tile": 1, **fields})


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# A row of 512 elements for each block of 128 threads; `sum_barrier` stands between two uses of shared memory.
SOFTMAX = """
extern "C" __global__ void __launch_bounds__(128)
jaxnorm_row_program(const char* __restrict__ i0, char* __restrict__ o0, long long rows, int chunks, int d0) {
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  float* shared = (float*)dynamic_shared();
  for (long long r = blockIdx.x; r < rows; r += chunks) {
    u32 w[4];
    float x[4];
    load<16>(w, i0 + (r * 512 + t * 4) * 4);
    UNROLL for (int v = 0; v < 4; ++v) x[v] = __uint_as_float(w[v]);
    float m = max_nan(max_nan(x[0], x[1]), max_nan(x[2], x[3]));
    UNROLL for (int d = 16; d; d >>= 1) m = max_nan(m, __shfl_xor_sync(~0u, m, d));
    if (lane == 0) shared[warp] = m;
    __syncthreads();
    m = max_nan(max_nan(shared[0], shared[1]), max_nan(shared[2], shared[3]));
    float s = 0.f;
    UNROLL for (int v = 0; v < 4; ++v) s += x[v] = fast_exp(x[v] - m);
    UNROLL for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
    SUM_BARRIER
    if (lane == 0) shared[warp] = s;
    __syncthreads();
    s = shared[0] + shared[1] + shared[2] + shared[3];
    UNROLL for (int v = 0; v < 4; ++v) w[v] = __float_as_uint(x[v] / s);
    store<16>(o0 + (r * 512 + t * 4) * 4, w);
    __syncthreads();
  }
}
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", [0, 1000])
def test_block_softmax(blocks, order):
    x = normal((20, 512))
    kernel = SOFTMAX.replace("SUM_BARRIER", "__syncthreads();")
    call = make_call(kernel, shared_bytes=16, blocks=blocks)
    (y,) = row_emulator.run(call, [x], [(x.shape, x.dtype)], order=order)
    np.testing.assert_allclose(y, softmax(x), rtol=2e-6)


def test_missing_barrier_shows():
    x = normal((6, 512))
    call = make_call(SOFTMAX.replace("SUM_BARRIER", ""), shared_bytes=16)
    (y,) = row_emulator.run(call, [x], [(x.shape, x.dtype)])
    assert (abs(y - softmax(x)).max(-1) > 1e-3).any()


# Column sums of groups of rows: each block adds up its rows, the second kernel what blocks have.
SUMS = """
extern "C" __global__ void __launch_bounds__(64)
jaxnorm_row_program(const char* __restrict__ i0, char* __restrict__ o0, float* __restrict__ s0, long long rows,
                    int chunks, int d0, int d1) {
  const int t = threadIdx.x, group = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int tiles = (d1 + 3) / 4;
  const int first = (int)((long long)tiles * chunk / chunks) * 4;
  const int last = min_of((int)((long long)tiles * (chunk + 1) / chunks) * 4, d1);
  float sum = 0.f;
  for (int r = first; r < last; ++r) {
    u32 w[1];
    load<4>(w, i0 + (((long long)group * d1 + r) * 64 + t) * 4);
    const float x = __uint_as_float(w[0]);
    sum += x;
    w[0] = __float_as_uint(x * x);
    store<4>(o0 + (((long long)group * d1 + r) * 64 + t) * 4, w);
  }
  s0[(u64)blockIdx.x * 64 + t] = sum;
}
extern "C" __global__ void __launch_bounds__(1024)
jaxnorm_row_program_finish(const float* __restrict__ s0, char* __restrict__ o1, long long rows, int chunks, int groups,
                           int d0, int d1) {
  __shared__ float sums[32][33];
  const int x = threadIdx.x, y = threadIdx.y, column = blockIdx.x * 32 + x;
  if (blockIdx.y >= groups) return;
  float sum = 0.f;
  for (int c = y; c < chunks; c += blockDim.y) sum += s0[((u64)blockIdx.y * chunks + c) * 64 + column];
  sums[y][x] = sum;
  __syncthreads();
  if (y == 0) {
    sum = 0.f;
    for (int i = 0; i < blockDim.y; ++i) sum += sums[i][x];
    const u32 word = __float_as_uint(sum);
    store<4>(o1 + (blockIdx.y * 64 + column) * 4, &word);
  }
}
"""


def sums_call(**fields):
    values = {
        "threads": 64,
        "rows_per_tile": 4,
        "blocks": 40,
        "group_dims": 1,
        "sizes": ((0, 0, 1), (0, 1, 1)),
        "arguments": (0, 1, 3),
        "scratch": ((40, 64),),
        "finish": (2, 1),
        "finish_arguments": (3, 2),
    }
    return make_call(SUMS, **{**values, **fields})


@pytest.mark.parametrize("resident_blocks", [1, 7, 33, 400])
@pytest.mark.parametrize("order", ORDERS)
def test_sums_over_rows(order, resident_blocks):
    x = normal((3, 50, 64))
    avals = [(x.shape, x.dtype), ((3, 64), x.dtype)]
    y, s = row_emulator.run(sums_call(), [x], avals, order=order, resident_blocks=resident_blocks)
    np.testing.assert_array_equal(y, x * x)
    np.testing.assert_allclose(s, x.astype(np.float64).sum(1), atol=2e-5)


@pytest.mark.parametrize("shape", [(0, 50, 64), (3, 0, 64)])
def test_no_rows(shape):
    avals = [(shape, np.float32), ((shape[0], 64), np.float32)]
    y, s = row_emulator.run(sums_call(), [np.zeros(shape, np.float32)], avals)
    assert y.shape == shape
    np.testing.assert_array_equal(s, np.zeros((shape[0], 64), np.float32))


def test_launch_rules():
    call = sums_call(chunk_multiple=4)
    chunks = lambda limit, rows=50: row_emulator.grid(call, [(3, rows, 64)], limit)[1]  # noqa: E731
    # Fewer than the multiple of 4 only where there are fewer tiles.
    assert [chunks(n) for n in (1, 9, 11, 12, 23, 39, 1000)] == [4, 4, 4, 4, 4, 8, 8]
    assert [chunks(1000, rows) for rows in (1, 8, 16, 23)] == [1, 2, 4, 4]
    rows, chunks, groups, dims = row_emulator.grid(
        make_call("", sizes=((0, 0, 1), (0, 1, 16), (-1, 5, 1)), rows_per_tile=2), [(3, 64)], 7
    )
    assert (rows, chunks, groups, dims) == (60, 30, 1, [3, 4, 5])
    with pytest.raises(EmulatorError, match="no multiple of 16"):
        row_emulator.grid(make_call("", sizes=((0, 0, 16),)), [(3, 64)], 7)


# Four blocks take a row together: each writes its sums to where all others read them.
CLUSTER = """
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(64)
jaxnorm_row_program(const char* __restrict__ i0, char* __restrict__ o0, long long rows, int chunks, int d0) {
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, rank = blockIdx.x % 4;
  u64* filled = (u64*)dynamic_shared();
  float* shared = (float*)(filled + 2);
  if (t == 0) barrier_init(filled, 1), barrier_init(filled + 1, 1), barriers_ready();
  int number = 0;
  FIRST_SYNC
  for (long long r = blockIdx.x / 4; r < rows; r += chunks, ++number) {
    u32 w[2];
    const long long offset = (r * 512 + rank * 128 + t * 2) * 4;
    load<8>(w, i0 + offset);
    float sum = __uint_as_float(w[0]) + __uint_as_float(w[1]);
    UNROLL for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    const int turn = number % 2;
    float* sums = shared + turn * 8;
    if (lane < 4) cluster_send((u32*)(sums + rank * 2 + warp), lane, __float_as_uint(sum), filled + turn);
    if (t == 0) barrier_expect(filled + turn, 32);
    barrier_wait(filled + turn, number / 2 % 2);
    sum = 0.f;
    UNROLL for (int i = 0; i < 8; ++i) sum += sums[i];
    UNROLL for (int v = 0; v < 2; ++v) w[v] = __float_as_uint(__uint_as_float(w[v]) - sum / 512.f);
    store<8>(o0 + offset, w);
  }
  cluster_sync();
}
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", [0, 1000])
def test_cluster(blocks, order):
    x = normal((20, 512))
    kernel = CLUSTER.replace("FIRST_SYNC", "cluster_sync();")
    call = make_call(kernel, threads=64, cluster=4, shared_bytes=80, blocks=blocks)
    (y,) = row_emulator.run(call, [x], [(x.shape, x.dtype)], order=order)
    np.testing.assert_allclose(y, x - x.mean(-1, keepdims=True), atol=1e-6)


def test_cluster_errors():
    x = normal((2, 512))
    run = lambda kernel, order="mixed", **fields: row_emulator.run(  # noqa: E731
        make_call(kernel, **{"threads": 64, "cluster": 4, "shared_bytes": 80, **fields}),
        [x],
        [(x.shape, x.dtype)],
        order=order,
    )
    with pytest.raises(EmulatorError, match="before the first cluster_sync"):
        run(CLUSTER.replace("FIRST_SYNC", ""))
    kernel = CLUSTER.replace("FIRST_SYNC", "cluster_sync();")
    with pytest.raises(EmulatorError, match="cluster_send to outside of shared memory"):
        run(kernel, shared_bytes=20)
    with pytest.raises(EmulatorError, match="cluster_send to rank 2 of 2"):
        run(kernel, cluster=2)
    # Without the last cluster_sync a block may end while another one writes to it.
    body = """
extern "C" __global__ void jaxnorm_row_program(const char* i0, char* o0, long long rows, int chunks, int d0) {
  u64* barrier = (u64*)dynamic_shared();
  if (threadIdx.x == 0) barrier_init(barrier, 1), barriers_ready();
  cluster_sync();
  FIRST
  if (threadIdx.x == 0) cluster_send((u32*)(barrier + 1), 1 - blockIdx.x % 2, 0u, barrier), barrier_expect(barrier, 4);
  WAIT
  END
}
"""
    end = {"FIRST": "", "WAIT": "barrier_wait(barrier, 0);", "END": "cluster_sync();"}

    def change(**changes):
        text = body
        for name, line in {**end, **changes}.items():
            text = text.replace(name, line)
        return text

    run(change(), cluster=2)
    with pytest.raises(EmulatorError, match="to a block that has ended"):
        run(change(FIRST="if (blockIdx.x % 2) return;"), cluster=2, order="reverse")
    with pytest.raises(EmulatorError, match="while its bulk copies are under way"):
        run(change(WAIT=""), cluster=2, order="forward")


# Rows come through a ring of three places in shared memory, each with a barrier.
RING = """
extern "C" __global__ void __launch_bounds__(96)
jaxnorm_row_program(const char* __restrict__ i0, char* __restrict__ o0, long long rows, int chunks, int d0) {
  const int t = threadIdx.x;
  char* ring = dynamic_shared() + 32;
  u64* barriers = (u64*)dynamic_shared();
  if (t == 0) {
    for (int s = 0; s < 3; ++s) barrier_init(barriers + s, 1);
    READY
  }
  __syncthreads();
  auto issue = [&](long long r, int s) {
    barrier_expect(barriers + s, EXPECTED);
    bulk_load(ring + s * 384, i0 + r * 384, 192, barriers + s);
    bulk_load(ring + s * 384 + 192, i0 + r * 384 + 192, 192, barriers + s);
  };
  if (t == 0) {
    for (int s = 0; s < 3; ++s) {
      if (blockIdx.x + s * (long long)chunks < rows) issue(blockIdx.x + s * (long long)chunks, s);
    }
  }
  int s = 0;
  u32 parity = 0;
  for (long long r = blockIdx.x; r < rows; r += chunks) {
    WAIT
    u32 w[1];
    load_shared<4>(w, ring + s * 384 + (95 - t) * 4);
    store<4>(o0 + (r * 96 + t) * 4, w);
    CONSUMED
    if (t == 0 && r + 3 * (long long)chunks < LAST) issue(r + 3 * (long long)chunks, s);
    if (++s == 3) s = 0, parity ^= 1;
  }
}
"""


def run_ring(x, order="mixed", **parts):
    values = {
        "READY": "barriers_ready();",
        "EXPECTED": "384",
        "WAIT": "barrier_wait(barriers + s, parity);",
        "CONSUMED": "__syncthreads();",
        "LAST": "rows",
    }
    kernel = RING
    for name, text in {**values, **parts}.items():
        kernel = kernel.replace(name, text)
    call = make_call(kernel, threads=96, shared_bytes=32 + 3 * 384, blocks=1000)
    return row_emulator.run(call, [x], [(x.shape, x.dtype)], order=order)[0]


@pytest.mark.parametrize("rows", [1, 20, 100])
@pytest.mark.parametrize("order", ORDERS)
def test_ring_of_bulk_copies(order, rows):
    x = normal((rows, 96))
    np.testing.assert_array_equal(run_ring(x, order), x[:, ::-1])


def test_ring_errors():
    x = normal((100, 96))
    with pytest.raises(EmulatorError, match="used before barriers_ready"):
        run_ring(x, READY="")
    with pytest.raises(
        EmulatorError, match=r"for ever: block 0, threads 0 to 95 wait at barrier_wait in line \d+"
    ):
        run_ring(x, EXPECTED="400")
    with pytest.raises(EmulatorError, match="barrier_expect twice in one phase"):
        run_ring(x, WAIT="")
    assert any((run_ring(x, order, CONSUMED="") != x[:, ::-1]).any() for order in ORDERS)
    with pytest.raises(EmulatorError, match=r"bulk_load of \d+ bytes outside of buffer 0"):
        run_ring(x, LAST="rows + 7")


# A row of COLUMNS elements begins anywhere in a vector; vectors that lie wholly in the row are taken at once.
EDGES = """
extern "C" __global__ void __launch_bounds__(32)
jaxnorm_row_program(const char* __restrict__ i0, char* __restrict__ o0, char* __restrict__ o1, long long rows,
                    int chunks, int d0) {
  const long long begin = (long long)blockIdx.x * COLUMNS;
  const char* row = i0 + begin * SIZE;
  const int shift = (int)(begin % COUNT);
  for (int slot = threadIdx.x; slot * COUNT - shift < COLUMNS; slot += 32) {
    const int column = slot * COUNT - shift;
    const bool whole = column >= 0 && column + COUNT <= COLUMNS;
    const long long offset = (begin + column) * SIZE;
    u32 w[4];
    if (whole) load<16>(w, i0 + offset);
    else load_elements<SIZE, COUNT>(w, row, column, 1, COLUMNS);
    if (whole) store<16>(o0 + offset, w);
    else store_edge<SIZE, COUNT>(o0 + offset, w, column, COLUMNS);
    load_elements<SIZE, COUNT>(w, row, COLUMNS - 1 - column, -1, COLUMNS);
    store_edge<SIZE, COUNT>(o1 + offset, w, column, COLUMNS);
  }
}
"""


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_odd_rows(dtype):
    size = np.dtype(dtype).itemsize
    for columns in (1, 37):
        x = np.random.default_rng(1).integers(-100, 100, (11, columns)).astype(dtype)
        kernel = EDGES.replace("COLUMNS", f"{columns}").replace("COUNT", f"{16 // size}")
        call = make_call(kernel.replace("SIZE", f"{size}"), threads=32, arguments=(0, 1, 2))
        y, z = row_emulator.run(call, [x], [(x.shape, x.dtype)] * 2)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(z, x[:, ::-1])


def each(body, operands, *dtypes):
    """`body` computes r0, r1, ... of x0, x1, ..., whose C++ types are those of the arrays' bits."""
    operands = [np.asarray(x) for x in operands]
    results = [np.dtype(d) for d in dtypes]
    floats = {"f4": "float", "f8": "double"}
    integers = dict(zip((1, 2, 4, 8), KINDS, strict=True))

    def kind(dtype):
        text = dtype.str[1:]
        return (
            floats.get(text)
            or ("signed " if text[0] == "i" else "unsigned ") + integers[dtype.itemsize]
        )

    pointers = [f"const {kind(x.dtype)}* i{n}" for n, x in enumerate(operands)]
    pointers += [f"{kind(d)}* o{n}" for n, d in enumerate(results)]
    loads = [f"const {kind(x.dtype)} x{n} = i{n}[i];" for n, x in enumerate(operands)]
    stores = [f"{kind(d)} r{n};" for n, d in enumerate(results)]
    last = [f"o{n}[i] = r{n};" for n in range(len(results))]
    kernel = f"""
extern "C" __global__ void jaxnorm_row_program({", ".join(pointers)}, long long rows, int chunks, int d0) {{
  for (int i = blockIdx.x * 32 + threadIdx.x; i < rows; i += chunks * 32) {{
    {" ".join(loads + stores)}
    {body}
    {" ".join(last)}
  }}
}}
"""
    arguments = tuple(range(len(operands) + len(results)))
    call = make_call(kernel, threads=32, blocks=4, arguments=arguments)
    return row_emulator.run(call, operands, [(operands[0].shape, d) for d in results])


def floats_around(codes, dtype):
    """All values of an 8-bit or 16-bit float dtype, what lies half-way between neighbours, and a bit beside those."""
    values = np.sort(codes.view(dtype).astype(np.float32))
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        last = values[-1] + (values[-1] - values[-2]) * np.float32([0.5, 1, 2])
        middle = values[:-1] / 2 + values[1:] / 2
    points = np.concatenate([values, middle, last, -last, [0, np.inf, -np.inf, 1e30, 1e-45, 3e38]])
    points = points.astype(np.float32)
    near = [np.nextafter(points, np.float32(d)) for d in (np.inf, -np.inf)]
    return np.concatenate([points, *near, -points, np.float32([np.nan, -np.nan])])


@pytest.mark.parametrize(
    ("dtype", "pack", "unpack"),
    [
        (ml_dtypes.bfloat16, "pack_bfloat16({}, {})", ("low_bfloat16({})", "high_bfloat16({})")),
        (np.float16, "pack_float16({}, {})", ("low_float16({})", "high_float16({})")),
        (ml_dtypes.float8_e4m3fn, "to_float8_e4m3fn({0})", ("from_float8_e4m3fn({})",)),
        (ml_dtypes.float8_e5m2, "to_float8_e5m2({0})", ("from_float8_e5m2({})",)),
        (ml_dtypes.float8_e4m3fn, "pack_float8_e4m3fn({0}, 0.f)", ("from_float8_e4m3fn({})",)),
        (ml_dtypes.float8_e5m2, "pack_float8_e5m2({0}, 0.f)", ("from_float8_e5m2({})",)),
        (ml_dtypes.float8_e4m3fn, "pack_float8_e4m3fn(0.f, {0}) >> 8", ("from_float8_e4m3fn({})",)),
        (ml_dtypes.float8_e5m2, "pack_float8_e5m2(0.f, {0}) >> 8", ("from_float8_e5m2({})",)),
    ],
)
def test_conversions(dtype, pack, unpack):
    bits = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
    codes = np.arange(np.iinfo(bits).max + 1, dtype=bits)
    body = f"r0 = {unpack[0].format('x0')};"
    if len(unpack) == 2:
        body += f"r1 = {unpack[1].format('(u32)x0 << 16')};"
    for found in each(body, [codes], *[np.float32] * len(unpack)):
        np.testing.assert_array_equal(found, codes.view(dtype).astype(np.float32))
        np.testing.assert_array_equal(np.signbit(found)[found == 0], codes[found == 0] != 0)

    x = floats_around(codes, dtype)
    (words,) = each(f"r0 = {pack.format('x0', 'x1')};", [x, x[::-1].copy()], np.uint32)
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    for found, want in ((words, expected), (words >> 16, expected[::-1]))[: len(unpack)]:
        found = (found & np.iinfo(bits).max).astype(bits).view(dtype)
        nan = np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
        np.testing.assert_array_equal(found.view(bits)[~nan], want.view(bits)[~nan])


def test_maxima_with_nan():
    special = np.float32([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan])
    a, b = (x.ravel() for x in np.meshgrid(special, special))
    body = """
      r0 = max_nan(x0, x1); r1 = min_nan(x0, x1);
      r2 = max_nan((double)x0, (double)x1); r3 = min_nan((double)x0, (double)x1);
      r4 = low_bfloat16(max_nan_bfloat16(pack_bfloat16(x0, 0.f), pack_bfloat16(x1, 9.f)));
      r5 = high_bfloat16(max_nan_bfloat16(pack_bfloat16(9.f, x0), pack_bfloat16(0.f, x1)));
      r6 = low_float16(max_nan_float16(pack_float16(x0, 0.f), pack_float16(x1, 9.f)));
      r7 = high_float16(max_nan_float16(pack_float16(9.f, x0), pack_float16(0.f, x1)));
    """
    found = each(body, [a, b], *[np.float32] * 8)
    most, least = np.maximum(a, b), np.minimum(a, b)
    for x, want in zip(found, [most, least] * 2 + [most] * 4, strict=True):
        np.testing.assert_array_equal(x, want)
    zeros = (a == 0) & (b == 0)
    for x in (found[0], *found[4:]):
        np.testing.assert_array_equal(np.signbit(x)[zeros], (np.signbit(a) & np.signbit(b))[zeros])


def test_functions_of_floats():
    x = np.concatenate(
        [np.linspace(-20, 20, 999), np.geomspace(1e-30, 1, 99), [0, np.inf, -np.inf]]
    )
    x = np.concatenate([x, -x, [np.nan]]).astype(np.float32)
    body = """
      r0 = fast_exp(x0); r1 = fast_logistic(x0); r2 = fast_tanh(x0); r3 = sign_of(x0);
      r4 = erfinvf(x0 / 20.f); r5 = erff(x0); r6 = rsqrtf(x0); r7 = __fdividef(1.f, x0);
    """
    found = each(body, [x], *[np.float32] * 8)
    f64 = x.astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = [np.exp(f64), 1 / (1 + np.exp(-f64)), np.tanh(f64), np.sign(f64)]
        wanted += [jax.lax.erf_inv(f64 / 20), jax.lax.erf(f64), 1 / np.sqrt(f64), 1 / f64]
        for y, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(y, np.asarray(want, np.float32), rtol=3e-6, atol=1e-37)


def test_random_bits():
    key = jax.random.key(2**40 + 7)
    low, high = (int(k) for k in jax.random.key_data(key))
    for bits, dtype in ((32, np.uint32), (64, np.uint64)):
        body = f"r0 = random_bits{bits}({low}u, {high}u, x0);"
        (found,) = each(body, [np.arange(300, dtype=np.uint64)], dtype)
        np.testing.assert_array_equal(found, jax.random.bits(key, (300,), dtype))
    # One position beyond 2^32, by the function that jax.random.bits is made of.
    position = 5 * 2**32 + 3
    (found,) = each(f"r0 = random_bits32({low}u, {high}u, x0);", [np.uint64([position])], np.uint32)
    counts = (jnp.uint32([position >> 32]), jnp.uint32([position % 2**32]))
    x, y = jax.extend.random.threefry2x32_p.bind(jnp.uint32(low), jnp.uint32(high), *counts)
    np.testing.assert_array_equal(found, x ^ y)


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
def test_integer_functions(dtype):
    info = np.iinfo(dtype)
    values = np.random.default_rng(0).integers(info.min, info.max, 20, dtype, endpoint=True)
    edges = np.array([0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 127], dtype)
    values = np.concatenate([values, edges, 0 - edges, np.array([info.min, info.max], dtype)])
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    body = """
      r0 = divide(x0, x1); r1 = remainder_of(x0, x1); r2 = shift_left(x0, x1); r3 = shift_right(x0, x1);
      r4 = integer_power(x0, 5); r5 = max_of(x0, x1); r6 = min_of(x0, x1); r7 = sign_of(x0);
    """
    lax = jax.lax
    right = lax.shift_right_arithmetic if info.min else lax.shift_right_logical
    wanted = [lax.div, lax.rem, lax.shift_left, right, lambda x, y: lax.integer_pow(x, 5)]
    wanted += [lax.max, lax.min, lambda x, y: lax.sign(x)]
    for x, function in zip(each(body, [a, b], *[dtype] * 8), wanted, strict=True):
        np.testing.assert_array_equal(x, function(a, b))


@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_floats_as_integers(wide):
    x = [
        0,
        0.5,
        0.99,
        1.5,
        127,
        127.5,
        128,
        200,
        255.9,
        256,
        3e4,
        32768,
        65535.5,
        65536,
        2**31,
        2**32 - 1,
    ]
    x = np.array([*x, 2**31 - 1, 2**32, 2**63, 2**64, 1e30, np.inf, np.nan], wide)
    x = np.concatenate([x, -x, np.nextafter(x, wide(0)), -np.nextafter(x, wide(0))])
    names = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    kinds = [f"{sign} {kind}" for sign in ("signed", "unsigned") for kind in KINDS]
    c = {np.float32: "float", np.float64: "double"}[wide]
    body = ""
    for n, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        info = np.iinfo(name)
        suffix = "u" if info.min == 0 else ""
        low, high = (
            f"({kind})({info.min + 1}ll - 1)" if info.min else f"({kind})0",
            f"({kind}){info.max}{suffix}ll",
        )
        body += f"r{n} = to_integer<{kind}, {c}>(x0, ({c}){low}, ({c}){high}, {low}, {high});\n"
    for y, name in zip(each(body, [x], *names), names, strict=True):
        with np.errstate(invalid="ignore"):
            expected = jax.lax.convert_element_type(jnp.asarray(x), name)
        np.testing.assert_array_equal(y, expected, err_msg=name)


def body_call(body, threads=64, **fields):
    head = """
extern "C" __global__ void jaxnorm_row_program(const char* i0, char* o0, long long rows, int chunks, int d0) {
  const int t = threadIdx.x, lane = t & 31;
  u32 w[4] = {};
"""
    return make_call(head + body + "\n}\n", **{"threads": threads, **fields})


def run_body(body, *, rows=1, order="mixed", seconds=60.0, **fields):
    x = np.zeros((1, 64), np.float32)
    avals = [((rows, 64), x.dtype)]
    return row_emulator.run(body_call(body, **fields), [x], avals, order=order, seconds=seconds)[0]


def test_unwritten_elements_show():
    y = run_body("if (t != 5) store<4>(o0 + t * 4, w);")
    np.testing.assert_array_equal(np.flatnonzero(y.view(np.int32)), [5])
    y = run_body("w[0] = ((u32*)dynamic_shared())[t]; store<4>(o0 + t * 4, w);", shared_bytes=256)
    assert np.isnan(y).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("store<4>(o0 + t * 4 + 4, w);", r"4 bytes were written behind buffer 1 .* the first at \+0 from its end"),
        ("store<4>(o0 + t * 4 - 8, w);", "8 bytes were written in front of buffer 1 .* the first at -8 from its start"),
        ("store<4>((char*)i0 + t * 4, w); store<4>(o0, w); w[0] = 1; store<4>((char*)i0, w);", "operand 0 was written"),
        ("load<4>(w, i0 + t * 4 + 4);", "__ldg of 4 bytes outside of buffer 0: offset 256 of 256"),
        ("load<4>(w, (const char*)0x1000);", "__ldg of 4 bytes from an address outside of all buffers"),
        ("*(volatile int*)0x1000 = 0;", "access to an invalid address 0x1000"),
        ("load<16>(w, i0 + 8);", "__ldg of 16 bytes from a misaligned address"),
        ("store<16>(o0 + 8, w);", r"misaligned address \.\.\.08 in line"),
        ("w[0] = 5; w[t] = 1; store<4>(o0, w);", "index 4 outside of an array"),
        ("w[0] = t << (t + 16); store<4>(o0, w);", "shift by 32 bits"),
        ("w[0] = 5 / (t % 7); store<4>(o0, w);", "integer division by zero"),
        ("char* s = dynamic_shared(); s[t] = 1;", "block 0 wrote behind its shared memory, byte 0"),
        ("if (t < 40) __syncthreads();", r"for ever: block 0, threads 0 to 39 wait at __syncthreads in line \d+; "
         "block 0, threads 40 to 63 have ended"),
        ("if (lane < 9) return; w[0] = __shfl_xor_sync(~0u, t, 1);", "threads 9 to 31 wait at __shfl_xor_sync"),
        ("if (t < 9) __syncthreads();\n else __syncthreads();", "threads of a block wait at different barriers"),
        ("if (lane < 9) __syncwarp();\n else __ballot_sync(~0u, 1);", "lanes of a warp do different things"),
        ("if (lane < 8) __shfl_xor_sync(0xffu, t, 8);", "lane . reads lane .*, which does not take part"),
        ("if (lane < 8) __shfl_xor_sync(0xffu << 8, t, 1);", "the lane is not in its mask"),
        ("for (volatile int i = 0; i < 1; i = 0) {}", "ran longer than 0.2 s"),
        ("u64* b = (u64*)dynamic_shared(); barrier_wait(b, 0);", "outside of the block's shared memory"),
        ("undeclared();", "(?s)g\\+\\+ does not compile the kernels.*undeclared"),
    ],
)  # fmt: skip
def test_errors(body, message):
    with pytest.raises(EmulatorError, match=message):
        run_body(body, seconds=0.2)


def test_errors_of_calls():
    with pytest.raises(
        EmulatorError, match="the kernel's parameters are pplii, the call passes ppli"
    ):
        row_emulator.run(
            make_call(SOFTMAX.replace("SUM_BARRIER", ""), sizes=()),
            [np.zeros((1, 512))],
            [((1,), "f4")],
        )
    with pytest.raises(EmulatorError, match="too many"):
        run_body("", shared_bytes=228 * 1024)
    with pytest.raises(ValueError, match=r"does not hold the text of machine\.cuh and exchange"):
        row_emulator.run(launches.call(""), [], [])


def test_bulk_copies_end_before_the_block():
    body = """
      u64* barrier = (u64*)dynamic_shared();
      if (t == 0) {
        barrier_init(barrier, 1);
        barriers_ready();
        barrier_expect(barrier, 64);
        bulk_load(dynamic_shared() + 128, i0, 64, barrier);
        CHANGE
      }
      __syncthreads();
      WAIT
      w[0] = ((u32*)(dynamic_shared() + 128))[t % 16];
      store<4>(o0 + t * 4, w);
    """
    run = lambda change="", wait="barrier_wait(barrier, 0);", order="forward": run_body(  # noqa: E731
        body.replace("CHANGE", change).replace("WAIT", wait), shared_bytes=256, order=order
    )
    for order in ORDERS:
        np.testing.assert_array_equal(run(order=order), np.zeros((1, 64)))
    for change, wait, message in (
        ("", "", "a block ends while its bulk copies are under way"),
        ("*barrier = 0;", "barrier_wait(barrier, 0);", "something wrote over a barrier"),
        ("bulk_load(dynamic_shared() + 128, i0, 16, barrier);", "", "two bulk copies to one place"),
        ("bulk_load(dynamic_shared() + 200, i0, 16, barrier);", "", "not multiples of 16"),
        ("bulk_load(dynamic_shared() + 240, i0, 32, barrier);", "", "to outside of shared memory"),
        ("barrier_expect(barrier, 64);", "", "barrier_expect twice in one phase"),
    ):
        with pytest.raises(EmulatorError, match=message):
            run(change, wait)


def test_shuffles():
    lane = np.arange(64) % 32
    t = np.arange(64)
    shuffles = {
        "__shfl_sync(~0u, t, 3)": t - lane + 3,
        "__shfl_sync(~0u, t, lane + 1, 8)": t - lane % 8 + (lane + 1) % 8,
        "__shfl_xor_sync(~0u, (double)t, 5)": t ^ 5,
        "__shfl_down_sync(~0u, (float)t, 4)": np.where(lane + 4 < 32, t + 4, t),
        "__shfl_down_sync(~0u, (u64)t, 4, 16)": np.where(lane % 16 + 4 < 16, t + 4, t),
        "__shfl_up_sync(~0u, (u32)t, 4)": np.where(lane >= 4, t - 4, t),
        "__popc(__ballot_sync(~0u, lane % 3 == 0))": 11 + 0 * t,
        "__any_sync(~0u, t == 40) * 2 + __all_sync(~0u, t < 32)": np.where(t < 32, 1, 2),
        "lane < 16 ? __shfl_xor_sync(0xffffu, t, 1) : __shfl_xor_sync(0xffff0000u, t, 2)": t
        ^ np.where(lane < 16, 1, 2),
    }
    body = "".join(
        f"w[0] = (u32)({expression}); store<4>(o0 + ({n} * 64 + t) * 4, w);\n"
        for n, expression in enumerate(shuffles)
    )
    for order in ORDERS:
        found = run_body(body, rows=len(shuffles), order=order).view(np.int32)
        for y, (expression, want) in zip(found, shuffles.items(), strict=True):
            np.testing.assert_array_equal(y, want, err_msg=expression)


def test_static_shared_memory_of_a_cluster():
    body = """
      __shared__ u32 mine[64];
      if (t < 32) mine[t] = blockIdx.x * 100 + t;
      cluster_sync();
      w[0] = mine[31 - lane];
      if (t < 32) store<4>(o0 + (blockIdx.x * 32 + t) * 4, w);
    """
    for order in ORDERS:
        y = run_body(body, cluster=2, order=order).view(np.int32)
        np.testing.assert_array_equal(y[0], np.r_[31:-1:-1, 131:99:-1])


def test_machine_is_complete():
    """Each function and type of machine.cuh and exchange.cuh has its counterpart."""
    names = re.findall(r"^DEVICE [\w:&* ]+?(\w+)\(", MACHINE, re.MULTILINE)
    assert len(names) > 15
    header = row_emulator.HEADER.read_text()
    inside = {"shared_address"}
    missing = [n for n in names if not re.search(rf"^[\w:&* ]+\b{n}\(", header, re.MULTILINE)]
    assert set(missing) <= inside
