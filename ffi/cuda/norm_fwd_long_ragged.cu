// layer_norm, forward, of long rows of 16-bit elements that are not whole slots: clusters stay for many rows and keep their
// parameters in registers. Scale and bias are four times the bytes of a row, and bundles of rows so long have few rows to
// share them.
//
// One warp copies rows to shared memory, as whole slots wherever they begin. The others read and write words of 4 bytes,
// always of the same columns. Rows of an odd number of elements begin in the middle of a word by turns, so a cluster has
// those that begin alike. In a turn, two rows are summed up and their sums sent to all blocks; the two before, whose sums
// have come meanwhile, are written.
//
// Where a row ends, a warp has less than its share. It runs the code of the others as far as can be: code of its own for all
// of it took that warp twice as long for a fourteenth of the work, and the others waited.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

// Measured to be faster than bundles from here on (5 % with 20001 columns, 4 to 14 % with more), and slower with 15001.
inline constexpr int kMinWords = 9600;
inline constexpr int kMinTurns = 16;  // that make up for filling the pipeline

inline constexpr int kTurnRows = 2;
inline constexpr int kUnits = 14;  // words of a row per thread, for which there are registers
inline constexpr int kUnitWords = kUnits * kWarp;
inline constexpr int kWorkWarps = 15;  // at most; one more copies
inline constexpr int kStages = 4;  // turns in shared memory: one is summed up, one is written, others are on their way
// Turns whose sums are on their way. A warp that puts those of turn t has had the sums of turn t - 2, which all warps have
// put, after they had those of turn t - 4.
inline constexpr int kPlaces = 4;

struct LongRaggedPlan {
  int clusters = 1, cluster = 1;
  int words = 0;      // of a row
  int warps = 1;      // of a block, that do not copy
  int row_bytes = 0;  // of a row in shared memory
};

// What a warp or a block has of a row.
struct PartSums {
  float mean, squares;
};

struct LongRaggedShared {
  struct alignas(kVecBytes) Turn {
    PartSums rows[kTurnRows];
  };
  Turn blocks[kPlaces][kMaxPortableCluster];
  Turn warps[kPlaces][kWarp / kTurnRows];
  uint64_t copied[kStages], written[kStages], put[kPlaces], sent[kPlaces];
  float warp_counts[kWarp / kTurnRows], block_counts[kMaxPortableCluster];  // elements of a row
};

