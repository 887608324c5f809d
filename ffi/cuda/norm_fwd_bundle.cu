// layer_norm and rms_norm, forward, of rows in shared memory: a thread works on several rows, with the same columns of
// each, so that scale and bias are loaded once for all of them. They may be larger than the rows' slots, and loading them
// for each row was measured to take as much time as all else.
//
// A block, or a cluster of them, has a bundle of rows that lie alike on the address grid. Each thread copies its slots to
// shared memory asynchronously and reads no others, so no barrier is needed before the sums meet. The blocks of a
// multiprocessor are at different points: some load while others store. Instructions count here too, and so does what a
// block has to wait for. What rows of odd length have beside their whole slots, fewer columns than two slots, is one
// column for each of some lanes, which load them before all else.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kMinBundleThreads = 128;  // of a block
// What was measured to be best. Beyond kMaxBytes, a bundle goes over a cluster of blocks with kPartBytes or less.
template <typename Op>
struct BundleSize {
  static constexpr bool kPlain = Op::kMode == Mode::kPlain;
  static constexpr int kMaxThreads = kPlain ? 256 : 224;
  static constexpr int kBlocks = kPlain ? 3 : 4;  // on a multiprocessor
  static constexpr int kMaxBytes = 72 << 10, kPartBytes = (kPlain ? 72 : 52) << 10;
  static constexpr int kSlotsPerThread = kPlain ? 8 : 16;  // of all rows
};

// From one row of a bundle to the next.
template <typename Op>
inline constexpr int kBundleStep = Op::kMode == Mode::kPlain ? 1 : Op::kVec;

struct BundlePlan {
  int threads_per_row = kWarp;  // whole warps, and a power of two of them where a block has several bundles
  int bundles_per_block = 1;
  int cluster = 1;     // blocks that share a bundle
  int part_slots = 0;  // whole slots of a row per block
  int half_slots = 0;  // of them, those copied first
  bool usual = false;  // layer_norm has scale and bias, rms_norm scale without offset, in the arithmetic's dtype
};

inline constexpr int kNoEdge = INT_MIN;
template <typename Op, int kRows>
struct BundleShared {
  using T = typename Op::T;
  using Partial = typename Op::Partial;
  Partial warps[kRows][BundleSize<Op>::kMaxThreads / kWarp];
  Partial blocks[kRows][kMaxPortableCluster];
  uint64_t barrier;
  int64_t first_row[kMinBundleThreads / kWarp];  // of each bundle
  struct Edge {                                  // a column beside whole slots
    int offset;                                  // from the first whole slot
    AccT<T> factor, shift;
    T rows[kRows];
  } edges[kMinBundleThreads / kWarp][2 * kVecSize<T>];
};

