// layer_norm and rms_norm, forward, of 16-bit rows of 128 columns, as heads of attention have them, where the device can
// have all of them on chip at once but norm_fwd_short.cu cannot in its registers: a warp copies its rows to shared memory
// before anything else, and works on them in steps, each when its rows are there. So all blocks run in one wave.
//
// For layer_norm that is worth something only with fewer instructions than the sums of a row and its statistics take
// otherwise. So tensor cores add up. mma.m16n8k16 multiplies a matrix of 16 x 16 by one of 16 x 8 and adds the product to
// one of 16 x 8 in float32; products of two 16-bit numbers are exact there, and sums cut off instead of rounded. Four
// neighbouring lanes, a quad, hold two rows of the first matrix. A sum does not ask for the order of its terms, so a row
// of it is whatever the quad has, as it was loaded. With ones for the second matrix, every column of the result has the
// sums of the rows. With quad i's elements for its column i, the diagonal has the sums of their squares. Three
// instructions replace 8 conversions, 8 additions and 8 multiplications, and add up over a quad, too.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kSlots = 16;  // of a row, and lanes that it has
inline constexpr int kWarps = 4, kMaxSteps = 3;
inline constexpr int kBlocks = 6;                  // of a multiprocessor
inline constexpr int kQuad = 4;                    // lanes, and rows of a thread in a step
inline constexpr int kGroups = kWarp / kSlots;     // of lanes that have rows of their own
inline constexpr int kStepRows = kQuad * kGroups;  // of a warp
// That norm_fwd_short.cu has at once on a multiprocessor, in 16 blocks, which their registers allow.
inline constexpr int kShortRows = 16 * (kShortThreads / kSlots) * ShortRows(kSlots);

// result += first * second. Lane 4q + t has of `first` columns 2t, 2t + 1 of rows q (a0) and q + 8 (a1), and columns 8
// further (a2, a3); of `second` the same rows (b0, b1) of column q; of the result columns 2t, 2t + 1 of rows q and q + 8.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&result)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
#define JAXNORM_MMA(type)                                                             \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(result[0]), "+f"(result[1]), "+f"(result[2]), "+f"(result[3])   \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __half>) {
    JAXNORM_MMA("f16");
  } else {
    JAXNORM_MMA("bf16");
  }
#undef JAXNORM_MMA
}

// What the quad has of a row, in each of its lanes.
template <typename T>
__device__ __forceinline__ float QuadSum(const Words<4>& slot) {
  const auto ones = std::bit_cast<uint32_t>(Vec<T, 2>{FromAcc<T>(1.0f), FromAcc<T>(1.0f)});
  float result[4] = {};
  MultiplyAdd<T>(result, slot.w[0], slot.w[1], slot.w[2], slot.w[3], ones, ones);
  return result[0] + result[2];
}
template <typename T>
__device__ __forceinline__ float QuadSquares(const Words<4>& slot) {
  // Rows q + 8 in an instruction of their own, in which they change places with rows q: so they are on the same diagonal.
  float result[4] = {};
  MultiplyAdd<T>(result, slot.w[0], slot.w[1], slot.w[2], slot.w[3], slot.w[0], slot.w[2]);
  MultiplyAdd<T>(result, slot.w[1], slot.w[0], slot.w[3], slot.w[2], slot.w[1], slot.w[3]);
  const int quad = threadIdx.x % kWarp / kQuad;
  return __shfl_sync(kAllLanes, quad % 2 == 0 ? result[0] : result[1], quad / 2, kQuad);
}

struct RowMoments {
  float mean, squares;  // of the deviations from it, or without it of the elements
  bool lost;            // some row of the warp has a mean that is far from 0 next to its deviations
};

// Of kQuad rows, of which kSlots lanes have a slot each. Lane i gets those of row i % kQuad.
template <bool kCenter, typename T>
__device__ __forceinline__ RowMoments MomentsOfRows(const Words<4> (&rows)[kQuad]) {
  constexpr int kVec = kVecSize<T>;
  // The sum of squared deviations is that of squares less sum * mean. Where so much is subtracted that more than about
  // four of its 24 bits are lost, and where it is no number, deviations are computed and added up.
  constexpr float kMostLost = 16;
  const int lane = threadIdx.x % kSlots, own = lane % kQuad;
  float sum = 0, squares = 0;
#pragma unroll
  for (int r = 0; r < kQuad; ++r) {
    if (const float of_quad = kCenter ? QuadSum<T>(rows[r]) : 0; own == r) sum = of_quad;
    if (const float of_quad = QuadSquares<T>(rows[r]); own == r) squares = of_quad;
  }
#pragma unroll
  for (int offset = kQuad; offset < kSlots; offset *= 2) {
    if (kCenter) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    squares += __shfl_xor_sync(kAllLanes, squares, offset);
  }
  if (!kCenter) return {0, squares, false};
  const float mean = sum * (1.0f / (kSlots * kVec));
  squares = fma(-sum, mean, squares);
  const bool lost = !(kMostLost * squares >= sum * mean), any_lost = __any_sync(kAllLanes, lost);
  if (any_lost) {
    float sums[kQuad] = {};
#pragma unroll
    for (int r = 0; r < kQuad; ++r) {
      const float mean_of_row = __shfl_sync(kAllLanes, mean, r, kSlots);
      float values[kVec];
      ToAccAll(std::bit_cast<Vec<T, kVec>>(rows[r]), values);
#pragma unroll
      for (float value : values) sums[r] = fma(value - mean_of_row, value - mean_of_row, sums[r]);
    }
    const float of_own = __shfl_sync(kAllLanes, SumOverLanes<kSlots>(sums, lane), own * (kSlots / kQuad), kSlots);
    if (lost) squares = of_own;
  }
  return {mean, squares, any_lost};
}

