// batch_norm forward, statistics and result in one call. batch_norm_args.h states the exact results.
//
// Bytes per element of b bytes where the device holds x (batch_norm_resident.cuh): 2b, with a residual 3b, and 1/8 for the
// bits. Elsewhere the two passes, which read x twice.
#include "cuda/batch_norm_resident.cuh"

namespace jaxnorm {
namespace {

// Numbers of each channel. kCentre: what squares are taken from, about the mean of what the block has. kOrigin: what all
// blocks take means from, the channel's first element.
enum : int { kCentre, kMean, kFactor, kBias, kOrigin, kNumbers };

// Of a channel. As it is loaded: arithmetic would wait for it.
template <typename T>
struct Known {
  T first;
  float scale, bias;
};

template <typename T>
__device__ __forceinline__ Known<T> Load(const GroupArrays& arrays, uint32_t inner, uint32_t channel) {
  return {arrays.x.Of<T>(0)[channel * inner], arrays.scale ? arrays.scale.Of<float>(0)[channel] : 1,
          arrays.bias ? arrays.bias.Of<float>(0)[channel] : 0};
}

template <typename T, bool kResidual, Bits kBits, bool kAlike>
__global__ void __launch_bounds__(kResidentThreads, 1)
    BatchNormTrainKernel(const __grid_constant__ ResidentPlan plan, const __grid_constant__ GroupArrays arrays,
                         uint32_t inner, float epsilon, bool relu) {
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  const ResidentTile tile(plan);
  tile.Copy<T, 1>(plan, shared_bytes);
  const Resident<T, 1, kNumbers, kAlike> block(plan, tile, shared_bytes);
  // What the channels are given comes behind the copies, so it is looked at last.
  const auto keep = [&](uint32_t slot, const Known<T>& known) {
    block.Number(kOrigin, slot) = Origin(ToAcc(known.first));
    block.Number(kFactor, slot) = known.scale;
    block.Number(kBias, slot) = known.bias;
  };
  const uint32_t own_slot = (threadIdx.x < kWarp ? blockDim.x : 0) + threadIdx.x - kWarp;  // by other warps first
  Known<T> own;
  if (own_slot < plan.slots) own = Load<T>(arrays, inner, block.first_channel + own_slot);
#pragma unroll 1
  for (uint32_t slot = own_slot + blockDim.x; slot < plan.slots; slot += blockDim.x) {
    keep(slot, Load<T>(arrays, inner, block.first_channel + slot));
  }
  __syncthreads();

  // First the mean of what comes first, 1/16 or all: then sums of distances from it, and of their squares, which lose at
  // most four bits where one is subtracted from the other.
  const float inverse_held = 1 / static_cast<float>(block.held);
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    block.WaitForGroup(0);
    const auto centre = pass == 0 ? block.Firsts() : block.Numbers(kCentre);
    float sum[kCols] = {}, square[kCols] = {};
    uint32_t turn = 0;
#pragma unroll 1
    for (int group = 0; group < (pass == 0 ? 1 : kCopyGroups); ++group) {
      const uint32_t end = block.WaitForGroup(group);
#pragma unroll 1
      for (; turn < end; ++turn) {
        const auto values = block.Load(0, turn).GetAcc();
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const float d = values.v[j] - centre[j];
          sum[j] += d;
          square[j] += d * d;
        }
      }
    }
    if (pass == 0 && turn > 0) {
      const float weight = static_cast<float>(block.turns) * Reciprocal(static_cast<float>(turn));
#pragma unroll
      for (float& number : sum) number *= weight;
    }
    if (pass == 1 && own_slot < plan.slots) keep(own_slot, own);
    using Numbers = ColumnNumbers<kAlike>;
    block.Merge(Numbers::Sum(sum), Numbers::Sum(square), [&](uint32_t slot, const Sums& sums) {
      const float mean = sums.first * inverse_held;
      float& centre = block.Number(kCentre, slot);
      if (pass == 0) {
        centre = Origin(block.First(slot) + mean);
      } else {
        const float m2 = max(sums.second - sums.first * mean, 0.f) + (mean - mean);  // max drops NaN
        block.Write(slot, {(centre - block.Number(kOrigin, slot)) + mean, m2});
      }
    });
  }
  const T* const residual = kResidual ? arrays.residual.Of<T>(0) : nullptr;
  if constexpr (kResidual) {
    for (uint32_t turn = 0; turn < block.turns; ++turn) {
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(residual + (block.at + turn * block.stride))));
    }
  }

  block.Exchange(
      [&](auto sums) {
        const float shift = sums([](Sums post, float count) { return count * post.first; }) * plan.inverse_count;
        const float var = sums([&](Sums post, float count) {
          const float distance = post.first - shift;
          return post.second + count * distance * distance;
        });
        return Sums{shift, var * plan.inverse_count};
      },
      [&](uint32_t slot, Sums total) {
        const float mean = block.Number(kOrigin, slot) + total.first;
        block.Number(kMean, slot) = mean;
        block.Number(kFactor, slot) *= rsqrt(total.second + epsilon);
        if (block.sharer == 0) {
          arrays.mean.Of<float>(0)[block.first_channel + slot] = mean;
          arrays.var.Of<float>(0)[block.first_channel + slot] = total.second;
        }
      });
  const uint64_t left_before = threadIdx.x == 0 ? block.Leave() : 0;
  const auto mean = block.Numbers(kMean), factor = block.Numbers(kFactor), bias = block.Numbers(kBias);
  T* const y = arrays.y.Of<T>(0);
  const auto write = [&](uint32_t first, uint32_t end) {
    ForTurns<2>(first, end, [&](auto at_once, uint32_t turn) {
      Cells<T> cells[at_once];
      [[maybe_unused]] Cells<T> residuals[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if constexpr (kResidual) residuals[k].Load(residual + (block.at + (turn + k) * block.stride));
        cells[k] = block.Load(0, turn + k);
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        float values[kCols];
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          values[j] = (cells[k].GetAcc().v[j] - mean[j]) * factor[j] + bias[j];
          if constexpr (kResidual) values[j] += residuals[k].GetAcc().v[j];
        }
        const uint32_t at = block.at + (turn + k) * block.stride;
        const Vec<T, kCols> line = kBits != Bits::kNone || relu ? RoundRelu<T>(values) : RoundVec<T>(values);
        cells[k].Set(line);
        cells[k].Store(y + at);
        if constexpr (kBits != Bits::kNone) block.KeepBits(turn + k - first, PositiveBits(line));
      }
    });
  };
  if constexpr (kBits == Bits::kNone) {
    write(0, block.turns);
  } else {
    // At once, but for arrays that leave little room beside them.
#pragma unroll 1
    for (uint32_t first = 0; first * plan.rows < tile.lines; first += plan.kept_turns) {
      if (first > 0) __syncthreads();
      write(first, min(first + plan.kept_turns, block.turns));
      __syncthreads();
      block.WriteBits(tile, first, arrays.bits.Of<uint8_t>(0));
    }
  }
  block.ClearAfterLast(left_before);
}

