// Shared by the batch_norm kernels: the view of an array, and its loads and stores.
//
// A group of an array is flat memory: element p belongs to channel p % cols / inner, with cols = channels * inner.
// Kernels know nothing else of the layout, so channels last (inner = 1), channels first and all layouts between them
// use the same code. The array is cut into lines of `period` elements, a multiple of cols and of 8, so that a column
// has the same channel in all lines. A thread has 8 neighbouring columns and goes down the lines. It loads the numbers
// of its channels once. Its accesses are aligned and of 16 bytes, and its columns make a whole byte of the ReLU's bits.
// A block has the columns of a tile: 4 KiB of 16-bit elements at most.
//
// Where the bits of a row are not whole bytes, threads of a block exchange bits through shared memory, several lines in
// one word (bits.cuh).
//
// The text before this file defines T, the type of elements. jaxnorm/_kernels/batch_norm.py fills the structures that
// hold the plan's choices.
using A = Acc<T>;  // type of sums, and of numbers of each channel

constexpr int kCols = 8;  // columns of one thread
// Threads of a block at most; shared memory holds some numbers for each column.
constexpr int kThreads = sizeof(T) == 8 ? 128 : 256;

// The number that means are distances from: `first`, or 0 if `first` is not finite. Any finite number will do.
DEVICE A Origin(A first) { return first - first == 0 ? first : A{0}; }

// ---- Operands and results ----

// The part of group g begins at element g * stride of data.
struct GroupArray {
  void* data;
  i64 stride;
  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  template <class E>
  __device__ __forceinline__ E* Of(u32 group) const {
    return static_cast<E*>(data) + group * stride;
  }
};

// Operands and results of one launch, by the names of jaxnorm/_ops/batch_norm_primitives.py.
struct GroupArrays {
  GroupArray x, dy, y, bits, mean, var, count, scale, bias, residual, dbias, dscale, dmean, dvar, dx, dresidual;
};

// ---- How an array is cut ----

struct Lines {
  i64 size;         // elements of a group
  i64 cols, inner;  // channels * inner; neighbouring elements of one channel
  i64 channels;
  i64 period;       // elements of a line, a multiple of 8 and of cols
  i64 lines, full;  // all lines; lines that do not end early, which are all or all but the last
  int tile, tiles;  // columns of a tile, a multiple of 8 (the last tile of a line may be narrower)
  int rows;         // lines that a block works on at once
  FastDiv by_cols, by_inner, by_tile;
  bool wide;  // numbers are too large for FastDiv

  // The channel of a column of a line.
  __device__ __forceinline__ i64 Channel(i64 column, i64* inner_index) const {
    if (wide) {
      column -= SlowDivide(column, cols) * cols;
      const i64 channel = SlowDivide(column, inner);
      *inner_index = column - channel * inner;
      return channel;
    }
    u32 in_cols, i;
    by_cols.DivMod(static_cast<u32>(column), &in_cols);
    const u32 channel = by_inner.DivMod(in_cols, &i);
    *inner_index = i;
    return channel;
  }

  // The tile that holds a column of a line.
  __device__ __forceinline__ int TileOf(i64 column) const {
    if (wide) return static_cast<int>(SlowDivide(column, tile));
    return static_cast<int>(by_tile.Div(static_cast<u32>(column)));
  }

  // How many channels `width` columns meet, from a column on that has index `inner_index` in its channel. A channel
  // that is met again counts again.
  __device__ __forceinline__ i64 ChannelsFrom(i64 inner_index, int width) const {
    const i64 last = inner_index + width - 1;
    return (wide ? SlowDivide(last, inner) : by_inner.Div(static_cast<u32>(last))) + 1;
  }

  // The number of columns of tile `t`.
  __device__ __forceinline__ int Width(int t) const { return static_cast<int>(min(i64{tile}, period - i64{t} * tile)); }
};

// A launch: each block has a tile and `span` lines of a group. Neighbouring blocks have neighbouring tiles, so that
// together they walk through memory in order.
struct Spans {
  int span;           // lines of a block
  u32 spans;          // parts of a group's lines: blocks that share a tile
  FastDiv by_blocks;  // by spans * tiles, the blocks of a group
  FastDiv by_tiles;
  bool aligned;  // arrays begin on 16 bytes
};

// ---- The part of a block and of a thread ----

