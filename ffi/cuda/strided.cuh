// Reductions along an axis that is not the last: columns of a matrix [axis, inner], one matrix per outer index. A block
// takes a tile of neighbouring columns over the whole axis, so that memory is read along `inner`, 64 contiguous bytes
// or more at a time, without a transpose. A thread owns kVec neighbouring columns at every ty-th axis position; what it
// reads it copies to shared memory first (asynchronously, so the whole tile is in flight), and reads from there for
// each pass. No other thread reads it, so the copy needs no barrier. Tiles too large for shared memory are re-read
// through L2 instead.
//
// Besides what rows.cuh asks of an Op, this needs
//   static constexpr int kColumnInputs       arrays that every call reads; const DeviceOperand<T>& Input(int k); T* Output()
//   struct Column; Column BeginColumn(row)   the other operands, for one column (kGeneral)
//   ReduceColumns<kVec>(Partial (&)[kVec], column, for_each)
//       for_each(f) calls f(a, Vec (&raw)[kColumnInputs]) for the axis positions a of this thread
//   ColumnResult<kVec>(raw, column, a, total, final, Acc (&result)[kVec])
#ifndef JAXNORM_CUDA_STRIDED_CUH_
#define JAXNORM_CUDA_STRIDED_CUH_

#include <algorithm>
#include <bit>

#include "launch.cuh"
#include "operand.cuh"
#include "reduce.cuh"
#include "rows.cuh"

namespace jaxnorm {

struct StridedPlan {
  int64_t inner = 1;
  int axis = 1;
  int tiles = 1;       // per outer index
  int lanes_x = 1;     // threads side by side along inner; a power of two <= 32
  bool staged = true;  // tile in shared memory
};

template <typename Op, int kVec>
__global__ void __launch_bounds__(kMaxThreads, 1) StridedKernel(const __grid_constant__ Op op, const StridedPlan plan) {
  using T = typename Op::T;
  using V = Vec<T, kVec>;
  using Partial = typename Op::Partial;
  extern __shared__ uint4 shared_bytes[];
  const int tx = threadIdx.x & (plan.lanes_x - 1), ty = threadIdx.x / plan.lanes_x;
  const int lanes_y = blockDim.x / plan.lanes_x;
  const int columns = plan.lanes_x * kVec;  // of the tile
  const int64_t outer = blockIdx.x / plan.tiles;
  const int64_t i = int64_t{blockIdx.x % plan.tiles} * columns + tx * kVec;
  const bool active = i < plan.inner;
  const int axis = active ? plan.axis : 0;
  const int64_t first_row = outer * plan.inner + (active ? i : 0);

  const T* source[Op::kColumnInputs];  // at this thread's first position
  int64_t pitch[Op::kColumnInputs];
#pragma unroll
  for (int k = 0; k < Op::kColumnInputs; ++k) {
    pitch[k] = op.Input(k).axis_stride;
    source[k] = op.Input(k).data + op.Input(k).RowOffset(first_row) + ty * pitch[k];
  }
  V* const tile = reinterpret_cast<V*>(shared_bytes) + ty * plan.lanes_x + tx;
  if (plan.staged) {
    const T* p[Op::kColumnInputs];
#pragma unroll
    for (int k = 0; k < Op::kColumnInputs; ++k) p[k] = source[k];
    V* to = tile;
    for (int a = ty; a < axis; a += lanes_y) {
#pragma unroll
      for (int k = 0; k < Op::kColumnInputs; ++k) {
        CopyAsync(to + k * plan.axis * plan.lanes_x, reinterpret_cast<const V*>(p[k]));
        p[k] += lanes_y * pitch[k];
      }
      to += lanes_y * plan.lanes_x;
    }
    CopyCommit();
    CopyWait<0>();
  }
  const typename Op::Column column = op.BeginColumn(first_row);

  const auto for_each = [&](auto&& body) {
    if (plan.staged) {
      const V* p = tile;
#pragma unroll 4
      for (int a = ty; a < axis; a += lanes_y) {
        V raw[Op::kColumnInputs];
#pragma unroll
        for (int k = 0; k < Op::kColumnInputs; ++k) raw[k] = p[k * plan.axis * plan.lanes_x];
        p += lanes_y * plan.lanes_x;
        body(a, raw);
      }
    } else {
      const T* p[Op::kColumnInputs];
#pragma unroll
      for (int k = 0; k < Op::kColumnInputs; ++k) p[k] = source[k];
#pragma unroll 2
      for (int a = ty; a < axis; a += lanes_y) {
        V raw[Op::kColumnInputs];
#pragma unroll
        for (int k = 0; k < Op::kColumnInputs; ++k) {
          raw[k] = *reinterpret_cast<const V*>(p[k]);
          p[k] += lanes_y * pitch[k];
        }
        body(a, raw);
      }
    }
  };

  Partial own[kVec];
  op.template ReduceColumns<kVec>(own, column, for_each);
  // Lanes of a warp that hold the same columns, then warps.
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset >= plan.lanes_x) own[v] = Partial::Merge(own[v], ShuffleXor(own[v], offset));
    }
  }
  const int tile_vectors = plan.staged ? Op::kColumnInputs * plan.axis * plan.lanes_x : 0;
  const int tile_bytes = (tile_vectors * static_cast<int>(sizeof(V)) + kVecBytes - 1) / kVecBytes * kVecBytes;
  Partial* const partials = reinterpret_cast<Partial*>(reinterpret_cast<char*>(shared_bytes) + tile_bytes);
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp < plan.lanes_x) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) partials[warp * columns + tx * kVec + v] = own[v];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    Partial total = partials[c];
    for (int w = 1; w < warps; ++w) total = Partial::Merge(total, partials[w * columns + c]);
    partials[c] = total;
  }
  __syncthreads();
  Partial total[kVec];
  typename Op::Final final[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    total[v] = partials[tx * kVec + v];
    final[v] = op.Finish(total[v]);
  }
  T* out = op.Output() + (outer * plan.axis + ty) * plan.inner + i;
  for_each([&](int a, const V(&raw)[Op::kColumnInputs]) {
    AccT<T> result[kVec];
    op.template ColumnResult<kVec>(raw, column, a, total, final, result);
    *reinterpret_cast<V*>(out) = RoundVec<T>(result);
    out += lanes_y * plan.inner;
  });
}

