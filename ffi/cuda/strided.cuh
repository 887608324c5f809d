// Reductions along an axis that is not the last: columns of a matrix [axis, inner], one matrix per outer index. A block
// takes a tile of neighbouring columns, so that memory is read along `inner`, 64 contiguous bytes or more at a time,
// without a transpose. A thread owns kVec neighbouring columns at every lanes_y-th axis position; what it reads it copies
// to shared memory first (asynchronously, so the whole tile is in flight), and reads from there for each pass. No other
// thread reads it, so the copy needs no barrier. While some blocks of a multiprocessor copy, others compute: a long axis
// is divided over a cluster of blocks (sm_90 and later), which keeps tiles small enough for many of them to be there at
// once. Tiles too large for shared memory are re-read through L2 instead.
//
// Besides what rows.cuh asks of an Op, this needs
//   static constexpr int kColumnInputs       arrays that every call reads; const DeviceOperand<T>& Input(int k); T* Output()
//   struct Column; Column BeginColumn(row)   the other operands, for one column (kGeneral)
//   struct ColumnFinal                       what the results of a column need
//   ReduceColumns<kVec>(v, column, for_each, all_reduce, ColumnFinal (&)[kVec])
//       for_each(f) calls f(a, Vec (&raw)[kColumnInputs]) for the axis positions a of this thread; all_reduce(value,
//       merge) merges what the threads of a column hold, for at most two values
//   ColumnResult<kVec>(v, raw, column, a, final, Acc (&result)[kVec])
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
  int cluster = 1;     // blocks that share a tile
  int lanes_x = 1;     // threads side by side along inner; a power of two <= 32
  int positions = 1;   // of the axis per thread, at most
  bool staged = true;  // tile in shared memory
};

// Where in shared memory values are exchanged: after the tile of `vectors` V, one place for each of a thread's columns in
// each warp and in each block of the cluster.
template <typename V>
__host__ __device__ __forceinline__ int64_t ExchangeOffset(int64_t vectors) {
  return (vectors * int64_t{sizeof(V)} + kVecBytes - 1) / kVecBytes * kVecBytes;
}
template <typename T, int kVec>
__host__ __device__ __forceinline__ int ExchangeBytes(int lanes_x, int warps, int cluster) {
  return (warps + cluster) * lanes_x * kVec * static_cast<int>(sizeof(AccT<T>));
}

template <typename Op, int kVec>
__global__ void __launch_bounds__(kMaxThreads, 1) StridedKernel(const __grid_constant__ Op op, const StridedPlan plan) {
  using T = typename Op::T;
  using V = Vec<T, kVec>;
  constexpr int kArrays = Op::kColumnInputs;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ uint64_t barriers[2];
  int rank = 0;
  int64_t block = blockIdx.x;
  if (plan.cluster > 1) {
    ClusterStart(&barriers[0], &barriers[1]);
    rank = static_cast<int>(block % plan.cluster);
    block /= plan.cluster;
  }
  const int tx = threadIdx.x & (plan.lanes_x - 1), ty = threadIdx.x / plan.lanes_x;
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int step = blockDim.x / plan.lanes_x * plan.cluster;  // from one position of a thread to its next
  const int first = rank * (blockDim.x / plan.lanes_x) + ty;  // of them
  const int64_t outer = block / plan.tiles;
  const int64_t i = (block % plan.tiles * plan.lanes_x + tx) * kVec;
  const bool active = i < plan.inner;
  const int axis = active ? plan.axis : 0;
  const int64_t first_column = outer * plan.inner + (active ? i : 0);
  const int part = plan.positions * blockDim.x;  // vectors of one array in shared memory

  const T* source[kArrays];  // at this thread's first position
  int64_t pitch[kArrays];
#pragma unroll
  for (int k = 0; k < kArrays; ++k) {
    pitch[k] = op.Input(k).axis_stride;
    source[k] = op.Input(k).data + op.Input(k).RowOffset(first_column) + first * pitch[k];
    pitch[k] *= step;
  }
  V* const staged = reinterpret_cast<V*>(shared_bytes) + threadIdx.x;
  if (plan.staged) {
    const T* p[kArrays];
#pragma unroll
    for (int k = 0; k < kArrays; ++k) p[k] = source[k];
    V* to = staged;
    for (int a = first; a < axis; a += step, to += blockDim.x) {
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        CopyAsync(to + k * part, reinterpret_cast<const V*>(p[k]));
        p[k] += pitch[k];
      }
    }
    CopyCommit();
  }
  const typename Op::Column column = op.BeginColumn(first_column);

  const auto for_each = [&](auto&& body) {
    if (plan.staged) {
      const V* p = staged;
#pragma unroll 4
      for (int a = first; a < axis; a += step, p += blockDim.x) {
        V raw[kArrays];
#pragma unroll
        for (int k = 0; k < kArrays; ++k) raw[k] = p[k * part];
        body(a, raw);
      }
    } else {
      const T* p[kArrays];
#pragma unroll
      for (int k = 0; k < kArrays; ++k) p[k] = source[k];
#pragma unroll 2
      for (int a = first; a < axis; a += step) {
        V raw[kArrays];
#pragma unroll
        for (int k = 0; k < kArrays; ++k) {
          raw[k] = *reinterpret_cast<const V*>(p[k]);
          p[k] += pitch[k];
        }
        body(a, raw);
      }
    }
  };

  // Lanes of a warp that hold the same columns, then warps, then the blocks of a cluster. Each call has a buffer of its
  // own, so that one barrier per level is enough.
  int turn = 0;
  const auto all_reduce = [&]<typename Value, typename Merge>(Value value, Merge merge) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset >= plan.lanes_x) value = merge(value, ShuffleXor(value, offset));
    }
    auto* const exchange = reinterpret_cast<char*>(shared_bytes) + ExchangeOffset<V>(plan.staged ? kArrays * part : 0) +
                           turn++ * ExchangeBytes<T, kVec>(plan.lanes_x, warps, plan.cluster);
    auto* const buffer = reinterpret_cast<Value*>(exchange);
    if (warps > 1) {
      if (threadIdx.x % kWarp < plan.lanes_x) buffer[warp * plan.lanes_x + tx] = value;
      __syncthreads();
      value = buffer[tx];
      for (int w = 1; w < warps; ++w) value = merge(value, buffer[w * plan.lanes_x + tx]);
    }
    if (plan.cluster > 1) {
      Value* const peers = buffer + warps * plan.lanes_x;
      if (ty < plan.cluster) SendToPeer(&peers[rank * plan.lanes_x + tx], &barriers[turn - 1], ty, value);
      ReceiveFromPeers(&barriers[turn - 1], plan.cluster * plan.lanes_x * static_cast<int>(sizeof(Value)), 0);
      value = peers[tx];
      for (int r = 1; r < plan.cluster; ++r) value = merge(value, peers[r * plan.lanes_x + tx]);
    }
    return value;
  };

  CopyWait<0>();
  if (plan.cluster > 1) ClusterWait();
  op.WithVariant([&](auto variant) {
    typename Op::ColumnFinal final[kVec];
    op.template ReduceColumns<kVec>(variant, column, for_each, all_reduce, final);
    T* out = op.Output() + (outer * plan.axis + first) * plan.inner + i;
    for_each([&](int a, const V(&raw)[kArrays]) {
      AccT<T> result[kVec];
      op.template ColumnResult<kVec>(variant, raw, column, a, final, result);
      *reinterpret_cast<V*>(out) = RoundVec<T>(result);
      out += step * plan.inner;
    });
  });
}

