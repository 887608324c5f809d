// Cross-entropy, forward: x read once (rows * cols * sizeof(T) bytes), two numbers per row written.
//
// A block copies its part of a row to shared memory although each element is used once: that is how the loads of a whole
// row are in flight at once without registers for them.
#ifndef JAXNORM_CUDA_CROSS_ENTROPY_FWD_CUH_
#define JAXNORM_CUDA_CROSS_ENTROPY_FWD_CUH_

#include "cross_entropy.cuh"

namespace jaxnorm {

// kSmooth is no variant of one kernel, in which all calls would pay for its registers: it has kernels of its own.
template <typename T_, Mode kMode_, bool kSmooth>
struct CrossEntropyFwd : CrossEntropyRows<T_, kMode_, kSmooth, false> {
  using Base = CrossEntropyRows<T_, kMode_, kSmooth, false>;
  using Base::Base, Base::cols, Base::kGeneral, Base::label_weight, Base::labels, Base::smoothing, Base::where, Base::x;
  using typename Base::Acc;
  using typename Base::Partial;
  using typename Base::Slot;
  using typename Base::T;

  static constexpr int kSlotsPerThread = kSmooth ? 16 : 8;

  Acc *nll, *lse;

  explicit CrossEntropyFwd(const CrossEntropyArgs& args)
      : Base(args), nll(static_cast<Acc*>(args.nll)), lse(static_cast<Acc*>(args.lse_out)) {}

  __host__ __device__ __forceinline__ T* Output() const { return nullptr; }

  struct Row {
    SlotGrid<T, Base::kMode> grid;  // of x itself
    OperandRow<T> x;
    OperandRow<bool> where;
    Acc centre = 0;
  };

  __device__ __forceinline__ Row Begin(int64_t index) const {
    Row r;
    if constexpr (kGeneral) {
      r.x = OperandRow<T>(x, index);
      r.where = OperandRow<bool>(where, index);
    } else {
      r.x = OperandRow<T>::Full(x, index * cols);
    }
    r.grid = {r.x.row, cols};
    if (kSmooth && cols > 0) r.centre = Base::Centre(*r.x.row, r.where.row);
    return r;
  }

  __device__ __forceinline__ const OperandRow<T>& Input(const Row& row, int) const { return row.x; }
  using Base::Input;

  // Nothing is written for single elements.
  struct Final {};
  struct Loaded {};
  using ColumnFinal = Final;
  template <typename Variant>
  __device__ __forceinline__ void Prepare(Variant, Slot&, const Partial&) const {}
  template <typename Variant>
  __device__ __forceinline__ Final Finish(Variant, const Partial&) const {
    return {};
  }
  template <typename Variant>
  __device__ __forceinline__ Loaded LoadForStore(Variant, const Row&, int) const {
    return {};
  }
  template <typename Variant>
  __device__ __forceinline__ void Store(Variant, const Row&, int, const Slot&, const Loaded&, const Final&) const {}

  struct Ahead {
    Acc picked;  // the label's logit: -inf if it is masked, NaN if the label is no class
    Acc centre;  // as Row's
  };

  __device__ __forceinline__ Ahead LoadAhead(int64_t index) const {
    const int label = labels.data[labels.RowOffset(index)];
    if (!Base::IsClass(label)) return {Acc(NAN), 0};
    const T* const row = x.data + x.RowOffset(index);
    const bool* const keep = Base::HasWhere() ? where.data + where.RowOffset(index) : nullptr;
    const bool masked = keep != nullptr && !keep[label * where.axis_stride];
    return {masked ? -Acc(INFINITY) : ToAcc(row[label * x.axis_stride]), kSmooth ? Base::Centre(*row, keep) : Acc(0)};
  }

  // nll = log(sum) - (1 - smoothing) * (x[label] - max) - smoothing * (mean(x) - max), where the largest logit is the
  // very number that the exponentials were taken against: its rounding cancels.
  template <typename Variant>
  __device__ __forceinline__ void StoreRow(Variant, int64_t index, const Partial& total, const Ahead& ahead) const {
    const Acc reference = total.max, log_sum = ::log(total.sum);
    Acc loss = log_sum;
    if (!kSmooth || label_weight != 0 || isnan(ahead.picked)) {
      loss -= Base::Below(ahead.picked, reference) * label_weight;
    }
    if constexpr (kSmooth) {
      loss -= (total.more[0] / Base::Classes(total) + (ahead.centre - reference)) * kLogitOfUnit<T> * smoothing;
    }
    nll[index] = loss;
    lse[index] = reference * kLogitOfUnit<T> + log_sum;
  }
};

// With smoothing (cross_entropy_smooth.cu).
Error LaunchSmoothCrossEntropyFwd(cudaStream_t stream, const CrossEntropyArgs& args, Scratch scratch);

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_CROSS_ENTROPY_FWD_CUH_
