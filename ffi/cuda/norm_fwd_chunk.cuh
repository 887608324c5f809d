// layer_norm and rms_norm, forward, of chunks of a few rows. Made for rows of any length that need not begin on a slot, and
// as fast for those that do.
//
// The rows of a chunk lie one behind the other in memory, and a block copies them to shared memory in whole slots,
// wherever a row begins. From there each thread takes the same columns of every row to registers, and keeps the parameters
// of these columns there for all of the block's chunks. So no row is shifted into place, and no parameter is loaded twice.
//
// A thread reads and writes units: slots where rows are whole slots, else 32-bit words. If rows have an odd number of
// 16-bit elements, every other one begins in the middle of a word. Word i has columns 2i and 2i + 1 of one row and columns
// 2i - 1 and 2i of the next, for which the thread has the parameters of three columns.
#ifndef JAXNORM_CUDA_NORM_FWD_CHUNK_CUH_
#define JAXNORM_CUDA_NORM_FWD_CHUNK_CUH_

#include "norm_fwd.cuh"

namespace jaxnorm {

struct ChunkPlan {
  int64_t chunks = 0;
  int blocks = 1;       // block i has chunks i, i + blocks, ...
  int array_bytes = 0;  // of shared memory, for a chunk of one array
};

inline constexpr int kChunkStages = 2;  // chunks on chip: one in work, one on its way

template <typename Op>  // elements
inline constexpr int kChunkUnit =
    (Op::kMode == Mode::kPlain ? kVecBytes : int{sizeof(uint32_t)}) / int{sizeof(typename Op::T)};

// Rows of a chunk, units of a row per thread, threads at most, and blocks of that many that registers are meant for: one
// less if there is a residual, which takes some.
template <int kRows_, int kUnits_, int kThreads_, int kBlocks_>
struct ChunkSize {
  static constexpr int kRows = kRows_, kUnits = kUnits_, kThreads = kThreads_;
  static constexpr int Blocks(bool add) { return kBlocks_ - (add && kBlocks_ > 2 ? 1 : 0); }
};

template <typename Op, bool kCenter, bool kAdd, bool kOdd, typename Size>
__global__ void __launch_bounds__(Size::kThreads, Size::Blocks(kAdd))
    NormFwdChunkKernel(const __grid_constant__ Op op, const ChunkPlan plan) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  constexpr int kRows = Size::kRows, kUnits = Size::kUnits, kStages = kChunkStages;
  constexpr int kUnit = kChunkUnit<Op>;
  constexpr int kStep = kWarp * kUnit;  // elements from one of a thread's units to the next
  constexpr int kVec = Op::kVec;
  constexpr int kBack = kOdd ? 1 : 0;    // columns that odd rows' units begin earlier
  constexpr int kLanes = kWarp / kRows;  // that end up with the sum of a row
  constexpr int kMaxWarps = Size::kThreads / kWarp;
  constexpr int kPartTurns = (kMaxWarps + kLanes - 1) / kLanes;
  constexpr bool kCorrect = kCenter && kCorrectsMean<T>;
  static_assert(!kOdd || kUnit == 2);
  using Unit = Vec<T, kUnit>;
  // Of each row and warp, 0 for warps that do not exist: first sums, squares of the deviations, their sum. rms_norm has the
  // first and second by turns.
  __shared__ Acc parts[3][kRows][kPartTurns * kLanes];
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  const int threads = blockDim.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  constexpr int kInputs = kAdd ? 2 : 1;
  const int first_column = (warp * kUnits * kWarp + lane) * kUnit;  // in even rows
  const int left = op.cols - first_column;
  // Whether all units of the warp are inside the rows.
  const bool inside = (warp + 1) * kUnits * kStep <= op.cols;
  const int chunk_size = kRows * op.cols;
  const int64_t size = op.rows * op.cols;
  const uint32_t shared = SharedAddress(shared_bytes);

