// What cross-entropy forward and backward share: rows of logits, reduced to a maximum, a sum of exponentials, and what
// `where` and smoothing need besides.
#ifndef JAXNORM_CUDA_CROSS_ENTROPY_CUH_
#define JAXNORM_CUDA_CROSS_ENTROPY_CUH_

#include "calls.h"
#include "cross_entropy_args.h"
#include "softmax.cuh"

namespace jaxnorm {

// A MaxSum and further sums.
template <typename T, int kMore>
struct MaxSums {
  using Acc = AccT<T>;
  Acc max, sum;
  Acc more[kMore];

  static __device__ __forceinline__ MaxSums Identity() { return With(MaxSum<T>::Identity(), {}); }
  static __device__ __forceinline__ MaxSums With(MaxSum<T> first, MaxSums rest) {
    rest.max = first.max;
    rest.sum = first.sum;
    return rest;
  }
  __device__ __forceinline__ MaxSum<T> First() const { return {max, sum}; }
  static __device__ __forceinline__ MaxSums Merge(MaxSums a, MaxSums b) {
    return With(MaxSum<T>::Merge(a.First(), b.First()), AddSums(a, b));
  }
  // Of equal maxima.
  static __device__ __forceinline__ MaxSums AddSums(MaxSums a, MaxSums b) {
    a.sum += b.sum;
#pragma unroll
    for (int i = 0; i < kMore; ++i) a.more[i] += b.more[i];
    return a;
  }
  static __device__ __forceinline__ MaxSums MergeLanes(MaxSums p, int width) {
#pragma unroll
    for (Acc& value : p.more) value = LaneSum(value, width);
    return With(MaxSum<T>::MergeLanes(p.First(), width), p);
  }
};

// The part of an Op (rows.cuh, strided.cuh) that reads logits, z in units. kSmooth: sum(z - centre) is added up too, in
// units, where the centre is some number near z, so that nothing is lost to a common offset. kKeepsTerms: Reduce leaves
// the exponentials in the slots, to be written.
template <typename T_, Mode kMode_, bool kSmooth, bool kKeepsTerms>
struct CrossEntropyRows {
  using T = T_;
  using Acc = AccT<T>;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kGeneral = kMode == Mode::kGeneral;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kInputs = 1;        // x
  static constexpr int kColumnInputs = 1;  // x
  static constexpr int kUnroll = 2;
  static constexpr bool kRare = false;
  static constexpr Acc factor = kUnit<T>;  // units per x
  // The sums of a Partial besides that of the exponentials: deviations, and classes that take part (kGeneral).
  static constexpr int kCount = kSmooth ? 1 : 0;
  static constexpr int kMore = kCount + (kGeneral ? 1 : 0);
  using Partial = std::conditional_t<kMore == 0, MaxSum<T>, MaxSums<T, kMore>>;

  int64_t rows;
  int cols;
  Acc smoothing, label_weight;  // of the target: what all classes share, and what is the label's
  DeviceOperand<T> x;
  DeviceOperand<int> labels;
  DeviceOperand<bool> where;

  explicit CrossEntropyRows(const CrossEntropyArgs& args)
      : rows(args.shape.rows()),
        cols(static_cast<int>(args.shape.axis)),
        smoothing(static_cast<Acc>(args.smoothing)),
        label_weight(static_cast<Acc>(1 - args.smoothing)),
        x(args.x, rows),
        labels(args.labels, rows),
        where(args.where, rows) {}

  __host__ __device__ __forceinline__ const DeviceOperand<T>& Input(int) const { return x; }
  __host__ __device__ __forceinline__ bool Has(int) const { return true; }
  __host__ __device__ __forceinline__ bool HasWhere() const { return kGeneral && where.data != nullptr; }
  __host__ __device__ __forceinline__ int Place(int) const { return 0; }
  __host__ __device__ __forceinline__ int Inputs() const { return 1; }

  template <typename F>
  __device__ __forceinline__ void WithVariant(F f) const {
    f(std::false_type());  // there is one
  }

  static __device__ __forceinline__ T NeutralInput() { return FromAcc<T>(-Acc(INFINITY)); }

  __device__ __forceinline__ bool IsClass(int label) const {
    return static_cast<unsigned>(label) < static_cast<unsigned>(cols);
  }

  // How many classes take part.
  __device__ __forceinline__ Acc Classes(const Partial& total) const {
    if constexpr (kGeneral) return total.more[kCount];
    return static_cast<Acc>(cols);
  }

  // ---- Rows (rows.cuh) ----

  struct Slot {
    Vec<T, kVec> x;   // after Decode, except
    Acc v[kVec];      // kGeneral: z in units. After Reduce or Prepare: exp(z - max)
    unsigned masked;  // kGeneral: bit i: element i is masked, or outside the row
    int first;        // the row's element that is element 0 here
    Acc centre;       // kSmooth
  };

