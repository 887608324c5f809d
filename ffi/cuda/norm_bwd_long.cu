// layer_norm and rms_norm, backward, of rows that no cluster can hold, or too few to fill the device with clusters, where
// norm_bwd_few.cu does not suit: they are read twice, the second time from L2 if they fit. One launch reduces them, and a
// second one, whose threads own columns, writes dx and sums up the gradients of parameters. A third one adds up what
// several threads have of a column.
#include <algorithm>

#include "norm_bwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kLongThreads = 128;
inline constexpr int kLongRows = kLongThreads / kWarp;  // that a block works on at once
inline constexpr int kLongSlots = 4;                    // of a row per thread, to be reduced

// Rows [first_row, first_row + rows) of one group.
struct NormBwdLongPlan {
  int64_t group = 0, first_row = 0, rows = 1;
  int chunks = 1;             // of a row, for its sums
  int tiles = 1, slices = 1;  // of columns and rows, for the rest
};

// Chunk blockIdx.x % chunks of kLongRows rows: sums[row][chunk].
template <typename Op>
__global__ void __launch_bounds__(kLongThreads)
    NormBwdLongReduceKernel(const __grid_constant__ Op op, const NormBwdLongPlan plan, typename Op::Sums* sums) {
  using Sums = typename Op::Sums;
  constexpr int kVec = Op::kVec;
  __shared__ Sums shared[kLongRows][kLongThreads / kWarp];
  const int chunk = static_cast<int>(blockIdx.x % plan.chunks);
  const int64_t first_row = int64_t{blockIdx.x / plan.chunks} * kLongRows;
  const auto inside = [&](int r) { return first_row + r < plan.rows; };
  Sums own[kLongRows];
  typename Op::Row rows[kLongRows];
  typename Op::Statistics statistics[kLongRows];
#pragma unroll
  for (int r = 0; r < kLongRows; ++r) {
    const int64_t index = plan.first_row + (inside(r) ? first_row + r : 0);
    own[r] = Sums::Identity();
    rows[r] = op.Begin(index);
    statistics[r] = op.StatisticsOf(index, true);
  }
#pragma unroll 1
  for (int j = 0; j < kLongSlots; ++j) {
    const int slot = (chunk * kLongSlots + j) * kLongThreads + threadIdx.x;
    if (slot >= op.Slots()) break;
    typename Op::V xs[kLongRows], gs[kLongRows];
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) {
      xs[r] = op.Columns(rows[r].in[0], slot * kVec);
      gs[r] = op.Columns(rows[r].in[1], slot * kVec);
    }
    typename Op::Acc sc[kVec];
    op.Scale(plan.group, slot * kVec, sc);
    op.Offset(sc);
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) op.Reduce(rows[r], statistics[r], slot * kVec, xs[r], gs[r], sc, own[r]);
  }
#pragma unroll
  for (int r = 0; r < kLongRows; ++r) {
    own[r] = Sums::MergeLanes(own[r], kWarp);
    if (threadIdx.x % kWarp == 0) shared[r][threadIdx.x / kWarp] = own[r];
  }
  __syncthreads();
  if (const int r = threadIdx.x; r < kLongRows && inside(r)) {
    Sums total = shared[r][0];
    for (int w = 1; w < kLongThreads / kWarp; ++w) total = Sums::Merge(total, shared[r][w]);
    sums[(first_row + r) * plan.chunks + chunk] = total;
  }
}

// One slot of columns for each thread, in every `slices`-th set of kLongRows rows.
template <typename Op>
__global__ void __launch_bounds__(kLongThreads, Op::kMode == Mode::kPlain ? 4 : 2)
    NormBwdLongKernel(const __grid_constant__ Op op, const NormBwdLongPlan plan, const typename Op::Sums* sums,
                      typename Op::Acc* partials, const NormBwdGradients gradients) {
  using Acc = typename Op::Acc;
  using Sums = typename Op::Sums;
  constexpr int kVec = Op::kVec;
  __shared__ typename Op::Final shared[2][kLongRows];
  const int slice = static_cast<int>(blockIdx.x / plan.tiles);
  const int slot = static_cast<int>(blockIdx.x % plan.tiles * kLongThreads + threadIdx.x), first = slot * kVec;
  const bool active = slot < op.Slots();
  Acc dscale[kVec], dbias[kVec], sc[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) dscale[i] = dbias[i] = 0;
  if (active) {
    op.Scale(plan.group, slot * kVec, sc);
    op.Offset(sc);
  }
  int turn = 0;
#pragma unroll 1
  for (int64_t base = int64_t{slice} * kLongRows; base < plan.rows; base += int64_t{plan.slices} * kLongRows, ++turn) {
    const auto index = [&](int r) { return plan.first_row + min(base + r, plan.rows - 1); };
    typename Op::V xs[kLongRows], gs[kLongRows], added[kLongRows];
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) {
      if (!active) continue;
      const typename Op::Row row = op.Begin(index(r));
      xs[r] = op.Columns(row.in[0], first);
      gs[r] = op.Columns(row.in[1], first);
      if (op.arrays == kMaxArrays) added[r] = op.Columns(row.in[2], first);
    }
    if (op.need_x) {  // warp r finishes the sums of row r
      const int64_t row = min(base + threadIdx.x / kWarp, plan.rows - 1);
      auto total = Sums::Identity();
      for (int c = threadIdx.x % kWarp; c < plan.chunks; c += kWarp) {
        total = Sums::Merge(total, sums[row * plan.chunks + c]);
      }
      total = Sums::MergeLanes(total, kWarp);
      if (threadIdx.x % kWarp == 0) shared[turn & 1][threadIdx.x / kWarp] = op.Finish(total);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) {
      if (!active || base + r >= plan.rows) continue;
      const auto statistics = op.StatisticsOf(index(r), true);
      Acc x[kVec], g[kVec];
      ToAccAll(xs[r], x);
      ToAccAll(gs[r], g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        dbias[i] += g[i];
        dscale[i] = fma(g[i], statistics.Xhat(x[i]), dscale[i]);
      }
      if (op.need_x) {
        Acc out[kVec];
        op.Dx(op.Begin(index(r)), statistics, first, xs[r], gs[r], sc, shared[turn & 1][r], out);
        if (op.arrays == kMaxArrays) op.Add(added[r], out);
        op.Store(op.dx + (index(r) * op.cols + first), first, out);
      }
    }
  }
  if (!active) return;
  StoreGradients(op, gradients, partials, plan.slices, static_cast<int>(plan.group * plan.slices) + slice, first,
                 dscale, dbias, plan.group);
}

}  // namespace

