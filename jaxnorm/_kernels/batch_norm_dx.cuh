// batch_norm's last pass backward: dx, and the residual's cotangent.
//
// Bytes per element of b bytes, each moved once: 3b, with the residual's cotangent 4b, and 1/8 for the bits. The pass
// before reads the same arrays from front to back. This pass goes from back to front, and finds the end of the arrays
// in the L2 cache.

// `n`: elements of a channel, if there is no array of counts.
template <int kCount, int kWidth>
__device__ __forceinline__ void SetConstants(const GroupArrays& arrays, const Lines& lines, const Part& part, A epsilon,
                                             A n, Constants<kCount, kWidth>& constants) {
  const auto numbers_of = [&](const GroupArray& array) { return array.Of<A>(part.group); };
  const Channels channels(lines, part.column);
  constexpr bool kTerms = kCount > 1;
  enum { kFactor, kRstd, kMean };
  A numbers[3][kCols];
#pragma unroll
  for (int j = 0; j < kCols; ++j) numbers[kFactor][j] = 1;
  channels.Load({numbers_of(arrays.scale), numbers_of(arrays.var), kTerms ? numbers_of(arrays.mean) : nullptr},
                numbers);
  SetFactor(epsilon, numbers[kRstd], numbers[kFactor]);
  constants.Set(0, numbers[kFactor]);
  if constexpr (kTerms) {
    constants.Set(1, numbers[kMean]);
    A slope[kCols] = {}, offset[kCols] = {};
    if (arrays.dbias) {
      A sums[2][kCols];
      channels.Load({numbers_of(arrays.dbias), numbers_of(arrays.dscale)}, sums);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        offset[j] = -numbers[kFactor][j] * sums[0][j];
        slope[j] = -numbers[kFactor][j] * numbers[kRstd][j] * sums[1][j];
      }
    }
    A values[1][kCols];
    const auto load = [&](const GroupArray& array) { channels.Load({numbers_of(array)}, values); };
    if (arrays.dmean) {
      load(arrays.dmean);
#pragma unroll
      for (int j = 0; j < kCols; ++j) offset[j] += values[0][j];
      load(arrays.dvar);
#pragma unroll
      for (int j = 0; j < kCols; ++j) slope[j] += 2 * values[0][j];
    }
    if (arrays.count) load(arrays.count);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      const A part = Reciprocal(arrays.count ? values[0][j] : n);
      offset[j] *= part;
      slope[j] *= part;
    }
    constants.Set(2, slope);
    constants.Set(3, offset);
  }
}

// Whether a multiprocessor has three blocks instead of two. With ragged bits, where the threads of a block wait for
// each other, three blocks save 7 to 10%. Constants are then read two at a time, so that registers suffice. Without
// ragged bits three blocks were 4% slower.
constexpr bool kCrowded = DX_BITS == kRaggedBits && DX_TERMS && !DX_MASKED && sizeof(T) < 8;

// Blocks of a multiprocessor at once.
constexpr int kDxBlocks = kCrowded ? 3 : 2;

// DX_TERMS: x and the sums of backward are there, so that dx is more than g times a factor.
extern "C" __global__ void __launch_bounds__(kThreads, DX_MASKED ? 1 : kDxBlocks)
    jaxnorm_batch_norm_dx(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                          const __grid_constant__ BitsView view, const __grid_constant__ MaskView mask, A epsilon,
                          A n) {
  constexpr int kLines = DX_MASKED ? 2 : kBatch<1>;
  Part part = FindPart(lines, spans, true);
  const T* dy = arrays.dy.Of<T>(part.group);
  const T* x = DX_TERMS ? arrays.x.Of<T>(part.group) : nullptr;
  T* dx = arrays.dx ? arrays.dx.Of<T>(part.group) : nullptr;
  T* dresidual = arrays.dresidual ? arrays.dresidual.Of<T>(part.group) : nullptr;
  const u8* bits = DX_BITS == kNoBits ? nullptr : arrays.bits.Of<u8>(part.group);
  Batch<kLines>(lines, part, part.begin, part.active && part.begin < part.full).Prefetch(dy, x);
  __shared__ typename BitsMover<DX_BITS>::Shared bits_shared;
  const BitsMover<DX_BITS> mover(view, lines, part, bits_shared);

  part.column = WaitForLaunchBefore(part.column);
  // dx = factor * g + slope * (x - mean) + offset
  __shared__ Constants<DX_TERMS ? 4 : 1, kCrowded ? 2 : kVecSize<A>> constants;
  if (dx) SetConstants(arrays, lines, part, epsilon, n, constants);
  const Counted counted(mask, part);
  int turn = 0;
  ForLines<kLines>(lines, part, [&](auto k_lines, i64 line) {
    const Batch<k_lines> batch(lines, part, line, part.active);
    Cells dys[k_lines] = {};
    [[maybe_unused]] Cells xs[k_lines] = {};
    batch.Load(dy, dys);
    if constexpr (DX_TERMS) batch.Load(x, xs);
    if constexpr (DX_BITS != kNoBits) {
      const u32 on = LoadBits<DX_BITS>(batch, view, part, line, turn++, bits, mover);
#pragma unroll
      for (int k = 0; k < k_lines; ++k) dys[k].Select(on >> kCols * k);
    }
    if (!part.active) return;
    if (dresidual) batch.Store(dresidual, dys);
    if (!dx) return;
    u32 counts[k_lines];
#pragma unroll
    for (int k = 0; k < k_lines; ++k) counts[k] = DX_MASKED ? counted.Line(line + k, batch.count) : 0;
#pragma unroll
    for (int q = 0; q < constants.kParts; ++q) {
      const auto factor = constants.Get(0, q);
      [[maybe_unused]] Vec<A, constants.kWidth> mean, slope, offset;
      if constexpr (DX_TERMS) {
        mean = constants.Get(1, q);
        slope = constants.Get(2, q);
        offset = constants.Get(3, q);
      }
#pragma unroll
      for (int k = 0; k < k_lines; ++k) {
        A values[constants.kWidth];
#pragma unroll
        for (int j = 0; j < constants.kWidth; ++j) {
          const int column = q * constants.kWidth + j;
          values[j] = factor.v[j] * dys[k].GetAcc().v[column];
          if constexpr (DX_TERMS) {
            const A drift = slope.v[j] * (xs[k].GetAcc().v[column] - mean.v[j]) + offset.v[j];
            if (!DX_MASKED || (counts[k] >> column & 1)) values[j] += drift;
          }
        }
        dys[k].SetSome(q, values);
      }
    }
    batch.Store(dx, dys);
  });
}