// kOdd: rows have an odd number of elements. clusters is even then.
template <typename Op, bool kOdd>
__global__ void __launch_bounds__((kWorkWarps + 1) * kWarp, 1)
    NormFwdLongRaggedKernel(const __grid_constant__ Op op, const LongRaggedPlan plan) {
#if __CUDA_ARCH__ >= 900
  using T = typename Op::T;
  using Partial = typename Op::Partial;
  constexpr int kVec = Op::kVec, kUnit = 2, kSize = sizeof(T);
  constexpr int kStep = kWarp * kUnit;       // columns from one of a thread's units to the next
  constexpr int kLanes = kWarp / kTurnRows;  // for each row of a turn, where its sums are merged
  static_assert(kSize == 2 && kLanes > kWorkWarps && kLanes >= kMaxPortableCluster);
  using Unit = Vec<T, kUnit>;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ LongRaggedShared shared;
  static_assert(sizeof(shared) <= kStaticSharedBytes);
  const int lane = threadIdx.x % kWarp, warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);  // known to be uniform
  const int rank = ClusterRank(), index = ClusterIndex();

  // Word w has columns 2w + back and the next one. The first column of odd rows is alone, and the last one of even rows if
  // their number is odd: the first or the last block has it.
  const int back = kOdd ? index & 1 : 0;
  const auto part_begin = [&](int block) { return static_cast<int>(int64_t{block} * plan.words / plan.cluster); };
  const auto has_single = [&](int block) { return kOdd && block == (back ? 0 : plan.cluster - 1); };
  const int begin = part_begin(rank), end = part_begin(rank + 1);
  const int first_column = rank == 0 ? 0 : begin * kUnit + back;  // of the block
  const int columns_end = rank == plan.cluster - 1 ? op.cols : end * kUnit + back;

  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.copied) InitBarrier(&barrier, 1);
    for (uint64_t& barrier : shared.written) InitBarrier(&barrier, plan.warps);
    for (uint64_t& barrier : shared.put) InitBarrier(&barrier, plan.warps);
  }
  static_assert(kPlaces == 4);
  ClusterStart(&shared.sent[0], &shared.sent[1], &shared.sent[2], &shared.sent[3]);
  // Parts that do not exist have 0.
  const auto elements = [&](int words, bool single) { return static_cast<float>(words * kUnit + (single ? 1 : 0)); };
  if (const int i = threadIdx.x; i < kLanes) {
    const int words = max(0, min(end - begin - i * kUnitWords, kUnitWords));
    shared.warp_counts[i] = elements(words, i == plan.warps - 1 && has_single(rank));
    for (auto& turn : shared.warps) turn[i] = {};
  } else if (const int block = i - kLanes; block < kMaxPortableCluster) {
    const int words = block < plan.cluster ? part_begin(block + 1) - part_begin(block) : 0;
    shared.block_counts[block] = elements(words, block < plan.cluster && has_single(block));
    for (auto& turn : shared.blocks) turn[block] = {};
  }
  __syncthreads();
  ClusterWait();

  const auto row_of = [&](int turn, int r) { return index + int64_t{turn * kTurnRows + r} * plan.clusters; };
  const auto own_rows = static_cast<int>((op.rows - index + plan.clusters - 1) / plan.clusters);
  const int turns = (own_rows + kTurnRows - 1) / kTurnRows;
  const uint32_t stages = SharedAddress(shared_bytes), copied = SharedAddress(shared.copied),
                 written = SharedAddress(shared.written);
  constexpr uint32_t kBarrier = sizeof(uint64_t);

  if (warp == plan.warps) {
    const int64_t size = op.rows * op.cols;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int stage = turn % kStages;
      if (turn >= kStages) WaitForBarrier(written + stage * kBarrier, (turn / kStages - 1) & 1);
      // Lane r copies row r.
      const bool exists = lane < kTurnRows && row_of(turn, lane) < op.rows;
      const int64_t row = row_of(turn, lane) * op.cols, from = (row + first_column) & -kVec, to = row + columns_end;
      const int64_t slots_end = min(to + kVec - 1, size) & -kVec;  // the array may end within its last slot
      const uint32_t offset = (stage * kTurnRows + lane) * plan.row_bytes;
      const uint32_t bytes = exists ? static_cast<uint32_t>(slots_end - from) * kSize : 0;
      for (int64_t i = slots_end; exists && i < to; ++i) {
        reinterpret_cast<T*>(shared_bytes)[offset / kSize + (i - from)] = op.x.data[i];
      }
      const uint32_t all_bytes = __reduce_add_sync(kAllLanes, bytes);
      __syncwarp();
      if (lane == 0) ExpectFromPeers(copied + stage * kBarrier, all_bytes);
      __syncwarp();
      if (bytes > 0) CopyBulk(stages + offset, op.x.data + from, bytes, copied + stage * kBarrier);
    }
    return;
  }

  // The warp has `whole` units of all lanes and, at the block's end, words of some lanes or the column that is alone: `rest`
  // elements of a lane.
  const int warp_word = begin + warp * kUnitWords, words = max(0, min(end - warp_word, kUnitWords));
  const int whole = words / kWarp;
  const bool single = warp == plan.warps - 1 && has_single(rank);
  const int own_column = (warp_word + lane) * kUnit + back;  // of unit 0
  int rest = 0, rest_column = own_column + whole * kStep;
  if (lane < words % kWarp) {
    rest = kUnit;
  } else if (single && lane == words % kWarp) {
    rest = 1;
    rest_column = back ? 0 : op.cols - 1;
  }
  float factor[kUnits][kUnit], shift[kUnits][kUnit], rest_factor[kUnit], rest_shift[kUnit];
  const auto load_parameters = [&]<typename U>(std::type_identity<U>) {
    const auto load = [&](bool exists, int column, float& f, float& s) {
      f = exists && op.scale.data != nullptr ? ToAcc(static_cast<const U*>(op.scale.data)[column]) : 1.0f;
      s = exists && op.bias.data != nullptr ? ToAcc(static_cast<const U*>(op.bias.data)[column]) : 0.0f;
    };
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
#pragma unroll
      for (int j = 0; j < kUnits; ++j) load(j < whole, own_column + j * kStep + e, factor[j][e], shift[j][e]);
      load(e < rest, rest_column + e, rest_factor[e], rest_shift[e]);
    }
  };
  if (op.narrow) {
    load_parameters(std::type_identity<T>());
  } else {
    load_parameters(std::type_identity<float>());
  }

  const uint32_t put = SharedAddress(shared.put), sent = SharedAddress(shared.sent);
  const int q = lane / kLanes, i = lane % kLanes;  // lane i of those for row q
  const float count = static_cast<float>(whole * kUnit + rest);
  const auto of_warp_count = WarpCount<float>::Of(count);
  // Of a column of row r in shared memory.
  const auto address_of = [&](int turn, int r, int column) {
    const int skew = static_cast<int>((row_of(turn, r) * op.cols + first_column) & (kVec - 1));
    return stages + (turn % kStages * kTurnRows + r) * plan.row_bytes + (skew + column - first_column) * kSize;
  };
  // Where the warp has no such unit, of whatever is there.
  const auto load_units = [&](int turn, int r, uint32_t(&words)[kUnits]) {
    const uint32_t address = Kept(address_of(turn, r, own_column));
#pragma unroll
    for (int j = 0; j < kUnits; ++j) words[j] = LoadShared<Words<1>>(address + j * kStep * kSize).w[0];
  };
  const auto load_rest = [&](int turn, int r, int e) {
    return ToAcc(reinterpret_cast<const T*>(shared_bytes)[(address_of(turn, r, rest_column + e) - stages) / kSize]);
  };

  int sender = 0;  // of the turn
