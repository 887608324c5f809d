// What the reductions of batch_norm share, the statistics of x (batch_norm_stats.cu) and the sums of backward
// (batch_norm_sums.cu). batch_norm_args.h states the exact results, batch_norm.cuh how an array is walked.
//
// A thread reduces each of its columns; a block then merges those of a channel and writes one partial result for each
// channel it has seen; a second, small launch merges the partials. Nothing depends on the order in which blocks run.
#ifndef JAXNORM_CUDA_BATCH_NORM_REDUCE_CUH_
#define JAXNORM_CUDA_BATCH_NORM_REDUCE_CUH_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "cuda/batch_norm.cuh"
#include "cuda/reduce.cuh"

namespace jaxnorm {

// ---- What is reduced ----

// Count, mean, and the sum of squared distances from the mean (Chan, Golub and LeVeque 1979, "Updating formulae and a
// pairwise algorithm for computing sample variances"). Means are distances from the channel's first element, so that what
// their rounding loses is small however far from 0 the values lie.
template <typename A>
struct Moments {
  A count = 0, mean = 0, m2 = 0;

  static __device__ __forceinline__ Moments Merge(const Moments& a, const Moments& b) {
    const A count = a.count + b.count;
    const A part = a.count > 0 ? b.count * Reciprocal(count) : A{1};
    const A delta = b.mean - a.mean;
    return {count, a.mean + delta * part, a.m2 + b.m2 + delta * delta * (a.count * part)};
  }
};

template <typename A>
struct Totals {
  A g = 0, gx = 0;  // sums of g, and of g * (x - mean)

  static __device__ __forceinline__ Totals Merge(const Totals& a, const Totals& b) { return {a.g + b.g, a.gx + b.gx}; }
};

// ---- From columns to channels ----

// Channels of a tile at most. (The first may be there in part, and once more behind the last.)
__host__ __device__ __forceinline__ int MaxSlots(const Lines& lines) {
  return static_cast<int>(min(lines.channels, (lines.tile - 1) / lines.inner + 2));
}

template <typename P>
struct Partials {
  P* data;
  int slots;        // room for each block
  int lanes;        // threads, of one warp, that merge a channel of a tile
  int shift;        // 2^shift columns, from a multiple of it on, are of one channel in any case: one entry
  int run, repeat;  // entries of a channel that are neighbours, and from one such run to the next; or more than a tile
};

// What the columns of a tile come to, in shared memory: one entry for each 2^shift of them in each row.
template <typename T, typename P>
class Entries {
 public:
  __device__ __forceinline__ void Store(P (&columns)[kCols], int shift) {
    if (shift > 0) MergeNeighbours<1>(columns);
    if (shift > 1) MergeNeighbours<2>(columns);
    if (shift > 2) MergeNeighbours<4>(columns);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (j % (1 << shift) == 0) values_[(j >> shift) * kStride + threadIdx.x] = columns[j];
    }
  }

  // Merges the columns of each channel of the tile, and writes what this block has of it. Slot q of its partials is that
  // of channel (first + q) % channels, where `first` is the channel of the tile's first column.
  __device__ __forceinline__ void Merge(const Lines& lines, const Part& part, const Partials<P>& partials) const {
    int64_t inner_index;
    lines.Channel(int64_t{part.tile} * lines.tile, &inner_index);
    const int slots = static_cast<int>(min(lines.channels, lines.ChannelsFrom(inner_index, part.width)));
    const int shift = partials.shift, width = part.width >> shift, run = partials.run;
    const int head = static_cast<int>(min(lines.inner - inner_index, int64_t{lines.tile})) >> shift;
    const int lanes = partials.lanes, lane = threadIdx.x % lanes;
    // Lanes share the entries of a run, or if runs are short, the runs.
    const bool long_runs = run >= lanes;
    const int first_run = long_runs ? 0 : lane, run_step = long_runs ? 1 : lanes;
    const int first_entry = long_runs ? lane : 0, entry_step = long_runs ? lanes : 1;
    const int thread_bits = std::countr_zero(static_cast<unsigned>(kCols)) - shift, per_thread = 1 << thread_bits;
    const int row_threads = lines.tile / kCols;
#pragma unroll 1
    for (int q0 = 0; q0 < slots; q0 += blockDim.x / lanes) {
      const int q = q0 + threadIdx.x / lanes;
      P merged;
      if (q < slots) {
#pragma unroll 1
        for (int begin = head + (q - 1) * run + first_run * partials.repeat; begin < width;
             begin += run_step * partials.repeat) {
          const int end = min(begin + run, width);
#pragma unroll 1
          for (int i = max(begin, 0) + first_entry; i < end; i += entry_step) {
            const P* entry = values_ + (i & (per_thread - 1)) * kStride + (i >> thread_bits);
            for (int row = 0; row < lines.rows; ++row) merged = P::Merge(merged, entry[row * row_threads]);
          }
        }
      }
      for (int distance = 1; distance < lanes; distance *= 2) merged = P::Merge(merged, ShuffleXor(merged, distance));
      if (q < slots && lane == 0) partials.data[int64_t{blockIdx.x} * partials.slots + q] = merged;
    }
  }