template <typename Op, int kVec>
ffi::Error LaunchStrided(const DeviceInfo& device, cudaStream_t stream, const Op& op, const AxisShape& shape,
                         const char* name) {
  using T = typename Op::T;
  using V = Vec<T, kVec>;
  constexpr int kWideTileBytes = 40 << 10;  // of tiles more than 64 bytes wide
  constexpr int kTileBytes = 72 << 10;      // three blocks per multiprocessor overlap copying with computing
  StridedPlan plan = {.inner = shape.inner, .axis = static_cast<int>(shape.axis)};
  // Of a tile of `lanes` vectors by 1 / cluster of the axis.
  const auto tile_bytes = [&](int lanes, int cluster) {
    return Op::kColumnInputs * CeilDiv(shape.axis, cluster) * lanes * int64_t{sizeof(V)};
  };
  // Narrower than 64 bytes wastes bandwidth, narrower than 32 parts of sectors.
  plan.lanes_x = std::min<int>(256 / sizeof(V), kWarp);
  while (plan.lanes_x * sizeof(V) > 64 && tile_bytes(plan.lanes_x, 1) > kWideTileBytes) plan.lanes_x /= 2;
  if (device.clusters) {
    while (plan.cluster < kMaxPortableCluster && tile_bytes(plan.lanes_x, plan.cluster) > kTileBytes) plan.cluster *= 2;
  }
  Grid grid;
  int64_t shared_bytes;
  for (;; plan.lanes_x /= 2) {
    constexpr int64_t kPositions = 16;
    const int64_t lanes_y = std::bit_ceil(static_cast<uint64_t>(CeilDiv(shape.axis, plan.cluster * kPositions)));
    grid.threads = static_cast<int>(std::clamp<int64_t>(lanes_y * plan.lanes_x, 64, kMaxThreads));
    const int64_t positions = CeilDiv(shape.axis, grid.threads / plan.lanes_x * plan.cluster);
    plan.positions = static_cast<int>(positions);
    const int64_t exchange = 2 * ExchangeBytes<T, kVec>(plan.lanes_x, grid.threads / kWarp, plan.cluster);
    shared_bytes = ExchangeOffset<V>(Op::kColumnInputs * positions * grid.threads) + exchange;
    plan.staged = shared_bytes <= device.max_shared_bytes - kStaticSharedBytes;
    if (!plan.staged) shared_bytes = exchange;
    if (plan.staged || plan.lanes_x * sizeof(V) <= 32) break;
  }
  grid.shared_bytes = static_cast<int>(shared_bytes);
  const int64_t tiles = CeilDiv(shape.inner, int64_t{plan.lanes_x} * kVec);
  JAXNORM_CHECK(tiles <= INT32_MAX);
  plan.tiles = static_cast<int>(tiles);
  grid.cluster = plan.cluster;
  grid.blocks = shape.outer * tiles * plan.cluster;
  return Launch<StridedKernel<Op, kVec>>(device, stream, grid, name, op, plan);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_STRIDED_CUH_