  const auto copy = [&](int64_t chunk, int stage) {
    const int64_t begin = chunk * chunk_size;
    const int skew = static_cast<int>(begin & (kVec - 1));
    const uint32_t to = shared + stage * kInputs * plan.array_bytes + threadIdx.x * kVecBytes;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (chunk >= plan.chunks) continue;
      const T* const from = (k == 0 ? op.x.data : op.residual.data) + (begin - skew);
      if (begin + chunk_size + kVec <= size) {
        const int slots = (skew + chunk_size + kVec - 1) / kVec;
#pragma unroll
        for (int i = 0; i <= kUnits * kUnit * kRows / kVec; ++i) {
          const int slot = threadIdx.x + i * threads;
          if (slot < slots) {
            CopyAsync</*kCached=*/true>(to + k * plan.array_bytes + i * threads * kVecBytes, from + slot * kVec);
          }
        }
      } else {  // the array may end within its last slot
        const int slots = static_cast<int>((size - begin + skew) / kVec);
        for (int slot = threadIdx.x; slot < slots; slot += threads) {
          CopyAsync</*kCached=*/true>(to + k * plan.array_bytes + (slot - threadIdx.x) * kVecBytes, from + slot * kVec);
        }
        T* const rest = reinterpret_cast<T*>(shared_bytes) +
                        (stage * kInputs + k) * (plan.array_bytes / static_cast<int>(sizeof(T))) + slots * kVec;
        const int count = static_cast<int>(size - begin + skew) - slots * kVec;
        if (static_cast<int>(threadIdx.x) < count) rest[threadIdx.x] = from[slots * kVec + threadIdx.x];
      }
    }
    CopyCommit();
  };
#pragma unroll 1
  for (int n = 0; n < kStages; ++n) copy(blockIdx.x + int64_t{n} * plan.blocks, n);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(parts) / sizeof(Acc)); i += threads) (&parts[0][0][0])[i] = 0;

  Acc factor[kUnits][kUnit + kBack], shift[kUnits][kUnit + kBack];
  if constexpr (kUnit == kVec) {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int first = first_column + j * kStep;
      op.Parameters(first < op.cols ? first : 0, factor[j], shift[j]);
    }
  } else {
    const auto load = [&]<typename U>(std::type_identity<U>) {
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
#pragma unroll
        for (int i = 0; i < kUnit + kBack; ++i) {
          const int column = first_column + j * kStep - kBack + i;
          const bool exists = column >= 0 && column < op.cols;
          factor[j][i] =
              exists && op.scale.data != nullptr ? ToAcc(static_cast<const U*>(op.scale.data)[column]) : Acc(1);
          shift[j][i] = exists && op.bias.data != nullptr ? ToAcc(static_cast<const U*>(op.bias.data)[column]) : Acc(0);
        }
      }
    };
    if (op.narrow) {
      load(std::type_identity<T>());
    } else {
      load(std::type_identity<Acc>());
    }
    if (op.scale.data != nullptr && op.scale_offset != 0) {  // last, so that no load waits for another
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
#pragma unroll
        for (int i = 0; i < kUnit + kBack; ++i) factor[j][i] += op.scale_offset;
      }
    }
  }
  // Whether element e of unit j is in row r, or in those before it (in warps that are not all inside).
  const auto in_rows = [&](int r, int j, int e) {
    return j * kStep + (kUnit == kVec || (kOdd && r % 2) ? 0 : e) < left;
  };
  // Whether it is the last element of the row before.
  const auto is_before = [&](int r, int j, int e) { return kOdd && r % 2 && j == 0 && e == 0 && threadIdx.x == 0; };
  // Calls f(edge): false only if in_rows is true for all of the warp.
  const auto with_edge = [&](auto f) {
    if (inside) {
      f(std::false_type());
    } else {
      f(std::true_type());
    }
  };
  const Acc count = static_cast<Acc>(op.cols), inverse = op.inverse_cols;
  const auto add = [](Acc a, Acc b) { return a + b; };
  CopyWait<kStages - 1>();
  __syncthreads();

  int stage = 0;
