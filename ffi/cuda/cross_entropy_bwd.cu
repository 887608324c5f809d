// Cross-entropy, backward: a * p - b * q, x read once and the result written once (2 * rows * cols * sizeof(T) bytes).
//
// The row is on chip anyway, so its logsumexp is computed from there and is no operand: where nobody asks for the loss,
// XLA drops the forward call, and a gradient is these bytes alone.
#include "cross_entropy.cuh"

namespace jaxnorm {
namespace {

template <typename T_, Mode kMode_>
struct CrossEntropyBwd : CrossEntropyRows<T_, kMode_, false, true> {
  using Base = CrossEntropyRows<T_, kMode_, false, true>;
  using Base::cols, Base::kGeneral, Base::kVec, Base::label_weight, Base::labels, Base::smoothing, Base::where, Base::x;
  using typename Base::Acc;
  using typename Base::Partial;
  using typename Base::Slot;
  using typename Base::T;

  static constexpr int kSlotsPerThread = 8;

  T* out;
  DeviceOperand<Acc> a, b;

  explicit CrossEntropyBwd(const CrossEntropyArgs& args)
      : Base(args), out(static_cast<T*>(args.out)), a(args.a, args.shape.rows()), b(args.b, args.shape.rows()) {}

  __host__ __device__ __forceinline__ T* Output() const { return out; }

  // What a row's result needs besides its logits.
  struct Numbers {
    int label;  // -1 if it is no class
    Acc a, b;
  };

  template <bool kSimple>
  __device__ __forceinline__ Numbers NumbersOf(int64_t index) const {
    Numbers n;
    if constexpr (kSimple) {
      n = {labels.data[index], a.data[index], b.data[index]};
    } else {
      n = {labels.data[labels.RowOffset(index)], a.data[a.RowOffset(index)], b.data[b.RowOffset(index)]};
    }
    if (!Base::IsClass(n.label)) n.label = -1;
    return n;
  }

  // Of a row: result = exp(z - max) * scale + shift, less `of_label` for the label.
  struct Factors {
    Acc scale, shift, of_label;
  };

  __device__ __forceinline__ Factors FactorsOf(const Numbers& n, const Partial& total) const {
    const Acc shared = smoothing != 0 ? n.b * (smoothing / Base::Classes(total)) : Acc(0);
    // Where every logit is -inf, the sum is 0, and all results become NaN.
    return {n.a * Reciprocal<T>(total.sum), -shared, n.b * label_weight};
  }

  // ---- Rows (rows.cuh) ----

  struct Row {
    T* out;
    SlotGrid<T, Base::kMode> grid;
    OperandRow<T> x;
    OperandRow<bool> where;
    Numbers numbers;
  };
  using Final = Partial;

  __device__ __forceinline__ Row Begin(int64_t index) const {
    T* row = out + index * cols;
    Row r = {row, {row, cols}, {}, {}, NumbersOf<!kGeneral>(index)};
    if constexpr (kGeneral) {
      r.x = OperandRow<T>(x, index);
      r.where = OperandRow<bool>(where, index);
    } else {
      r.x = OperandRow<T>::Full(x, index * cols);
    }
    return r;
  }

  __device__ __forceinline__ const OperandRow<T>& Input(const Row& row, int) const { return row.x; }
  using Base::Input;

  template <typename Variant>
  __device__ __forceinline__ void Prepare(Variant, Slot& slot, const Partial& total) const {
    Acc powers[kVec];
    Base::Subtract(slot, total.max, powers);
#pragma unroll
    for (int i = 0; i < kVec; ++i) slot.v[i] = ExpOfPowers<T>(powers[i]);
  }

  template <typename Variant>
  __device__ __forceinline__ Final Finish(Variant, const Partial& total) const {
    return total;
  }

  struct Loaded {};
  template <typename Variant>
  __device__ __forceinline__ Loaded LoadForStore(Variant, const Row&, int) const {
    return {};
  }

  template <typename Variant>
  __device__ __forceinline__ void Store(Variant, const Row& row, int, const Slot& kept, const Loaded&,
                                        const Final& total) const {
    const Factors f = FactorsOf(row.numbers, total);
    Acc result[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) result[i] = fma(kept.v[i], f.scale, f.shift);
    if (const int at = row.numbers.label - kept.first; at >= 0 && at < kVec) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) result[i] -= i == at ? f.of_label : Acc(0);
    }
    if constexpr (kGeneral) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (kept.masked >> i & 1) result[i] = 0;
      }
    }
    // Rows without a label are 0, selected by words.
    auto words = std::bit_cast<uint4>(RoundVec<T>(result));
    const unsigned keep = row.numbers.label < 0 ? 0 : ~0u;
    words = {words.x & keep, words.y & keep, words.z & keep, words.w & keep};
    StoreSlot(row.out, row.grid, kept.first, std::bit_cast<Vec<T, kVec>>(words));
  }

  using Ahead = Numbers;
  __device__ __forceinline__ Ahead LoadAhead(int64_t index) const { return NumbersOf<false>(index); }
  template <typename Variant>
  __device__ __forceinline__ void StoreRow(Variant, int64_t, const Partial&, const Ahead&) const {}

  // ---- Columns (strided.cuh) ----

  struct ColumnFinal {
    Acc reference;
    Factors factors;
    int label;
  };

  template <typename Variant>
  __device__ __forceinline__ ColumnFinal FinishColumn(Variant, const Partial& total, const Ahead& n) const {
    return {ColumnReference(*this, total.max), FactorsOf(n, total), n.label};
  }

  template <int kN, typename Variant>
  __device__ __forceinline__ void ColumnResult(Variant, const Vec<T, kN> (&raw)[1], const typename Base::Column& column,
                                               int position, const ColumnFinal (&final)[kN], Acc (&result)[kN]) const {
    bool masked;
    Acc powers[kN];
    ColumnPowers(*this, raw[0], column, position, [&](int v) { return final[v].reference; }, powers, masked);
#pragma unroll
    for (int v = 0; v < kN; ++v) {
      const Factors& f = final[v].factors;
      result[v] = fma(ExpOfPowers<T>(powers[v]), f.scale, f.shift) - (position == final[v].label ? f.of_label : Acc(0));
      if (masked || final[v].label < 0) result[v] = 0;
    }
  }
};

}  // namespace

Error RunCrossEntropyBwd(cudaStream_t stream, const CrossEntropyArgs& args, Scratch scratch) {
  return LaunchCrossEntropy<CrossEntropyBwd>(stream, args, scratch, "cross_entropy_bwd");
}

}  // namespace jaxnorm