 private:
  template <int kDistance>
  static __device__ __forceinline__ void MergeNeighbours(P (&columns)[kCols]) {
#pragma unroll
    for (int j = 0; j < kCols; j += 2 * kDistance) columns[j] = P::Merge(columns[j], columns[j + kDistance]);
  }

  // Words of neighbouring columns, which are 8 of a thread and 4 threads of 8, fall into different banks.
  static constexpr int kStride = kBatchNormThreads<T> + 4;
  P values_[kCols * kStride];
};

// ---- How blocks go down the lines ----

// A block has its lines in runs, and between two of them are those of the other blocks of its tile. So all blocks together
// walk through memory from front to back, and what they read last is where the next pass begins, in the L2 cache.
struct Walk {
  int64_t full = 0;  // lines that are read by vectors
  int64_t gap = 0;   // lines between runs, which have spans.span
  int64_t kept = 0;  // L2 is to keep what is read from this line on, and to drop what came before
};

// Calls step(std::integral_constant<int, n>, line) for the block's lines, n at a time as ForLines does.
template <int kLines, typename F>
__device__ __forceinline__ void ForRuns(const Lines& lines, const Spans& spans, const Walk& walk, Part& part,
                                        F&& step) {
  const int batch = kLines * lines.rows;
  int64_t line = part.begin, end = line + spans.span;
  while (line + batch <= walk.full) {
    step(std::integral_constant<int, kLines>(), line);
    line += batch;
    if (line == end) {
      line += walk.gap;
      end = line + spans.span;
    }
  }
  // Fewer than that many are left, or all of them if they are not read by vectors; then there is one run.
  part.end = min(end, lines.lines);
  part.full = walk.full;
  for (; line < part.end; line += lines.rows) step(std::integral_constant<int, 1>(), line);
}

// ---- The last step ----

inline constexpr int kFinalBits = 7, kFinalThreads = 1 << kFinalBits;
inline constexpr int kFinalAtOnce = 4;  // partial results that a thread reads before it looks at the first

// In the order of its use, so that few lines of the constant cache are waited for.
template <typename P>
struct FinalPlan {
  const P* partials;
  int64_t channels, inner;
  // A channel has 2^tile_bits * 2^span_bits lanes, each for some tiles and some spans.
  int tile_bits = 0, span_bits = 0;
  uint32_t blocks = 1, spans;   // of a group
  uint32_t slots, tiles, tile;  // as in Partials and Lines
  bool one_tile;                // has all there is of a channel in a line
  GroupArray other;             // x, or var if dscale is wanted
  GroupArray results[3];        // mean, var, count; or dbias, dscale
};

