"""Calls of the target jaxnorm_launch with kernels that are written here."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm._rows.call import Call

# Of rows of 64 columns, a block takes 4.
SCALE = """
extern "C" __global__ void jaxnorm_row_program(const float* x, float* y, long long rows, int chunks, int d0) {
  for (long long row = blockIdx.x * 4ll; row < blockIdx.x * 4ll + 4 && row < rows; ++row)
    for (int c = threadIdx.x; c < 64; c += blockDim.x) y[row * 64 + c] = x[row * 64 + c] * 2;
}
"""


def call(source: str = SCALE, **changes) -> Call:
    """A Call for one operand and one result with one dimension of rows; `changes` make it another one."""
    usual = dict(
        threads=128,
        shared_bytes=0,
        cluster=1,
        rows_per_tile=4,
        blocks=0,
        chunk_multiple=1,
        group_dims=0,
        sizes=((0, 0, 1),),
        arguments=(0, 1),
        scratch=(),
        finish=(),
        finish_arguments=(),
    )
    return Call(source=source, **{**usual, **changes})


def run(made: Call, results, *operands, **changes):
    """Results of the call; `changes` are to its attributes, of which None removes one."""
    attributes = {k: v for k, v in {**made.attributes, **changes}.items() if v is not None}
    return jax.ffi.ffi_call("jaxnorm_launch", results)(*operands, **attributes)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def numbers(*shape, seed=0):
    """Small integers, so that sums in any order are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-9, 10, shape), jnp.float32)


def scale(x, **changes):
    return run(call(), like(x), x, **changes)


REVERSE = """
extern "C" __global__ void jaxnorm_row_program(const float* x, float* y, long long rows, int chunks, int d0, int d1) {
  extern __shared__ float row[];
  const int columns = COLUMNS;
  for (int c = threadIdx.x; c < columns; c += blockDim.x) row[c] = x[(long long)blockIdx.x * columns + c];
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += blockDim.x) y[(long long)blockIdx.x * columns + c] = row[columns - 1 - c];
}
"""


def reverse(x, shared_bytes):
    """Rows backwards, by way of shared memory."""
    source = REVERSE.replace("COLUMNS", str(x.shape[1]))
    made = call(source, rows_per_tile=1, shared_bytes=shared_bytes, sizes=((0, 0, 1), (-1, 1, 1)))
    return jax.jit(lambda x: run(made, like(x), x))(x)


RANKS = """
extern "C" __global__ void jaxnorm_row_program(int* y, long long rows, int chunks, int d0) {
  unsigned rank, size, id;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  if (threadIdx.x == 0) y[id * size + rank] = size * 1000 + rank;
}
"""


def ranks(number, cluster):
    """For each of some clusters, 1000 times its size plus the rank of each of its blocks."""
    made = call(RANKS, cluster=cluster, rows_per_tile=1, sizes=((-1, number, 1),), arguments=(0,))
    return jax.jit(lambda: run(made, jax.ShapeDtypeStruct((number, cluster), jnp.int32)))()


SUMS = """
extern "C" __global__ void jaxnorm_row_program(const float* x, float* sums, long long rows, int chunks, int d0,
                                               int d1) {
  const long long group_rows = rows / (gridDim.x / chunks);
  const float* its_rows = x + blockIdx.x / chunks * group_rows * 64;
  float sum = 0;
  for (long long row = blockIdx.x % chunks * 4; row < group_rows; row += chunks * 4)
    for (int r = 0; r < 4 && row + r < group_rows; ++r) sum += its_rows[(row + r) * 64 + threadIdx.x];
  sums[blockIdx.x * 64 + threadIdx.x] = sum;
}
extern "C" __global__ void jaxnorm_row_program_finish(const float* sums, float* y, long long rows, int chunks,
                                                      int groups, int d0, int d1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the launch is an early one
#endif
  __shared__ float part[32][33];
  if (groups == 0) return;
  const int column = blockIdx.x * 32 + threadIdx.x, group = blockIdx.y;
  float sum = 0;
  for (int chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y)
    sum += sums[(group * chunks + chunk) * 64 + column];
  part[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int i = 1; threadIdx.y == 0 && i < blockDim.y; ++i) sum += part[i][threadIdx.x];
  if (threadIdx.y == 0) y[group * 64 + column] = sum;
}
"""


def sums(x, group_dims, blocks=264, multiple=1):
    """Sums over rows of x[groups, rows, 64], of each group or of all."""
    groups = x.shape[0] if group_dims else 1
    made = call(
        SUMS, threads=64, blocks=blocks, chunk_multiple=multiple, group_dims=group_dims,
        sizes=((0, 0, 1), (0, 1, 1)), arguments=(0, 2), finish=(2, 1), finish_arguments=(2, 1),
    )  # fmt: skip
    scratch = jax.ShapeDtypeStruct((max(blocks, groups), 64), jnp.float32)
    results = (jax.ShapeDtypeStruct((groups, 64), jnp.float32), scratch)
    return jax.jit(lambda x: run(made, results, x)[0])(x)