template <typename Op, int kVec>
ffi::Error LaunchStrided(const DeviceInfo& device, cudaStream_t stream, const Op& op, const AxisShape& shape,
                         const char* name) {
  constexpr int kVecSizeBytes = kVec * sizeof(typename Op::T);
  constexpr int kComfortableTile = 40 << 10;  // several blocks per multiprocessor overlap copying with computing
  StridedPlan plan = {.inner = shape.inner, .axis = static_cast<int>(shape.axis)};
  const auto tile_bytes = [&](int lanes) { return Op::kColumnInputs * shape.axis * lanes * kVecSizeBytes; };
  const auto fits = [&](int lanes) {
    const int64_t partials = int64_t{kMaxThreads / kWarp} * lanes * kVec * sizeof(typename Op::Partial);
    return tile_bytes(lanes) + partials + kVecBytes <= device.max_shared_bytes - kStaticSharedBytes;
  };
  // Narrower than 64 bytes wastes bandwidth, narrower than 32 parts of sectors.
  plan.lanes_x = std::min(256 / kVecSizeBytes, kWarp);
  while (plan.lanes_x * kVecSizeBytes > 64 && tile_bytes(plan.lanes_x) > kComfortableTile) plan.lanes_x /= 2;
  while (plan.lanes_x * kVecSizeBytes > 32 && !fits(plan.lanes_x)) plan.lanes_x /= 2;
  plan.staged = fits(plan.lanes_x);
  const int64_t columns = int64_t{plan.lanes_x} * kVec;
  const int64_t tiles = CeilDiv(shape.inner, columns);
  JAXNORM_CHECK(tiles <= INT32_MAX);
  plan.tiles = static_cast<int>(tiles);
  constexpr int64_t kPositionsPerThread = 16 / Op::kColumnInputs;
  const int64_t lanes_y = std::bit_ceil(static_cast<uint64_t>(CeilDiv(shape.axis, kPositionsPerThread)));
  Grid grid;
  grid.blocks = shape.outer * tiles;
  grid.threads = static_cast<int>(std::clamp<int64_t>(lanes_y * plan.lanes_x, 64, kMaxThreads));
  const int64_t partials = grid.threads / kWarp * columns * sizeof(typename Op::Partial);
  grid.shared_bytes = static_cast<int>((plan.staged ? tile_bytes(plan.lanes_x) + kVecBytes : 0) + partials);
  return Launch<StridedKernel<Op, kVec>>(device, stream, grid, name, op, plan);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_STRIDED_CUH_
