// batch_norm's second pass: the normalised result with its residual, its ReLU and the ReLU's bits. batch_norm_args.h
// states the exact results, batch_norm.cuh how an array is walked.
//
// Bytes per element of b bytes, each moved once: 2b, with a residual 3b, and 1/8 for the bits. The pass before has read x
// from front to back, so this one goes from back to front and finds the last of it in the L2 cache.
#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda/batch_norm.cuh"

namespace jaxnorm {
namespace {

// Lines of one step. With ragged bits as many as a word has bits of: threads wait for each other once for all of them.
template <typename T, bool kResidual, Bits kBits>
constexpr int kStep = kBits == Bits::kRagged ? RaggedBits<T>::kMostLines : kBatch<T, 1 + kResidual>;

// Of a multiprocessor, at once.
template <typename T>
constexpr int kBlocks = sizeof(T) == 2 ? 3 : 2;

template <typename T, bool kResidual, Bits kBits>
__global__ void __launch_bounds__(kBatchNormThreads<T>, kBlocks<T>)
    BatchNormFwdKernel(const __grid_constant__ GroupArrays arrays, const __grid_constant__ Lines lines, Spans spans,
                       const __grid_constant__ BitsView view, AccT<T> epsilon, bool relu) {
  using A = AccT<T>;
  constexpr int kLines = kBatch<T, 1 + kResidual>;
  Part part = FindPart(lines, spans, true);
  const T* x = arrays.x.Of<T>(part.group);
  const T* residual = kResidual ? arrays.residual.Of<T>(part.group) : nullptr;
  T* y = arrays.y.Of<T>(part.group);
  uint8_t* bits = kBits == Bits::kNone ? nullptr : arrays.bits.Of<uint8_t>(part.group);
  // With ragged bits, the thread after the tile finds those of the next 8 columns. (No byte reaches into the next line.)
  const bool beyond = kBits == Bits::kRagged && part.place == part.width && part.tile + 1 < lines.tiles;
  const bool reads = part.active || beyond;
  Batch<kLines>(lines, part, part.begin, reads && part.begin < part.full).Prefetch(x, residual);

  part.column = WaitForLaunchBefore(part.column);
  __shared__ Constants<T, 3> constants;
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
  __shared__ typename BitsMover<T, kBits>::Shared bits_shared;
  const BitsMover<T, kBits> mover(view, lines, part, bits_shared);
  int turn = 0;
  ForLines<kStep<T, kResidual, kBits>>(lines, part, [&](auto step, int64_t first) {
    constexpr int k_lines = std::min<int>(step, kLines);
    uint32_t on = 0;
#pragma unroll 1
    for (int i = 0; i < step; i += k_lines) {
      Batch<k_lines> batch(lines, part, first + i, reads);
      Cells<T> cells[k_lines] = {};
      [[maybe_unused]] Cells<T> residuals[k_lines] = {};
      batch.Load(x, cells);
      if constexpr (kResidual) batch.Load(residual, residuals);
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
            if constexpr (kResidual) values[j] += residuals[k].GetAcc().v[column];
          }
          cells[k].SetSome(q, values);
        }
      }
      if (kBits != Bits::kNone || relu) {
#pragma unroll
        for (int k = 0; k < k_lines; ++k) {
          const Vec<T, kCols> y_line = cells[k].Get();
          on |= PositiveBits(y_line) << kCols * (i + k);
          cells[k].Set(Relu(y_line));
        }
      }
      if (part.active) batch.Store(y, cells);
      if constexpr (kBits == Bits::kFlat) StoreFlatBits(batch, on, bits);
    }
    if constexpr (kBits == Bits::kRagged) mover.template Store<step>(view, part, first, turn++, on, bits);
  });
}

// ---- Launch ----

// Columns of a tile at most. With ragged bits there is a thread more, and so few columns that a thread moves one byte, if that
// leaves no more than an eighth of the threads idle: a second round for some of them takes longer.
template <typename T, Bits kBits>
int64_t TileColumns(const BatchNormShape& shape) {
  constexpr int64_t kThreads = kBatchNormThreads<T>;
  if (kBits != Bits::kRagged) return kThreads * kCols;
  const int64_t most = (kThreads - 1) * kCols, one_round = kThreads * shape.last / shape.bits_cols() / kCols * kCols;
  return one_round * 8 < kThreads * kCols * 7 ? most : std::min(most, one_round);
}

template <typename T, bool kResidual, Bits kBits>
Error RunFwd(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, double epsilon, bool relu) {
  constexpr int kBeyond = kBits == Bits::kRagged;  // threads
  constexpr int kStepLines = kStep<T, kResidual, kBits>, kLeast = 2 * kBatch<T, 1 + kResidual>;
  const Lines lines = MakeLines(args.shape, TileColumns<T, kBits>(args.shape));
  return ForGroups(args, [&](const GroupArrays& arrays) {
    const Spans spans = MakeSpans(lines, arrays.groups, kBlocks<T> * device.sms, kElementwiseWaves, kStepLines,
                                  kLeast / kStepLines, AllAligned<T>(arrays.x, arrays.residual, arrays.y));
    const Grid grid{.blocks = spans.blocks() * arrays.groups,
                    .threads = (lines.tile / kCols + kBeyond + 31) / 32 * 32,
                    .early = true};
    return Launch<BatchNormFwdKernel<T, kResidual, kBits>>(device, stream, grid, "BatchNormFwdKernel", arrays, lines,
                                                           spans, BitsView(args.shape, lines),
                                                           static_cast<AccT<T>>(epsilon), relu);
  });
}

}  // namespace

Error RunBatchNormFwd(cudaStream_t stream, const BatchNormArgs& args, double epsilon, bool relu) {
  if (args.shape.groups * args.shape.group_size() == 0) return Error::Success();
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) {
    return DispatchBits<T>(args, [&](auto bits) {
      return args.residual ? RunFwd<T, true, bits>(*device, stream, args, epsilon, relu)
                           : RunFwd<T, false, bits>(*device, stream, args, epsilon, relu);
    });
  });
}

}  // namespace jaxnorm
