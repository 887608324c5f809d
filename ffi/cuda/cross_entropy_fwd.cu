// Cross-entropy, forward: x read once (rows * cols * sizeof(T) bytes), two numbers per row written.
//
// A block copies its part of a row to shared memory although each element is used once: that is how the loads of a whole
// row are in flight at once without registers for them.
#include "cross_entropy.cuh"

namespace jaxnorm {
namespace {

template <typename T_, Mode kMode_>
struct CrossEntropyFwd : CrossEntropyRows<T_, kMode_, true> {
  using Base = CrossEntropyRows<T_, kMode_, true>;
  using Base::Base, Base::cols, Base::kGeneral, Base::kPerUnit, Base::label_weight, Base::labels, Base::smoothing,
      Base::where, Base::x;
  using typename Base::Acc;
  using typename Base::Partial;
  using typename Base::Slot;
  using typename Base::T;

  Acc *nll, *lse;

  explicit CrossEntropyFwd(const CrossEntropyArgs& args)
      : Base(args), nll(static_cast<Acc*>(args.nll)), lse(static_cast<Acc*>(args.lse_out)) {}

  __host__ __device__ __forceinline__ T* Output() const { return nullptr; }

  // The variant is whether there is smoothing. kGeneral leaves it to run time, for the sake of the code's size.
  template <typename F>
  __device__ __forceinline__ void WithVariant(F f) const {
    if constexpr (kGeneral) {
      f(smoothing != 0);
    } else if (smoothing != 0) {
      f(std::true_type());
    } else {
      f(std::false_type());
    }
  }

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
    if (smoothing != 0 && cols > 0) r.centre = Base::Centre(*r.x.row, r.where.row);
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

  // nll = log(sum) - (1 - smoothing) * (x[label] - max) - smoothing * (mean(x) - max), where the largest logit is the
  // very number that the exponentials were taken against: its rounding cancels.
  template <typename Variant>
  __device__ __forceinline__ void StoreRow(Variant smooth, int64_t index, const Partial& total) const {
    const Acc reference = Finite(total.max), log_sum = ::log(total.sum);
    const auto beyond_max = [&](Acc value) { return fma(value, kUnit<T>, -reference) * kPerUnit; };
    const int label = labels.data[labels.RowOffset(index)];
    Acc loss = Acc(NAN);
    if (Base::IsClass(label)) {
      const T* const row = x.data + x.RowOffset(index);
      const bool* const keep = Base::HasWhere() ? where.data + where.RowOffset(index) : nullptr;
      loss = log_sum;
      if (smoothing < 1) {
        const bool masked = keep != nullptr && !keep[label * where.axis_stride];
        loss -= beyond_max(masked ? -Acc(INFINITY) : ToAcc(row[label * x.axis_stride])) * label_weight;
      }
      if (smooth) {
        loss -= (total.more[0] / Base::Classes(total) + beyond_max(Base::Centre(*row, keep))) * smoothing;
      }
    }
    nll[index] = loss;
    lse[index] = reference * kPerUnit + log_sum;
  }

  template <typename Variant>
  __device__ __forceinline__ void StoreColumn(Variant smooth, int64_t index, const Partial& total) const {
    StoreRow(smooth, index, total);
  }
};

ffi::Error CrossEntropyFwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer labels, ffi::RemainingArgs rest,
                                  ffi::Result<ffi::AnyBuffer> nll, ffi::Result<ffi::AnyBuffer> lse,
                                  ffi::Result<ffi::AnyBuffer> scratch, int64_t axis, double smoothing) {
  CrossEntropyArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseCrossEntropyFwd(x, labels, rest, *nll, *lse, axis, smoothing, &args));
  if (args.shape.rows() == 0) return ffi::Error::Success();
  return LaunchCrossEntropy<CrossEntropyFwd>(stream, args, *scratch, "cross_entropy_fwd");
}

JAXNORM_REGISTER(cross_entropy_fwd, CrossEntropyFwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("smoothing"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
