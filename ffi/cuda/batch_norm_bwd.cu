// batch_norm backward, its sums and dx in one call. batch_norm_args.h states the exact results.
//
// Bytes per element of b bytes where the device holds x and dy (batch_norm_resident.cuh): 3b, with the residual's cotangent
// 4b, and 1/8 for the bits. Elsewhere the two passes, which read x, dy and the bits twice, or the residual's cotangent where
// they would read dy and the bits again.
#include <utility>

#include "cuda/batch_norm_resident.cuh"

namespace jaxnorm {
namespace {

// Numbers of each channel. kSlope: rstd until it is known.
enum : int { kMean, kFactor, kSlope, kOffset, kNumbers };

constexpr int kFirstBits = 16;  // of a thread's cells, that are asked for before the cells

// Of a channel. As it is loaded: arithmetic would wait for it.
struct Known {
  float mean, var, scale;
};

__device__ __forceinline__ Known Load(const GroupArrays& arrays, uint32_t channel) {
  return {arrays.mean.Of<float>(0)[channel], arrays.var.Of<float>(0)[channel],
          arrays.scale ? arrays.scale.Of<float>(0)[channel] : 1};
}

template <typename T, Bits kBits, bool kAlike>
__global__ void __launch_bounds__(kResidentThreads, 1)
    BatchNormBwdKernel(const __grid_constant__ ResidentPlan plan, const __grid_constant__ GroupArrays arrays,
                       float epsilon) {
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  const ResidentTile tile(plan);
  const Resident<T, 2, kNumbers, kAlike> block(plan, tile, shared_bytes);
  [[maybe_unused]] const uint8_t* const bits = kBits == Bits::kNone ? nullptr : arrays.bits.Of<uint8_t>(0);
  const auto load_bits = [&](uint32_t turn) { return bits[(block.at + turn * block.stride) / kCols]; };
  // Before the copies: behind them they would come last.
  Known known;
  if (threadIdx.x < plan.slots) known = Load(arrays, block.first_channel + threadIdx.x);
  [[maybe_unused]] uint8_t first_bits[kFirstBits];
  if constexpr (kBits != Bits::kNone) {
#pragma unroll
    for (int turn = 0; turn < kFirstBits; ++turn) {
      if (turn < block.turns) first_bits[turn] = load_bits(turn);
    }
  }
  tile.Copy<T, 2>(plan, shared_bytes);
#pragma unroll 1
  for (uint32_t slot = threadIdx.x; slot < plan.slots; slot += blockDim.x) {
    if (slot >= blockDim.x) known = Load(arrays, block.first_channel + slot);
    block.Number(kMean, slot) = known.mean;
    const float rstd = rsqrt(known.var + epsilon);
    block.Number(kFactor, slot) = rstd * known.scale;
    block.Number(kSlope, slot) = rstd;
  }
  if constexpr (kBits != Bits::kNone) {
#pragma unroll
    for (int turn = 0; turn < kFirstBits; ++turn) {
      if (turn < block.turns) StoreSharedByte(block.ByteAddress(turn), first_bits[turn]);
    }
#pragma unroll 1
    for (uint32_t turn = kFirstBits; turn < block.turns; ++turn) {
      StoreSharedByte(block.ByteAddress(turn), load_bits(turn));
    }
  }
  __syncthreads();

  const auto mean = block.Numbers(kMean);
  T* const dresidual = arrays.dresidual ? arrays.dresidual.Of<T>(0) : nullptr;
  float sum[kCols] = {}, product[kCols] = {};
  uint32_t turn = 0;
#pragma unroll 1
  for (int group = 0; group < kCopyGroups; ++group) {
    const uint32_t end = block.WaitForGroup(group);
#pragma unroll 1
    for (; turn < end; ++turn) {
      Cells<T> g = block.Load(0, turn);
      const auto values = block.Load(1, turn).GetAcc();
      if constexpr (kBits != Bits::kNone) {
        g.Select(LoadSharedByte(block.ByteAddress(turn)));
        block.Store(0, turn, g);
      }
      if (dresidual) g.Store(dresidual + (block.at + turn * block.stride));
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const float v = g.GetAcc().v[j];
        sum[j] += v;
        product[j] += v * (values.v[j] - mean[j]);
      }
    }
  }
  using Numbers = ColumnNumbers<kAlike>;
  block.Merge(Numbers::Sum(sum), Numbers::Sum(product),
              [&](uint32_t slot, const Sums& sums) { block.Write(slot, sums); });

