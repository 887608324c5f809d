// softmax and log_softmax, forward: x read once, y written once (2 * rows * cols * sizeof(T) bytes).
#include "softmax.cuh"

namespace jaxnorm {
namespace {

// y = exp(z - max) / sum or z - max - log(sum), with z = factor * scale * x + bias where `where` is true.
template <typename T_, Mode kMode_>
struct SoftmaxFwd {
  using T = T_;
  using Acc = AccT<T>;
  using Partial = MaxSum<T>;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kGeneral = kMode == Mode::kGeneral, kOperands = kMode == Mode::kOperands;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kInputs = kGeneral || kOperands ? 3 : 1;  // x, scale, bias
  static constexpr int kColumnInputs = 1;                        // x
  static constexpr int kSlotsPerThread = 8;
  static constexpr int kUnroll = kGeneral ? 1 : kOperands ? 2 : 4;  // registers are scarce
  static constexpr bool kRare = false;

  // What every call reads comes first, in one line of the constant cache.
  int64_t rows;
  int cols;
  bool log;
  bool plain_factor;  // see IsPlainFactor
  Acc factor;         // units per x
  T* y;
  DeviceOperand<T> x, scale, bias;
  DeviceOperand<bool> where;

  SoftmaxFwd(const SoftmaxFwdArgs& args)
      : rows(args.shape.rows()),
        cols(static_cast<int>(args.shape.axis)),
        log(args.log),
        plain_factor(IsPlainFactor<T>(args.factor)),
        factor(UnitFactor<T>(args.factor)),
        y(static_cast<T*>(args.y)),
        x(args.x, rows),
        scale(args.scale, rows),
        bias(args.bias, rows),
        where(args.where, rows) {}

  __host__ __device__ __forceinline__ const DeviceOperand<T>& Input(int) const { return x; }
  __host__ __device__ __forceinline__ T* Output() const { return y; }

  // ---- Rows (rows.cuh) ----

  struct Row {
    T* y;
    SlotGrid<T, kMode> grid;
    OperandRow<T> x, scale, bias;
    OperandRow<bool> where;
  };
  struct Slot {
    Vec<T, kVec> x;       // after Decode; and there, in kGeneral and where a bias is added:
    Acc v[kVec];          // z in units. After Reduce or Prepare: exp(z - max); log_softmax: z - max, in powers
    unsigned masked;      // kGeneral: bit i: element i is masked
    WhereBytes<T> where;  // kOperands
  };
  struct Final {
    Acc scale, shift;  // y = v * scale + shift
  };

  __device__ __forceinline__ Row Begin(int64_t index) const {
    T* row = y + index * cols;
    Row r = {row, {row, cols}, {}, {}, {}, {}};
    if constexpr (kGeneral) {
      r.x = OperandRow<T>(x, index);
      r.scale = OperandRow<T>(scale, index);
      r.bias = OperandRow<T>(bias, index);
      r.where = OperandRow<bool>(where, index);
    } else {
      r.x = OperandRow<T>::Full(x, index * cols);
      if constexpr (kOperands) {
        r.bias = OperandRow<T>(bias, index);
        r.where = OperandRow<bool>(where, index);
      }
    }
    return r;
  }

  __device__ __forceinline__ Row RowAfter(Row row, int64_t elements) const {
    row.y += elements;
    row.x.row += elements;
    return row;
  }

  __device__ __forceinline__ const OperandRow<T>& Input(const Row& row, int k) const {
    return k == 0 ? row.x : k == 1 ? row.scale : row.bias;
  }
  __host__ __device__ __forceinline__ bool Has(int k) const {
    return k == 0 || (k == 1 ? kGeneral && scale.data != nullptr : bias.data != nullptr);
  }
  __host__ __device__ __forceinline__ bool HasWhere() const { return (kGeneral || kOperands) && where.data != nullptr; }
  // Whether this is a case for kOperands. -inf times the factor stays that, as it has to for what is masked.
  bool OnSlots() const { return scale.data == nullptr && plain_factor && IsOnSlots<T>(bias) && IsOnSlots<T>(where); }
  __host__ __device__ __forceinline__ int Place(int k) const { return k < 2 ? k : 1 + (Has(1) ? 1 : 0); }
  __host__ __device__ __forceinline__ int Inputs() const {
    return kInputs == 1 ? 1 : 1 + (Has(1) ? 1 : 0) + (Has(2) ? 1 : 0);
  }

  static __device__ __forceinline__ T NeutralInput() { return FromAcc<T>(-Acc(INFINITY)); }

