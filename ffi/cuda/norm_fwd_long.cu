// layer_norm and rms_norm, forward, of long rows: clusters stay for many rows and keep their parameters in registers, as
// norm_rows.cuh describes. Scale and bias of a slot take several times its own bytes, and bundles of rows so long have
// few rows to share them.
//
// A turn of layer_norm begins with row t: its sum. The mean of row t - 1 and the variance of row t - 2 become known, and
// the squared deviations of row t - 1 are summed. Row t - 3 is written meanwhile. rms_norm has no mean to wait for.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kBlockThreads = 256;  // or twice as many, if only x is read
inline constexpr int kLongSlots = 4;       // of a row per thread
inline constexpr int kLongStages = 6;      // rows
inline constexpr uint32_t kLongSlotBytes = kBlockThreads * kVecBytes;

// Over a row: deviations' squares, elements and, to correct the mean, deviations.
enum { kSquares, kSum, kRest };
template <typename T, bool kCenter>
using NormFwdLongSums = RowSums<AccT<T>, !kCenter           ? 1
                                         : kCorrectsMean<T> ? 3
                                                            : 2>;

template <typename Op, bool kCenter>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormFwdLongKernel(const __grid_constant__ Op op, const RowsPlan plan) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = Vec<T, Op::kVec>;
  constexpr int kVec = Op::kVec, kSlots = kLongSlots, kStages = kLongStages;
  constexpr bool kCorrect = kCenter && kCorrectsMean<T>;
  constexpr int kLag = kCenter ? 3 : 2;   // turns from reading a row to writing it
  constexpr int kAhead = kStages - kLag;  // and from copying it to reading it
  using Sums = NormFwdLongSums<T, kCenter>;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ RowExchangeShared<Sums> shared;
  static_assert(sizeof(shared) <= kStaticSharedBytes);
  RowExchange<Sums>::ClusterStart(shared);
  const int rank = blockIdx.x % plan.cluster, block = blockIdx.x / plan.cluster;
  const int turns = plan.turns + (block < plan.rest ? 1 : 0);
  const int first_slot = rank * plan.part_slots + threadIdx.x;
  const int end = min((rank + 1) * plan.part_slots, op.cols / kVec);
  const int slot_step = blockDim.x * kVec;  // in elements
  // Bit j: the row has this thread's slot j. One register, where comparisons would take several.
  unsigned active_slots = 0;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) active_slots |= (first_slot + j * static_cast<int>(blockDim.x) < end ? 1u : 0u) << j;
  asm volatile("" : "+r"(active_slots));
  const auto active = [&](int j) { return (active_slots >> j & 1) != 0; };
  // Slot j of array k of a stage, at constant distances so that addresses take few registers.
  const uint32_t stage_bytes = kSlots * op.Inputs() * kLongSlotBytes;
  const uint32_t own = SharedAddress(shared_bytes) + threadIdx.x % kBlockThreads * kVecBytes +
                       threadIdx.x / kBlockThreads * (kStages * stage_bytes);
  const auto at = [&](int stage, int j, int k) {
    return own + stage * stage_bytes + (k * kSlots + j) * kLongSlotBytes;
  };
  const auto load = [&](int stage, int j, int k) { return LoadShared<V>(at(stage, j, k)); };
  for (int j = 0; j < kSlots; ++j) {  // slots that do not exist can be read: they are 0
    for (int n = 0; !active(j) && n < kStages * op.Inputs(); ++n) {
      StoreShared(at(0, j, 0) + n * kSlots * kLongSlotBytes, uint4());
    }
  }
  const auto after = [](int stage, int by) { return stage + by >= kStages ? stage + by - kStages : stage + by; };
  // Of this thread's first slot in the row to be copied next.
  const int64_t step_elements = int64_t{plan.blocks} * op.cols;
  int64_t copy_offset = int64_t{block} * op.cols + first_slot * kVec;
  const auto copy = [&](int turn, int stage) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      if (turn >= turns || !op.Has(k)) continue;
      const T* const from = (k == 0 ? op.x.data : op.residual.data) + copy_offset;
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (active(j)) CopyAsync(at(stage, j, k), from + j * slot_step);
      }
    }
    copy_offset += step_elements;
    CopyCommit();
  };
  for (int n = 0; n < kAhead; ++n) copy(n, n);
  Acc factor[kSlots][kVec], shift[kSlots][kVec];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    op.Parameters(active(j) ? first_slot * kVec + j * slot_step : 0, factor[j], shift[j]);
  }
  const RowExchange<Sums> exchange(shared, reinterpret_cast<char*>(shared_bytes) + plan.exchange_offset, plan, rank, 0);
  ClusterWait();

  const Acc count = static_cast<Acc>(op.cols), inverse = op.inverse_cols;
  Sums sums = exchange.Put(Sums::Identity(), 0);
  Acc mean = 0;                   // of row turn - 2
  typename Op::Final final = {};  // of row turn - kLag
  int stage = 0;                  // of row `turn`
