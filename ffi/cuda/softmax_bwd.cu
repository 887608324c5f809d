// The linear maps behind softmax's and log_softmax's derivatives (forms in softmax_args.h): y and t read once, the result
// written once (3 * rows * cols * sizeof(T) bytes).
#include "softmax.cuh"

namespace jaxnorm {
namespace {

template <typename T_, Mode kMode_>
struct SoftmaxBwd {
  using T = T_;
  using Acc = AccT<T>;
  using Partial = Sum<T>;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kGeneral = kMode == Mode::kGeneral, kOperands = kMode == Mode::kOperands;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kInputs = 2;  // y, t
  static constexpr int kColumnInputs = 2;
  static constexpr int kSlotsPerThread = 4;
  static constexpr int kUnroll = kGeneral ? 1 : 2;
  static constexpr bool kRare = false;

  // What every call reads comes first, in one line of the constant cache or two.
  int64_t rows;
  int cols;
  Acc factor;
  SoftmaxForm form;
  T* out;
  DeviceOperand<T> y, t;
  DeviceOperand<bool> where;

  SoftmaxBwd(const SoftmaxBwdArgs& args)
      : rows(args.shape.rows()),
        cols(static_cast<int>(args.shape.axis)),
        factor(static_cast<Acc>(args.factor)),
        form(args.form),
        out(static_cast<T*>(args.out)),
        y(args.y, rows),
        t(args.t, rows),
        where(args.where, rows) {}

  // ---- Rows (rows.cuh) ----

  struct Row {
    T* out;
    SlotGrid<T, kMode> grid;
    OperandRow<T> y, t;
    OperandRow<bool> where;
  };
  // Kept as they were loaded, which takes half the registers of float32; elements outside the row and masked ones are 0.
  struct Slot {
    Vec<T, kVec> y, t;
    unsigned masked;      // kGeneral
    WhereBytes<T> where;  // kOperands
  };
  struct Final {
    Acc scaled_sum;
  };

  __device__ __forceinline__ Row Begin(int64_t index) const {
    T* row = out + index * cols;
    Row r = {row, {row, cols}, {}, {}, {}};
    if constexpr (kGeneral) {
      r.y = OperandRow<T>(y, index);
      r.t = OperandRow<T>(t, index);
      r.where = OperandRow<bool>(where, index);
    } else {
      r.y = OperandRow<T>::Full(y, index * cols);
      r.t = OperandRow<T>::Full(t, index * cols);
      if constexpr (kOperands) r.where = OperandRow<bool>(where, index);
    }
    return r;
  }

  __device__ __forceinline__ const OperandRow<T>& Input(const Row& row, int k) const { return k == 0 ? row.y : row.t; }
  __host__ __device__ __forceinline__ bool Has(int) const { return true; }
  __host__ __device__ __forceinline__ bool HasWhere() const { return (kGeneral || kOperands) && where.data != nullptr; }
  bool OnSlots() const { return IsOnSlots<T>(where); }  // whether this is a case for kOperands
  __host__ __device__ __forceinline__ int Place(int k) const { return k; }
  __host__ __device__ __forceinline__ int Inputs() const { return kInputs; }

  static __device__ __forceinline__ T NeutralInput() { return FromAcc<T>(Acc(0)); }