struct Part {
  u32 group;
  i64 begin, full, end;  // lines; lines before `full` are accessed by vectors
  int tile, width;
  i64 column;   // this thread's first column, in a line
  int place;    // this thread's first column, in the tile
  int row;      // this thread's first line, from the first line of the block
  bool active;  // this thread has columns of the tile
};

// `reversed`: the last blocks of the launch have the beginning of memory.
__device__ __forceinline__ Part FindPart(const Lines& lines, const Spans& spans, bool reversed) {
  Part part;
  const u32 index = reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  u32 block, tile;
  part.group = spans.by_blocks.DivMod(index, &block);
  const u32 span = spans.by_tiles.DivMod(block, &tile);
  part.tile = static_cast<int>(tile);
  part.width = lines.Width(part.tile);
  part.begin = i64{span} * spans.span;
  part.end = min(lines.lines, part.begin + spans.span);
  part.full = spans.aligned ? min(lines.full, part.end) : part.begin;
  const int threads = lines.tile / kCols;  // threads of a line of the tile
  part.row = lines.rows == 1 ? 0 : static_cast<int>(threadIdx.x) / threads;
  part.place = (static_cast<int>(threadIdx.x) - part.row * threads) * kCols;
  part.column = i64{part.tile} * lines.tile + part.place;
  part.active = part.row < lines.rows && part.place < part.width;
  return part;
}

// Calls step(Number<n>, line) for all lines of the part. n = kLines: each row of threads takes kLines lines together,
// and vectors can access these lines. n = 1: each row of threads takes one line.
template <int kLines, class F>
__device__ __forceinline__ void ForLines(const Lines& lines, const Part& part, F&& step) {
  i64 line = part.begin;
  for (; line + kLines * lines.rows <= part.full; line += kLines * lines.rows) {
    step(Number<kLines>(), line);
  }
  for (; line < part.end; line += lines.rows) step(Number<1>(), line);
}

// The channels of a thread's columns.
class Channels {
 public:
  __device__ __forceinline__ Channels(const Lines& lines, i64 column) : lines_(lines) {
    first_ = lines.Channel(column < lines.period ? column : column - lines.period, &inner_index_);
  }

  // values[i][j] = arrays[i][channel of column j * stride], for arrays that are not null. All loads are under way
  // before the first one is waited for: loading array after array took an eighth of the time of blocks with few lines.
  template <int kN, class V>
  __device__ __forceinline__ void Load(const V* const (&arrays)[kN], A (&values)[kN][kCols], i64 stride = 1) const {
    constexpr int kWide = kVecSize<V>;
    if (lines_.inner >= kCols) {
      // Two channels at most, of which the first one has `own` columns.
      const auto own = static_cast<int>(min(lines_.inner - inner_index_, i64{kCols}));
      const i64 next = own == kCols ? first_ : first_ + 1 == lines_.channels ? 0 : first_ + 1;
      V loaded[kN][2];
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (arrays[i] == nullptr) continue;
        loaded[i][0] = arrays[i][first_ * stride];
        loaded[i][1] = arrays[i][next * stride];
      }
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (arrays[i] == nullptr) continue;
#pragma unroll
        for (int j = 0; j < kCols; ++j) values[i][j] = ToAcc(j < own ? loaded[i][0] : loaded[i][1]);
      }
    } else if (lines_.inner == 1 && first_ + kCols <= lines_.channels && AreAligned(arrays)) {
      Vec<V, kWide> loaded[kN][kCols / kWide];
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; j += kWide) {
          if (arrays[i] != nullptr) loaded[i][j / kWide] = LoadVec(arrays[i] + first_ + j);
        }
      }
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (arrays[i] == nullptr) continue;
#pragma unroll
        for (int j = 0; j < kCols; ++j) values[i][j] = ToAcc(loaded[i][j / kWide].v[j % kWide]);
      }
    } else {
      auto left = static_cast<int>(lines_.inner - inner_index_);
      i64 channel = first_;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          if (arrays[i] != nullptr) values[i][j] = ToAcc(arrays[i][channel * stride]);
        }
        if (--left == 0) {
          left = static_cast<int>(lines_.inner);
          if (++channel == lines_.channels) channel = 0;
        }
      }
    }
  }

 private:
  template <int kN, class V>
  __device__ __forceinline__ bool AreAligned(const V* const (&arrays)[kN]) const {
    bool aligned = true;
#pragma unroll
    for (int i = 0; i < kN; ++i) aligned &= arrays[i] == nullptr || IsVecAligned(arrays[i] + first_);
    return aligned;
  }

  const Lines& lines_;
  i64 first_, inner_index_;  // of the first column
};

