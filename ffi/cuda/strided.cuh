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
//   Partial                                  see reduce.cuh; Partial::AddSums(a, b) merges two that differ in sums only
//   ReduceColumns<kVec>(v, column, for_parts, for_all, block_reduce, PerColumn<Partial, kVec>&)
//       of this thread's positions; what else than sums is in partials is the same in all of the block.
//       for_parts(f) calls f(a, Vec (&raw)[kColumnInputs]) for the axis positions a of this thread, as they arrive, and
//       is called first; for_all(f) does it again. block_reduce(value, merge) merges what the threads of the block hold
//       of a column, at most once
//   struct ColumnFinal; ColumnFinal FinishColumn(v, Partial, Ahead)   what the results of a column need; empty where
//                                            there are none
//   ColumnResult<kVec>(v, raw, column, a, final, Acc (&result)[kVec])
//   StoreRow(v, row, Partial, Ahead)         called by one thread for each column where there are no results
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
  FastDiv tiles;            // per outer index
  int cluster = 1;          // blocks that share a tile
  int log2_lanes_x = 0;     // threads side by side along inner, at most 32
  int positions = 1;        // of the axis per thread, at most
  int first_positions = 0;  // of them, those of the first part
  bool staged = true;       // tile in shared memory
};

// A value for each of a thread's columns; of any size, unlike a Vec.
template <typename P, int N>
struct alignas(sizeof(P) * N & -(sizeof(P) * N)) PerColumn {
  P v[N];
};

// Where in shared memory values are exchanged: after the tile of `vectors` V.
template <typename V>
__host__ __device__ __forceinline__ int64_t ExchangeOffset(int64_t vectors) {
  return (vectors * int64_t{sizeof(V)} + kVecBytes - 1) / kVecBytes * kVecBytes;
}
template <typename Op, int kVec>
int ExchangeBytes(int lanes_x, int warps, int cluster) {
  constexpr int kAcc = sizeof(AccT<typename Op::T>), kPartial = sizeof(typename Op::Partial);
  return lanes_x * kVec *
         (warps * (kAcc + kPartial) + cluster * kPartial + static_cast<int>(sizeof(typename Op::ColumnFinal)));
}

inline constexpr int kStridedThreads = 256;  // with more, registers would not do for three blocks

