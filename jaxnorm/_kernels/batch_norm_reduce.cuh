// What the reductions of batch_norm share: the statistics of x (batch_norm_stats.cuh) and the sums of backward
// (batch_norm_sums.cuh).
//
// A thread reduces each of its columns; a block then merges those of a channel and writes one partial result for each
// channel it has seen; a second, small launch merges the partials. Nothing depends on the order in which blocks run.

// ---- What is reduced ----

// Count, mean, and the sum of squared distances from the mean (Chan, Golub and LeVeque 1979, "Updating formulae and a
// pairwise algorithm for computing sample variances"). Means are distances from the channel's first element, so that
// what their rounding loses is small however far from 0 the values lie.
struct Moments {
  A count = 0, mean = 0, m2 = 0;

  // What StoreChannel needs beside the partial results: the channel's first element.
  static __device__ __forceinline__ A LoadOther(const GroupArray& x, u32 group, i64 channel, i64 inner) {
    return ToAcc(x.Of<T>(group)[channel * inner]);
  }
  // Mean, var and, if there is an array for it, count.
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

  // The variance.
  static __device__ __forceinline__ A LoadOther(const GroupArray& var, u32 group, i64 channel, i64) {
    return var.Of<A>(group)[channel];
  }
  // Those of dbias and dscale for which there is an array.
  __device__ __forceinline__ void StoreChannel(const GroupArray (&results)[3], u32 group, i64 channel, A var,
                                               A epsilon) const {
    if (results[0]) results[0].Of<A>(group)[channel] = g;
    if (results[1]) results[1].Of<A>(group)[channel] = gx * rsqrt(var + epsilon);
  }

  static __device__ __forceinline__ Totals Merge(const Totals& a, const Totals& b) { return {a.g + b.g, a.gx + b.gx}; }
};

constexpr int kReduceBlocks = 3;  // of a multiprocessor, at once

// ---- From columns to channels ----

constexpr int kColBits = 3;  // kCols is 2^kColBits

template <class P>
struct Partials {
  P* data;
  int slots;        // room for each block
  int lanes;        // threads, of one warp, that merge a channel of a tile
  int shift;        // 2^shift columns, from a multiple of it on, are of one channel in any case: one entry
  int run, repeat;  // entries of a channel that are neighbours, and from one such run to the next; or more than a tile
};

// What the columns of a tile come to, in shared memory: one entry for each 2^shift of them in each row.
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

  // Merges the columns of each channel of the tile, and writes what this block has of it. Slot q of its partials is
  // that of channel (first + q) % channels, where `first` is the channel of the tile's first column.
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

  // Words of neighbouring columns, which are 8 of a thread and 4 threads of 8, fall into different banks.
  static constexpr int kStride = kThreads + 4;
  P values_[kCols * kStride];
};

// ---- How blocks go down the lines ----

// A block has its lines in runs, and between two of them are those of the other blocks of its tile. So all blocks
// together walk through memory from front to back, and what they read last is where the next pass begins, in the L2
// cache.
struct Walk {
  i64 full;  // lines that are read by vectors
  i64 gap;   // lines between runs, which have spans.span
  i64 kept;  // L2 is to keep what is read from this line on, and to drop what came before
};

// Calls step(Number<n>, line) for the block's lines, n at a time as ForLines does.
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
  // Fewer than that many are left, or all of them if they are not read by vectors; then there is one run.
  part.end = min(end, lines.lines);
  part.full = walk.full;
  for (; line < part.end; line += lines.rows) step(Number<1>(), line);
}