// `kCount` numbers for each column of a thread. A thread reads its own numbers only, but they are in shared memory:
// with a register for each number, too few threads would fit to keep the memory busy. Neighbouring threads have
// neighbouring vectors.
template <int kCount, int kWidth_ = kVecSize<A>>
struct Constants {
  static constexpr int kWidth = kWidth_, kParts = kCols / kWidth;  // columns per read, and number of reads
  Vec<A, kWidth> values[kCount][kParts][kThreads];

  __device__ __forceinline__ void Set(int which, const A (&of)[kCols]) {
#pragma unroll
    for (int q = 0; q < kParts; ++q) {
      Vec<A, kWidth> some;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) some.v[j] = of[q * kWidth + j];
      values[which][q][threadIdx.x] = some;
    }
  }

  // Columns q * kWidth and following.
  __device__ __forceinline__ Vec<A, kWidth> Get(int which, int q) const { return values[which][q][threadIdx.x]; }

  __device__ __forceinline__ Vec<A, kCols> GetAll(int which) const {
    struct Parts {
      Vec<A, kWidth> vectors[kParts];
    } parts;
#pragma unroll
    for (int q = 0; q < kParts; ++q) parts.vectors[q] = Get(which, q);
    return BitsAs<Vec<A, kCols>>(parts);
  }
};

// Turns the variance in `rstd` into rstd, and the scale in `factor` into rstd * scale.
DEVICE void SetFactor(A epsilon, A (&rstd)[kCols], A (&factor)[kCols]) {
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    rstd[j] = rsqrt(rstd[j] + epsilon);
    factor[j] *= rstd[j];
  }
}

// ---- Elements ----

// This thread's columns of one line, as words: 16-bit elements would take a register each.
struct Cells {
  static constexpr int kVecs = kCols * sizeof(T) / kVecBytes;
  uint4 words[kVecs];

  __device__ __forceinline__ Vec<T, kCols> Get() const { return BitsAs<Vec<T, kCols>>(*this); }
  __device__ __forceinline__ Vec<A, kCols> GetAcc() const { return ToAccAll(Get()); }
  __device__ __forceinline__ void Set(const Vec<T, kCols>& values) { *this = BitsAs<Cells>(values); }

  // Columns [kN * q, kN * (q + 1)), rounded.
  template <int kN>
  __device__ __forceinline__ void SetSome(int q, const A (&values)[kN]) {
    struct Parts {
      Vec<T, kN> parts[kCols / kN];
    };
    auto all = BitsAs<Parts>(*this);
    all.parts[q] = RoundVec<T>(values);
    *this = BitsAs<Cells>(all);
  }

  // Puts 0 where the bit of a column is off.
  __device__ __forceinline__ void Select(u32 bits) {
    if constexpr (sizeof(T) == 2) {
      auto pairs = BitsAs<Words<kCols / 2>>(*this);
      const u32 apart = (bits & 0xff) * 0x8001;  // a copy that is 15 bits higher serves odd columns
#pragma unroll
      for (int i = 0; i < kCols / 2; ++i) pairs.w[i] &= SignsOfHalves(apart << (15 - 2 * i));
      *this = BitsAs<Cells>(pairs);
    } else {
      Vec<T, kCols> values = Get();
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (!(bits >> j & 1)) values.v[j] = T{};
      }
      Set(values);
    }
  }

  __device__ __forceinline__ void Load(const T* p) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) words[i] = __ldg((const uint4*)p + i);
  }
  __device__ __forceinline__ void Load(const T* p, L2Policy policy) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) words[i] = LoadWords(p + i * kVecSize<T>, policy);
  }
  __device__ __forceinline__ void Store(T* p) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      StoreWords(p + i * kVecSize<T>, words[i]);
    }
  }
  // Access to the first `count` elements. LoadSome sets the others to 0, StoreSome leaves them alone.
  __device__ __forceinline__ void LoadSome(const T* p, int count) {
    Vec<T, kCols> values;
#pragma unroll
    for (int j = 0; j < kCols; ++j) values.v[j] = j < count ? p[j] : T{};
    Set(values);
  }
  __device__ __forceinline__ void StoreSome(T* p, int count) const {
    const Vec<T, kCols> values = Get();
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (j < count) p[j] = values.v[j];
    }
  }
};

