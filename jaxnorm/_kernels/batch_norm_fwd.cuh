// batch_norm's second pass: the normalised result with its residual, its ReLU and the ReLU's bits.
//
// Bytes per element of b bytes, each moved once: 2b, with a residual 3b, and 1/8 for the bits. The pass before reads x
// from front to back. This pass goes from back to front, and finds the end of x in the L2 cache.

// Lines of one step. With ragged bits, a step has as many lines as a word has room for: threads wait once for all of
// them.
constexpr int kFwdLines = kBatch<1 + FWD_RESIDUAL>;
constexpr int kFwdStep = FWD_BITS == kRaggedBits ? RaggedBits::kMostLines : kFwdLines;

// Blocks of a multiprocessor at once.
constexpr int kFwdBlocks = sizeof(T) == 2 ? 3 : 2;

extern "C" __global__ void __launch_bounds__(kThreads, kFwdBlocks)
    jaxnorm_batch_norm_fwd(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                           const __grid_constant__ BitsView view, A epsilon, int relu) {
  Part part = FindPart(lines, spans, true);
  const T* x = arrays.x.Of<T>(part.group);
  const T* residual = FWD_RESIDUAL ? arrays.residual.Of<T>(part.group) : nullptr;
  T* y = arrays.y.Of<T>(part.group);
  u8* bits = FWD_BITS == kNoBits ? nullptr : arrays.bits.Of<u8>(part.group);
  // With ragged bits, the thread behind the tile computes the bits of the next 8 columns. (No byte reaches into the
  // next line.)
  const bool beyond = FWD_BITS == kRaggedBits && part.place == part.width && part.tile + 1 < lines.tiles;
  const bool reads = part.active || beyond;
  Batch<kFwdLines>(lines, part, part.begin, reads && part.begin < part.full).Prefetch(x, residual);

  part.column = WaitForLaunchBefore(part.column);
  __shared__ Constants<3> constants;
  {
    enum { kMean, kFactor, kBias, kRstd, kNumbers };
    const A* const from[kNumbers] = {arrays.mean.Of<A>(part.group), arrays.scale.Of<A>(part.group),
                                     arrays.bias.Of<A>(part.group), arrays.var.Of<A>(part.group)};
    A numbers[kNumbers][kCols];
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      numbers[kFactor][j] = 1;
      numbers[kBias][j] = 0;
    }
    Channels(lines, part.column).Load(from, numbers);
    SetFactor(epsilon, numbers[kRstd], numbers[kFactor]);
#pragma unroll
    for (int i = kMean; i <= kBias; ++i) constants.Set(i, numbers[i]);
  }
  __shared__ typename BitsMover<FWD_BITS>::Shared bits_shared;
  const BitsMover<FWD_BITS> mover(view, lines, part, bits_shared);
  int turn = 0;
  ForLines<kFwdStep>(lines, part, [&](auto step, i64 first) {
    constexpr int k_lines = step < kFwdLines ? step : kFwdLines;
    u32 on = 0;
#pragma unroll 1
    for (int i = 0; i < step; i += k_lines) {
      Batch<k_lines> batch(lines, part, first + i, reads);
      Cells cells[k_lines] = {};
      [[maybe_unused]] Cells residuals[k_lines] = {};
      batch.Load(x, cells);
      if constexpr (FWD_RESIDUAL) batch.Load(residual, residuals);
#pragma unroll
      for (int q = 0; q < constants.kParts; ++q) {
        const auto mean = constants.Get(0, q), factor = constants.Get(1, q), bias = constants.Get(2, q);
#pragma unroll
        for (int k = 0; k < k_lines; ++k) {
          A values[constants.kWidth];
#pragma unroll
          for (int j = 0; j < constants.kWidth; ++j) {
            const int column = q * constants.kWidth + j;
            values[j] = (cells[k].GetAcc().v[column] - mean.v[j]) * factor.v[j] + bias.v[j];
            if constexpr (FWD_RESIDUAL) values[j] += residuals[k].GetAcc().v[column];
          }
          cells[k].SetSome(q, values);
        }
      }
      if (FWD_BITS != kNoBits || relu) {
#pragma unroll
        for (int k = 0; k < k_lines; ++k) {
          const Vec<T, kCols> y_line = cells[k].Get();
          on |= PositiveBits(y_line) << kCols * (i + k);
          cells[k].Set(Relu(y_line));
        }
      }
      if (part.active) batch.Store(y, cells);
      if constexpr (FWD_BITS == kFlatBits) StoreFlatBits(batch, on, bits);
    }
    if constexpr (FWD_BITS == kRaggedBits) mover.template Store<step>(view, part, first, turn++, on, bits);
  });
}