// Latency and nothing else, to which instructions that are fetched for the first time contribute most. So the code is
// short, and of the two ways to the partial results the one for channels last, which have many, has several loads of a
// thread under way at once; the other has so many lanes that each finds about one.
template <typename T, typename P>
__global__ void __launch_bounds__(kFinalThreads)
    BatchNormFinalKernel(const __grid_constant__ FinalPlan<P> plan, AccT<T> epsilon,
                         const __grid_constant__ Lines lines) {
  using A = AccT<T>;
  constexpr bool kMoments = std::is_same_v<P, Moments<A>>;
  LetNextBegin();
  const int width_bits = kFinalBits - plan.tile_bits - plan.span_bits;
  const uint32_t width = 1u << width_bits, lane = threadIdx.x >> width_bits, group = blockIdx.x / plan.blocks;
  const int64_t channel = int64_t{blockIdx.x - group * plan.blocks} * width + (threadIdx.x & (width - 1));
  const bool there = channel < plan.channels;
  A other{};  // on its way with the partial results
  if (lane == 0 && there && plan.other) {
    if constexpr (kMoments) {
      other = ToAcc(plan.other.template Of<T>(group)[channel * plan.inner]);
    } else {
      other = plan.other.template Of<A>(group)[channel];
    }
  }
  P merged;
  const uint64_t span_stride = uint64_t{plan.tiles} * plan.slots;
  const P* const partials = plan.partials + WaitForLaunchBefore(uint64_t{group} * plan.spans * span_stride);
  if (there && plan.one_tile) {
    const uint32_t tile = plan.tiles == 1 ? 0 : static_cast<uint32_t>(channel) / plan.tile;
    const P* const of_tile = partials + uint64_t{tile} * plan.slots + (channel - int64_t{tile} * plan.tile);
#pragma unroll 1
    for (uint32_t begin = lane; begin < plan.spans; begin += kFinalAtOnce << plan.span_bits) {
      P found[kFinalAtOnce];
#pragma unroll
      for (int i = 0; i < kFinalAtOnce; ++i) {
        const uint32_t span = begin + (i << plan.span_bits);
        if (span < plan.spans) found[i] = of_tile[span * span_stride];
      }
#pragma unroll
      for (int step = kFinalAtOnce / 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < step; ++i) found[i] = P::Merge(found[i], found[i + step]);
      }
      merged = P::Merge(merged, found[0]);
    }
  } else if (there) {
    // Lines that hold each channel once have it in neighbouring tiles, which wrap around for no channel.
    const bool once = lines.period == lines.cols;
    const int first = once ? lines.TileOf(channel * lines.inner) : 0;
    const int end = once ? lines.TileOf((channel + 1) * lines.inner - 1) + 1 : lines.tiles;
#pragma unroll 1
    for (int tile = first + static_cast<int>(lane & ((1u << plan.tile_bits) - 1)); tile < end;
         tile += 1 << plan.tile_bits) {
      int64_t inner_index, q = channel - lines.Channel(int64_t{tile} * lines.tile, &inner_index);
      if (q < 0) q += lines.channels;
      if (!once && q >= lines.ChannelsFrom(inner_index, lines.Width(tile))) continue;
      const P* const of_tile = partials + int64_t{tile} * plan.slots + q;
#pragma unroll 1
      for (uint32_t span = lane >> plan.tile_bits; span < plan.spans; span += 1u << plan.span_bits) {
        merged = P::Merge(merged, of_tile[span * span_stride]);
      }
    }
  }
  // The lanes of a channel: those of a warp, then the warps.
#pragma unroll 1
  for (uint32_t distance = width; distance < kWarp; distance *= 2) {
    merged = P::Merge(merged, ShuffleXor(merged, distance));
  }
  __shared__ P shared[kFinalThreads];
  shared[threadIdx.x] = merged;
  __syncthreads();
  if (lane > 0 || !there) return;
  const uint32_t step = max(width, uint32_t{kWarp});
#pragma unroll 1
  for (uint32_t i = threadIdx.x + step; i < kFinalThreads; i += step) merged = P::Merge(merged, shared[i]);
  const auto store = [&](int i, A value) { plan.results[i].template Of<A>(group)[channel] = value; };
  if constexpr (kMoments) {
    const bool any = merged.count > 0;
    store(0, any ? Origin(other) + merged.mean : A{NAN});
    store(1, any ? merged.m2 / merged.count : A{NAN});
    if (plan.results[2]) store(2, merged.count);
  } else {
    if (plan.results[0]) store(0, merged.g);
    if (plan.results[1]) store(1, plan.spans > 0 ? merged.gx * rsqrt(other + epsilon) : A{0});
  }
}

// ---- Launch ----

// Of a multiprocessor, at once.
inline constexpr int kReduceBlocks = 3;

// A tile has few channels, so that there are few partial results. Where bits are moved in the block, it has one row.
inline constexpr int64_t kMaxTileChannels = 256;

template <typename T>
Lines ReduceLines(const BatchNormShape& shape, bool rows) {
  constexpr int64_t kThreads = kBatchNormThreads<T>;
  const int64_t few = kMaxTileChannels * std::clamp<int64_t>(shape.inner, 1, kThreads);
  Lines lines = MakeLines(shape, rows ? std::min(kThreads * kCols, few) : MostColumns<T>(shape));
  if (rows) lines.rows = static_cast<int>(kThreads / (lines.tile / kCols));
  return lines;
}

// Cuts what each block has into about `runs` runs of whole steps, or leaves it in one piece if some blocks would then have
// much more than others.
inline Walk MakeWalk(const Lines& lines, int64_t step, int64_t runs, Spans* spans) {
  constexpr int64_t kMaxWaste = 50;  // 1 / 50 of what a block has
  const int64_t steps = (spans->span + step - 1) / step, run = (steps + runs - 1) / runs;
  const int64_t waste = (steps + run - 1) / run * run - steps;
  if (spans->aligned && waste * kMaxWaste <= steps) spans->span = static_cast<int>(run * step);
  return {.full = spans->aligned ? lines.full : 0, .gap = (int64_t{spans->spans} - 1) * spans->span};
}

