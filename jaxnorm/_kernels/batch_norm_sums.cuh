// The sums of batch_norm's backward. With the ReLU's bits and x, they read 2b + 1/8 bytes of each element of b bytes.
//
// Where dx follows in the same call and the residual has a cotangent, this kernel writes the cotangent, which is g. The
// next pass then reads no bits.

enum {         // SUMS_NEED
  kNeedBias,   // the sum of g
  kNeedBoth,   // and the sum of g * (x - mean), for which x is read
  kNeedStore,  // and g itself, as dresidual
};
using Partial = Totals;

// Fewer bytes under way and more blocks were faster, except with ragged bits, where all lines of a batch share a
// barrier.
constexpr int kSumsBatch = SUMS_BITS == kRaggedBits ? kBatch<1> : kBatch<2>;

extern "C" __global__ void __launch_bounds__(kThreads, kReduceBlocks)
    jaxnorm_batch_norm_sums(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines,
                            Spans spans, Walk walk, Partials<Totals> partials, const __grid_constant__ BitsView view) {
  constexpr int kLines = kSumsBatch;
  constexpr bool kProduct = SUMS_NEED != kNeedBias;
  Part part = FindPart(lines, spans, false);
  const T* dy = arrays.dy.Of<T>(part.group);
  const T* x = kProduct ? arrays.x.Of<T>(part.group) : nullptr;
  const u8* bits = SUMS_BITS == kNoBits ? nullptr : arrays.bits.Of<u8>(part.group);
  Batch<kLines>(lines, part, part.begin, part.active && part.begin < part.full).Prefetch(dy, x);
  __shared__ Constants<1> constants;
  if constexpr (kProduct) {
    A mean[1][kCols];
    Channels(lines, part.column).Load({arrays.mean.Of<A>(part.group)}, mean);
    constants.Set(0, mean[0]);
  }
  __shared__ typename BitsMover<SUMS_BITS>::Shared bits_shared;
  const BitsMover<SUMS_BITS> mover(view, lines, part, bits_shared);

  Totals totals[kCols];
  int turn = 0;
  ForRuns<kLines>(lines, spans, walk, part, [&](auto k_lines, i64 line) {
    const Batch<k_lines> batch(lines, part, line, part.active);
    Cells dys[k_lines] = {};
    [[maybe_unused]] Cells xs[k_lines] = {};
    batch.Load(dy, dys);
    if constexpr (kProduct) batch.Load(x, xs);
    if constexpr (SUMS_BITS != kNoBits) {
      const u32 on = LoadBits<SUMS_BITS>(batch, view, part, line, turn++, bits, mover);
#pragma unroll
      for (int k = 0; k < k_lines; ++k) dys[k].Select(on >> kCols * k);
    }
    if constexpr (SUMS_NEED == kNeedStore) batch.Store(arrays.dresidual.Of<T>(part.group), dys);
#pragma unroll
    for (int q = 0; q < constants.kParts; ++q) {
      [[maybe_unused]] Vec<A, constants.kWidth> mean;
      if constexpr (kProduct) mean = constants.Get(0, q);
#pragma unroll
      for (int k = 0; k < k_lines; ++k) {
#pragma unroll
        for (int j = 0; j < constants.kWidth; ++j) {
          const int column = q * constants.kWidth + j;
          const A g = dys[k].GetAcc().v[column];
          totals[column].g += g;
          if constexpr (kProduct) totals[column].gx += g * (xs[k].GetAcc().v[column] - mean.v[j]);
        }
      }
    }
  });

  let_next_begin();
  __shared__ Entries<Totals> entries;
  entries.Store(totals, partials.shift);
  __syncthreads();
  entries.Merge(lines, part, partials);
}
