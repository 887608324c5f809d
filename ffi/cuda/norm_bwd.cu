// layer_norm and rms_norm, backward: the formulas are in norm_args.h.
//
// x and dy are read once, dx is written once. Gradients of the parameters are sums over rows, so blocks stay for many
// rows: a thread owns the same columns of each of its rows and keeps their scale and their sums in registers. A block
// then leaves one row of partial sums in float32, and a second, small launch adds those up. Nothing depends on the order
// in which blocks run, so results are the same bits every time.
//
// Rows are on their way to shared memory several turns before they are needed. Each thread copies and reads its own
// slots only, which takes no barrier. What a turn does is shifted by one row between the two passes: the first one sums
// row t + 1 while the sums of row t travel between warps and between the blocks of a cluster, then the second one writes
// row t.
#include <algorithm>

#include "norm_bwd.cuh"

namespace jaxnorm {
namespace {

// More were measured to be no faster.
inline constexpr int kBwdStages = 3;
inline constexpr int kTogether = 2;  // slots of a thread, for which there are registers

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormBwdKernel(const __grid_constant__ Op op, const RowsPlan plan, typename Op::Acc* partials) {
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  using Sums = typename Op::Sums;
  using T = typename Op::T;
  constexpr int kVec = Op::kVec, kSlots = Op::kSlots, kStages = kBwdStages;
  using Stages = RowStages<T, Op::kMode, kMaxArrays, kSlots, kStages>;
  constexpr bool kPlain = Op::kMode == Mode::kPlain;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ RowExchangeShared<Sums> shared;
  static_assert(sizeof(shared) <= kStaticSharedBytes);
  if (plan.cluster > 1) RowExchange<Sums>::ClusterStart(shared);
  const RowsPlace rows(plan, op.rows_per_group);
  const Stages stages(shared_bytes, op, op.arrays, plan, rows);
  // Of this thread's first slot, in the row to be copied next and in the one to be stored next.
  const int64_t step_elements = int64_t{rows.step} * op.cols;
  int64_t copy_offset = rows.base * op.cols + stages.First(0), store_offset = copy_offset;
  const int last_turn = rows.Index(rows.own_turns - 1) + 1 == op.rows ? rows.own_turns - 1 : -1;
  const auto copy = [&](int turn, int place) {
    if (!rows.Inside(turn)) {
    } else if constexpr (Op::kGeneral) {
      const typename Op::Row row = op.Begin(rows.Index(turn));
#pragma unroll
      for (int k = 0; k < kMaxArrays; ++k) {
        if (k == op.arrays) break;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if (stages.IsActive(j)) {
            StoreShared(stages.At(place, j, k), row.in[k].template Load<kVec>(stages.First(j)));
          }
        }
      }
    } else {
      stages.Copy(copy_offset, place, turn == last_turn, op.rows * op.cols, [&](int k) { return op.Array(k).data; });
    }
    copy_offset += step_elements;
    CopyCommit();
  };

  for (int place = 0; place < kStages; ++place) copy(place, place);
  auto now = op.StatisticsOf(rows.Index(0), rows.Inside(0)), next = op.StatisticsOf(rows.Index(1), rows.Inside(1));
  Acc scale[kSlots][kVec], dscale[kSlots][kVec], dbias[kSlots][kVec];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) scale[j][i] = dscale[j][i] = dbias[j][i] = 0;
    if (stages.IsActive(j)) op.Scale(rows.param_group, stages.Slot(j), stages.skew, scale[j]);
  }
  const RowExchange<Sums> exchange(
      shared, reinterpret_cast<char*>(shared_bytes) + Stages::Bytes(op.arrays, blockDim.x, plan.rows_per_block), plan,
      rows);
  if (plan.cluster > 1) ClusterWait();

  // Slots that do not exist are 0 and add nothing.
  const auto reduce = [&](int turn, int place, const typename Op::Statistics& statistics) {
    auto sums = Sums::Identity();
    if (rows.Inside(turn)) {
      const typename Op::Row row = op.Begin(rows.Index(turn));
      V x[kSlots], dy[kSlots];
      if (op.arrays == kMaxArrays) stages.Complete(place, 2);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        for (int k = j; j % kTogether == 0 && k < min(j + kTogether, kSlots); ++k) {
          x[k] = stages.LoadFirst(place, k, 0);
          dy[k] = stages.LoadFirst(place, k, 1);
        }
        op.Reduce(row, statistics, stages.First(j), x[j], dy[j], scale[j], sums, dscale[j], dbias[j]);
      }
    }
    return op.need_x ? exchange.Put(sums, turn) : sums;
  };

  int place = 0;
  CopyWait<kStages - 2>();
  Sums sums = reduce(0, 0, now);
