// layer_norm and rms_norm, backward, of short rows: blocks stay for many rows and leave partial sums, as norm_bwd.cu says,
// but rows go to registers directly, those of the next turn while a turn is worked on. A row has 4 to 32 lanes. How many,
// and whether it fills them, is known when this is compiled, as in norm_fwd_short.cu.
#include "norm_bwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kShortBwdBlocks = 2;  // of a multiprocessor
// Of a block: fewer if rows are few, and no more than leave their threads enough registers.
inline constexpr int kMinShortBwdWarps = 4;
template <bool kCenter, int kItems>
inline constexpr int kMaxShortBwdWarps = !kCenter && kItems == 1 ? 10 : 8;

// Sums over each row.
template <bool kCenter>
inline constexpr int kShortSums = kCenter ? 2 : 1;

// kFull: rows fill their lanes with kItems slots each. A thread works on kRows rows at a time, one behind the other.
template <typename Op, bool kCenter, int kLanes, int kItems, int kRows, bool kFull>
__global__ void __launch_bounds__(kMaxShortBwdWarps<kCenter, kItems>* kWarp, kShortBwdBlocks)
    NormBwdShortKernel(const __grid_constant__ Op op, const NormBwdParts<typename Op::Acc> parts,
                       const NormBwdGradients gradients) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  constexpr int kVec = Op::kVec, kSums = kShortSums<kCenter>;
  constexpr int kStep = kLanes * kVec;  // elements from one of a thread's slots to the next
  static_assert(Op::kMode == Mode::kPlain);
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  const int cols = kFull ? kStep * kItems : op.cols;
  const int lane = threadIdx.x % kLanes, first = lane * kVec;
  const auto active = [&](int j) { return kFull || first + j * kStep < cols; };
  const int block_rows = static_cast<int>(blockDim.x) / kLanes * kRows, rows = static_cast<int>(op.rows);
  const int step_rows = gridDim.x * block_rows;  // from one turn to the next
  const int64_t step_elements = int64_t{step_rows} * cols;

  // What a turn reads; 0 where there is nothing.
  struct Rows {
    WordsOf<V> x[kRows][kItems], dy[kRows][kItems];  // as elements, each would be selected by itself
    Acc mean[kRows], rstd[kRows];
  };
  int first_row = blockIdx.x * block_rows + threadIdx.x / kLanes * kRows;  // of the next turn
  const T* from = op.x.data + (int64_t{first_row} * cols + first);
  T* to = op.dx + (int64_t{first_row} * cols + first);
  const auto load = [&](int row, Rows& loaded) {
    loaded = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= rows) continue;
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (!active(j)) continue;
        const T* const x = from + r * cols + j * kStep;
        loaded.x[r][j] = std::bit_cast<WordsOf<V>>(jaxnorm::Load(x));
        loaded.dy[r][j] = std::bit_cast<WordsOf<V>>(jaxnorm::Load(op.Beside(x, 1)));
      }
      if (kCenter) loaded.mean[r] = op.mean.data[row + r];
      loaded.rstd[r] = op.rstd.data[row + r];
    }
    from += step_elements;
  };

  Rows even, odd;
  load(first_row, even);
  Acc scale[kItems][kVec] = {}, dscale[kItems][kVec] = {}, dbias[kItems][kVec] = {};
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (active(j)) op.Scale(0, first + j * kStep, scale[j]);
  }
#pragma unroll
  for (int j = 0; j < kItems; ++j) op.Offset(scale[j]);
  const auto turn = [&](const Rows& loaded, Rows& next) {
    load(first_row + step_rows, next);
    Acc sums[kRows * kSums];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const typename Op::Statistics statistics = {loaded.mean[r], loaded.rstd[r]};
      typename Op::Sums own = Op::Sums::Identity();
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        Acc xs[kVec], dys[kVec];
        ToAccAll(std::bit_cast<V>(loaded.x[r][j]), xs);
        ToAccAll(std::bit_cast<V>(loaded.dy[r][j]), dys);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          op.Reduce(statistics, xs[i], dys[i], scale[j][i], own, dscale[j][i], dbias[j][i]);
        }
      }
      sums[r * kSums] = own.v[kProduct];
      if constexpr (kCenter) sums[r * kSums + 1] = own.v[kW];
    }
    const Acc mean = SumOverLanes<kLanes>(sums, lane) * op.inverse_cols;
    const auto mean_of = [&](int i) { return __shfl_sync(kAllLanes, mean, i * (kLanes / (kRows * kSums)), kLanes); };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      typename Op::Final final = {0, mean_of(r * kSums)};
      if constexpr (kCenter) final.c1 = mean_of(r * kSums + 1);
      if (first_row + r >= rows) continue;
      const typename Op::Statistics statistics = {loaded.mean[r], loaded.rstd[r]};
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (!active(j)) continue;
        Acc xs[kVec], dys[kVec], dx[kVec];
        ToAccAll(std::bit_cast<V>(loaded.x[r][j]), xs);
        ToAccAll(std::bit_cast<V>(loaded.dy[r][j]), dys);