template <typename Op, int kVec>
__global__ void __launch_bounds__(kStridedThreads, sizeof(typename Op::T) == 8 ? 2 : 3)
    StridedKernel(const __grid_constant__ Op op, const StridedPlan plan) {
  using T = typename Op::T;
  using V = Vec<T, kVec>;
  constexpr int kArrays = Op::kColumnInputs;
  constexpr int kGroup = 4 / kArrays;  // positions whose vectors are loaded at once
  constexpr bool kResults = !std::is_empty_v<typename Op::ColumnFinal>;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ uint64_t barrier;
  const int lanes_x = 1 << plan.log2_lanes_x;
  int rank = 0;
  int block = blockIdx.x;
  if (plan.cluster > 1) {
    rank = ClusterRank();
    block = ClusterIndex();
  }
  const int tx = threadIdx.x & (lanes_x - 1), ty = threadIdx.x >> plan.log2_lanes_x;
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int lanes_y = blockDim.x >> plan.log2_lanes_x;
  const int step = lanes_y * plan.cluster;  // from one position of a thread to its next
  const int first = rank * lanes_y + ty;    // of them
  uint32_t tile;
  const int64_t outer = plan.tiles.DivMod(block, &tile);
  const int64_t i = ((int64_t{tile} << plan.log2_lanes_x) + tx) * kVec;
  const bool active = i < plan.inner;
  const int axis = active ? plan.axis : 0;
  const int64_t first_column = outer * plan.inner + (active ? i : 0);
  const int part = plan.positions * blockDim.x;  // vectors of one array in shared memory

  const T* source[kArrays];  // at this thread's first position
  int64_t pitch[kArrays];
#pragma unroll
  for (int k = 0; k < kArrays; ++k) {
    if constexpr (Op::kMode == Mode::kPlain) {
      pitch[k] = plan.inner;
      source[k] = op.Input(k).data + (outer * plan.axis + first) * plan.inner + (active ? i : 0);
    } else {
      pitch[k] = op.Input(k).axis_stride;
      source[k] = op.Input(k).data + op.Input(k).RowOffset(first_column) + first * pitch[k];
    }
    pitch[k] *= step;
  }
  // The positions come in two parts, copied as separate groups, so that one is reduced while the other is on its way.
  const int middle = min(first + plan.first_positions * step, axis);
  V* const staged = reinterpret_cast<V*>(shared_bytes) + threadIdx.x;
  if (plan.staged) {
    const T* p[kArrays];
#pragma unroll
    for (int k = 0; k < kArrays; ++k) p[k] = source[k];
    V* to = staged;
    int a = first;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      for (const int end = half == 0 ? middle : axis; a < end; a += step, to += blockDim.x) {
#pragma unroll
        for (int k = 0; k < kArrays; ++k) {
          CopyAsync(to + k * part, reinterpret_cast<const V*>(p[k]));
          p[k] += pitch[k];
        }
      }
      CopyCommit();
    }
  }
  if (plan.cluster > 1) ClusterStart(&barrier);
  // What becomes of a column is one thread's work; there are no more columns than threads.
  const int columns = lanes_x * kVec, own_column = threadIdx.x;
  const int64_t own_inside = int64_t{tile} * columns + own_column, own_index = outer * plan.inner + own_inside;
  typename Op::Ahead ahead = {};
  if (own_column < columns && own_inside < plan.inner) ahead = op.LoadAhead(own_index);
  const typename Op::Column column = op.BeginColumn(first_column);

  // Calls body for this thread's positions from position number `number` on, which is a, up to `end`.
  const auto for_range = [&](int number, int a, int end, auto&& body) {
    if (plan.staged) {
      // In groups without a branch between them, so that their loads overlap.
      const V* p = staged + number * blockDim.x;
      const auto group = [&]<int kCount>(std::integral_constant<int, kCount>) {
        V raw[kCount][kArrays];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
#pragma unroll
          for (int k = 0; k < kArrays; ++k) raw[j][k] = p[k * part + j * blockDim.x];
        }
#pragma unroll
        for (int j = 0; j < kCount; ++j) body(a + j * step, raw[j]);
        a += kCount * step;
        p += kCount * blockDim.x;
      };
#pragma unroll 1
      while (a + (kGroup - 1) * step < end) group(std::integral_constant<int, kGroup>());
#pragma unroll 1
      while (a < end) group(std::integral_constant<int, 1>());
    } else {
      const T* p[kArrays];
#pragma unroll
      for (int k = 0; k < kArrays; ++k) p[k] = source[k] + number * pitch[k];
#pragma unroll 2
      for (; a < end; a += step) {
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
  const auto for_parts = [&](auto&& body) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half == 0) {
        CopyWait<1>();
      } else {
        CopyWait<0>();
      }
      for_range(half == 0 ? 0 : plan.first_positions, half == 0 ? first : middle, half == 0 ? middle : axis, body);
    }
  };
  const auto for_all = [&](auto&& body) { for_range(0, first, axis, body); };

  // Where values are exchanged: largest ones of each warp; partials of each warp, and of each block; what becomes of them.
  using Partial = typename Op::Partial;
  using ColumnFinal = typename Op::ColumnFinal;
  const int lane = threadIdx.x % kWarp;
  char* const exchange = reinterpret_cast<char*>(shared_bytes) + ExchangeOffset<V>(plan.staged ? kArrays * part : 0);
  auto* const of_warps = reinterpret_cast<PerColumn<Partial, kVec>*>(exchange + warps * columns * sizeof(AccT<T>));
  auto* const of_blocks = reinterpret_cast<Partial*>(of_warps + warps * lanes_x);
  auto* const finals = reinterpret_cast<ColumnFinal*>(of_blocks + plan.cluster * columns);
  const auto block_reduce = [&]<typename Value, typename Merge>(Value value, Merge merge) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset >= lanes_x) value = merge(value, ShuffleXor(value, offset));
    }
    auto* const buffer = reinterpret_cast<Value*>(exchange);
    if (lane < lanes_x) buffer[warp * lanes_x + tx] = value;
    __syncthreads();
    value = buffer[tx];
    for (int w = 1; w < warps; ++w) value = merge(value, buffer[w * lanes_x + tx]);
    return value;
  };

  if (plan.cluster > 1) ClusterWait();
  op.WithVariant([&](auto variant) {
    PerColumn<Partial, kVec> own;
    op.template ReduceColumns<kVec>(variant, column, for_parts, for_all, block_reduce, own);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset < lanes_x) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) own.v[v] = Partial::AddSums(own.v[v], ShuffleXor(own.v[v], offset));
    }
    if (lane < lanes_x) of_warps[warp * lanes_x + tx] = own;
    __syncthreads();
    // From here on each column is one thread's, since all threads doing the same was measured to cost 2 to 5%.
    if (const int c = own_column; c < columns) {
      const auto* const partials = reinterpret_cast<const Partial*>(of_warps) + c;
      Partial total = partials[0];
      for (int w = 1; w < warps; ++w) total = Partial::AddSums(total, partials[w * columns]);
      if (plan.cluster == 1) of_blocks[c] = total;
      for (int r = 0; plan.cluster > 1 && r < plan.cluster; ++r) {
        SendToPeer(&of_blocks[rank * columns + c], &barrier, r, total);
      }
    }
    if (plan.cluster > 1) ReceiveFromPeers(&barrier, plan.cluster * columns * static_cast<int>(sizeof(Partial)), 0);
    if (const int c = own_column; c < columns) {
      Partial total = of_blocks[c];
      for (int r = 1; r < plan.cluster; ++r) total = Partial::Merge(total, of_blocks[r * columns + c]);
      if constexpr (kResults) {
        finals[c] = op.FinishColumn(variant, total, ahead);
      } else {
        if (rank == 0 && own_inside < plan.inner) op.StoreRow(variant, own_index, total, ahead);
      }
    }
    if constexpr (kResults) {
      __syncthreads();
      ColumnFinal final[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) final[v] = finals[tx * kVec + v];
      T* out = op.Output() + (outer * plan.axis + first) * plan.inner + i;
      for_all([&](int a, const V(&raw)[kArrays]) {
        AccT<T> result[kVec];
        op.template ColumnResult<kVec>(variant, raw, column, a, final, result);
        *reinterpret_cast<V*>(out) = RoundVec<T>(result);
        out += step * plan.inner;
      });
    }
  });
}