// There are at least as many rows as kBundleStep bundles have.
template <typename Op, bool kCenter, int kRows>
__global__ void __launch_bounds__(BundleSize<Op>::kMaxThreads, BundleSize<Op>::kBlocks)
    NormFwdBundleKernel(const __grid_constant__ Op op, const BundlePlan plan) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = Vec<T, Op::kVec>;
  using Partial = typename Op::Partial;
  constexpr bool kRagged = Op::kMode == Mode::kRagged;
  constexpr int kVec = Op::kVec, kStep = kBundleStep<Op>;
  constexpr int kLanes = kWarp / kRows;  // that merge one row's partials
  constexpr auto center = std::bool_constant<kCenter>();
  static_assert(Op::kMode == Mode::kPlain || kRagged);
  static_assert(kLanes >= BundleSize<Op>::kMaxThreads / kWarp && kLanes >= kMaxPortableCluster);
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ BundleShared<Op, kRows> shared;
  const int threads = plan.threads_per_row, inputs = op.Inputs();
  int thread = threadIdx.x, group = 0, rank = 0;
  int64_t index = blockIdx.x;
  if (plan.bundles_per_block > 1) {
    thread &= threads - 1;
    group = threadIdx.x >> (31 - __clz(threads));
    index = index * plan.bundles_per_block + group;
  } else if (plan.cluster > 1) {
    ClusterStart(&shared.barrier);
    index = ClusterIndex();
    rank = ClusterRank();
  }
  // The last rows are shared by two bundles where their number is not a multiple; both write the same values.
  const int64_t first_row = min(index / kStep * (kStep * kRows), op.rows - kStep * kRows) + index % kStep;
  const int skew =
      kRagged ? static_cast<int>(reinterpret_cast<uintptr_t>(op.y + first_row * op.cols) / sizeof(T) % kVec) : 0;
  const void *const scale = op.Shifted(op.scale, skew), *const bias = op.Shifted(op.bias, skew);
  // A row is `lead` elements, whole slots and fewer elements than a slot. This block has `slots` of them.
  const int lead = -skew & (kVec - 1);
  const int all_slots = (op.cols - lead) / kVec, begin = rank * plan.part_slots;
  const int slots = max(0, min(plan.part_slots, all_slots - begin)), half = min(plan.half_slots, slots);
  const int first_column = lead + begin * kVec;
  // Of the first row's first slot here; and from row to row.
  const int64_t offset = first_row * op.cols + first_column;
  T *const y = Kept(op.y + offset), *const sum = op.sum + offset;
  const T* const data[] = {op.x.data + offset, op.residual.data + offset};
  const int stride = kStep * op.cols;
  const uint32_t part_bytes = plan.part_slots * kVecBytes;
  const uint32_t base = SharedAddress(shared_bytes) + group * inputs * kRows * part_bytes;
  const auto at = [&](int r, int slot, int k) { return base + (k * kRows + r) * part_bytes + slot * kVecBytes; };

  const auto copy = [&](int from, int to) {
    for (int slot = from + thread; slot < to; slot += threads) {
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
        if (!op.Has(k)) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) CopyAsync(at(r, slot, k), data[k] + slot * kVec + r * stride);
      }
    }
    CopyCommit();
  };
  // Columns beside whole slots, of which those before them come first. The row's last warp has them, which has the
  // fewest slots. Loaded first, so that they do not come last.
  constexpr int kEdges = 2 * kVec;
  const auto edge_lane = [&] { return kRagged && rank == 0 ? thread - (threads - kWarp) : kEdges; };
  int edge = -1;
  if (const int i = edge_lane(); i >= 0 && i < kEdges) {
    const int after = lead + all_slots * kVec + i - kVec;
    if (i < kVec ? i < lead : after < op.cols) edge = i < kVec ? i : after;
  }
  T edges[kRows] = {}, added_edges[kRows];
  Acc edge_factor = 1, edge_shift = 0;
  if (kRagged && edge >= 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      edges[r] = data[0][edge - lead + r * stride];
      if (inputs > 1) added_edges[r] = data[1][edge - lead + r * stride];
    }
    const auto load = [&](const void* parameters) {
      return op.narrow ? ToAcc(static_cast<const T*>(parameters)[edge]) : static_cast<const Acc*>(parameters)[edge];
    };
    if (scale != nullptr) edge_factor = load(scale);
    if (bias != nullptr) edge_shift = load(bias);
  }
  copy(0, half);
  copy(half, slots);

  if (kRagged && edge >= 0 && inputs > 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      edges[r] = AddRounded(Vec<T, 2>{edges[r]}, Vec<T, 2>{added_edges[r]}).v[0];
      sum[edge - lead + r * stride] = edges[r];
    }
  }
  if (const int i = edge_lane(); i >= 0 && i < kEdges) {
    auto& kept = shared.edges[group][i];
    kept.offset = edge < 0 ? kNoEdge : edge - lead;
    kept.factor = scale != nullptr ? edge_factor + op.scale_offset : edge_factor;
    kept.shift = edge_shift;
#pragma unroll
    for (int r = 0; r < kRows; ++r) kept.rows[r] = edges[r];
  }
  if (thread == 0) shared.first_row[group] = first_row;
  if (plan.cluster > 1) ClusterWait();

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = threads / kWarp;
  const auto own_slots = [&](int from, int to) { return max(to - from - thread + threads - 1, 0) / threads; };
  const int own_count = (own_slots(0, half) + own_slots(half, slots)) * kVec + (kRagged && edge >= 0 ? 1 : 0);
  const auto all = WarpCount<Acc>::Of(static_cast<Acc>(own_count));
  // f(slot) for this thread's slots of a turn.
  const auto for_slots = [&](int turn, auto f) {
    const int to = turn == 0 ? half : slots;
#pragma unroll 1
    for (int slot = (turn == 0 ? 0 : half) + thread; slot < to; slot += threads) f(slot);
  };
  // For the copies of a turn, which are a group; and adds the residual.
  const auto wait = [&](int turn) {
    if (turn == 0) {
      CopyWait<1>();
    } else {
      CopyWait<0>();
    }
    if (inputs == 1) return;
    for_slots(turn, [&](int slot) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const V added = AddRounded(LoadShared<V>(at(r, slot, 0)), LoadShared<V>(at(r, slot, 1)));
        StoreShared(at(r, slot, 0), added);
        jaxnorm::Store(sum + slot * kVec + r * stride, added);
      }
    });
  };
  Acc factor[kVec], shift[kVec] = {};
  const auto load_parameters = [&](int slot) {
    const int first = first_column + (slot < slots ? slot : 0) * kVec;
    if (plan.usual) {  // half the instructions
      const auto load = [&](const void* parameters, Acc(&values)[kVec]) {
        ToAccAll(LoadColumns<Acc, kVec, true>(static_cast<const Acc*>(parameters), first, op.cols), values);
      };
      load(scale, factor);
      if (kCenter) load(bias, shift);
    } else {
      op.Parameters(scale, bias, first, factor, shift);
    }
  };
  int turns = 0;  // that have come
  wait(turns++);
  Acc pivots[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Lane 0 has a slot of this turn if any lane has one.
    if (kCenter) {
      pivots[r] = __shfl_sync(kAllLanes, thread < half ? Op::MeanOfSlot(LoadShared<V>(at(r, thread, 0))) : Acc(0), 0);
    }
  }
  const Partial own = SumWarp<Op, kCenter>(pivots, all, lane, [&](auto& running) {
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == turns) wait(turns++);
      for_slots(turn, [&](int slot) {
        V rows[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) rows[r] = LoadShared<V>(at(r, slot, 0));
        op.Accumulate(center, rows, running);
      });
    }
    if (kRagged && edge >= 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) op.Accumulate(center, ToAcc(edges[r]), r, running);
    }
  });
  // Lane (q, i) merges what warp i, and then block i, has of row q.
  const int q = lane / kLanes, i = lane % kLanes, first_warp = group * warps;
  if (i == 0) shared.warps[q][warp] = own;
  load_parameters(thread);  // on their way while the sums meet
  const Acc cols = static_cast<Acc>(op.cols);
  Acc count = cols, inverse = op.inverse_cols;
  if (plan.cluster > 1) {
    const int beside = rank == 0 ? first_column + ((op.cols - first_column) & (kVec - 1)) : 0;
    count = static_cast<Acc>(slots * kVec + beside);
    inverse = Partial::Inverse(count);
  }
  __syncthreads();
  const Partial of_warp[] = {i < warps ? shared.warps[q][first_warp + i] : Partial::Identity()};
  Partial total = op.MergeLanes(center, of_warp, kLanes, count, inverse);
  if (plan.cluster > 1) {
    if (warp == 0 && i < plan.cluster) SendToPeer(&shared.blocks[q][rank], &shared.barrier, i, total);
    ReceiveFromPeers(&shared.barrier, plan.cluster * kRows * static_cast<int>(sizeof(Partial)), 0);
    const Partial of_block[] = {i < plan.cluster ? shared.blocks[q][i] : Partial::Identity()};
    total = op.MergeLanes(center, of_block, kLanes, cols, op.inverse_cols);
  }
  const typename Op::Final of_row = {total.mean, InverseSqrt(fma(total.squares, op.inverse_cols, op.epsilon))};
  if (rank == 0 && warp == first_warp && i == 0) {
    op.StoreStatistics(center, shared.first_row[group] + q * kStep, of_row);
  }
  typename Op::Final final[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) final[r] = ShuffleFrom(of_row, r * kLanes);