  template <bool kEdges>
  __device__ __forceinline__ void Decode(const Row& row, int slot, const RawSlot<SoftmaxBwd>& raw,
                                         Slot& out_slot) const {
    const int first = row.grid.First(slot);
    out_slot.masked = 0;
    if constexpr (kOperands) {
      out_slot.where = raw.where;
      uint4 from_y = raw.in[0], from_t = raw.in[1];
      if (HasWhere()) {
        const KeptBits<T> kept(raw.where);
        from_y = kept.Select(from_y, FromAcc<T>(Acc(0)));
        from_t = kept.Select(from_t, FromAcc<T>(Acc(0)));
      }
      out_slot.y = std::bit_cast<Vec<T, kVec>>(from_y);
      out_slot.t = std::bit_cast<Vec<T, kVec>>(from_t);
    } else {
      out_slot.y = raw.in[0];
      out_slot.t = raw.in[1];
    }
    if constexpr (kGeneral) {
      if (HasWhere()) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (!raw.where.v[i]) {
            out_slot.masked |= 1u << i;
            out_slot.y.v[i] = out_slot.t.v[i] = FromAcc<T>(Acc(0));
          }
        }
      }
    }
    if (kEdges && !row.grid.Whole(first)) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (first + i < 0 || first + i >= cols) out_slot.y.v[i] = out_slot.t.v[i] = FromAcc<T>(Acc(0));
      }
    }
  }

  __device__ __forceinline__ static Acc ExpOf(T y) { return Exp<T>(ToAcc(y)); }

  // What element (y, t) adds to the sum.
  __device__ __forceinline__ static Acc Term(SoftmaxForm form, T y, T t) {
    if (form == SoftmaxForm::kLogVjp) return ToAcc(t);
    return (form == SoftmaxForm::kSoftmax ? ToAcc(y) : ExpOf(y)) * ToAcc(t);
  }

  // Its result, given factor * sum.
  __device__ __forceinline__ Acc Value(SoftmaxForm form, T y, T t, Acc scaled_sum) const {
    if (form == SoftmaxForm::kSoftmax) return ToAcc(y) * fma(ToAcc(t), factor, -scaled_sum);
    if (form == SoftmaxForm::kLogJvp) return fma(ToAcc(t), factor, -scaled_sum);
    return fma(ToAcc(t), factor, -ExpOf(y) * scaled_sum);
  }

  // The variant is the form.
  template <typename F>
  __device__ __forceinline__ void WithVariant(F f) const {
    switch (form) {
      case SoftmaxForm::kSoftmax:
        return f(std::integral_constant<SoftmaxForm, SoftmaxForm::kSoftmax>());
      case SoftmaxForm::kLogJvp:
        return f(std::integral_constant<SoftmaxForm, SoftmaxForm::kLogJvp>());
      default:
        return f(std::integral_constant<SoftmaxForm, SoftmaxForm::kLogVjp>());
    }
  }

  template <typename Variant, int kN>
  __device__ __forceinline__ Partial Reduce(Variant form, Slot (&slots)[kN], int width) const {
    Acc sum = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum += Term(form, slots[j].y.v[i], slots[j].t.v[i]);
    }
    return Partial::MergeLanes({sum}, width);
  }

  template <typename Variant>
  __device__ __forceinline__ void Prepare(Variant, Slot&, const Partial&) const {}
  template <typename Variant>
  __device__ __forceinline__ Final Finish(Variant, const Partial& total) const {
    return {total.sum * factor};
  }

  struct Loaded {};
  template <typename Variant>
  __device__ __forceinline__ Loaded LoadForStore(Variant, const Row&, int) const {
    return {};
  }

  template <typename Variant>
  __device__ __forceinline__ void Store(Variant form, const Row& row, int slot, const Slot& kept, const Loaded&,
                                        const Final& final) const {
    Acc result[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      result[i] = Value(form, kept.y.v[i], kept.t.v[i], final.scaled_sum);
      if (kGeneral && (kept.masked >> i & 1)) result[i] = 0;
    }
    auto rounded = RoundVec<T>(result);
    if constexpr (kOperands) {
      if (HasWhere()) rounded = KeptBits<T>(kept.where).Select(rounded, FromAcc<T>(Acc(0)));
    }
    StoreSlot(row.out, row.grid, row.grid.First(slot), rounded);
  }

  struct Ahead {};
  __device__ __forceinline__ Ahead LoadAhead(int64_t) const { return {}; }
  template <typename Variant>
  __device__ __forceinline__ void StoreRow(Variant, int64_t, const Partial&, const Ahead&) const {}

  // ---- Columns (strided.cuh) ----

  __host__ __device__ __forceinline__ const DeviceOperand<T>& Input(int k) const { return k == 0 ? y : t; }
  __host__ __device__ __forceinline__ T* Output() const { return out; }

  struct Column {
    const bool* where = nullptr;
  };
  using ColumnFinal = Final;

  __device__ __forceinline__ Column BeginColumn(int64_t index) const {
    Column c;
    if (kGeneral && where.data != nullptr) c.where = where.data + where.RowOffset(index);
    return c;
  }

  __device__ __forceinline__ bool Masked(const Column& column, int a) const {
    return kGeneral && column.where != nullptr && !column.where[a * where.axis_stride];
  }

  template <int kN, typename Variant, typename ForParts, typename ForAll, typename BlockReduce>
  __device__ __forceinline__ void ReduceColumns(Variant form, const Column& column, ForParts for_parts, ForAll,
                                                BlockReduce, PerColumn<Partial, kN>& total) const {
#pragma unroll
    for (int v = 0; v < kN; ++v) total.v[v].sum = 0;
    for_parts([&](int a, const Vec<T, kN>(&raw)[2]) {
      if (Masked(column, a)) return;
#pragma unroll
      for (int v = 0; v < kN; ++v) total.v[v].sum += Term(form, raw[0].v[v], raw[1].v[v]);
    });
  }

  template <typename Variant>
  __device__ __forceinline__ ColumnFinal FinishColumn(Variant form, const Partial& total, const Ahead&) const {
    return Finish(form, total);
  }

  template <int kN, typename Variant>
  __device__ __forceinline__ void ColumnResult(Variant form, const Vec<T, kN> (&raw)[2], const Column& column, int a,
                                               const ColumnFinal (&final)[kN], Acc (&result)[kN]) const {
    const bool masked = Masked(column, a);
#pragma unroll
    for (int v = 0; v < kN; ++v) {
      result[v] = masked ? Acc(0) : Value(form, raw[0].v[v], raw[1].v[v], final[v].scaled_sum);
    }
  }
};

}  // namespace

Error RunSoftmaxBwd(cudaStream_t stream, const SoftmaxBwdArgs& args, bool plain, Scratch scratch) {
  return LaunchSoftmax<SoftmaxBwd>(stream, args, plain, scratch, "softmax_bwd");
}

}  // namespace jaxnorm
