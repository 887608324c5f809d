// The reductions of batch_norm: statistics of x, and the sums of backward. batch_norm_args.h states the exact results,
// batch_norm.cuh how an array is walked.
//
// Bytes per element of b bytes, each read once: statistics b, sums 2b + 1/8 with the ReLU's bits and x. A thread reduces
// each of its columns; a block then merges those of a channel and writes one partial result for each channel it has seen;
// a second, small launch merges the partials. Nothing depends on the order in which blocks run.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "cuda/batch_norm.cuh"
#include "cuda/reduce.cuh"

namespace jaxnorm {
namespace {

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

// What means are distances from. Any finite number will do.
template <typename A>
__device__ __forceinline__ A Origin(A first) {
  return first - first == 0 ? first : A{0};
}

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
    const int slots = static_cast<int>(min(lines.channels, (inner_index + part.width - 1) / lines.inner + 1));
    const int shift = partials.shift, width = part.width >> shift, run = partials.run;
    const int head = static_cast<int>(min(lines.inner - inner_index, int64_t{lines.tile})) >> shift;
    const int lanes = partials.lanes, lane = threadIdx.x % lanes;
    // Lanes share the entries of a run, or if runs are short, the runs.
    const bool long_runs = run >= lanes;
    const int first_run = long_runs ? 0 : lane, run_step = long_runs ? 1 : lanes;
    const int first_entry = long_runs ? lane : 0, entry_step = long_runs ? lanes : 1;
    const int per_thread = kCols >> shift, row_threads = lines.tile / kCols;
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
            const P* entry = values_ + i % per_thread * kStride + i / per_thread;
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

// ---- Kernels ----

// Of a multiprocessor, at once.
constexpr int kReduceBlocks = 3;

// Reading alone, twice as many bytes under way were faster.
template <typename T>
constexpr int kStatsBatch = 2 * kBatch<T, 1>;

template <typename T, bool kMasked>
__global__ void __launch_bounds__(kBatchNormThreads<T>, kMasked ? 2 : kReduceBlocks)
    BatchNormStatsKernel(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                         Partials<Moments<AccT<T>>> partials, const __grid_constant__ MaskView view) {
  using A = AccT<T>;
  const Part part = FindPart(lines, spans, false);
  const T* x = arrays.x.Of<T>(part.group);
  __shared__ Entries<T, Moments<A>> entries;
  Moments<A> columns[kCols];

  if constexpr (kMasked) {
    const Counted counted(view, part);
    A origin[kCols];
    Channels(lines, part.column).Load(x, origin, lines.inner);
    for (int64_t line = part.begin; line < part.end; line += lines.rows) {
      const Batch<1> batch(lines, part, line, part.active);
      Cells<T> cells[1];
      batch.Load(x, cells);
      const uint32_t on = counted.Line(line + part.row, batch.count);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (!(on >> j & 1)) continue;
        Moments<A>& m = columns[j];
        m.count += 1;
        const A v = ToAcc(cells[0].Get().v[j]) - Origin(origin[j]), delta = v - m.mean;
        m.mean += delta * Reciprocal(m.count);
        m.m2 += delta * (v - m.mean);
      }
    }
  } else {
    // Sums of distances, and of their squares, from a centre: the mean of two elements. In one thread there are too
    // few elements for much of them to cancel, even where those two lie far from all others.
    A centre[kCols] = {}, sum[kCols] = {}, square[kCols] = {};
    int n = 0;
    uint32_t short_of = 0;  // columns that the last line does not have
    ForLines<kStatsBatch<T>>(lines, part, [&](auto k_lines, int64_t line) {
      const Batch<k_lines> batch(lines, part, line, part.active);
      Cells<T> cells[k_lines];
      batch.Load(x, cells);
      if (batch.count == 0) return;
      if (n == 0) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          centre[j] = Origin(A{0.5} * ToAcc(cells[0].Get().v[j]) + A{0.5} * ToAcc(cells[k_lines - 1].Get().v[j]));
        }
      }
      n += k_lines;
      short_of = kCols - batch.count;
#pragma unroll
      for (int k = 0; k < k_lines; ++k) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const A d = ToAcc(cells[k].Get().v[j]) - centre[j];
          if (k_lines == 1 && j >= batch.count) continue;
          sum[j] += d;
          square[j] += d * d;
        }
      }
    });
    A origin[kCols];
    if (part.active) Channels(lines, part.column).Load(x, origin, lines.inner);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      const A count = static_cast<A>(n - (j + short_of >= kCols));
      const A mean = count > 0 ? sum[j] * Reciprocal(count) : A{0};
      columns[j] = {count, (centre[j] - Origin(origin[j])) + mean, max(square[j] - sum[j] * mean, A{0})};
      if (const A nan = sum[j] - sum[j]; nan != 0) columns[j].m2 = nan;  // NaN or an infinity, which max drops
    }
  }
  entries.Store(columns, partials.shift);
  __syncthreads();
  entries.Merge(lines, part, partials);
}