// Lines that a thread reads of each of `kArrays` arrays before it uses the first: 64 bytes or more are then under way.
template <int kArrays>
constexpr int kBatch = 8 / (int)sizeof(T) / kArrays > 2 ? 8 / (int)sizeof(T) / kArrays : 2;

// The lines that a thread works on in one step of ForLines.
template <int kLines>
struct Batch {
  i64 at, stride;     // index of the first element; distance from one line to the next
  int count;          // existing elements of each line
  bool whole = true;  // lines are accessed by vectors

  __device__ __forceinline__ Batch(const Lines& lines, const Part& part, i64 line, bool active)
      : at((line + part.row) * lines.period + part.column), stride(lines.rows * lines.period) {
    count = active ? kCols : 0;
    if constexpr (kLines == 1) {
      const i64 left = line + part.row < part.end ? lines.size - at : 0;
      count = static_cast<int>(max(i64{0}, min(i64{count}, left)));
      whole = line + part.row < part.full;
    }
  }

  // `policy` is an L2Policy or nothing.
  template <class... Policy>
  __device__ __forceinline__ void Load(const T* p, Cells (&cells)[kLines], Policy... policy) const {
    if (whole) {
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        if (count > 0) cells[k].Load(p + at + k * stride, policy...);
      }
    } else {
      cells[0].LoadSome(p + at, count);
    }
  }

  __device__ __forceinline__ void Store(T* p, const Cells (&cells)[kLines]) const {
    if (whole) {
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        if (count > 0) cells[k].Store(p + at + k * stride);
      }
    } else {
      cells[0].StoreSome(p + at, count);
    }
  }

  // Brings the lines into the L2 cache, without holding registers for them.
  template <class... Array>
  __device__ __forceinline__ void Prefetch(const Array*... arrays) const {
    const auto prefetch = [&](const auto* p) {
      if (p == nullptr || count == 0) return;
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        PrefetchToL2(p + at + k * stride);
      }
    };
    (prefetch(arrays), ...);
  }
};

// ---- The ReLU's bits ----

enum Bits { kNoBits, kFlatBits, kRaggedBits };

// The layout of the bits.
struct BitsView {
  Rows rows;
  i64 line_bytes, group_bytes;  // of a line and of a group; both are whole rows
};

// Moves the bits of a tile whose rows are not whole bytes. Each byte of a word belongs to another line.
class RaggedBits {
  using Word = u32;

 public:
  static constexpr int kMostLines = sizeof(Word);

  // A word for the columns of each thread, in the tile and just behind it; or a word for each byte of the mask.
  // Consecutive calls use different halves, so that one barrier is enough.
  struct Shared {
    Word words[2][kThreads * kCols / 2];
  };

  __device__ __forceinline__ RaggedBits(const BitsView& view, const Lines& lines, const Part& part, Shared& shared)
      : shared_(shared), place_(view.rows.Find(i64{part.tile} * lines.tile)) {}

  // `flat`: the bits of this thread's columns in kLines lines. `turn` counts the calls.
  template <int kLines>
  __device__ __forceinline__ void Store(const BitsView& view, const Part& part, i64 line, int turn, Word flat,
                                        u8* bits) const {
    Word* own = shared_.words[turn % 2];
    own[threadIdx.x] = flat;
    __syncthreads();
    const u32 end = view.rows.ByteFrom(place_.col + part.width);
    const i64 first = line * view.line_bytes + place_.first_byte;
    for (u32 byte = view.rows.ByteFrom(place_.col) + threadIdx.x; byte < end; byte += blockDim.x) {
      const Word value = view.rows.FlatToByte(own, place_.col, byte);
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        const i64 i = first + k * view.line_bytes + byte;
        if (kLines > 1 || i < view.group_bytes) bits[i] = static_cast<u8>(value >> 8 * k);
      }
    }
  }

  // The bits of this thread's columns in kLines lines.
  template <int kLines>
  __device__ __forceinline__ Word Load(const BitsView& view, const Part& part, i64 line, int turn,
                                       const u8* bits) const {
    Word* own = shared_.words[turn % 2];
    const u32 begin = view.rows.ByteOf(place_.col), last = view.rows.ByteOf(place_.col + part.width - 1);
    const i64 first = line * view.line_bytes + place_.first_byte;
    for (u32 byte = begin + threadIdx.x; byte <= last; byte += blockDim.x) {
      Word value = 0;
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        const i64 i = first + k * view.line_bytes + byte;
        if (kLines > 1 || i < view.group_bytes) value |= Word{bits[i]} << 8 * k;
      }
      own[byte - begin] = value;
    }
    __syncthreads();
    return part.active ? view.rows.BytesToFlat<kCols>(own, begin, place_.col + part.place) : 0;
  }

 private:
  Shared& shared_;
  Place place_;
};

