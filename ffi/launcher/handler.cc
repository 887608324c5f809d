#include "launcher/handler.h"

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "launcher/driver.h"
#include "launcher/plan.h"
#include "launcher/program.h"

namespace jaxnorm {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxDevices = 64;

// The state of one call in an executable. It is deleted with the executable.
struct State {
  static ffi::TypeId id;

  Plan plan;
  std::shared_ptr<Program> program;
  // By ordinal, for devices that are ready. Threads may load for different devices at once.
  std::array<std::atomic<const Kernels*>, kMaxDevices> ready{};

  State() = default;
  ~State() {
    for (auto& kernels : ready) delete kernels.load();
  }

  std::string Load(int ordinal) {
    if (ordinal < 0 || ordinal >= kMaxDevices) {
      return "GPU number " + std::to_string(ordinal) + " is beyond the " + std::to_string(kMaxDevices) + " supported";
    }
    if (ready[ordinal].load(std::memory_order_acquire) != nullptr) return "";
    auto kernels = std::make_unique<Kernels>();
    if (std::string error = program->Load(plan, ordinal, kernels.get()); !error.empty()) return error;
    const Kernels* none = nullptr;
    if (ready[ordinal].compare_exchange_strong(none, kernels.get(), std::memory_order_acq_rel)) kernels.release();
    return "";
  }
};
ffi::TypeId State::id = {};
constexpr XLA_FFI_TypeInfo kStateInfo = ffi::MakeTypeInfo<State>();

ffi::Error ToFfi(const Error& error) { return ffi::Error(error.code(), error.message()); }
Error Invalid(const std::string& what) { return Error::InvalidArgument("jaxnorm: launch: " + what); }

// ---- instantiate ----

Error ReadText(const ffi::Dictionary& dictionary, const char* name, std::string_view* text) {
  const auto found = dictionary.get<std::string_view>(name);
  if (!found.has_value()) return Invalid(std::string("the attribute ") + name + " must be a string");
  *text = *found;
  return Error::Success();
}

Error ReadIntegers(const ffi::Dictionary& dictionary, const char* name, Integers* integers) {
  const auto span = dictionary.get<ffi::Span<const int64_t>>(name);
  if (!span.has_value()) return Invalid(std::string("the attribute ") + name + " must be an array of int64");
  *integers = {span->begin(), span->size()};
  return Error::Success();
}

Error ReadAttributes(const ffi::Dictionary& dictionary, Attributes* attributes) {
  const auto version = dictionary.get<int64_t>("version");
  if (!version.has_value()) return Invalid("the attribute version must be an int64");
  attributes->version = *version;
  if (*version != Attributes::kVersion) return Error::Success();  // unread, since DecodePlan refuses other versions
  JAXNORM_RETURN_IF_ERROR(ReadText(dictionary, "operation", &attributes->operation));
  JAXNORM_RETURN_IF_ERROR(ReadText(dictionary, "source", &attributes->source));
  JAXNORM_RETURN_IF_ERROR(ReadText(dictionary, "kernels", &attributes->kernels));
  JAXNORM_RETURN_IF_ERROR(ReadIntegers(dictionary, "launches", &attributes->launches));
  JAXNORM_RETURN_IF_ERROR(ReadIntegers(dictionary, "buffer_bytes", &attributes->buffer_bytes));
  JAXNORM_RETURN_IF_ERROR(ReadIntegers(dictionary, "row_tiles", &attributes->row_tiles));
  return ReadIntegers(dictionary, "sizes", &attributes->sizes);
}

Error MakeState(const ffi::Dictionary& dictionary, State* state) {
  Attributes attributes;
  JAXNORM_RETURN_IF_ERROR(ReadAttributes(dictionary, &attributes));
  JAXNORM_RETURN_IF_ERROR(DecodePlan(attributes, &state->plan));
  state->program = Program::ForSource(attributes.source);
  // Without a GPU the executable is for another machine.
  if (!AllGpus().reason.empty()) return Error::Success();
  const std::string error = OnEachDevice([state](int ordinal) { return state->Load(ordinal); });
  return error.empty() ? Error::Success() : state->plan.Invalid(error);
}

ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Dictionary dictionary) {
  try {
    auto state = std::make_unique<State>();
    const Error error = MakeState(dictionary, state.get());
    if (error.failure()) return ffi::Unexpected(ToFfi(error));
    return state;
  } catch (const std::exception& error) {
    return ffi::Unexpected(ToFfi(Error::Internal(std::string("jaxnorm: launch: ") + error.what())));
  }
}