#pragma unroll 1
  for (int turn = 0; turn < turns + kLag; ++turn) {
    sums = exchange.Begin(sums, turn);
    CopyWait<kAhead - 1>();
    Sums own = Sums::Identity();
    V s[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) s[j] = load(stage, j, 0);
    if (op.Has(1)) {
      T* const sum = op.sum + (copy_offset - kAhead * step_elements);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        s[j] = AddRounded(s[j], load(stage, j, 1));
        StoreShared(at(stage, j, 0), s[j]);
        if (active(j) && turn < turns) {
          jaxnorm::Store(sum + j * slot_step, s[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      Acc values[kVec], sum = 0;
      ToAccAll(s[j], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum = kCenter ? sum + values[i] : fma(values[i], values[i], sum);
      own.v[kCenter ? kSum : kSquares] += sum;
    }
    const int written = turn - kLag, written_stage = after(stage, kAhead);
    if (written >= 0 && written < turns) {
      T* const y = op.y + (copy_offset - kStages * step_elements);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        // Two at a time, for which there are registers.
        if (j % 2 == 0) {
          s[j] = load(written_stage, j, 0);
          s[j + 1] = load(written_stage, j + 1, 0);
        }
        Acc values[kVec], out[kVec];
        ToAccAll(s[j], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          out[i] = fma((kCenter ? values[i] - final.mean : values[i]) * final.rstd, factor[j][i], shift[j][i]);
        }
        if (active(j)) jaxnorm::Store(y + j * slot_step, RoundVec<T>(out));
      }
    }
    sums = exchange.End(sums, turn);
    Acc squares = sums.v[kSquares];
    if constexpr (kCenter) {
      const Acc next = MeanOf(sums.v[kSum], count, inverse);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) s[j] = load(after(stage, kStages - 1), j, 0);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        Acc values[kVec], sum = 0, rest = 0;
        ToAccAll(s[j], values);
        const Acc amount = active(j) ? next : Acc(0);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] -= amount;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          sum = fma(values[i], values[i], sum);
          rest += values[i];
        }
        own.v[kSquares] += sum;
        if constexpr (kCorrect) own.v[kRest] += rest;
      }
      if constexpr (kCorrect) {  // and the sum of squares
        const Acc amount = sums.v[kRest] * inverse;
        mean += amount;
        squares = fma(-sums.v[kRest], amount, squares);
        squares = squares < 0 ? Acc(0) : squares;  // not fmax, which would drop NaN
      }
      final.mean = mean;
      mean = next;
    }
    final.rstd = InverseSqrt(fma(squares, inverse, op.epsilon));
    if (const int done = written + 1; done >= 0 && done < turns && rank == 0 && threadIdx.x == 0) {
      op.StoreStatistics(std::bool_constant<kCenter>(), block + int64_t{done} * plan.blocks, final);
    }
    if (turn + 1 < turns + kLag) sums = exchange.Put(own, turn + 1);  // nobody would wait for the last one
    copy(turn + kAhead, written_stage);
    stage = after(stage, 1);
  }
}

template <typename Op, bool kCenter>
bool LaunchKernel(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name,
                  Error* status) {
  constexpr auto kKernel = NormFwdLongKernel<Op, kCenter>;
  const int arrays = op.Inputs(), max_part = (arrays == 1 ? kMaxThreads : kBlockThreads) * kLongSlots;
  RowsPlan plan;
  while (plan.cluster < kMaxCluster && CeilDiv(slots, plan.cluster) > max_part) plan.cluster *= 2;
  plan.part_slots = static_cast<int>(CeilDiv(slots, plan.cluster));
  if (plan.cluster == 1 || plan.part_slots > max_part) return false;
  plan.threads_per_row = static_cast<int>(CeilDiv(CeilDiv(plan.part_slots, kLongSlots), kWarp) * kWarp);
  const int at_once = ActiveClusters<kKernel>(device, kMaxThreads, plan.cluster);
  if (at_once == 0 || op.rows * plan.cluster < device.sms) return false;
  plan.blocks = static_cast<int>(std::min<int64_t>(op.rows, at_once));
  if (op.rows / plan.blocks >= INT32_MAX / 2) return false;
  plan.turns = static_cast<int>(op.rows / plan.blocks);
  plan.rest = static_cast<int>(op.rows % plan.blocks);
  const int halves = static_cast<int>(CeilDiv(plan.threads_per_row, kBlockThreads));
  plan.exchange_offset = kLongStages * kLongSlots * arrays * halves * static_cast<int>(kLongSlotBytes);
  const Grid grid = {
      .blocks = int64_t{plan.blocks} * plan.cluster,
      .threads = plan.threads_per_row,
      .shared_bytes = plan.exchange_offset + RowExchange<NormFwdLongSums<typename Op::T, kCenter>>::Bytes(plan),
      .cluster = plan.cluster};
  *status = Launch<kKernel>(device, stream, grid, name, op, plan);
  return true;
}

}  // namespace

template <typename Op>
bool LaunchNormFwdLong(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name,
                       Error* status) {
  if (op.center) return LaunchKernel<Op, true>(device, stream, op, slots, name, status);
  return LaunchKernel<Op, false>(device, stream, op, slots, name, status);
}

#define JAXNORM_INSTANTIATE(T)                                                                                 \
  template bool LaunchNormFwdLong(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, \
                                  const char*, Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
