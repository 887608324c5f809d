// The sums of batch_norm's backward: 2b + 1/8 bytes of each element of b bytes, with the ReLU's bits and x.
//
// Where dx follows in the same call and the residual has a cotangent, that is g, and written here: the next pass then reads
// no bits.
#include "cuda/batch_norm_reduce.cuh"

namespace jaxnorm {
namespace {

constexpr int kSumsRuns = 4;  // where L2 keeps the end of them

enum class Need {
  kBias,   // the sum of g
  kBoth,   // and that of g * (x - mean), for which x is read
  kStore,  // and g itself, as dresidual
};

// Fewer bytes under way and more blocks were faster, but for ragged bits, of which all lines of a batch share a barrier.
template <typename T, Bits kBits>
constexpr int kSumsBatch = kBits == Bits::kRagged ? kBatch<T, 1> : kBatch<T, 2>;

template <typename T, Bits kBits, Need kNeed>
__global__ void __launch_bounds__(kBatchNormThreads<T>, kReduceBlocks)
    BatchNormSumsKernel(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                        Walk walk, Partials<Totals<AccT<T>>> partials, const __grid_constant__ BitsView view) {
  using A = AccT<T>;
  constexpr int kLines = kSumsBatch<T, kBits>;
  constexpr bool kProduct = kNeed != Need::kBias;
  Part part = FindPart(lines, spans, false);
  const T* dy = arrays.dy.Of<T>(part.group);
  const T* x = kProduct ? arrays.x.Of<T>(part.group) : nullptr;
  const uint8_t* bits = kBits == Bits::kNone ? nullptr : arrays.bits.Of<uint8_t>(part.group);
  Batch<kLines>(lines, part, part.begin, part.active && part.begin < part.full).Prefetch(dy, x);
  __shared__ Constants<T, 1> constants;
  if constexpr (kProduct) {
    A mean[1][kCols];
    Channels(lines, part.column).Load({arrays.mean.Of<A>(part.group)}, mean);
    constants.Set(0, mean[0]);
  }
  __shared__ typename BitsMover<T, kBits>::Shared bits_shared;
  const BitsMover<T, kBits> mover(view, lines, part, bits_shared);

  Totals<A> totals[kCols];
  int turn = 0;
  ForRuns<kLines>(lines, spans, walk, part, [&](auto k_lines, int64_t line) {
    const Batch<k_lines> batch(lines, part, line, part.active);
    Cells<T> dys[k_lines] = {};
    [[maybe_unused]] Cells<T> xs[k_lines] = {};
    batch.Load(dy, dys);
    if constexpr (kProduct) batch.Load(x, xs);
    if constexpr (kBits != Bits::kNone) {
      const uint32_t on = LoadBits<kBits>(batch, view, part, line, turn++, bits, mover);
#pragma unroll
      for (int k = 0; k < k_lines; ++k) dys[k].Select(on >> kCols * k);
    }
    if constexpr (kNeed == Need::kStore) batch.Store(arrays.dresidual.Of<T>(part.group), dys);
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

  LetNextBegin();
  __shared__ Entries<T, Totals<A>> entries;
  entries.Store(totals, partials.shift);
  __syncthreads();
  entries.Merge(lines, part, partials);
}

template <typename T, Bits kBits, Need kNeed>
Error RunSums(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, double epsilon,
              Scratch scratch) {
  const Lines lines = ReduceLines<T>(args.shape, kBits != Bits::kRagged);
  const int touched = kNeed == Need::kBias ? 1 : kNeed == Need::kBoth ? 2 : 3;
  const int64_t bytes = args.shape.groups * lines.size * sizeof(T) * touched;
  return ForGroups(args, [&](const GroupArrays& arrays) {
    return Reduce<T, Totals<AccT<T>>>(
        device, stream, arrays, lines, kSumsBatch<T, kBits>, IsKeptByL2(device, bytes) ? kSumsRuns : 1,
        AllAligned<T>(arrays.dy, arrays.x, arrays.dresidual), epsilon, scratch,
        [&](const Grid& grid, const Spans& spans, const Walk& walk, const auto& partials) {
          return Launch<BatchNormSumsKernel<T, kBits, kNeed>>(device, stream, grid, "BatchNormSumsKernel", arrays,
                                                              lines, spans, walk, partials,
                                                              BitsView(args.shape, lines));
        });
  });
}

}  // namespace

Error RunBatchNormSums(cudaStream_t stream, const BatchNormArgs& args, double epsilon, Scratch scratch) {
  if (args.shape.groups * args.shape.channels == 0) return Error::Success();
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) {
    return DispatchBits<T>(args, [&](auto bits) {
      const auto run = [&]<Need kNeed>() { return RunSums<T, bits, kNeed>(*device, stream, args, epsilon, scratch); };
      if constexpr (bits != Bits::kRagged) {
        if (args.dresidual) return run.template operator()<Need::kStore>();
      }
      if (args.dscale) return run.template operator()<Need::kBoth>();
      return run.template operator()<Need::kBias>();
    });
  });
}

}  // namespace jaxnorm