// Whether L2 holds so much of `bytes` that the order in which they are read matters to the next pass.
inline bool IsKeptByL2(const DeviceInfo& device, int64_t bytes) { return bytes <= 4 * int64_t{device.l2_bytes}; }

// Runs kernel(grid, spans, walk, partials) and the last step. A block reads `batch` lines of each row at once, in up to
// `runs` runs. The partials have the room that Python gives them.
template <typename T, typename P, typename F>
Error Reduce(const DeviceInfo& device, cudaStream_t stream, const GroupArrays& arrays, const Lines& lines, int batch,
             int runs, bool aligned, double epsilon, Scratch scratch, F&& kernel) {
  const int shift = std::countr_zero(static_cast<uint64_t>(std::gcd(lines.inner, int64_t{kCols})));
  // A tile has fewer than 2^16 entries.
  const auto run = static_cast<int>(std::min(lines.inner >> shift, int64_t{1} << 16));
  const auto repeat = static_cast<int>(std::min(lines.cols >> shift, int64_t{1} << 18));
  Partials<P> partials{static_cast<P*>(scratch.data), MaxSlots(lines), 1, shift, run, repeat};
  Spans spans;
  if (lines.size > 0) {
    const int64_t room =  // spans
        static_cast<int64_t>(scratch.bytes / sizeof(P)) / (arrays.groups * lines.tiles * partials.slots);
    JAXNORM_CHECK(room >= 1);
    // Blocks that run at once and no more: each has partial results to merge and to write.
    spans = MakeSpans(lines, arrays.groups, kReduceBlocks * device.sms, 1, batch, 1, aligned, room);
    const Grid grid{spans.blocks() * arrays.groups, ThreadsFor(lines)};
    while (partials.lanes < kWarp && MaxSlots(lines) * partials.lanes * 2 <= grid.threads) partials.lanes *= 2;
    const Walk walk = MakeWalk(lines, int64_t{batch} * lines.rows, runs, &spans);
    JAXNORM_RETURN_IF_ERROR(kernel(grid, spans, walk, partials));
  }
  const bool once = lines.period == lines.cols, any = lines.size > 0;
  FinalPlan<P> plan{.partials = partials.data,
                    .channels = lines.channels,
                    .inner = lines.inner,
                    .spans = any ? spans.spans : 0,
                    .slots = static_cast<uint32_t>(partials.slots),
                    .tiles = static_cast<uint32_t>(lines.tiles),
                    .tile = static_cast<uint32_t>(lines.tile),
                    .one_tile = lines.tiles == 1 || (once && lines.inner == 1 && !lines.wide)};
  if constexpr (std::is_same_v<P, Moments<AccT<T>>>) {
    if (any) plan.other = arrays.x;
    plan.results[0] = arrays.mean;
    plan.results[1] = arrays.var;
    plan.results[2] = arrays.count;
  } else {
    if (any && arrays.dscale) plan.other = arrays.var;
    plan.results[0] = arrays.dbias;
    plan.results[1] = arrays.dscale;
  }
  // Of a channel.
  const int64_t tiles = plan.one_tile ? 1 : once ? (lines.inner - 1) / lines.tile + 2 : lines.tiles;
  const auto lanes = [&] { return 1 << (plan.tile_bits + plan.span_bits); };
  while (lanes() < kFinalThreads && int64_t{1} << plan.tile_bits < tiles) ++plan.tile_bits;
  while (lanes() < kFinalThreads && int64_t{plan.one_tile ? kFinalAtOnce : 1} << plan.span_bits < plan.spans) {
    ++plan.span_bits;
  }
  plan.blocks = static_cast<uint32_t>((lines.channels - 1) / (kFinalThreads / lanes()) + 1);
  const int64_t blocks = plan.blocks * arrays.groups;
  const Grid grid = {
      .blocks = blocks, .threads = kFinalThreads, .shared_bytes = any ? SpreadBytes(device, blocks) : 0, .early = any};
  return Launch<BatchNormFinalKernel<T, P>>(device, stream, grid, "BatchNormFinalKernel", plan,
                                            static_cast<AccT<T>>(epsilon), lines);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_BATCH_NORM_REDUCE_CUH_
