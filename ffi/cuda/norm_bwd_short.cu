// layer_norm and rms_norm, backward, of short rows: blocks stay for many rows and leave partial sums, as norm_bwd.cu says,
// but rows go to registers directly, those of the next turn while a turn is worked on. A row has 4 to 32 lanes. How many,
// and whether it fills them, is known when this is compiled, as in norm_fwd_short.cu. If L2 holds the arrays, blocks tell each
// other their partial sums, and each adds up some columns, instead of a second launch.
#include "norm_bwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kShortBwdBlocks = 2;  // of a multiprocessor
// Of a block: fewer if rows are few, and no more than leave their threads enough registers.
inline constexpr int kMinShortBwdWarps = 4;
template <bool kCenter, int kItems>
inline constexpr int kMaxShortBwdWarps = !kCenter && kItems == 1 ? 10 : 8;

// Partial sums of two columns, which fit a post's part.
template <typename Acc>
using ColumnPair = Vec<Acc, 2>;

// Where blocks leave their partial sums, two columns each: for a second launch; or as posts, if all blocks are running, each of
// which adds up those of 2^log2_own pairs at a time.
template <typename Acc>
struct NormBwdShortPlan {
  ColumnPair<Acc>* partials = nullptr;     // [blocks][pairs]
  Post<ColumnPair<Acc>>* posts = nullptr;  // [blocks][pairs], in the same place
  int log2_own = 0;
  uint64_t tag = 0;
};

// Sums over each row.
template <bool kCenter>
inline constexpr int kShortSums = kCenter ? 2 : 1;

// kFull: rows fill their lanes with kItems slots each. A thread works on kRows rows at a time, one behind the other.
template <typename Op, bool kCenter, int kLanes, int kItems, int kRows, bool kFull>
__global__ void __launch_bounds__(kMaxShortBwdWarps<kCenter, kItems>* kWarp, kShortBwdBlocks)
    NormBwdShortKernel(const __grid_constant__ Op op, const NormBwdShortPlan<typename Op::Acc> plan,
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
  using Pair = ColumnPair<Acc>;
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
  __syncthreads();
  const int blocks = static_cast<int>(gridDim.x), pairs = width / 2;
  const auto add = [](Pair& sum, const Pair& more) {
    sum.v[0] += more.v[0];
    sum.v[1] += more.v[1];
  };
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    Pair sum = {};
#pragma unroll 4
    for (int w = 0; w < warps; ++w) add(sum, *reinterpret_cast<const Pair*>(total + w * width + 2 * p));
    if (const int at = blockIdx.x * pairs + p; plan.posts == nullptr) {
      plan.partials[at] = sum;
    } else {
      plan.posts[at].Write(sum, plan.tag);
    }
  }
  if (plan.posts == nullptr) return;
  // Threads that have the same pair read posts of different blocks.
  __shared__ Pair of_warps[kMaxShortBwdWarps<kCenter, kItems>][kWarp];
  const int own_pairs = 1 << plan.log2_own, x = threadIdx.x & (own_pairs - 1), y = threadIdx.x >> plan.log2_own;
  const int ways = static_cast<int>(blockDim.x) >> plan.log2_own;
  for (int p = blockIdx.x * own_pairs + x; p - x < pairs; p += blocks * own_pairs) {
    Post<Pair>* const of_pair = plan.posts + p;
    Pair sum = {};
    for (int b = 0; b < blocks; b += kLanePosts * ways) {
      Pair values[kLanePosts];
      ReadPosts(of_pair + b * pairs, p < pairs ? blocks - b : 0, plan.tag, values, y, ways, pairs);
#pragma unroll
      for (const Pair& value : values) add(sum, value);
    }
    for (int offset = own_pairs; offset < kWarp; offset *= 2) {
      add(sum, {__shfl_xor_sync(kAllLanes, sum.v[0], offset), __shfl_xor_sync(kAllLanes, sum.v[1], offset)});
    }
    if (threadIdx.x % kWarp < own_pairs) of_warps[warp][x] = sum;
    __syncthreads();
    if (p < pairs) {
      if (y == 0) {
        for (int w = 1; w < warps; ++w) add(sum, of_warps[w][x]);
#pragma unroll
        for (int i = 0; i < 2; ++i) gradients.Store<T>(0, 2 * p + i, sum.v[i]);
      }
      // A graph is launched again with the same tag.
      for (int b = y; b < blocks; b += ways) of_pair[b * pairs].Clear();
    }
    __syncthreads();
  }
}

}  // namespace

template <typename Op>
bool LaunchNormBwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                        ffi::AnyBuffer scratch, ffi::Error* status) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  const int slots = op.Slots(), outputs = op.Outputs();
  if (slots < 4 || slots > 2 * kWarp || op.rows > INT32_MAX / 2 || args.shape.groups > 1 || op.arrays != 2 ||
      !op.need_x || (op.need_bias && !op.center)) {
    return false;
  }
  // Larger arrays displace posts, which then come from memory when blocks ask for them: 256 columns took 6 % more.
  const bool meet = outputs > 0 && 3 * op.rows * op.cols * static_cast<int64_t>(sizeof(T)) <= device.l2_bytes;
  const int pairs = outputs * op.cols / 2;
  int64_t most = int64_t{device.sms} * kShortBwdBlocks;
  if (outputs > 0) {
    const auto pair_bytes = static_cast<int64_t>(meet ? sizeof(Post<ColumnPair<Acc>>) : sizeof(ColumnPair<Acc>));
    most = std::min(most, static_cast<int64_t>(scratch.size_bytes()) / (pairs * pair_bytes));
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
    NormBwdShortPlan<Acc> plan;
    plan.partials = static_cast<ColumnPair<Acc>*>(scratch.untyped_data());
    if (meet) {
      plan.posts = static_cast<Post<ColumnPair<Acc>>*>(scratch.untyped_data());
      plan.log2_own = std::countr_zero(
          static_cast<unsigned>(std::min(NextPowerOfTwo(CeilDiv(int64_t{pairs}, grid.blocks)), kWarp)));
      plan.tag = LaunchTag();
    }
    constexpr auto kKernel = NormBwdShortKernel<Op, kCenter, kLanes, kItems, kRows, kFull>;
    *status = Launch<kKernel>(device, stream, grid, "norm_bwd", op, plan, Gradients<Op>(args));
    if (status->success() && outputs > 0 && !meet) {
      *status = LaunchSum(device, stream, op, args, static_cast<Acc*>(scratch.untyped_data()), grid.blocks);
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
                                   const NormBwdArgs&, ffi::AnyBuffer, ffi::Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