#pragma unroll 1
  for (int slot = thread; slot < slots; slot += threads) {
    if (slot != thread) load_parameters(slot);
    V rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = LoadShared<V>(at(r, slot, 0));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Acc values[kVec];
      ToAccAll(rows[r], values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        values[j] = fma((kCenter ? values[j] - final[r].mean : values[j]) * final[r].rstd, factor[j], shift[j]);
      }
      jaxnorm::Store(y + slot * kVec + r * stride, RoundVec<T>(values));
    }
  }
  if (const int i = edge_lane(); i >= 0 && i < kEdges) {
    const auto& kept = shared.edges[group][i];
    if (kept.offset == kNoEdge) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Acc value = ToAcc(kept.rows[r]);
      y[kept.offset + r * stride] =
          FromAcc<T>(fma((kCenter ? value - final[r].mean : value) * final[r].rstd, kept.factor, kept.shift));
    }
  }
}

// Bundles of kRows rows; false if they do not suit.
template <typename Op, bool kCenter, int kRows>
bool LaunchKernel(const DeviceInfo& device, cudaStream_t stream, Op& op, Scratch scratch, const char* name,
                  Error* status) {
  using Size = BundleSize<Op>;
  constexpr int kStep = kBundleStep<Op>, kSlots = Size::kSlotsPerThread / kRows;
  if (op.rows < kRows * kStep) return false;
  const int64_t slots = op.cols / Op::kVec, slot_bytes = int64_t{kVecBytes} * op.Inputs() * kRows;
  const int64_t cluster = slots * slot_bytes <= Size::kMaxBytes ? 1 : CeilDiv(slots * slot_bytes, Size::kPartBytes);
  if (cluster > (device.clusters ? kMaxPortableCluster : 1)) return false;
  BundlePlan plan = {.cluster = static_cast<int>(cluster), .part_slots = static_cast<int>(CeilDiv(slots, cluster))};
  plan.usual = op.scale.data != nullptr && (op.bias.data != nullptr) == kCenter && !op.narrow && op.scale_offset == 0;
  const int64_t threads = CeilDiv(plan.part_slots, kSlots);
  if (threads <= kMinBundleThreads && cluster == 1) {
    plan.threads_per_row = std::max(NextPowerOfTwo(threads), kWarp);
    plan.bundles_per_block = kMinBundleThreads / plan.threads_per_row;
  } else {
    const int64_t turns = std::max<int64_t>(kSlots, CeilDiv(plan.part_slots, Size::kMaxThreads));
    const int64_t warps = CeilDiv(CeilDiv(plan.part_slots, turns), kWarp);
    plan.threads_per_row = static_cast<int>(std::clamp<int64_t>(warps * kWarp, kMinBundleThreads, Size::kMaxThreads));
  }
  plan.half_slots = CeilDiv(plan.part_slots, 2 * plan.threads_per_row) * plan.threads_per_row;
  const int64_t shared_bytes = plan.part_slots * slot_bytes * plan.bundles_per_block;
  if (shared_bytes > device.max_shared_bytes - kStaticSharedBytes) return false;
  // Too few rows to fill the device are better spread one by one.
  const int64_t blocks = CeilDiv(CeilDiv(op.rows, kStep * kRows) * kStep, plan.bundles_per_block) * plan.cluster;
  if (blocks < device.sms) return false;
  if constexpr (kStep > 1) {
    if (!op.ShiftParameters(device, stream, scratch, name, status)) return false;
    if (status->failure()) return true;
  }
  const Grid grid = {.blocks = blocks,
                     .threads = plan.threads_per_row * plan.bundles_per_block,
                     .shared_bytes = static_cast<int>(shared_bytes),
                     .cluster = plan.cluster};
  *status = Launch<NormFwdBundleKernel<Op, kCenter, kRows>>(device, stream, grid, name, op, plan);
  return true;
}

}  // namespace

template <typename Op>
bool LaunchNormFwdBundles(const DeviceInfo& device, cudaStream_t stream, Op op, Scratch scratch, const char* name,
                          Error* status) {
  constexpr int kPairSlots = 512;  // of layer_norm, up to which two rows were measured to be better than four
  const auto launch = [&]<bool kCenter>() {
    const bool pairs = Op::kMode == Mode::kPlain && kCenter && op.cols <= kPairSlots * Op::kVec;
    return (!pairs && LaunchKernel<Op, kCenter, 4>(device, stream, op, scratch, name, status)) ||
           LaunchKernel<Op, kCenter, 2>(device, stream, op, scratch, name, status);
  };
  return op.center ? launch.template operator()<true>() : launch.template operator()<false>();
}

#define JAXNORM_INSTANTIATE(T)                                                                                        \
  template bool LaunchNormFwdBundles(const DeviceInfo&, cudaStream_t, NormFwd<T, Mode::kPlain>, Scratch, const char*, \
                                     Error*);                                                                         \
  template bool LaunchNormFwdBundles(const DeviceInfo&, cudaStream_t, NormFwd<T, Mode::kRagged, true>, Scratch,       \
                                     const char*, Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