// Fewer bytes under way and more blocks were faster, but for ragged bits, of which all lines of a batch share a barrier.
template <typename T, Bits kBits>
constexpr int kSumsBatch = kBits == Bits::kRagged ? kBatch<T, 1> : kBatch<T, 2>;

// kProduct: x is read for the sum of g * (x - mean).
template <typename T, Bits kBits, bool kProduct>
__global__ void __launch_bounds__(kBatchNormThreads<T>, kReduceBlocks)
    BatchNormSumsKernel(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                        Partials<Totals<AccT<T>>> partials, const __grid_constant__ BitsView view) {
  using A = AccT<T>;
  constexpr int kLines = kSumsBatch<T, kBits>;
  const Part part = FindPart(lines, spans, false);
  const T* dy = arrays.dy.Of<T>(part.group);
  const T* x = kProduct ? arrays.x.Of<T>(part.group) : nullptr;
  const uint8_t* bits = kBits == Bits::kNone ? nullptr : arrays.bits.Of<uint8_t>(part.group);
  Batch<kLines>(lines, part, part.begin, part.active && part.begin < part.full).Prefetch(dy, x);
  __shared__ Constants<T, 1> constants;
  if constexpr (kProduct) {
    A mean[kCols];
    Channels(lines, part.column).Load(arrays.mean.Of<A>(part.group), mean);
    constants.Set(0, mean);
  }
  [[maybe_unused]] __shared__ BitsShared<T, kBits> ragged;
  if constexpr (kBits == Bits::kRagged) ragged.Find(view, lines, part);

  Totals<A> totals[kCols];
  int turn = 0;
  ForLines<kLines>(lines, part, [&](auto k_lines, int64_t line) {
    const Batch<k_lines> batch(lines, part, line, part.active);
    Cells<T> dys[k_lines] = {};
    [[maybe_unused]] Cells<T> xs[k_lines] = {};
    batch.Load(dy, dys);
    if constexpr (kProduct) batch.Load(x, xs);
    if constexpr (kBits != Bits::kNone) {
      const uint32_t on = LoadBits<kBits>(batch, view, part, line, turn++, bits, ragged);
#pragma unroll
      for (int k = 0; k < k_lines; ++k) dys[k].Select(on >> kCols * k);
    }
#pragma unroll
    for (int q = 0; q < constants.kQuads; ++q) {
      [[maybe_unused]] Vec<A, constants.kQuad> mean;
      if constexpr (kProduct) mean = constants.Get(0, q);
#pragma unroll
      for (int k = 0; k < k_lines; ++k) {
#pragma unroll
        for (int j = 0; j < constants.kQuad; ++j) {
          const int column = q * constants.kQuad + j;
          const A g = ToAcc(dys[k].Get().v[column]);
          totals[column].g += g;
          if constexpr (kProduct) totals[column].gx += g * (ToAcc(xs[k].Get().v[column]) - mean.v[j]);
        }
      }
    }
  });

  __shared__ Entries<T, Totals<A>> entries;
  entries.Store(totals, partials.shift);
  __syncthreads();
  entries.Merge(lines, part, partials);
}

// ---- The last step ----

constexpr int kFinalThreads = 512;
constexpr int kFinalAtOnce = 4;  // partial results that a thread reads before it looks at the first