template <typename Op>
Error LaunchNormBwdLong(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                        Scratch scratch) {
  using Acc = typename Op::Acc;
  using Sums = typename Op::Sums;
  const NormShape& shape = args.shape;
  const bool parameters = op.Outputs() > 0;
  const int64_t capacity = static_cast<int64_t>(scratch.bytes / sizeof(Acc));
  const int64_t part_size = shape.groups * op.Outputs() * shape.cols;  // partial sums of a slice
  NormBwdLongPlan plan;
  plan.chunks = static_cast<int>(CeilDiv(op.Slots(), kLongThreads * kLongSlots));
  plan.tiles = static_cast<int>(CeilDiv(op.Slots(), kLongThreads));
  // All rows of a group in one launch if their gradients are summed; otherwise as many as there is memory for their sums.
  const int64_t sums_per_row = op.need_x ? plan.chunks * static_cast<int64_t>(sizeof(Sums) / sizeof(Acc)) : 0;
  plan.rows = shape.rows_per_group;
  if (!parameters) plan.rows = std::min(plan.rows, capacity / sums_per_row);
  const int64_t left = capacity - plan.rows * sums_per_row;
  JAXNORM_CHECK(plan.rows > 0 && left >= 0);
  auto* const sums = static_cast<Sums*>(scratch.data);
  auto* const partials = static_cast<Acc*>(scratch.data) + plan.rows * sums_per_row;
  // Enough slices to fill the device, if each has rows enough for what its partial sums cost.
  int64_t slices = CeilDiv(8 * device.sms, plan.tiles);
  if (parameters) slices = std::min({slices, plan.rows / 16, left / part_size});
  plan.slices = static_cast<int>(std::clamp<int64_t>(slices, 1, CeilDiv(plan.rows, kLongRows)));
  const int64_t batch = plan.rows;
  for (plan.group = 0; plan.group < shape.groups; ++plan.group) {
    for (int64_t row = 0; row < shape.rows_per_group; row += batch) {
      plan.first_row = plan.group * shape.rows_per_group + row;
      plan.rows = std::min(batch, shape.rows_per_group - row);
      if (op.need_x) {
        const Grid grid = {.blocks = CeilDiv(plan.rows, kLongRows) * plan.chunks, .threads = kLongThreads};
        JAXNORM_RETURN_IF_ERROR(Launch<NormBwdLongReduceKernel<Op>>(device, stream, grid, "norm_bwd", op, plan, sums));
      }
      const Grid grid = {.blocks = int64_t{plan.slices} * plan.tiles, .threads = kLongThreads};
      JAXNORM_RETURN_IF_ERROR(Launch<NormBwdLongKernel<Op>>(
          device, stream, grid, "norm_bwd", op, plan, static_cast<const Sums*>(sums), partials, Gradients<Op>(args)));
    }
  }
  if (!parameters || plan.slices == 1) return Error::Success();
  return LaunchSum(device, stream, op, args, partials, plan.slices);
}

#define JAXNORM_INSTANTIATE(T, mode)                                                                             \
  template Error LaunchNormBwdLong(const DeviceInfo&, cudaStream_t, const NormBwd<T, mode>&, const NormBwdArgs&, \
                                   Scratch);
JAXNORM_INSTANTIATE(double, Mode::kGeneral)
JAXNORM_INSTANTIATE(float, Mode::kPlain)
JAXNORM_INSTANTIATE(float, Mode::kRagged)
JAXNORM_INSTANTIATE(float, Mode::kGeneral)
JAXNORM_INSTANTIATE(__half, Mode::kPlain)
JAXNORM_INSTANTIATE(__half, Mode::kRagged)
JAXNORM_INSTANTIATE(__half, Mode::kGeneral)
JAXNORM_INSTANTIATE(__nv_bfloat16, Mode::kPlain)
JAXNORM_INSTANTIATE(__nv_bfloat16, Mode::kRagged)
JAXNORM_INSTANTIATE(__nv_bfloat16, Mode::kGeneral)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