template <typename Op, bool kCenter>
__global__ void __launch_bounds__(kWarps* kWarp) NormFwdAtOnceKernel(int steps, const __grid_constant__ Op op) {
#if __CUDA_ARCH__ >= 900
  using T = typename Op::T;
  using V = Vec<T, Op::kVec>;
  constexpr int kVec = Op::kVec, kCols = kSlots * kVec;
  constexpr uint32_t kRowBytes = kCols * sizeof(T), kStepBytes = kStepRows * kRowBytes, kBarrier = sizeof(uint64_t);
  constexpr auto variant = std::bool_constant<kCenter>();
  __shared__ __align__(kLineBytes) uint4 staged[kWarps][kMaxSteps * kStepBytes / kVecBytes];
  __shared__ uint64_t copied[kWarps][kMaxSteps];
  const int warp = WarpIndex(), warp_lane = threadIdx.x % kWarp;
  const int lane = warp_lane % kSlots, group = warp_lane / kSlots;
  const int64_t first_row = (int64_t{blockIdx.x} * kWarps + warp) * (steps * kStepRows);
  const int rows = static_cast<int>(max(min(op.rows - first_row, static_cast<int64_t>(steps * kStepRows)), int64_t{0}));
  const uint32_t stages = SharedAddress(staged[warp]), barriers = SharedAddress(copied[warp]);
  if (ElectLane()) {
#pragma unroll
    for (int step = 0; step < kMaxSteps; ++step) InitBarrier(&copied[warp][step], 1);
    PublishBarriers();
#pragma unroll
    for (int step = 0; step < kMaxSteps; ++step) {
      const int step_rows = min(rows - step * kStepRows, kStepRows);
      if (step_rows <= 0) break;
      ExpectFromPeers(barriers + step * kBarrier, step_rows * kRowBytes);
      CopyBulk(stages + step * kStepBytes, op.x.data + (first_row + step * kStepRows) * kCols, step_rows * kRowBytes,
               barriers + step * kBarrier, EvictFirst());
    }
  }
  __syncwarp();
  float factor[kVec], shift[kVec];
  op.Parameters(lane * kVec, factor, shift);
#pragma unroll 1
  for (int begin = 0, step = 0; begin < rows; begin += kStepRows, ++step) {
    WaitForBarrier(barriers + step * kBarrier, 0);
    // Row r of the thread is r * kGroups after its first. What is beyond the last row is whatever shared memory had.
    const auto inside = [&](int r) { return begin + r * kGroups + group < rows; };
    const uint32_t from = stages + step * kStepBytes + warp_lane * kVecBytes;
    Words<4> words[kQuad];
#pragma unroll
    for (int r = 0; r < kQuad; ++r) words[r] = LoadShared<Words<4>>(from + r * kGroups * kRowBytes);
    const auto moments = MomentsOfRows<kCenter, T>(words);
    const typename Op::Final final = {moments.mean, InverseSqrt(fma(moments.squares, 1.0f / kCols, op.epsilon))};
    const int64_t row = first_row + begin + group;
    if (lane < kQuad && inside(lane)) op.StoreStatistics(variant, row + lane * kGroups, final);
    T* const y = op.y + (row * kCols + lane * kVec);
    // In most steps all rows exist, and (value - mean) * rstd is as good in one instruction.
    const auto write = [&](auto usual) {
      const float own_centre = usual ? -final.mean * final.rstd : final.mean;
      float centres[kQuad] = {}, rstds[kQuad];
#pragma unroll
      for (int r = 0; r < kQuad; ++r) {
        if (kCenter) centres[r] = __shfl_sync(kAllLanes, own_centre, r, kSlots);
        rstds[r] = __shfl_sync(kAllLanes, final.rstd, r, kSlots);
      }
#pragma unroll
      for (int r = 0; r < kQuad; ++r) {
        if (!usual && !inside(r)) continue;
        float values[kVec];
        ToAccAll(std::bit_cast<V>(words[r]), values);
#pragma unroll
        for (float& value : values) {
          value = !kCenter ? value * rstds[r]
                  : usual  ? fma(value, rstds[r], centres[r])
                           : (value - centres[r]) * rstds[r];
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) values[j] = fma(values[j], factor[j], shift[j]);
        jaxnorm::Store(y + r * kGroups * kCols, RoundVec<T>(values));
      }
    };
    if (!moments.lost && begin + kStepRows <= rows) {
      write(std::true_type());
    } else {
      write(std::false_type());
    }
  }
#endif
}

}  // namespace

template <typename Op>
bool LaunchNormFwdAtOnce(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status) {
  if (!device.clusters || op.cols != kSlots * Op::kVec || op.Has(1) || op.rows <= int64_t{device.sms} * kShortRows) {
    return false;
  }
  const int64_t all_steps = CeilDiv(op.rows, kStepRows);
  const int64_t steps = CeilDiv(all_steps, int64_t{device.sms} * kBlocks * kWarps);
  if (steps > kMaxSteps) return false;
  const Grid grid = {.blocks = CeilDiv(all_steps, steps * kWarps), .threads = kWarps * kWarp};
  const auto launch = [&](auto center) {
    return Launch<NormFwdAtOnceKernel<Op, center>>(device, stream, grid, name, static_cast<int>(steps), op);
  };
  *status = op.center ? launch(std::true_type()) : launch(std::false_type());
  return true;
}

#define JAXNORM_INSTANTIATE(T)                                                                        \
  template bool LaunchNormFwdAtOnce(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, \
                                    const char* name, Error*);
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
