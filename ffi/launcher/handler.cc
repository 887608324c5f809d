#include "launcher/handler.h"

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "launcher/driver.h"
#include "launcher/plan.h"
#include "launcher/program.h"

namespace jaxnorm {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxDevices = 64;

// Made once for each call of an executable, and deleted with it.
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
Error Invalid(const std::string& what) { return Error::InvalidArgument("jaxnorm: row_program: " + what); }
Error Internal(const std::string& what) { return Error::Internal("jaxnorm: row_program: " + what); }

// ---- instantiate ----

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
  if (*version != Attributes::kVersion) return Error::Success();  // others may look different; DecodePlan refuses them
  const auto source = dictionary.get<std::string_view>("source");
  if (!source.has_value()) return Invalid("the attribute source must be a string");
  attributes->source = *source;
  JAXNORM_RETURN_IF_ERROR(ReadIntegers(dictionary, "launch", &attributes->launch));
  JAXNORM_RETURN_IF_ERROR(ReadIntegers(dictionary, "sizes", &attributes->sizes));
  JAXNORM_RETURN_IF_ERROR(ReadIntegers(dictionary, "arguments", &attributes->arguments));
  JAXNORM_RETURN_IF_ERROR(ReadIntegers(dictionary, "finish", &attributes->finish));
  return ReadIntegers(dictionary, "finish_arguments", &attributes->finish_arguments);
}

Error MakeState(const ffi::Dictionary& dictionary, State* state) {
  Attributes attributes;
  JAXNORM_RETURN_IF_ERROR(ReadAttributes(dictionary, &attributes));
  JAXNORM_RETURN_IF_ERROR(DecodePlan(attributes, &state->plan));
  state->program = Program::ForSource(attributes.source);
  // Without a GPU the executable is for another machine.
  if (!AllGpus().reason.empty()) return Error::Success();
  const std::string error = OnEachDevice([state](int ordinal) { return state->Load(ordinal); });
  return error.empty() ? Error::Success() : Invalid(error);
}

ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Dictionary dictionary) {
  try {
    auto state = std::make_unique<State>();
    const Error error = MakeState(dictionary, state.get());
    if (error.failure()) return ffi::Unexpected(ToFfi(error));
    return state;
  } catch (const std::exception& error) {
    return ffi::Unexpected(ToFfi(Internal(error.what())));
  }
}

// ---- execute ----

// A kernel's arguments: pointers to buffers, then numbers.
class KernelArguments {
 public:
  void AppendBuffers(const BufferList& list, const Buffers& buffers) {
    for (int buffer : list) Append(reinterpret_cast<uint64_t>(buffers[buffer].data));
  }
  // An int lies in the low half, which comes first in memory.
  void Append(uint64_t value) {
    values_[size_] = value;
    pointers_[size_] = &values_[size_];
    ++size_;
  }
  void AppendDims(const Plan& plan, const Launches& launches) {
    for (int k = 0; k < plan.sizes.size; ++k) Append(launches.dims[k]);
  }
  void** pointers() { return pointers_.data(); }

 private:
  static constexpr int kMax = kMaxBuffers + 3 + kMaxRowDims;
  std::array<uint64_t, kMax> values_;
  std::array<void*, kMax> pointers_;
  int size_ = 0;
};

Error Launch(const char* name, const CudaLaunchConfig& config, void* kernel, KernelArguments* arguments) {
  const Driver& driver = StartedDriver();
  const int result = driver.LaunchKernel(&config, kernel, arguments->pointers(), nullptr);
  if (result == 0) return Error::Success();
  return Internal(driver.Describe(std::string("launching ") + name, result));
}

Error LaunchBoth(const Plan& plan, const Kernels& kernels, const Buffers& buffers, void* stream) {
  Launches launches;
  JAXNORM_RETURN_IF_ERROR(SizeLaunches(plan, buffers, kernels.resident, &launches));
  if (launches.grid.x > 0) {
    KernelArguments arguments;
    arguments.AppendBuffers(plan.arguments, buffers);
    arguments.Append(launches.rows);
    arguments.Append(launches.chunks);
    arguments.AppendDims(plan, launches);
    CudaLaunchAttribute attribute{};
    if (plan.together) {
      attribute.id = kLaunchAttributeCooperative;
      attribute.value.cooperative = 1;
    } else {
      attribute.id = kLaunchAttributeCluster;
      attribute.value.cluster = {static_cast<unsigned>(plan.cluster), 1, 1};
    }
    const Grid& grid = launches.grid;
    const CudaLaunchConfig config{grid.x,
                                  grid.y,
                                  grid.z,
                                  static_cast<unsigned>(plan.threads),
                                  1,
                                  1,
                                  static_cast<unsigned>(plan.shared_bytes),
                                  stream,
                                  &attribute,
                                  plan.cluster > 1 ? 1u : 0u};
    JAXNORM_RETURN_IF_ERROR(Launch("row_program", config, kernels.row_program, &arguments));
  }
  if (launches.finish_grid.x > 0) {
    KernelArguments arguments;
    arguments.AppendBuffers(plan.finish_arguments, buffers);
    arguments.Append(launches.rows);
    arguments.Append(launches.chunks);
    arguments.Append(launches.groups);
    arguments.AppendDims(plan, launches);
    const Grid& grid = launches.finish_grid;
    const CudaLaunchConfig config{grid.x, grid.y, grid.z, 32, launches.finish_threads_y, 1, 0, stream, nullptr, 0};
    JAXNORM_RETURN_IF_ERROR(Launch("row_program_finish", config, kernels.finish, &arguments));
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
    buffers->Append({buffer.untyped_data(), dims.begin(), static_cast<int>(dims.size())});
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
    if (std::string error = state->Load(ordinal); !error.empty()) return Internal(error);
    kernels = state->ready[ordinal].load(std::memory_order_acquire);
  }
  Buffers buffers;
  JAXNORM_RETURN_IF_ERROR(CollectBuffers(operands, results, &buffers));
  return LaunchBoth(state->plan, *kernels, buffers, stream);
}

ffi::Error Execute(void* stream, int32_t ordinal, State* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  try {
    return ToFfi(Run(stream, ordinal, state, operands, results));
  } catch (const std::exception& error) {
    return ToFfi(Internal(error.what()));
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

XLA_FFI_Error* RowProgramInstantiate(XLA_FFI_CallFrame* frame) { return kInstantiate(frame); }
XLA_FFI_Error* RowProgramExecute(XLA_FFI_CallFrame* frame) { return kExecute(frame); }
XLA_FFI_TypeId* RowProgramStateId() { return &State::id; }
const XLA_FFI_TypeInfo* RowProgramStateInfo() { return &kStateInfo; }

}  // namespace jaxnorm
