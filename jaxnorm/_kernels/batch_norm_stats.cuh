// The statistics of x for batch_norm. They read b bytes of each element of b bytes.

// In a pass that only reads, twice as many bytes under way were faster.
constexpr int kStatsBatch = 2 * kBatch<1>;

// How the statistics read x: without a mask, with a mask, or so that L2 keeps the end of x, a third of L2's size. Loads
// of the last kind are 4% slower, which is more than the next pass saves where x is large.
enum { kReadAll, kReadMasked, kReadKeepEnd };  // STATS_READ
using Partial = Moments;

extern "C" __global__ void __launch_bounds__(kThreads, STATS_READ == kReadMasked ? 2 : kReduceBlocks)
    jaxnorm_batch_norm_stats(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines,
                             Spans spans, Walk walk, Partials<Moments> partials,
                             const __grid_constant__ MaskView view) {
  Part part = FindPart(lines, spans, false);
  const T* x = arrays.x.Of<T>(part.group);
  Batch<kStatsBatch>(lines, part, part.begin, part.active && part.begin < part.full).Prefetch(x);
  __shared__ Constants<1> origins;
  {
    A origin[1][kCols];
    Channels(lines, part.column).Load({x}, origin, lines.inner);
#pragma unroll
    for (int j = 0; j < kCols; ++j) origin[0][j] = Origin(origin[0][j]);
    origins.Set(0, origin[0]);
  }
  __shared__ Entries<Moments> entries;
  Moments columns[kCols];

  if constexpr (STATS_READ == kReadMasked) {
    const Counted counted(view, part);
    const auto origin = origins.GetAll(0);
    for (i64 line = part.begin; line < part.end; line += lines.rows) {
      const Batch<1> batch(lines, part, line, part.active);
      Cells cells[1];
      batch.Load(x, cells);
      const u32 on = counted.Line(line + part.row, batch.count);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (!(on >> j & 1)) continue;
        Moments& m = columns[j];
        m.count += 1;
        const A v = cells[0].GetAcc().v[j] - origin.v[j], delta = v - m.mean;
        m.mean += delta * Reciprocal(m.count);
        m.m2 += delta * (v - m.mean);
      }
    }
  } else {
    // Sums of distances from a centre, the mean of two elements, and sums of their squares. A thread has too few
    // elements for much cancellation, even where these two elements lie far from all others.
    A centre[kCols] = {}, sum[kCols] = {}, square[kCols] = {};
    int n = 0;
    u32 short_of = 0;  // columns that are missing in the last line
    ForRuns<kStatsBatch>(lines, spans, walk, part, [&](auto k_lines, i64 line) {
      const Batch<k_lines> batch(lines, part, line, part.active);
      Cells cells[k_lines];
      if constexpr (STATS_READ == kReadKeepEnd) {
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
  let_next_begin();
  entries.Store(columns, partials.shift);
  __syncthreads();
  entries.Merge(lines, part, partials);
}