#pragma unroll 1
  for (int64_t chunk = blockIdx.x; chunk < plan.chunks; chunk += plan.blocks) {
    const int64_t begin = chunk * chunk_size;
    const int rows = static_cast<int>(min(op.rows - chunk * kRows, int64_t{kRows}));
    // From this thread's first unit in the chunk, which these point to, to that in row r.
    const auto row_offset = [&](int r) { return r * op.cols - (r % 2 ? kBack : 0); };
    const uint32_t from = shared + stage * kInputs * plan.array_bytes +
                          (static_cast<int>(begin & (kVec - 1)) + first_column) * static_cast<int>(sizeof(T));
    T* const y = op.y + (begin + first_column);
    T* const sum = op.sum + (begin + first_column);
    // Stores unit j of row r, or what is inside of it.
    const auto store = [&](auto edge, T* array, int r, int j, const Unit& unit) {
      T* const to = array + row_offset(r) + j * kStep;
      if ((!edge || in_rows(r, j, kUnit - 1)) && !is_before(r, j, 0)) jaxnorm::Store(to, unit);
      if constexpr (kOdd) {
        if (edge && r % 2 == 0 && in_rows(r, j, 0) && !in_rows(r, j, 1)) jaxnorm::Store(to, Vec<T, 1>{unit.v[0]});
        if (is_before(r, j, 0)) jaxnorm::Store(to + 1, Vec<T, 1>{unit.v[1]});
      }
    };
    Acc values[kRows][kUnits][kUnit];
    const auto clear_outside = [&](auto edge, int r, int j) {
#pragma unroll
      for (int e = 0; e < kUnit; ++e) {
        if ((edge && !in_rows(r, j, e)) || is_before(r, j, e)) values[r][j][e] = 0;
      }
    };
    with_edge([&](auto edge) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          WordsOf<Unit> words = {};  // as elements, they would be packed and unpacked one by one
          const uint32_t at = from + (row_offset(r) + j * kStep) * static_cast<int>(sizeof(T));
          if (!edge || in_rows(r, j, 0)) {
            words = LoadShared<WordsOf<Unit>>(at);
            if constexpr (kAdd) {
              const auto added = LoadShared<Unit>(at + plan.array_bytes);
              words = std::bit_cast<WordsOf<Unit>>(AddRounded(std::bit_cast<Unit>(words), added));
            }
          }
          const auto unit = std::bit_cast<Unit>(words);
          if (kAdd && r < rows) store(edge, sum, r, j, unit);
          ToAccAll(unit, values[r][j]);
          clear_outside(edge, r, j);
        }
      }
    });
    Acc sums[kRows];
    const auto sum_up = [&](auto f) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] = 0;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
#pragma unroll
          for (int e = 0; e < kUnit; ++e) sums[r] = f(sums[r], values[r][j][e]);
        }
      }
    };
    const auto put = [&](int place) {
      const Acc merged = SumOverLanes<kWarp>(sums, lane);
      if (lane % kLanes == 0) parts[place][lane / kLanes][warp] = merged;
    };
    const auto total = [&](int place) {
      Acc merged = 0;
#pragma unroll
      for (int i = 0; i < kPartTurns; ++i) merged += parts[place][lane / kLanes][lane % kLanes + i * kLanes];
      return LaneSum(merged, kLanes);
    };
    const auto of_row = [&](Acc value, int r) { return __shfl_sync(kAllLanes, value, r * kLanes); };
    const auto copy_next = [&] { copy(chunk + int64_t{kStages} * plan.blocks, stage); };

    Acc mean = 0, squares = 0, rest = 0;  // of row lane / kLanes
    if constexpr (kCenter) {
      sum_up(add);
      put(0);
      __syncthreads();
      copy_next();  // all have read this stage
      mean = MeanOf(total(0), count, inverse);
      Acc means[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) means[r] = of_row(mean, r);
      with_edge([&](auto edge) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j < kUnits; ++j) {
#pragma unroll
            for (int e = 0; e < kUnit; ++e) values[r][j][e] -= means[r];
            clear_outside(edge, r, j);
          }
        }
      });
      if constexpr (kCorrect) {
        sum_up(add);
        put(2);
      }
    }
    // A place that no warp may still read from.
    const int place = kCenter ? 1 : stage;
    sum_up([](Acc sum, Acc value) { return fma(value, value, sum); });
    put(place);
    CopyWait<kCenter ? kStages - 1 : kStages - 2>();  // the next chunk has come
    __syncthreads();
    if (!kCenter) copy_next();
    squares = total(place);
    if constexpr (kCorrect) {  // the mean was rounded
      const Acc deviations = total(2);
      rest = deviations * inverse;
      mean += rest;
      squares = fma(-deviations, rest, squares);
      squares = squares < 0 ? Acc(0) : squares;  // not fmax, which would drop NaN
    }
    const typename Op::Final final = {mean, InverseSqrt(fma(squares, inverse, op.epsilon))};
    if (warp == 0 && lane % kLanes == 0 && lane / kLanes < rows) {
      op.StoreStatistics(std::bool_constant<kCenter>(), chunk * kRows + lane / kLanes, final);
    }
    Acc rests[kRows], rstds[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rests[r] = kCorrect ? of_row(rest, r) : Acc(0);
      rstds[r] = of_row(final.rstd, r);
    }
    with_edge([&](auto edge) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          Acc out[kUnit];
#pragma unroll
          for (int e = 0; e < kUnit; ++e) {
            const int column = e + (r % 2 ? 0 : kBack);
            const Acc value = kCorrect ? values[r][j][e] - rests[r] : values[r][j][e];
            out[e] = fma(value * rstds[r], factor[j][column], shift[j][column]);
          }
          store(edge, y, r, j, RoundVec<T>(out));
        }
      }
    });
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