#pragma unroll 1
  for (int turn = 0; turn < rows.turns; ++turn) {
    if (op.need_x) sums = exchange.Begin(sums, turn);
    const auto upcoming = op.StatisticsOf(rows.Index(turn + 2), rows.Inside(turn + 2));
    CopyWait<kStages - 2>();
    const int next_place = stages.Next(place);
    Sums next_sums;
    if (turn + 1 < rows.turns) next_sums = reduce(turn + 1, next_place, next);
    if (op.need_x) {
      sums = exchange.End(sums, turn);
      if (rows.Inside(turn)) {
        const typename Op::Row row = op.Begin(rows.Index(turn));
        const auto final = op.Finish(sums);
        V x[kSlots], dy[kSlots];
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          for (int k = j; j % kTogether == 0 && k < min(j + kTogether, kSlots); ++k) {
            x[k] = stages.Load(place, k, 0);
            dy[k] = stages.Load(place, k, 1);
          }
          Acc out[kVec];
          op.Dx(row, now, stages.First(j), x[j], dy[j], scale[j], final, out);
          if (op.arrays == kMaxArrays) op.Add(stages.Load(place, j, 2), out);
          if (stages.IsActive(j)) {
            stages.Store(op.dx + (store_offset + j * stages.slot_step * kVec), j, RoundVec<T>(out));
          }
        }
      }
    }
    store_offset += step_elements;
    copy(turn + kStages, place);
    place = next_place;
    sums = next_sums;
    now = next;
    next = upcoming;
  }
  const int outputs = op.Outputs();
  if (outputs == 0) return;

  // One row of sums for each block: [outputs][cols].
  const auto put = [&](Acc* to, int j, const Acc(&values)[kVec]) {
    if (kPlain) {
#pragma unroll
      for (int i = 0; i < kVec; i += kVecSize<Acc>) {
        Vec<Acc, kVecSize<Acc>> vector;
#pragma unroll
        for (int k = 0; k < kVecSize<Acc>; ++k) vector.v[k] = values[i + k];
        *reinterpret_cast<Vec<Acc, kVecSize<Acc>>*>(to + stages.First(j) + i) = vector;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (const int column = op.Column(stages.Slot(j), stages.skew, i); column < op.cols) to[column] = values[i];
      }
    }
  };
  const auto put_all = [&](Acc* to) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (!stages.IsActive(j)) continue;
      if (op.need_scale) put(to, j, dscale[j]);
      if (op.need_bias) put(to + (op.need_scale ? op.cols : 0), j, dbias[j]);
    }
  };
  Acc* const out = partials + (rows.param_group * plan.blocks + rows.block) * outputs * op.cols;
  if (plan.rows_per_block == 1) return put_all(out);
  // The rows of a block leave their sums in the memory that the stages had. Those of a warp are summed first, if their
  // slots have the same columns.
  const int threads = rows.threads;
  int sets = plan.rows_per_block, set = rows.row_group;
  bool writes = true;
  if (kPlain && threads < kWarp) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        for (int offset = threads; offset < kWarp; offset *= 2) {
          dscale[j][i] += __shfl_xor_sync(kAllLanes, dscale[j][i], offset);
          dbias[j][i] += __shfl_xor_sync(kAllLanes, dbias[j][i], offset);
        }
      }
    }
    sets = blockDim.x / kWarp;
    set = threadIdx.x / kWarp;
    writes = threadIdx.x % kWarp < threads;
  }
  CopyWait<0>();
  __syncthreads();
  auto* const total = reinterpret_cast<Acc*>(shared_bytes);
  const int width = outputs * op.cols;
  if (writes) put_all(total + set * width);
  __syncthreads();
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    Acc sum = total[c];
    for (int s = 1; s < sets; ++s) sum += total[s * width + c];
    out[c] = sum;
  }
}

// ---- Launching ----