#pragma unroll
        for (int i = 0; i < kVec; ++i) dx[i] = op.Dx(statistics, xs[i], dys[i], scale[j][i], final, true);
        jaxnorm::Store(to + r * cols + j * kStep, RoundVec<T>(dx));
      }
    }
    first_row += step_rows;
    to += step_elements;
  };
#pragma unroll 1
  for (int row = blockIdx.x * block_rows; row < rows; row += 2 * step_rows) {
    turn(even, odd);
    if (row + step_rows >= rows) break;
    turn(odd, even);
  }

  // The sums of a warp's rows, then of all warps, then of all blocks.
  if (op.Outputs() == 0) return;
  LetNextBegin();
  auto* const total = reinterpret_cast<Acc*>(shared_bytes);
  const int warp = threadIdx.x / kWarp, warps = static_cast<int>(blockDim.x) / kWarp, width = op.Outputs() * cols;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
#pragma unroll
      for (int offset = kLanes; offset < kWarp; offset *= 2) {
        dscale[j][i] += __shfl_xor_sync(kAllLanes, dscale[j][i], offset);
        if constexpr (kCenter) dbias[j][i] += __shfl_xor_sync(kAllLanes, dbias[j][i], offset);
      }
    }
    if (threadIdx.x % kWarp >= kLanes || !active(j)) continue;
    Acc* const own = total + warp * width;
    if (op.need_scale) StoreColumns<Op>(own, first + j * kStep, cols, dscale[j]);
    if (kCenter && op.need_bias) StoreColumns<Op>(own + width - cols, first + j * kStep, cols, dbias[j]);
  }
  __shared__ ColumnPair<Acc> of_threads[kMaxShortBwdWarps<kCenter, kItems> * kWarp];
  __syncthreads();
  LeaveSums(parts, blockIdx.x, total, warps, width);
  if (parts.posts != nullptr) AddUpPosts<T>(parts, gridDim.x, width, of_threads, gradients);
}

}  // namespace

template <typename Op>
bool LaunchNormBwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                        Scratch scratch, Error* status) {
  using Acc = typename Op::Acc;
  const int slots = op.Slots(), outputs = op.Outputs();
  if (slots < 4 || slots > 2 * kWarp || op.rows > INT32_MAX / 2 || args.shape.groups > 1 || op.arrays != 2 ||
      !op.need_x || (op.need_bias && !op.center)) {
    return false;
  }
  int64_t most = std::min(int64_t{device.sms} * kShortBwdBlocks, op.rows);
  const bool meet = MayMeet(device, op, most, scratch);
  if (outputs > 0 && !meet) {
    most = std::min(most, static_cast<int64_t>(scratch.bytes) / PartBytes<Acc>(outputs * op.cols, false));
    if (most == 0) return false;
  }
  const auto launch = [&]<bool kCenter, int kLanes, int kItems, bool kFull>() {
    constexpr int kRows = kItems == 1 ? 2 : 1, kTurnRows = kWarp / kLanes * kRows;  // of a warp
    // As many warps as make the last turn a full one.
    const int64_t warp_turns = CeilDiv(op.rows, most * kTurnRows);
    const int64_t turns = CeilDiv(warp_turns, kMaxShortBwdWarps<kCenter, kItems>);
    const int64_t warps = std::max<int64_t>(CeilDiv(warp_turns, turns), kMinShortBwdWarps);
    const Grid grid = {.blocks = std::min(most, CeilDiv(op.rows, warps * kTurnRows)),
                       .threads = static_cast<int>(warps * kWarp),
                       .shared_bytes = static_cast<int>(warps * outputs * op.cols * int64_t{sizeof(Acc)}),
                       .cooperative = meet};
    const NormBwdParts<Acc> parts(scratch.data, outputs * op.cols, grid.blocks, meet);
    constexpr auto kKernel = NormBwdShortKernel<Op, kCenter, kLanes, kItems, kRows, kFull>;
    *status = Launch<kKernel>(device, stream, grid, "norm_bwd", op, parts, Gradients<Op>(args));
    if (!status->failure() && outputs > 0 && !meet) {
      *status = LaunchSum(device, stream, op, args, parts.partials, grid.blocks);
    }
    return true;
  };
  const auto with = [&]<int kLanes, int kItems, bool kFull>() {
    return op.center ? launch.template operator()<true, kLanes, kItems, kFull>()
                     : launch.template operator()<false, kLanes, kItems, kFull>();
  };
  switch (slots) {
    case 4:
      return with.template operator()<4, 1, true>();
    case 8:
      return with.template operator()<8, 1, true>();
    case 16:
      return with.template operator()<16, 1, true>();
    case 32:
      return with.template operator()<32, 1, true>();
    case 64:
      return with.template operator()<32, 2, true>();
  }
  switch (NextPowerOfTwo(slots)) {
    case 8:
      return with.template operator()<8, 1, false>();
    case 16:
      return with.template operator()<16, 1, false>();
    case 32:
      return with.template operator()<32, 1, false>();
    default:
      return with.template operator()<32, 2, false>();
  }
}

#define JAXNORM_INSTANTIATE(T)                                                                       \
  template bool LaunchNormBwdShort(const DeviceInfo&, cudaStream_t, const NormBwd<T, Mode::kPlain>&, \
                                   const NormBwdArgs&, Scratch, Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