// One channel of one group per `lanes` threads; a block has channels that are neighbours, whose partials are too.
template <typename T, typename P>
__global__ void __launch_bounds__(kFinalThreads)
    BatchNormFinalKernel(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                         Partials<P> partials, int lanes, AccT<T> epsilon) {
  using A = AccT<T>;
  const uint32_t width = kFinalThreads / lanes, lane = threadIdx.x / width;
  const auto blocks = static_cast<uint32_t>((lines.channels + width - 1) / width);  // of a group
  const uint32_t group = blockIdx.x / blocks;
  const int64_t channel = int64_t{blockIdx.x - group * blocks} * width + threadIdx.x % width;
  const bool there = channel < lines.channels;
  // What the result needs besides, on its way with the partial results.
  A other{};
  if (lane == 0 && there && lines.size > 0) {
    if constexpr (std::is_same_v<P, Moments<A>>) {
      other = ToAcc(arrays.x.Of<T>(group)[channel * lines.inner]);
    } else if (arrays.dscale) {
      other = arrays.var.Of<A>(group)[channel];
    }
  }
  P merged;
  if (there && lines.size > 0) {
    // Lines that hold each channel once have it in neighbouring tiles, which wrap around for no channel.
    const bool once = lines.period == lines.cols;
    const int first = once ? lines.TileOf(channel * lines.inner) : 0;
    const uint32_t tiles = (once ? lines.TileOf((channel + 1) * lines.inner - 1) + 1 : lines.tiles) - first;
    const uint32_t entries = tiles * spans.spans;
#pragma unroll 1
    for (uint32_t begin = lane; begin < entries; begin += kFinalAtOnce * lanes) {
      P found[kFinalAtOnce];
#pragma unroll
      for (int i = 0; i < kFinalAtOnce; ++i) {
        const uint32_t e = begin + i * lanes;
        if (e >= entries) break;
        const uint32_t span = tiles == 1 ? e : e / tiles;
        const int tile = first + static_cast<int>(e - span * tiles);
        int64_t inner_index, q = channel - lines.Channel(int64_t{tile} * lines.tile, &inner_index);
        if (q < 0) q += lines.channels;
        const int64_t block = int64_t{group} * spans.blocks + span * lines.tiles + tile;
        if (once || q <= (inner_index + lines.Width(tile) - 1) / lines.inner) {
          found[i] = partials.data[block * partials.slots + q];
        }
      }
#pragma unroll
      for (int i = 0; i < kFinalAtOnce; ++i) merged = P::Merge(merged, found[i]);
    }
  }
  __shared__ P shared[kFinalThreads];
  shared[threadIdx.x] = merged;
  for (uint32_t step = lanes / 2; step > 0; step /= 2) {
    __syncthreads();
    if (lane < step) shared[threadIdx.x] = merged = P::Merge(merged, shared[threadIdx.x + step * width]);
  }
  if (lane > 0 || !there) return;
  if constexpr (std::is_same_v<P, Moments<A>>) {
    A mean = NAN, var = NAN;
    if (merged.count > 0) {
      mean = Origin(other) + merged.mean;
      var = merged.m2 / merged.count;
    }
    arrays.mean.Of<A>(group)[channel] = mean;
    arrays.var.Of<A>(group)[channel] = var;
    if (arrays.count) arrays.count.Of<A>(group)[channel] = merged.count;
  } else {
    if (arrays.dbias) arrays.dbias.Of<A>(group)[channel] = merged.g;
    if (arrays.dscale) {
      arrays.dscale.Of<A>(group)[channel] = lines.size > 0 ? merged.gx * rsqrt(other + epsilon) : A{0};
    }
  }
}

// ---- Launch ----

// A tile has few channels, so that there are few partial results. Where bits are moved in the block, it has one row.
constexpr int64_t kMaxTileChannels = 256;

template <typename T>
Lines ReduceLines(const BatchNormShape& shape, bool rows) {
  constexpr int64_t kThreads = kBatchNormThreads<T>;
  const int64_t few = kMaxTileChannels * std::clamp<int64_t>(shape.inner, 1, kThreads);
  Lines lines = MakeLines(shape, rows ? std::min(kThreads * kCols, few) : MostColumns<T>(shape));
  if (rows) lines.rows = static_cast<int>(kThreads / (lines.tile / kCols));
  return lines;
}

// Runs kernel(arrays, spans, partials) and the last step. `blocks` run at once. The partials have the room that Python
// gives them.
template <typename T, typename P, typename F>
ffi::Error Reduce(const DeviceInfo& device, cudaStream_t stream, const GroupArrays& arrays, const Lines& lines,
                  int blocks, int batch, bool aligned, double epsilon, ffi::AnyBuffer scratch, F&& kernel) {
  const int shift = std::countr_zero(static_cast<uint64_t>(std::gcd(lines.inner, int64_t{kCols})));
  // A tile has fewer than 2^16 entries.
  const auto run = static_cast<int>(std::min(lines.inner >> shift, int64_t{1} << 16));
  const auto repeat = static_cast<int>(std::min(lines.cols >> shift, int64_t{1} << 18));
  Partials<P> partials{static_cast<P*>(scratch.untyped_data()), MaxSlots(lines), 1, shift, run, repeat};
  Spans spans;
  if (lines.size > 0) {
    const int64_t room =  // spans
        static_cast<int64_t>(scratch.size_bytes() / sizeof(P)) / (arrays.groups * lines.tiles * partials.slots);
    JAXNORM_CHECK(room >= 1);
    // Blocks that run at once and no more: each has partial results to merge and to write.
    spans = MakeSpans(lines, arrays.groups, blocks, 1, batch, 1, aligned, room);
    const Grid grid{spans.blocks * arrays.groups, ThreadsFor(lines)};
    while (partials.lanes < kWarp && MaxSlots(lines) * partials.lanes * 2 <= grid.threads) partials.lanes *= 2;
    JAXNORM_RETURN_IF_ERROR(kernel(grid, spans, partials));
  }
  const bool once = lines.period == lines.cols;
  const int64_t entries = spans.spans * (once ? lines.inner / lines.tile + 2 : lines.tiles);
  int lanes = 1;
  while (lanes < kFinalThreads / 4 && lanes * kFinalAtOnce < entries) lanes *= 2;
  const int64_t width = kFinalThreads / lanes;
  const Grid grid{(lines.channels + width - 1) / width * arrays.groups, kFinalThreads};
  return Launch<BatchNormFinalKernel<T, P>>(device, stream, grid, "BatchNormFinalKernel", arrays, lines, spans,
                                            partials, lanes, static_cast<AccT<T>>(epsilon));
}

