// Shared by the reductions of batch_norm: the statistics of x (batch_norm_stats.cuh) and the sums of backward
// (batch_norm_sums.cuh).
//
// A thread reduces each of its columns. A block then merges the columns of each channel, and writes one partial result
// for each channel of its tile. A second, small launch merges the partial results. Nothing depends on the order in
// which blocks run.

// ---- What is reduced ----

// Count, mean, and the sum of squared distances from the mean (Chan, Golub and LeVeque 1979, "Updating formulae and a
// pairwise algorithm for computing sample variances"). Means are distances from the channel's first element, so that
// their rounding errors are small however far from 0 the values lie.
struct Moments {
  A count = 0, mean = 0, m2 = 0;

  // The operand of StoreChannel besides the partial results: the channel's first element.
  static __device__ __forceinline__ A LoadOther(const GroupArray& x, u32 group, i64 channel, i64 inner) {
    return ToAcc(x.Of<T>(group)[channel * inner]);
  }
  // Stores mean, var and, if there is an array for it, count.
  __device__ __forceinline__ void StoreChannel(const GroupArray (&results)[3], u32 group, i64 channel, A first,
                                               A) const {
    const A nan = __int_as_float(0x7fffffff);
    const bool any = count > 0;
    results[0].Of<A>(group)[channel] = any ? Origin(first) + mean : nan;
    results[1].Of<A>(group)[channel] = any ? m2 / count : nan;
    if (results[2]) results[2].Of<A>(group)[channel] = count;
  }

  static __device__ __forceinline__ Moments Merge(const Moments& a, const Moments& b) {
    const A count = a.count + b.count;
    const A part = a.count > 0 ? b.count * Reciprocal(count) : A{1};
    const A delta = b.mean - a.mean;
    return {count, a.mean + delta * part, a.m2 + b.m2 + delta * delta * (a.count * part)};
  }
};

struct Totals {
  A g = 0, gx = 0;  // sums of g, and of g * (x - mean)

  // The operand of StoreChannel besides the partial results: the variance.
  static __device__ __forceinline__ A LoadOther(const GroupArray& var, u32 group, i64 channel, i64) {
    return var.Of<A>(group)[channel];
  }
  // Stores dbias and dscale, if there are arrays for them.
  __device__ __forceinline__ void StoreChannel(const GroupArray (&results)[3], u32 group, i64 channel, A var,
                                               A epsilon) const {
    if (results[0]) results[0].Of<A>(group)[channel] = g;
    if (results[1]) results[1].Of<A>(group)[channel] = gx * rsqrt(var + epsilon);
  }

  static __device__ __forceinline__ Totals Merge(const Totals& a, const Totals& b) { return {a.g + b.g, a.gx + b.gx}; }
};

constexpr int kReduceBlocks = 3;  // blocks of a multiprocessor at once

// ---- From columns to channels ----

constexpr int kColBits = 3;  // kCols is 2^kColBits

template <class P>
struct Partials {
  P* data;
  int slots;        // the most partial results of a block
  int lanes;        // threads, of one warp, that merge a channel of a tile
  int shift;        // 2^shift columns, from a multiple of 2^shift on, are of one channel: one entry
  int run, repeat;  // neighbouring entries of a channel; distance to the next ones, or more than a tile
};

// The results of a tile's columns in shared memory: one entry for each 2^shift columns in each row of threads.
template <class P>
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

  // Merges the columns of each channel of the tile, and writes the block's partial results. Slot q of them is for
  // channel (first + q) % channels, where `first` is the channel of the tile's first column.
  __device__ __forceinline__ void Merge(const Lines& lines, const Part& part, const Partials<P>& partials) const {
    i64 inner_index;
    lines.Channel(i64{part.tile} * lines.tile, &inner_index);
    const int slots = static_cast<int>(min(lines.channels, lines.ChannelsFrom(inner_index, part.width)));
    const int shift = partials.shift, width = part.width >> shift, run = partials.run;
    const int head = static_cast<int>(min(lines.inner - inner_index, i64{lines.tile})) >> shift;
    const int lanes = partials.lanes, lane = threadIdx.x % lanes;
    // Lanes share the entries of a run, or if runs are short, the runs.
    const bool long_runs = run >= lanes;
    const int first_run = long_runs ? 0 : lane, run_step = long_runs ? 1 : lanes;
    const int first_entry = long_runs ? lane : 0, entry_step = long_runs ? lanes : 1;
    const int thread_bits = kColBits - shift, per_thread = 1 << thread_bits;
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
      if (q < slots && lane == 0) partials.data[i64{blockIdx.x} * partials.slots + q] = merged;
    }
  }

 private:
  template <int kDistance>
  static __device__ __forceinline__ void MergeNeighbours(P (&columns)[kCols]) {
#pragma unroll
    for (int j = 0; j < kCols; j += 2 * kDistance) columns[j] = P::Merge(columns[j], columns[j + kDistance]);
  }

  // Words of 32 neighbouring columns, 8 for each of 4 threads, fall into different banks.
  static constexpr int kStride = kThreads + 4;
  P values_[kCols * kStride];
};

// ---- How blocks go down the lines ----

// A block's lines come in runs. Between two runs of a block lie runs of the other blocks of its tile, so that all
// blocks together walk through memory from front to back. The lines that they read last are in the L2 cache when the
// next pass begins with them.
struct Walk {
  i64 full;  // lines that are read by vectors
  i64 gap;   // lines between runs of a block; a run has spans.span lines
  i64 kept;  // L2 keeps lines from this line on, and drops the lines before it
};

// Calls step(Number<n>, line) for the block's lines, n at a time as in ForLines.
template <int kLines, class F>
__device__ __forceinline__ void ForRuns(const Lines& lines, const Spans& spans, const Walk& walk, Part& part,
                                        F&& step) {
  const int batch = kLines * lines.rows;
  i64 line = part.begin, end = line + spans.span;
  while (line + batch <= walk.full) {
    step(Number<kLines>(), line);
    line += batch;
    if (line == end) {
      line += walk.gap;
      end = line + spans.span;
    }
  }
  // Fewer than `batch` lines are left, or all lines if none is read by vectors; then the block has one run.
  part.end = min(end, lines.lines);
  part.full = walk.full;
  for (; line < part.end; line += lines.rows) step(Number<1>(), line);
}