template <typename Op, bool kCenter, bool kAdd, bool kOdd, typename Size>
bool LaunchChunkKernel(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status) {
  using T = typename Op::T;
  constexpr auto kKernel = NormFwdChunkKernel<Op, kCenter, kAdd, kOdd, Size>;
  constexpr int kUnit = kChunkUnit<Op>;
  const int threads = static_cast<int>(CeilDiv(CeilDiv(op.cols, kUnit), Size::kUnits * kWarp) * kWarp);
  if (threads > Size::kThreads) return false;
  const int bytes = Size::kRows * op.cols * static_cast<int>(sizeof(T)) + kVecBytes;
  ChunkPlan plan = {.chunks = CeilDiv(op.rows, Size::kRows),
                    .array_bytes = static_cast<int>(CeilDiv(bytes, kLineBytes) * kLineBytes)};
  const int shared_bytes = (Op::kMode == Mode::kPlain ? 1 : kChunkStages) * (kAdd ? 2 : 1) * plan.array_bytes;
  if (shared_bytes > device.max_shared_bytes - kStaticSharedBytes) return false;
  // A block that stays for several chunks loads its parameters once, and copies one chunk while it works on another; but
  // multiprocessors are not equally fast, and if blocks are few, most wait for the slowest. Whole slots have their
  // parameters in few loads.
  const int64_t at_once = int64_t{device.sms} * Size::Blocks(kAdd) * (Size::kThreads / threads);
  const int64_t max_turns = Op::kMode == Mode::kPlain ? 1 : std::max<int64_t>(2, CeilDiv(op.cols, 512));
  const int64_t turns = std::clamp<int64_t>(plan.chunks / (2 * at_once), 1, max_turns);
  if (CeilDiv(plan.chunks, turns) > INT32_MAX) return false;
  plan.blocks = static_cast<int>(CeilDiv(plan.chunks, turns));
  const Grid grid = {.blocks = plan.blocks, .threads = threads, .shared_bytes = shared_bytes};
  *status = Launch<kKernel>(device, stream, grid, name, op, plan);
  return true;
}

// Calls LaunchChunkKernel of each size until one suits; false if none does.
template <bool kOdd, typename... Size, typename Op>
bool LaunchChunks(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status) {
  const auto launch = [&]<bool kCenter, bool kAdd>() {
    return (LaunchChunkKernel<Op, kCenter, kAdd, kOdd, Size>(device, stream, op, name, status) || ...);
  };
  if (op.Has(1))
    return op.center ? launch.template operator()<true, true>() : launch.template operator()<false, true>();
  return op.center ? launch.template operator()<true, false>() : launch.template operator()<false, false>();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_NORM_FWD_CHUNK_CUH_
