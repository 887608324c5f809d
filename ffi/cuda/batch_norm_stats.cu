// The statistics of x for batch_norm: b bytes of each element of b bytes.
#include "cuda/batch_norm_reduce.cuh"

namespace jaxnorm {
namespace {

// Reading alone, twice as many bytes under way were faster.
template <typename T>
constexpr int kStatsBatch = 2 * kBatch<T, 1>;

// How the statistics read x: all of it, with a mask, or so that L2 keeps the end of it, a third of what it holds. Such loads
// are 4% slower, which is more than the next pass saves where x is large.
enum class Read { kAll, kMasked, kKeepEnd };
constexpr int kKeptPart = 3;
constexpr int kStatsRuns = 16;  // for kKeepEnd; 4 were 1% slower

template <typename T, Read kRead>
__global__ void __launch_bounds__(kBatchNormThreads<T>, kRead == Read::kMasked ? 2 : kReduceBlocks)
    BatchNormStatsKernel(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                         Walk walk, Partials<Moments<AccT<T>>> partials, const __grid_constant__ MaskView view) {
  using A = AccT<T>;
  Part part = FindPart(lines, spans, false);
  const T* x = arrays.x.Of<T>(part.group);
  Batch<kStatsBatch<T>>(lines, part, part.begin, part.active && part.begin < part.full).Prefetch(x);
  __shared__ Constants<T, 1> origins;
  {
    A origin[1][kCols];
    Channels(lines, part.column).Load({x}, origin, lines.inner);
#pragma unroll
    for (int j = 0; j < kCols; ++j) origin[0][j] = Origin(origin[0][j]);
    origins.Set(0, origin[0]);
  }
  __shared__ Entries<T, Moments<A>> entries;
  Moments<A> columns[kCols];

  if constexpr (kRead == Read::kMasked) {
    const Counted counted(view, part);
    const auto origin = origins.GetAll(0);
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
        const A v = cells[0].GetAcc().v[j] - origin.v[j], delta = v - m.mean;
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
    ForRuns<kStatsBatch<T>>(lines, spans, walk, part, [&](auto k_lines, int64_t line) {
      const Batch<k_lines> batch(lines, part, line, part.active);
      Cells<T> cells[k_lines];
      if constexpr (kRead == Read::kKeepEnd) {
        batch.Load(x, cells, line < walk.kept ? EvictFirst() : EvictLast());
      } else {
        batch.Load(x, cells);
      }
      if (batch.count == 0) return;
      if (n == 0) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          centre[j] = Origin(A{0.5} * cells[0].GetAcc().v[j] + A{0.5} * cells[k_lines - 1].GetAcc().v[j]);
        }
      }
      n += k_lines;
      short_of = kCols - batch.count;
#pragma unroll
      for (int k = 0; k < k_lines; ++k) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const A d = cells[k].GetAcc().v[j] - centre[j];
          if (k_lines == 1 && j >= batch.count) continue;
          sum[j] += d;
          square[j] += d * d;
        }
      }
    });
    const auto origin = origins.GetAll(0);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      const A count = static_cast<A>(n - (j + short_of >= kCols));
      const A mean = count > 0 ? sum[j] * Reciprocal(count) : A{0};
      columns[j] = {count, (centre[j] - origin.v[j]) + mean, max(square[j] - sum[j] * mean, A{0})};
      if (const A nan = sum[j] - sum[j]; nan != 0) columns[j].m2 = nan;  // NaN or an infinity, which max drops
    }
  }
  LetNextBegin();
  entries.Store(columns, partials.shift);
  __syncthreads();
  entries.Merge(lines, part, partials);
}

template <typename T, Read kRead>
Error RunStats(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, Scratch scratch) {
  const Lines lines = ReduceLines<T>(args.shape, true);
  return ForGroups(args, [&](const GroupArrays& arrays) {
    return Reduce<T, Moments<AccT<T>>>(
        device, stream, arrays, lines, kStatsBatch<T>, kRead == Read::kKeepEnd ? kStatsRuns : 1,
        AllAligned<T>(arrays.x), 0, scratch,
        [&](const Grid& grid, const Spans& spans, Walk walk, const auto& partials) {
          walk.kept = (lines.size - device.l2_bytes / kKeptPart / static_cast<int>(sizeof(T))) / lines.period;
          return Launch<BatchNormStatsKernel<T, kRead>>(device, stream, grid, "BatchNormStatsKernel", arrays, lines,
                                                        spans, walk, partials,
                                                        MaskView(args, lines, arrays.first_group));
        });
  });
}

}  // namespace

Error RunBatchNormStats(cudaStream_t stream, const BatchNormArgs& args, Scratch scratch) {
  if (args.shape.groups * args.shape.channels == 0) return Error::Success();
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if (args.mask) return RunStats<T, Read::kMasked>(*device, stream, args, scratch);
    if constexpr (sizeof(T) < 8) {  // nobody waits for float64
      if (args.shape.groups == 1 && IsKeptByL2(*device, args.shape.group_size() * sizeof(T))) {
        return RunStats<T, Read::kKeepEnd>(*device, stream, args, scratch);
      }
    }
    return RunStats<T, Read::kAll>(*device, stream, args, scratch);
  });
}

}  // namespace jaxnorm