// ---- execute ----

// A tag that no other launch has, in this or another process. It is a multiple of kTagStep: its low bits are for
// counting.
uint64_t NextTag() {
  constexpr uint64_t kTagStep = 1 << 16;
  static std::atomic<uint64_t> next = [] {
    std::random_device random;
    return (uint64_t{random()} << 32 | random()) / kTagStep * kTagStep;
  }();
  return next.fetch_add(kTagStep, std::memory_order_relaxed);
}

Error LaunchAll(const Plan& plan, const Kernels& kernels, const Buffers& buffers, void* stream) {
  JAXNORM_RETURN_IF_ERROR(CheckBuffers(plan, buffers));
  Rows rows;
  if (plan.has_rows) JAXNORM_RETURN_IF_ERROR(CountRows(plan, buffers, kernels.resident, &rows));
  const Driver& driver = StartedDriver();
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    const Launch& launch = plan.launches[i];
    Size size;
    JAXNORM_RETURN_IF_ERROR(SizeLaunch(plan, launch, rows, &size));
    if (size.grid.x == 0) continue;
    Arguments arguments;
    FillArguments(launch, buffers, rows, NextTag(), &arguments);
    LaunchAttributes attributes(launch, *kernels.gpu);
    const CudaLaunchConfig config = LaunchConfig(launch, size, &attributes, stream);
    const int result = driver.LaunchKernel(&config, kernels.of_launch[i], arguments.pointers.data(), nullptr);
    if (result != 0) return plan.Internal(driver.Describe("launching " + plan.kernels[launch.kernel], result));
  }
  return Error::Success();
}

Error CollectBuffers(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, Buffers* buffers) {
  if (operands.size() + results.size() > kMaxBuffers) {
    return Invalid("a call has at most " + std::to_string(kMaxBuffers) + " buffers, got " +
                   std::to_string(operands.size() + results.size()));
  }
  auto append = [buffers](const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    buffers->Append({buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes()), dims.begin(),
                     static_cast<int>(dims.size())});
  };
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    if (!operand.has_value()) return Invalid(operand.error().message());
    append(*operand);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return Invalid(result.error().message());
    append(**result);
  }
  return Error::Success();
}

Error Run(void* stream, int ordinal, State* state, const ffi::RemainingArgs& operands,
          const ffi::RemainingRets& results) {
  const bool known = ordinal >= 0 && ordinal < kMaxDevices;
  const Kernels* kernels = known ? state->ready[ordinal].load(std::memory_order_acquire) : nullptr;
  if (kernels == nullptr) {  // the device was not in use when the executable was made
    if (std::string error = state->Load(ordinal); !error.empty()) return state->plan.Internal(error);
    kernels = state->ready[ordinal].load(std::memory_order_acquire);
  }
  Buffers buffers;
  JAXNORM_RETURN_IF_ERROR(CollectBuffers(operands, results, &buffers));
  return LaunchAll(state->plan, *kernels, buffers, stream);
}

ffi::Error Execute(void* stream, int32_t ordinal, State* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  try {
    return ToFfi(Run(stream, ordinal, state, operands, results));
  } catch (const std::exception& error) {
    return ToFfi(state->plan.Internal(error.what()));
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::State<State>>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* LaunchInstantiate(XLA_FFI_CallFrame* frame) { return kInstantiate(frame); }
XLA_FFI_Error* LaunchExecute(XLA_FFI_CallFrame* frame) { return kExecute(frame); }
XLA_FFI_TypeId* LaunchStateId() { return &State::id; }
const XLA_FFI_TypeInfo* LaunchStateInfo() { return &kStateInfo; }

}  // namespace jaxnorm