  template <bool kEdges>
  __device__ __forceinline__ void Decode(const Row& row, int slot, const RawSlot<SoftmaxFwd>& raw, Slot& out) const {
    const int first = row.grid.First(slot);
    out.x = std::bit_cast<Vec<T, kVec>>(raw.in[0]);
    out.masked = 0;
    if constexpr (kGeneral) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) out.v[i] = RoundedProduct(ToAcc(out.x.v[i]), factor);
      if (Has(1)) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) out.v[i] = RoundedProduct(out.v[i], ToAcc(raw.in[1].v[i]));
      }
      if (Has(2)) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) out.v[i] += ToAcc(raw.in[2].v[i]) * kUnit<T>;
      }
      if (HasWhere()) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (!raw.where.v[i]) {
            out.v[i] = -Acc(INFINITY);
            out.masked |= 1u << i;
          }
        }
      }
    }
    if constexpr (kOperands) {
      out.where = raw.where;
      uint4 from = raw.in[0], added = raw.in[2];
      if (HasWhere()) {
        const KeptBits<T> kept(raw.where);
        from = kept.Select(from, FromAcc<T>(-Acc(INFINITY)));
        if (Has(2)) added = kept.Select(added, FromAcc<T>(Acc(0)));  // else +inf might meet -inf
      }
      out.x = std::bit_cast<Vec<T, kVec>>(from);
#pragma unroll
      for (int i = 0; i < kVec; ++i) out.v[i] = RoundedProduct(ToAcc(out.x.v[i]), factor);
      if (Has(2)) {
        const auto more = std::bit_cast<Vec<T, kVec>>(added);
#pragma unroll
        for (int i = 0; i < kVec; ++i) out.v[i] += ToAcc(more.v[i]) * kUnit<T>;
      }
    }
    if (kEdges && !row.grid.Whole(first)) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (first + i < 0 || first + i >= cols) {
          out.x.v[i] = FromAcc<T>(-Acc(INFINITY));
          out.v[i] = -Acc(INFINITY);
        }
      }
    }
  }

  // The variant of kOperands; as a number: whether this is log_softmax.
  template <bool kLog, bool kBias_>
  struct OperandsVariant {
    static constexpr bool kBias = kBias_;
    __device__ constexpr operator bool() const { return kLog; }
  };
  // Whether z is what Decode left in v, or factor * x.
  template <typename Variant>
  static constexpr bool IsDecoded() {
    if constexpr (kOperands) return Variant::kBias;
    return kGeneral;
  }

  // What powers are computed from: of z itself the maximum in units.
  template <bool kDecoded>
  using Reference = std::conditional_t<kDecoded, Acc, PowersOf<T>>;
  template <bool kDecoded>
  __device__ __forceinline__ Reference<kDecoded> ReferenceOf(Acc max) const {
    if constexpr (kDecoded) {
      return max;
    } else {
      return {factor, max};
    }
  }

  // z - max in powers.
  static __device__ __forceinline__ void Subtract(const Slot& slot, Acc max, Acc (&powers)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) powers[i] = (slot.v[i] - max) * kPowers<T>;
  }
  static __device__ __forceinline__ void Subtract(const Slot& slot, const PowersOf<T>& of, Acc (&powers)[kVec]) {
    ToAccAll(slot.x, powers);
#pragma unroll
    for (int i = 0; i < kVec; ++i) powers[i] = of(powers[i]);
  }

  // The variant is whether this is log_softmax. kGeneral leaves it to run time, for the sake of the code's size.
  template <typename F>
  __device__ __forceinline__ void WithVariant(F f) const {
    if constexpr (kGeneral) {
      f(log);
    } else if constexpr (kOperands) {
      const auto with_bias = [&](auto kBias) {
        if (log) {
          f(OperandsVariant<true, kBias>());
        } else {
          f(OperandsVariant<false, kBias>());
        }
      };
      if (Has(2)) {
        with_bias(std::true_type());
      } else {
        with_bias(std::false_type());
      }
    } else if (log) {
      f(std::true_type());
    } else {
      f(std::false_type());
    }
  }

  // The maximum over the lanes comes first, so that lanes then merge by adding.
  template <typename Variant, int kN>
  __device__ __forceinline__ Partial Reduce(Variant log, Slot (&slots)[kN], int width) const {
    const Acc own = MaxOfSlots<T, IsDecoded<Variant>()>(slots, factor);
    const Acc m = Finite<T>(LaneReduce(own, width, [](Acc a, Acc b) { return Max(a, b); }));
    // Side by side where there is little else to do, and one sum would wait for each addition.
    constexpr int kSums = kN <= 2 && kVec > 4 ? 4 : 1;
    const auto reference = ReferenceOf<IsDecoded<Variant>()>(m);
    Acc sums[kSums];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      Acc powers[kVec];
      Subtract(slots[j], reference, powers);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc e = ExpOfPowers<T>(powers[i]);
        sums[i % kSums] = j == 0 && i < kSums ? e : sums[i % kSums] + e;
        slots[j].v[i] = log ? powers[i] : e;
      }
    }
    return {m, LaneSum(TreeSum(sums), width)};
  }

  template <typename Variant>
  __device__ __forceinline__ void Prepare(Variant log, Slot& slot, const Partial& total) const {
    Acc powers[kVec];
    Subtract(slot, ReferenceOf<IsDecoded<Variant>()>(total.max), powers);
#pragma unroll
    for (int i = 0; i < kVec; ++i) slot.v[i] = log ? powers[i] : ExpOfPowers<T>(powers[i]);
  }

  // Where every logit is -inf, the sum is 0, and all results become NaN.
  template <typename Variant>
  __device__ __forceinline__ Final Finish(Variant log, const Partial& total) const {
    if (!log) return {Reciprocal<T>(total.sum), 0};
    return {IsDecoded<Variant>() ? kLogitOfPower<T> : PowersOf<T>::Logit(total.max), -LogOfSum(total.sum)};
  }

  struct Loaded {};
  template <typename Variant>
  __device__ __forceinline__ Loaded LoadForStore(Variant, const Row&, int) const {
    return {};
  }

  template <typename Variant>
  __device__ __forceinline__ void Store(Variant log, const Row& row, int slot, const Slot& kept, const Loaded&,
                                        const Final& final) const {
    Acc out[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      out[i] = log ? fma(kept.v[i], final.scale, final.shift) : kept.v[i] * final.scale;
      if (kGeneral && (kept.masked >> i & 1)) out[i] = log ? -Acc(INFINITY) : Acc(0);
    }
    auto rounded = RoundVec<T>(out);
    if constexpr (kOperands) {
      const T masked = FromAcc<T>(log ? -Acc(INFINITY) : Acc(0));
      if (HasWhere()) rounded = KeptBits<T>(kept.where).Select(rounded, masked);
    }
    StoreSlot(row.y, row.grid, row.grid.First(slot), rounded);
  }

  struct Ahead {};
  __device__ __forceinline__ Ahead LoadAhead(int64_t) const { return {}; }
  template <typename Variant>
  __device__ __forceinline__ void StoreRow(Variant, int64_t, const Partial&, const Ahead&) const {}

  // ---- Columns (strided.cuh) ----

  struct Column {
    const T *scale = nullptr, *bias = nullptr;
    const bool* where = nullptr;
  };

  __device__ __forceinline__ Column BeginColumn(int64_t index) const {
    Column c;
    if constexpr (kGeneral) {
      if (scale.data != nullptr) c.scale = scale.data + scale.RowOffset(index);
      if (bias.data != nullptr) c.bias = bias.data + bias.RowOffset(index);
      if (where.data != nullptr) c.where = where.data + where.RowOffset(index);
    }
    return c;
  }

  // z in units of one element in kGeneral; masked: -inf.
  __device__ __forceinline__ Acc ColumnZ(T raw, const Column& column, int a, bool& masked) const {
    Acc z = RoundedProduct(ToAcc(raw), factor);
    if (column.scale != nullptr) z = RoundedProduct(z, ToAcc(column.scale[a * scale.axis_stride]));
    if (column.bias != nullptr) z += ToAcc(column.bias[a * bias.axis_stride]) * kUnit<T>;
    masked = column.where != nullptr && !column.where[a * where.axis_stride];
    return masked ? -Acc(INFINITY) : z;
  }

  // What a column's results need: y = exp(z - max) * scale or (z - max) * scale + shift.
  struct ColumnFinal {
    Acc reference, scale, shift;
  };

  template <int kN, typename Variant, typename ForParts, typename ForAll, typename BlockReduce>
  __device__ __forceinline__ void ReduceColumns(Variant, const Column& column, ForParts for_parts, ForAll for_all,
                                                BlockReduce block_reduce, PerColumn<Partial, kN>& total) const {
    ReduceColumnsToMaxSum(*this, column, for_parts, for_all, block_reduce, total, [](int, T, bool) {});
  }

  template <typename Variant>
  __device__ __forceinline__ ColumnFinal FinishColumn(Variant log, const Partial& total, const Ahead&) const {
    const Acc reference = ColumnReference(*this, total.max);
    if (log) return {reference, kLogitOfPower<T>, -LogOfSum(total.sum)};
    return {reference, Reciprocal<T>(total.sum), 0};
  }

  template <int kN, typename Variant>
  __device__ __forceinline__ void ColumnResult(Variant log, const Vec<T, kN> (&raw)[1], const Column& column, int a,
                                               const ColumnFinal (&final)[kN], Acc (&result)[kN]) const {
    bool masked;
    Acc powers[kN];
    ColumnPowers(*this, raw[0], column, a, [&](int v) { return final[v].reference; }, powers, masked);
#pragma unroll
    for (int v = 0; v < kN; ++v) {
      result[v] = log ? fma(powers[v], final[v].scale, final[v].shift) : ExpOfPowers<T>(powers[v]) * final[v].scale;
      if (masked) result[v] = log ? -Acc(INFINITY) : Acc(0);
    }
  }
};

}  // namespace

Error RunSoftmaxFwd(cudaStream_t stream, const SoftmaxFwdArgs& args, bool plain, Scratch scratch) {
  return LaunchSoftmax<SoftmaxFwd>(stream, args, plain, scratch, "softmax_fwd");
}

}  // namespace jaxnorm