  template <bool kEdges, typename Row, typename Raw>
  __device__ __forceinline__ void Decode(const Row& row, int slot, const Raw& raw, Slot& out) const {
    out.first = row.grid.First(slot);
    out.x = raw.in[0];
    out.masked = 0;
    if constexpr (kSmooth) out.centre = row.centre;
    if constexpr (kGeneral) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) out.v[i] = RoundedProduct(ToAcc(out.x.v[i]), kUnit<T>);
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
    if (kEdges && !row.grid.Whole(out.first)) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (out.first + i < 0 || out.first + i >= cols) {
          out.x.v[i] = NeutralInput();
          out.v[i] = -Acc(INFINITY);
          out.masked |= 1u << i;
        }
      }
    }
  }

  // z - max in powers, where max is in units.
  static __device__ __forceinline__ void Subtract(const Slot& slot, Acc max, Acc (&powers)[kVec]) {
    if constexpr (kGeneral) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) powers[i] = (slot.v[i] - max) * kPowers<T>;
    } else {
      ToAccAll(slot.x, powers);
      ToPowers<T>(powers, factor, max);
    }
  }

  // z - max itself, of a number of the row, as its exponential was taken.
  static __device__ __forceinline__ Acc Below(Acc x, Acc max) {
    if constexpr (kGeneral) return (RoundedProduct(x, kUnit<T>) - max) * kLogitOfUnit<T>;
    Acc powers[1] = {x};
    ToPowers<T>(powers, factor, max);
    return powers[0] * kLogitOfPower<T>;
  }

  // The maximum over the lanes comes first, so that lanes then merge by adding. Deviations are added up as distances from
  // that maximum, which the exponentials take anyway.
  template <typename Variant, int kN>
  __device__ __forceinline__ Partial Reduce(Variant, Slot (&slots)[kN], int width) const {
    const Acc m = MaxOfSlots<T, kGeneral>(slots, kUnit<T>);
    Partial p = Partial::Identity();
    p.max = Finite<T>(LaneReduce(m, width, [](Acc a, Acc b) { return Max(a, b); }));
    Acc distances = 0, count = kN * kVec;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      Acc powers[kVec];
      Subtract(slots[j], p.max, powers);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        slots[j].v[i] = kKeepsTerms ? ExpOfPowers<T>(powers[i]) : ExpOfTerm<T>(powers[i]);
        p.sum += slots[j].v[i];
        if constexpr (kSmooth) distances += kGeneral && (slots[j].masked >> i & 1) ? Acc(0) : powers[i];
      }
    }
    p.sum = LaneSum(p.sum, width);
    if constexpr (kGeneral) {
#pragma unroll
      for (int j = 0; j < kN; ++j) count -= static_cast<Acc>(__popc(slots[j].masked));
      p.more[kCount] = LaneSum(count, width);
    }
    if constexpr (kSmooth) {
      Acc deviation = fma(count, p.max - slots[0].centre, distances / kPowers<T>);
      if constexpr (!kGeneral) {
        // At the edges, a neutral element cannot be told from a logit of -inf.
        bool all = true;
#pragma unroll
        for (int j = 0; j < kN; ++j) all = all && Whole(slots[j]);
        if (!all) deviation = EdgeDeviation(slots);
      }
      p.more[0] = LaneSum(deviation, width);
    }
    return p;
  }

  __device__ __forceinline__ bool Whole(const Slot& slot) const { return slot.first >= 0 && slot.first + kVec <= cols; }

  // Sum of z - centre over the elements of the row. Not from what Reduce computes, which would have to be kept for it.
  template <int kN>
  __device__ __forceinline__ Acc EdgeDeviation(const Slot (&slots)[kN]) const {
    Acc sum = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int c = slots[j].first + i;
        if (c >= 0 && c < cols) sum += fma(ToAcc(slots[j].x.v[i]), kUnit<T>, -slots[j].centre);
      }
    }
    return sum;
  }

  // ---- Columns (strided.cuh) ----

  struct Column {
    const bool* where = nullptr;
    Vec<T, kGeneral ? 1 : kVec> first;  // kSmooth: of each column
  };

  __device__ __forceinline__ Column BeginColumn(int64_t index) const {
    Column c;
    if (HasWhere()) c.where = where.data + where.RowOffset(index);
    if (kSmooth && cols > 0) {
      c.first = *reinterpret_cast<const decltype(c.first)*>(x.data + x.RowOffset(index));
    }
    return c;
  }

  // z in units of one element in kGeneral; masked: -inf.
  __device__ __forceinline__ Acc ColumnZ(T raw, const Column& column, int a, bool& masked) const {
    masked = column.where != nullptr && !column.where[a * where.axis_stride];
    return masked ? -Acc(INFINITY) : RoundedProduct(ToAcc(raw), kUnit<T>);
  }

  // What deviations are from: a row's first logit, in units, if it is a number that takes part.
  __device__ __forceinline__ static Acc Centre(T first, const bool* where) {
    const Acc value = RoundedProduct(ToAcc(first), kUnit<T>);
    return (where == nullptr || *where) && isfinite(value) ? value : Acc(0);
  }

  template <int kN, typename Variant, typename ForParts, typename ForAll, typename BlockReduce>
  __device__ __forceinline__ void ReduceColumns(Variant, const Column& column, ForParts for_parts, ForAll for_all,
                                                BlockReduce block_reduce, PerColumn<Partial, kN>& total) const {
#pragma unroll
    for (int v = 0; v < kN; ++v) total.v[v] = Partial::Identity();
    ReduceColumnsToMaxSum(*this, column, for_parts, for_all, block_reduce, total, [&](int v, T raw, bool masked) {
      if constexpr (kSmooth) {
        if (!masked) {
          total.v[v].more[0] += fma(ToAcc(raw), kUnit<T>, -Centre(column.first.v[v], column.where));
        }
      }
      if constexpr (kGeneral) total.v[v].more[kCount] += masked ? Acc(0) : Acc(1);
    });
  }
};

// `simple`: all operands are full, and there is no `where`.
template <template <typename, Mode> typename Op>
Error LaunchCrossEntropy(cudaStream_t stream, const CrossEntropyArgs& args, Scratch scratch, const char* name) {
  const int64_t rows = args.shape.rows();
  bool simple = !args.where;
  for (const Operand* operand : {&args.labels, &args.a, &args.b}) {
    simple = simple && (!*operand || operand->elements == rows);
  }
  return LaunchSoftmax<Op>(stream, args, simple, scratch, name);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_CROSS_ENTROPY_CUH_