#pragma unroll 1
  for (int turn = 0; turn <= turns; ++turn) {
    if (turn < turns) {
      WaitForBarrier(copied + turn % kStages * kBarrier, turn / kStages & 1);
      float pivots[kTurnRows];  // from lane 0, which has as many units as any
#pragma unroll
      for (int r = 0; r < kTurnRows; ++r) {
        float first = 0;
        if (whole > 1) {
          const uint32_t address = address_of(turn, r, own_column);
          const auto unit = [&](int j) {
            float values[kUnit];
            ToAccAll(std::bit_cast<Unit>(LoadShared<Words<1>>(address + j * kStep * kSize)), values);
            return TreeSum(values);
          };
          first = (unit(0) + unit(1)) * (1.0f / (2 * kUnit));
        } else if (whole == 1) {
          first = ToAcc(reinterpret_cast<const T*>(shared_bytes)[(address_of(turn, r, own_column) - stages) / kSize]);
        } else if (rest > 0) {
          first = load_rest(turn, r, 0);
        }
        pivots[r] = __shfl_sync(kAllLanes, first, 0);
      }
      const auto of_warp = SumWarp<Op, true>(pivots, of_warp_count, lane, [&](auto& running) {
        constexpr auto center = std::true_type();
#pragma unroll
        for (int r = 0; r < kTurnRows; ++r) {
          uint32_t words[kUnits];
          load_units(turn, r, words);
          const auto accumulate_units = [&](auto all) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
              if (!all && j >= whole) break;
              float values[kUnit];
              ToAccAll(std::bit_cast<Unit>(words[j]), values);
#pragma unroll
              for (int e = 0; e < kUnit; ++e) op.Accumulate(center, values[e], r, running);
            }
          };
          if (whole == kUnits) {
            accumulate_units(std::true_type());
          } else {
            accumulate_units(std::false_type());
          }
          if (rest > 0) {
#pragma unroll
            for (int e = 0; e < kUnit; ++e) {
              if (e < rest) op.Accumulate(center, load_rest(turn, r, e), r, running);
            }
          }
        }
      });
      const int place = turn % kPlaces;
      if (i == 0) shared.warps[place][warp].rows[q] = {of_warp.mean, of_warp.squares};
      __syncwarp();
      if (lane == 0) ArriveAtBarrier(put + place * kBarrier);
      // One warp, another one in each turn, adds up what those of its block have; no other waits before it needs the sums.
      if (warp == sender) {
        WaitForBarrier(put + place * kBarrier, turn / kPlaces & 1);
        const PartSums part = shared.warps[place][i].rows[q];
        const float all = shared.block_counts[rank];
        const auto of_block = Partial::MergeLanes({{shared.warp_counts[i], part.mean, part.squares}}, kLanes, 0, all,
                                                  Partial::Inverse(all));
        const PartSums sums = {of_block.mean, of_block.squares};
        LongRaggedShared::Turn message;
#pragma unroll
        for (int r = 0; r < kTurnRows; ++r) message.rows[r] = ShuffleFrom(sums, r * kLanes);
        const uint32_t barrier = sent + place * kBarrier;
        if (lane == 0) ExpectFromPeers(barrier, plan.cluster * static_cast<int>(sizeof(message)));
        if (lane < plan.cluster) SendToPeer<4>(SharedAddress(&shared.blocks[place][rank]), barrier, lane, message);
      }
      sender = sender + 1 == plan.warps ? 0 : sender + 1;
    }

    if (turn == 0) continue;
    const int before = turn - 1, place = before % kPlaces, block = i % kMaxPortableCluster;
    WaitForBarrier(sent + place * kBarrier, before / kPlaces & 1);
    const PartSums part = shared.blocks[place][block].rows[q];
    const auto of_row = Partial::MergeLanes({{shared.block_counts[block], part.mean, part.squares}},
                                            kMaxPortableCluster, 0, static_cast<float>(op.cols), op.inverse_cols);
    const typename Op::Final own = {of_row.mean, InverseSqrt(fma(of_row.squares, op.inverse_cols, op.epsilon))};
    if (rank == 0 && warp == 0 && i == 0 && row_of(before, q) < op.rows) {
      op.StoreStatistics(/*center=*/std::true_type(), row_of(before, q), own);
    }
