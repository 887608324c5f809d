// batch_norm's last pass backward: dx, and the residual's cotangent. batch_norm_args.h states the exact results,
// batch_norm.cuh how an array is walked.
//
// Bytes per element of b bytes, each moved once: 3b, with the residual's cotangent 4b, and 1/8 for the bits. The pass
// before has read the same from front to back, so this one goes from back to front and finds the last of it in the L2
// cache.
#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda/batch_norm.cuh"

namespace jaxnorm {
namespace {

// `n`: elements of a channel, if they are not counted.
template <typename T, int kCount, int kWidth>
__device__ __forceinline__ void SetConstants(const GroupArrays& arrays, const Lines& lines, const Part& part,
                                             AccT<T> epsilon, AccT<T> n, Constants<T, kCount, kWidth>& constants) {
  using A = AccT<T>;
  const auto of = [&](const GroupArray& array) { return array.Of<A>(part.group); };
  const Channels channels(lines, part.column);
  constexpr bool kTerms = kCount > 1;
  enum { kFactor, kRstd, kMean };
  A numbers[3][kCols];
#pragma unroll
  for (int j = 0; j < kCols; ++j) numbers[kFactor][j] = 1;
  channels.Load({of(arrays.scale), of(arrays.var), kTerms ? of(arrays.mean) : nullptr}, numbers);
  SetFactor(epsilon, numbers[kRstd], numbers[kFactor]);
  constants.Set(0, numbers[kFactor]);
  if constexpr (kTerms) {
    constants.Set(1, numbers[kMean]);
    A slope[kCols] = {}, offset[kCols] = {};
    if (arrays.dbias) {
      A sums[2][kCols];
      channels.Load({of(arrays.dbias), of(arrays.dscale)}, sums);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        offset[j] = -numbers[kFactor][j] * sums[0][j];
        slope[j] = -numbers[kFactor][j] * numbers[kRstd][j] * sums[1][j];
      }
    }
    A values[1][kCols];
    const auto load = [&](const GroupArray& array) { channels.Load({of(array)}, values); };
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

// Whether there are as many blocks as can be. With ragged bits, where the threads of a block wait for each other, that saves
// 7 to 10%; so that registers suffice, constants are read two at a time. Without them it was 4% slower.
template <typename T, Bits kBits, bool kTerms, bool kMasked>
constexpr bool kCrowded = kBits == Bits::kRagged && kTerms && !kMasked && sizeof(T) < 8;

// Of a multiprocessor, at once.
template <typename T, Bits kBits, bool kTerms, bool kMasked>
constexpr int kDxBlocks = kCrowded<T, kBits, kTerms, kMasked> ? 3 : 2;

// kTerms: x and the sums of backward are there, so that dx is more than g times a factor.
template <typename T, Bits kBits, bool kTerms, bool kMasked>
__global__ void __launch_bounds__(kBatchNormThreads<T>, kMasked ? 1 : kDxBlocks<T, kBits, kTerms, kMasked>)
    BatchNormDxKernel(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                      const __grid_constant__ BitsView view, const __grid_constant__ MaskView mask, AccT<T> epsilon,
                      AccT<T> n) {
  using A = AccT<T>;
  constexpr int kLines = kMasked ? 2 : kBatch<T, 1>;
  Part part = FindPart(lines, spans, true);
  const T* dy = arrays.dy.Of<T>(part.group);
  const T* x = kTerms ? arrays.x.Of<T>(part.group) : nullptr;
  T* dx = arrays.dx ? arrays.dx.Of<T>(part.group) : nullptr;
  T* dresidual = arrays.dresidual ? arrays.dresidual.Of<T>(part.group) : nullptr;
  const uint8_t* bits = kBits == Bits::kNone ? nullptr : arrays.bits.Of<uint8_t>(part.group);
  Batch<kLines>(lines, part, part.begin, part.active && part.begin < part.full).Prefetch(dy, x);
  __shared__ typename BitsMover<T, kBits>::Shared bits_shared;
  const BitsMover<T, kBits> mover(view, lines, part, bits_shared);

  part.column = WaitForLaunchBefore(part.column);
  // dx = factor * g + slope * (x - mean) + offset
  __shared__ Constants<T, kTerms ? 4 : 1, kCrowded<T, kBits, kTerms, kMasked> ? 2 : kVecSize<A>> constants;
  if (dx) SetConstants(arrays, lines, part, epsilon, n, constants);
  const Counted counted(mask, part);
  int turn = 0;
  ForLines<kLines>(lines, part, [&](auto k_lines, int64_t line) {
    const Batch<k_lines> batch(lines, part, line, part.active);
    Cells<T> dys[k_lines] = {};
    [[maybe_unused]] Cells<T> xs[k_lines] = {};
    batch.Load(dy, dys);
    if constexpr (kTerms) batch.Load(x, xs);
    if constexpr (kBits != Bits::kNone) {
      const uint32_t on = LoadBits<kBits>(batch, view, part, line, turn++, bits, mover);
#pragma unroll
      for (int k = 0; k < k_lines; ++k) dys[k].Select(on >> kCols * k);
    }
    if (!part.active) return;
    if (dresidual) batch.Store(dresidual, dys);
    if (!dx) return;
    uint32_t counts[k_lines];
#pragma unroll
    for (int k = 0; k < k_lines; ++k) counts[k] = kMasked ? counted.Line(line + k, batch.count) : 0;
#pragma unroll
    for (int q = 0; q < constants.kParts; ++q) {
      const auto factor = constants.Get(0, q);
      [[maybe_unused]] Vec<A, constants.kWidth> mean, slope, offset;
      if constexpr (kTerms) {
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
          if constexpr (kTerms) {
            const A drift = slope.v[j] * (xs[k].GetAcc().v[column] - mean.v[j]) + offset.v[j];
            if (!kMasked || (counts[k] >> column & 1)) values[j] += drift;
          }
        }
        dys[k].SetSome(q, values);
      }
    }
    batch.Store(dx, dys);
  });
}

// ---- Launch ----

template <typename T, Bits kBits, bool kTerms, bool kMasked>
Error RunDx(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, double epsilon,
            int64_t replicas) {
  const Lines lines = MakeLines(args.shape, MostColumns<T>(args.shape));
  const double n = static_cast<double>(args.shape.reduced()) * static_cast<double>(replicas);
  return ForGroups(args, [&](const GroupArrays& arrays) {
    const Spans spans =
        MakeSpans(lines, arrays.groups, kDxBlocks<T, kBits, kTerms, kMasked> * device.sms, kElementwiseWaves,
                  kBatch<T, 1>, 2, AllAligned<T>(arrays.dy, arrays.x, arrays.dx, arrays.dresidual));
    const Grid grid{.blocks = spans.blocks() * arrays.groups, .threads = ThreadsFor(lines), .early = true};
    return Launch<BatchNormDxKernel<T, kBits, kTerms, kMasked>>(
        device, stream, grid, "BatchNormDxKernel", arrays, lines, spans, BitsView(args.shape, lines),
        MaskView(args, lines, arrays.first_group), static_cast<AccT<T>>(epsilon), static_cast<AccT<T>>(n));
  });
}

}  // namespace

Error RunBatchNormDx(cudaStream_t stream, const BatchNormArgs& args, double epsilon, int64_t replicas) {
  if (args.shape.groups * args.shape.group_size() == 0) return Error::Success();
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) {
    return DispatchBits<T>(args, [&](auto bits) {
      if (!args.dx || !(args.dbias || args.dmean)) {
        return RunDx<T, bits, false, false>(*device, stream, args, epsilon, replicas);
      }
      if constexpr (bits != Bits::kFlat) {
        if (args.mask) return RunDx<T, bits, true, true>(*device, stream, args, epsilon, replicas);
      }
      return RunDx<T, bits, true, false>(*device, stream, args, epsilon, replicas);
    });
  });
}

}  // namespace jaxnorm