// BitsMover is RaggedBits for ragged bits, else NoBitsMover.
struct NoBitsMover {
  struct Shared {};
  __device__ __forceinline__ NoBitsMover(const BitsView&, const Lines&, const Part&, Shared&) {}
  template <int kLines>
  __device__ __forceinline__ void Store(const BitsView&, const Part&, i64, int, u32, u8*) const {}
};
template <int kBits>
struct BitsMoverOf {
  using type = NoBitsMover;
};
template <>
struct BitsMoverOf<kRaggedBits> {
  using type = RaggedBits;
};
template <int kBits>
using BitsMover = typename BitsMoverOf<kBits>::type;

// Bit 8k + j of the result belongs to this thread's column j in line k of the batch.
template <int kBits, int kLines, class M>
__device__ __forceinline__ u32 LoadBits(const Batch<kLines>& batch, const BitsView& view, const Part& part, i64 line,
                                        int turn, const u8* bits, const M& mover) {
  if constexpr (kBits == kRaggedBits) {
    return mover.template Load<kLines>(view, part, line, turn, bits);
  } else {
    u32 on = 0;
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      if (batch.count > 0) on |= u32{bits[(batch.at + k * batch.stride) / kCols]} << kCols * k;
    }
    return on;
  }
}

// Stores the bits of a batch, in the order of LoadBits, to a flat mask.
template <int kLines>
__device__ __forceinline__ void StoreFlatBits(const Batch<kLines>& batch, u32 on, u8* bits) {
  if (batch.count == 0) return;
  const u32 there = kLines > 1 ? 0xff : (1u << batch.count) - 1;
#pragma unroll
  for (int k = 0; k < kLines; ++k) {
    bits[(batch.at + k * batch.stride) / kCols] = static_cast<u8>(on >> kCols * k & there);
  }
}

// ---- The mask of elements that count ----

// The mask's rows are (group, outer) with channels as columns if inner is 1, else (group, outer, channel) with inner as
// columns. A line is a number of whole rows.
constexpr int kMaskDims = 8;
struct MaskView {
  const bool* data;
  int ndim;   // dimensions of the mask's rows, after merging
  bool wide;  // more rows than FastDiv divides
  FastDiv digit[kMaskDims];
  i64 size[kMaskDims], stride[kMaskDims], column_stride;
  i64 cols, group_rows, line_rows, first_row;

  // Not unrolled: copies of a 64-bit division make large kernels, which start slowly.
  __device__ __forceinline__ i64 RowOffset(i64 row) const {
    i64 offset = 0;
#pragma unroll 1
    for (int d = ndim - 1; d > 0; --d) {
      i64 rest;
      if (wide) {
        const i64 quotient = SlowDivide(row, size[d]);
        rest = row - quotient * size[d];
        row = quotient;
      } else {
        u32 remainder;
        row = digit[d].DivMod((u32)row, &remainder);
        rest = remainder;
      }
      offset += rest * stride[d];
    }
    return ndim > 0 ? offset + row * stride[0] : 0;
  }
};

// Which of this thread's columns count.
class Counted {
 public:
  __device__ __forceinline__ Counted(const MaskView& view, const Part& part)
      : view_(view), row_(SlowDivide(part.column, view.cols)), col_(part.column - row_ * view.cols) {
    row_ += view.first_row + part.group * view.group_rows;
  }

  // Bit j says whether column j of a line counts. Only the first `count` columns of the line exist.
  __device__ __forceinline__ u32 Line(i64 line, int count) const {
    if (count == 0) return 0;
    i64 row = row_ + line * view_.line_rows, col = col_, offset = view_.RowOffset(row);
    u32 bits = 0;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      bits |= static_cast<u32>(view_.data[offset + col * view_.column_stride]) << j;
      if (++col == view_.cols && j + 1 < count) {
        col = 0;
        offset = view_.RowOffset(++row);
      }
    }
    return bits;
  }

 private:
  const MaskView& view_;
  i64 row_, col_;
};