template <typename Op, int kVec>
Error LaunchStrided(const DeviceInfo& device, cudaStream_t stream, const Op& op, const AxisShape& shape,
                    const char* name) {
  using T = typename Op::T;
  using V = Vec<T, kVec>;
  constexpr int kWideBytes = 128, kNarrowBytes = 64;  // of a tile along inner
  constexpr int kTileBytes = 72 << 10;                // three blocks per multiprocessor overlap copying with computing
  StridedPlan plan = {.inner = shape.inner, .axis = static_cast<int>(shape.axis)};
  const auto blocks_for = [&](int lanes) {  // of tiles of that many vectors along inner
    const int64_t bytes = Op::kColumnInputs * shape.axis * lanes * int64_t{sizeof(V)};
    return static_cast<int>(std::min<int64_t>(std::bit_ceil(static_cast<uint64_t>(CeilDiv(bytes, kTileBytes))), 64));
  };
  // Narrower than 128 bytes costs a few percent of the bandwidth, narrower than 64 much, narrower than 32 parts of
  // sectors; but so do large clusters.
  int lanes_x = std::min<int>(kWideBytes / sizeof(V), kWarp);
  lanes_x =
      static_cast<int>(std::min<int64_t>(lanes_x, std::bit_ceil(static_cast<uint64_t>(CeilDiv(shape.inner, kVec)))));
  if (blocks_for(lanes_x) > (device.clusters ? kMaxPortableCluster / 2 : 1)) {
    while (lanes_x * sizeof(V) > kNarrowBytes) lanes_x /= 2;
  }
  if (device.clusters) {
    if (blocks_for(lanes_x) > kMaxPortableCluster && lanes_x * sizeof(V) > 32) lanes_x /= 2;
    plan.cluster = std::min(blocks_for(lanes_x), kMaxPortableCluster);
  }
  Grid grid;
  int64_t shared_bytes;
  for (;; lanes_x /= 2) {
    constexpr int64_t kPositions = 16 / Op::kColumnInputs;
    const int64_t lanes_y = std::bit_ceil(static_cast<uint64_t>(CeilDiv(shape.axis, plan.cluster * kPositions)));
    grid.threads = static_cast<int>(std::clamp<int64_t>(lanes_y * lanes_x, 64, kStridedThreads));
    const int64_t positions = CeilDiv(shape.axis, grid.threads / lanes_x * plan.cluster);
    plan.positions = static_cast<int>(positions);
    plan.first_positions = plan.positions / 2;
    const int64_t exchange = ExchangeBytes<Op, kVec>(lanes_x, grid.threads / kWarp, plan.cluster);
    shared_bytes = ExchangeOffset<V>(Op::kColumnInputs * positions * grid.threads) + exchange;
    plan.staged = shared_bytes <= device.max_shared_bytes - kStaticSharedBytes;
    if (!plan.staged) shared_bytes = exchange;
    if (plan.staged || lanes_x * sizeof(V) <= 32) break;
  }
  grid.shared_bytes = static_cast<int>(shared_bytes);
  const int64_t tiles = CeilDiv(shape.inner, int64_t{lanes_x} * kVec);
  JAXNORM_CHECK(tiles <= INT32_MAX);
  plan.tiles = FastDiv(static_cast<int32_t>(tiles));
  plan.log2_lanes_x = std::countr_zero(static_cast<unsigned>(lanes_x));
  grid.cluster = plan.cluster;
  grid.blocks = shape.outer * tiles * plan.cluster;
  return Launch<StridedKernel<Op, kVec>>(device, stream, grid, name, op, plan);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_STRIDED_CUH_