template <typename T, bool kMasked>
ffi::Error RunStats(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, ffi::AnyBuffer scratch) {
  const Lines lines = ReduceLines<T>(args.shape, true);
  return ForGroups(args, [&](const GroupArrays& arrays) {
    return Reduce<T, Moments<AccT<T>>>(
        device, stream, arrays, lines, kReduceBlocks * device.sms, kStatsBatch<T>, AllAligned<T>(arrays.x), 0, scratch,
        [&](const Grid& grid, const Spans& spans, const auto& partials) {
          return Launch<BatchNormStatsKernel<T, kMasked>>(device, stream, grid, "BatchNormStatsKernel", arrays, lines,
                                                          spans, partials, MaskView(args, lines, arrays.first_group));
        });
  });
}

template <typename T, Bits kBits, bool kProduct>
ffi::Error RunSums(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, double epsilon,
                   ffi::AnyBuffer scratch) {
  const Lines lines = ReduceLines<T>(args.shape, kBits != Bits::kRagged);
  return ForGroups(args, [&](const GroupArrays& arrays) {
    return Reduce<T, Totals<AccT<T>>>(device, stream, arrays, lines, kReduceBlocks * device.sms, kSumsBatch<T, kBits>,
                                      AllAligned<T>(arrays.dy, arrays.x), epsilon, scratch,
                                      [&](const Grid& grid, const Spans& spans, const auto& partials) {
                                        return Launch<BatchNormSumsKernel<T, kBits, kProduct>>(
                                            device, stream, grid, "BatchNormSumsKernel", arrays, lines, spans, partials,
                                            BitsView(args.shape, lines));
                                      });
  });
}

ffi::Error BatchNormStats(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                          int64_t axis, int64_t end, int64_t operand_names, int64_t result_names) {
  BatchNormCall call;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormStats(operand_names, result_names));
  JAXNORM_RETURN_IF_ERROR(call.Parse(operands, results, groups, axis, end, operand_names, result_names));
  auto scratch = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (scratch.has_error()) return scratch.error();
  if (call.args.shape.groups * call.args.shape.channels == 0) return ffi::Error::Success();
  return DispatchFloat(call.args.dtype, [&]<typename T>(std::type_identity<T>) {
    return call.args.mask ? RunStats<T, true>(*call.device, stream, call.args, **scratch)
                          : RunStats<T, false>(*call.device, stream, call.args, **scratch);
  });
}

ffi::Error BatchNormSums(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                         int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon) {
  BatchNormCall call;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormSums(operand_names, result_names));
  JAXNORM_RETURN_IF_ERROR(call.Parse(operands, results, groups, axis, end, operand_names, result_names));
  auto scratch = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (scratch.has_error()) return scratch.error();
  if (call.args.shape.groups * call.args.shape.channels == 0) return ffi::Error::Success();
  return DispatchFloat(call.args.dtype, [&]<typename T>(std::type_identity<T>) {
    return DispatchBits<T>(call.args, [&](auto bits) {
      return call.args.dscale ? RunSums<T, bits, true>(*call.device, stream, call.args, epsilon, **scratch)
                              : RunSums<T, bits, false>(*call.device, stream, call.args, epsilon, **scratch);
    });
  });
}

JAXNORM_REGISTER(batch_norm_stats, BatchNormStats, BatchNormBinding(), {ffi::Traits::kCmdBufferCompatible});
JAXNORM_REGISTER(batch_norm_sums, BatchNormSums, BatchNormBinding().Attr<double>("epsilon"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