// If the device can hold x; then *done is set.
template <typename T, bool kResidual, Bits kBits>
Error RunResident(const DeviceInfo& device, cudaStream_t stream, const BatchNormArgs& args, double epsilon, bool relu,
                  Scratch scratch, bool* done) {
  ResidentPlan plan;
  Grid grid;
  *done = PlanResident<T, 1, kNumbers, (kBits != Bits::kNone)>(device, args.shape, scratch, &plan, &grid);
  if (!*done) return Error::Success();
  return ForGroups(args, [&](const GroupArrays& arrays) {
    *done = AllAligned<T>(arrays.x, arrays.residual, arrays.y) && IsVecAligned(arrays.bits.data);
    if (!*done) return Error::Success();
    plan.arrays[0] = arrays.x.data;
    const auto launch = [&](auto alike) {
      return Launch<BatchNormTrainKernel<T, kResidual, kBits, alike>>(
          device, stream, grid, "BatchNormTrainKernel", plan, arrays, static_cast<uint32_t>(args.shape.inner),
          static_cast<float>(epsilon), relu);
    };
    return IsAlike(args.shape) ? launch(std::true_type()) : launch(std::false_type());
  });
}

}  // namespace

Error RunBatchNormTrain(cudaStream_t stream, const BatchNormArgs& args, double epsilon, bool relu, Scratch scratch) {
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  bool done = false;
  JAXNORM_RETURN_IF_ERROR(IfResident(args, [&]<typename T>(std::type_identity<T>, auto bits) {
    return args.residual ? RunResident<T, true, bits>(*device, stream, args, epsilon, relu, scratch, &done)
                         : RunResident<T, false, bits>(*device, stream, args, epsilon, relu, scratch, &done);
  }));
  if (done) return Error::Success();
  JAXNORM_RETURN_IF_ERROR(RunBatchNormStats(stream, args, scratch));
  return RunBatchNormFwd(stream, args, epsilon, relu);
}

}  // namespace jaxnorm