template <typename Op>
ffi::Error LaunchNormBwd(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                         ffi::AnyBuffer scratch) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using Stages = RowStages<T, Op::kMode, kMaxArrays, Op::kSlots, kBwdStages>;
  constexpr int kMaxPart = kMaxThreads * Op::kSlots;
  const int slots = op.Slots(), outputs = op.Outputs();
  // Rows that fit no cluster; and those of which L2 can hold all, unless one block has a row for itself.
  const int64_t input_bytes = args.shape.size() * 2 * static_cast<int64_t>(sizeof(T));
  RowsPlan plan;
  int at_once = 0;
  while (plan.cluster < kMaxCluster && CeilDiv(slots, plan.cluster) > kMaxPart) plan.cluster *= 2;
  if (plan.cluster > 1) at_once = ActiveClusters<NormBwdKernel<Op>>(device, kMaxThreads, plan.cluster);
  if (plan.cluster > 1 &&
      (CeilDiv(slots, plan.cluster) > kMaxPart || at_once == 0 || input_bytes <= device.l2_bytes / 4 * 3)) {
    return LaunchNormBwdLong(device, stream, op, args, scratch);
  }
  plan.part_slots = static_cast<int>(CeilDiv(slots, plan.cluster));
  const int64_t wanted = CeilDiv(plan.part_slots, Op::kSlots);
  plan.threads_per_row = static_cast<int>(wanted > kWarp ? CeilDiv(wanted, kWarp) * kWarp : NextPowerOfTwo(wanted));
  plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  const int threads = plan.threads_per_row * plan.rows_per_block;
  if (plan.cluster == 1) at_once = device.sms * (threads <= kBlockThreads ? 2 : 1);
  const int64_t unit = BlockUnit<Op>(plan.rows_per_block);
  int64_t most = CeilDiv(op.rows_per_group, plan.rows_per_block);
  if (outputs > 0) {
    const int64_t row_bytes = args.shape.groups * outputs * args.shape.cols * int64_t{sizeof(Acc)};
    const int64_t room = static_cast<int64_t>(scratch.size_bytes()) / row_bytes;
    JAXNORM_CHECK(room > 0);
    most = std::min(most, room);
  }
  if (most < unit) return LaunchNormBwd(device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
  // Each block leaves a row of partial sums, which are written and read.
  plan.blocks = RowBlocks(op.rows_per_group, plan.rows_per_block, unit, most, at_once, 3 * sizeof(T), 4 * sizeof(Acc));
  JAXNORM_CHECK(PlanTurns(op.rows_per_group, plan));
  Grid grid = {.blocks = args.shape.groups * plan.blocks * plan.cluster,
               .threads = threads,
               .shared_bytes =
                   Stages::Bytes(op.arrays, threads, plan.rows_per_block) + RowExchange<typename Op::Sums>::Bytes(plan),
               .cluster = plan.cluster};
  auto* const partials = static_cast<Acc*>(scratch.untyped_data());
  JAXNORM_RETURN_IF_ERROR(Launch<NormBwdKernel<Op>>(device, stream, grid, "norm_bwd", op, plan, partials));
  if (outputs == 0) return ffi::Error::Success();
  return LaunchSum(device, stream, op, args, partials, plan.blocks);
}

ffi::Error NormBwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::RemainingArgs rest,
                          ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double scale_offset,
                          int64_t operands, int64_t need) {
  NormBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormBwd(x, dy, rest, results, axis, groups, center, scale_offset, operands, need, &args));
  const NormShape& shape = args.shape;
  JAXNORM_CHECK(shape.cols < INT32_MAX / 2);  // positions within a row are 32-bit; Python lowers the formula instead
  if (shape.size() == 0) {
    const size_t bytes = shape.groups * shape.cols * ffi::ByteWidth(args.gradient_dtype);
    for (void* out : {args.dscale, args.dbias}) {
      if (out == nullptr || bytes == 0) continue;
      JAXNORM_RETURN_IF_ERROR(LaunchStatus(cudaMemsetAsync(out, 0, bytes, stream), "norm_bwd"));
    }
    return ffi::Error::Success();
  }
  auto scratch = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (scratch.has_error()) return scratch.error();
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) -> ffi::Error {
    bool full = !args.mask && args.mean.elements == (args.center ? shape.rows() : 0) &&
                args.rstd.elements == shape.rows() && (args.dx == nullptr || IsVecAligned(args.dx));
    for (const Operand* a : {&args.x, &args.dy, &args.dsum}) {
      full = full && (!*a || (IsVecAligned(a->data) && a->elements == shape.size()));
    }
    if constexpr (!std::is_same_v<T, double>) {
      using Plain = NormBwd<T, Mode::kPlain>;
      using Ragged = NormBwd<T, Mode::kRagged>;
      if (full && shape.cols % kVecSize<T> == 0) return LaunchNormBwd(*device, stream, Plain(args), args, **scratch);
      if (full) return LaunchNormBwd(*device, stream, Ragged(args), args, **scratch);
    }
    return LaunchNormBwd(*device, stream, NormBwd<T, Mode::kGeneral>(args), args, **scratch);
  });
}

JAXNORM_REGISTER(norm_bwd, NormBwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .RemainingRets()
                     .Attr<int64_t>("axis")
                     .Attr<int64_t>("groups")
                     .Attr<bool>("center")
                     .Attr<double>("scale_offset")
                     .Attr<int64_t>("operands")
                     .Attr<int64_t>("need"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