#pragma unroll
    for (int r = 0; r < kTurnRows; ++r) {
      if (row_of(before, r) >= op.rows) break;
      const auto final = ShuffleFrom(own, r * kLanes);
      const auto normalize = [&](float value, float f, float s) {
        return fma((value - final.mean) * final.rstd, f, s);
      };
      T* const row = op.y + row_of(before, r) * op.cols;
      T* const y = Kept(row + own_column);
      uint32_t words[kUnits];
      load_units(before, r, words);
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        float values[kUnit];
        ToAccAll(std::bit_cast<Unit>(words[j]), values);
#pragma unroll
        for (int e = 0; e < kUnit; ++e) values[e] = normalize(values[e], factor[j][e], shift[j][e]);
        const auto out = RoundVec<T>(values);
        if (j < whole) jaxnorm::Store(y + j * kStep, out);
      }
#pragma unroll
      for (int e = 0; e < kUnit; ++e) {
        if (e >= rest) break;
        row[rest_column + e] = FromAcc<T>(normalize(load_rest(before, r, e), rest_factor[e], rest_shift[e]));
      }
    }
    __syncwarp();
    if (lane == 0) ArriveAtBarrier(written + before % kStages * kBarrier);
  }
#endif
}

template <bool kOdd, typename Op>
bool LaunchKernel(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status) {
  constexpr auto kKernel = NormFwdLongRaggedKernel<Op, kOdd>;
  LongRaggedPlan plan = {.words = op.cols / 2};
  if (plan.words < kMinWords) return false;
  static_assert(kMinWords > kWorkWarps * kUnitWords);  // a block alone would not be launched as a cluster
  constexpr int kSingle = kOdd ? 1 : 0;                // takes the place of a word
  plan.cluster = static_cast<int>(CeilDiv(plan.words, kWorkWarps * kUnitWords - kSingle));
  if (plan.cluster > kMaxPortableCluster) return false;
  const int64_t part = CeilDiv(plan.words, plan.cluster);
  plan.warps = static_cast<int>(CeilDiv(part + kSingle, kUnitWords));
  constexpr int kWord = sizeof(uint32_t);
  plan.row_bytes = static_cast<int>(CeilDiv((part + kSingle) * kWord + 2 * kVecBytes, kLineBytes) * kLineBytes);
  plan.clusters = ActiveClusters<kKernel>(device, (kWorkWarps + 1) * kWarp, plan.cluster);
  if (kOdd) plan.clusters &= ~1;
  if (plan.clusters == 0 || op.rows < int64_t{plan.clusters} * kTurnRows * kMinTurns) return false;
  if (op.rows / plan.clusters >= INT32_MAX / 2) return false;
  const Grid grid = {.blocks = int64_t{plan.clusters} * plan.cluster,
                     .threads = (plan.warps + 1) * kWarp,
                     // Behind the last row, what units are loaded from that do not exist.
                     .shared_bytes = kStages * kTurnRows * plan.row_bytes + kUnitWords * kWord,
                     .cluster = plan.cluster};
  if (grid.shared_bytes > device.max_shared_bytes - kStaticSharedBytes) return false;
  *status = Launch<kKernel>(device, stream, grid, name, op, plan);
  return true;
}

}  // namespace

template <typename Op>
bool LaunchNormFwdLongRagged(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name,
                             Error* status) {
  if constexpr (sizeof(typename Op::T) == 2) {
    if (!op.center || op.Has(1)) return false;
    return op.cols % 2 != 0 ? LaunchKernel<true>(device, stream, op, name, status)
                            : LaunchKernel<false>(device, stream, op, name, status);
  } else {
    return false;
  }
}

#define JAXNORM_INSTANTIATE(T)                                                                             \
  template bool LaunchNormFwdLongRagged(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kRagged>&, \
                                        const char*, Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