  block.Exchange([](auto sums) { return sums([](Sums post, float) { return post; }); },
                 [&](uint32_t slot, Sums total) {
                   const float factor = block.Number(kFactor, slot), rstd = block.Number(kSlope, slot);
                   const float dscale = total.second * rstd;
                   block.Number(kSlope, slot) = -factor * rstd * dscale * plan.inverse_count;
                   block.Number(kOffset, slot) = -factor * total.first * plan.inverse_count;
                   if (block.sharer == 0) {
                     arrays.dbias.Of<float>(0)[block.first_channel + slot] = total.first;
                     arrays.dscale.Of<float>(0)[block.first_channel + slot] = dscale;
                   }
                 });
  const uint64_t left_before = threadIdx.x == 0 ? block.Leave() : 0;
  const auto factor = block.Numbers(kFactor), slope = block.Numbers(kSlope), offset = block.Numbers(kOffset);
  T* const dx = arrays.dx.Of<T>(0);
  ForTurns<2>(0, block.turns, [&](auto at_once, uint32_t turn) {
    Cells<T> g[at_once], v[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      g[k] = block.Load(0, turn + k);
      v[k] = block.Load(1, turn + k);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      float values[kCols];
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const float drift = slope[j] * (v[k].GetAcc().v[j] - mean[j]) + offset[j];
        values[j] = factor[j] * g[k].GetAcc().v[j] + drift;
      }
      g[k].Set(RoundVec<T>(values));
      g[k].Store(dx + (block.at + (turn + k) * block.stride));
    }
  });
  block.ClearAfterLast(left_before);
}

// If the device can hold x and dy; then *done is set.
template <typename T, Bits kBits>
Error RunResident(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, double epsilon,
                  int64_t replicas, Scratch scratch, bool* done) {
  ResidentPlan plan;
  Grid grid;
  *done = PlanResident<T, 2, kNumbers, (kBits != Bits::kNone)>(device, args.shape, scratch, &plan, &grid);
  if (!*done) return Error::Success();
  plan.inverse_count /= static_cast<float>(replicas);
  return ForGroups(args, [&](const GroupArrays& arrays) {
    *done = AllAligned<T>(arrays.dy, arrays.x, arrays.dx, arrays.dresidual);
    if (!*done) return Error::Success();
    plan.arrays[0] = arrays.dy.data;
    plan.arrays[1] = arrays.x.data;
    const auto launch = [&](auto alike) {
      return Launch<BatchNormBwdKernel<T, kBits, alike>>(device, stream, grid, "BatchNormBwdKernel", plan, arrays,
                                                         static_cast<float>(epsilon));
    };
    return IsAlike(args.shape) ? launch(std::true_type()) : launch(std::false_type());
  });
}

}  // namespace

Error RunBatchNormBwd(cudaStream_t stream, const BatchNormArgs& args, double epsilon, int64_t replicas,
                      Scratch scratch) {
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  bool done = false;
  JAXNORM_RETURN_IF_ERROR(IfResident(args, [&]<typename T>(std::type_identity<T>, auto bits) {
    return RunResident<T, bits>(*device, stream, args, epsilon, replicas, scratch, &done);
  }));
  if (done) return Error::Success();
  // The residual's cotangent is g: written by the first pass, it is what the second one reads, without bits. With ragged
  // bits, for which the threads of a block wait for each other, the first pass has no time for that.
  BatchNormArgs sums = args, dx = args;
  if (BitsOf(args) == Bits::kRagged) {
    sums.dresidual = {};
  } else if (args.dresidual) {
    dx.dy = std::exchange(dx.dresidual, {});
    dx.bits = {};
  }
  JAXNORM_RETURN_IF_ERROR(RunBatchNormSums(stream, sums, epsilon, scratch));
  return RunBatchNormDx(stream, dx, epsilon, replicas);
}

}  // namespace jaxnorm
