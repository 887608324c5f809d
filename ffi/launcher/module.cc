// The Python side of the launcher: jaxnorm/_rows/launcher.py is its only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "launcher/compile.h"
#include "launcher/driver.h"
#include "launcher/handler.h"
#include "launcher/plan.h"

namespace nb = nanobind;

namespace jaxnorm {
namespace {

using Numbers = std::vector<int64_t>;

nb::capsule Handler(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::tuple CompileInPython(const std::string& source, int architecture) {
  std::shared_ptr<const Code> code;
  bool in_memory = false;
  std::string error;
  {
    nb::gil_scoped_release release;
    error = Compile(source, architecture, &code, &in_memory);
  }
  if (!error.empty()) throw std::runtime_error(error);
  return nb::make_tuple(nb::bytes(code->cubin.data(), code->cubin.size()), nb::str(code->log.data(), code->log.size()),
                        in_memory ? 0.0 : code->seconds, in_memory || code->cached);
}

// The launches of the target for buffers of these dimensions, with one byte for each element: (rows, chunks, groups,
// dims, for each launch (kernel, grid, block, arguments)). An argument is a list of its words in memory. The address of
// a buffer is its number times 2^32. An error of the target is raised as a ValueError.
nb::tuple PlanLaunches(const nb::dict& given, const std::vector<Numbers>& buffer_dims, int64_t resident) {
  auto check = [](const Error& error) {
    if (error.failure()) throw nb::value_error(error.message().c_str());
  };
  auto text = [&](const char* name) { return nb::cast<std::string>(given[name]); };
  auto numbers = [&](const char* name) { return nb::cast<Numbers>(given[name]); };
  auto integers = [](const Numbers& numbers) { return Integers{numbers.data(), numbers.size()}; };
  const std::string operation = text("operation"), source = text("source"), kernels = text("kernels");
  const Numbers launches = numbers("launches"), bytes = numbers("buffer_bytes"), tiles = numbers("row_tiles"),
                sizes = numbers("sizes");
  Plan plan;
  check(DecodePlan({nb::cast<int64_t>(given["version"]), operation, source, kernels, integers(launches),
                    integers(bytes), integers(tiles), integers(sizes)},
                   &plan));
  if (buffer_dims.size() > kMaxBuffers) throw nb::value_error("too many buffers");
  Buffers buffers;
  for (const Numbers& dims : buffer_dims) {
    int64_t size = 1;
    for (int64_t dim : dims) size *= dim;
    buffers.Append({reinterpret_cast<void*>(static_cast<int64_t>(buffers.size) << 32), size, dims.data(),
                    static_cast<int>(dims.size())});
  }
  check(CheckBuffers(plan, buffers));
  Rows rows;
  if (plan.has_rows) check(CountRows(plan, buffers, resident, &rows));
  auto tuple = [](const Extent& extent) { return nb::make_tuple(extent.x, extent.y, extent.z); };
  nb::list dims, made;
  for (int k = 0; k < plan.rows.sizes.size; ++k) dims.append(rows.dims[k]);
  for (const Launch& launch : plan.launches) {
    Size size;
    check(SizeLaunch(plan, launch, rows, &size));
    Arguments arguments;
    FillArguments(launch, buffers, rows, 0, &arguments);
    nb::list all;
    for (size_t i = 0; i < launch.words.size(); ++i) {
      const auto* words = static_cast<const uint64_t*>(arguments.pointers[i]);
      all.append(Numbers(words, words + launch.words[i]));
    }
    made.append(nb::make_tuple(plan.kernels[launch.kernel], tuple(size.grid), tuple(size.block), all));
  }
  return nb::make_tuple(rows.rows, rows.chunks, rows.groups, nb::tuple(dims), made);
}

}  // namespace
}  // namespace jaxnorm

NB_MODULE(_launcher, m) {
  // Compared with the installed jaxlib before anything is registered: see jaxnorm/_lib.py.
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("types", [] {
    nb::dict types, state;
    state["type_id"] = nb::capsule(static_cast<const void*>(jaxnorm::LaunchStateId()));
    state["type_info"] = nb::capsule(static_cast<const void*>(jaxnorm::LaunchStateInfo()));
    types["launch_state"] = state;
    return types;
  });
  m.def("targets", [] {
    nb::dict targets, stages;
    stages["instantiate"] = jaxnorm::Handler(jaxnorm::LaunchInstantiate);
    stages["execute"] = jaxnorm::Handler(jaxnorm::LaunchExecute);
    targets["launch"] = stages;
    return targets;
  });
  m.def("configure", &jaxnorm::Configure, nb::arg("nvrtc"), nb::arg("cache_folder"), nb::arg("cache_limit"));
  m.def("compiler", [] {
    const jaxnorm::CompilerState state = jaxnorm::GetCompilerState();
    return nb::make_tuple(state.major, state.minor, state.path, state.missing, state.cache_off);
  });
  m.def("can_compile_for", &jaxnorm::CanCompileFor);
  m.def("gpus", [] {
    const jaxnorm::Gpus& gpus = jaxnorm::AllGpus();
    nb::list list;
    for (const jaxnorm::Gpu& gpu : gpus.list) {
      list.append(nb::make_tuple(gpu.name, gpu.architecture, gpu.multiprocessors, gpu.shared_bytes, gpu.l2_bytes));
    }
    return nb::make_tuple(list, gpus.reason);
  });
  m.def("compile", &jaxnorm::CompileInPython, nb::arg("source"), nb::arg("architecture"));
  m.def("plan_launches", &jaxnorm::PlanLaunches, nb::arg("attributes"), nb::arg("buffer_dims"), nb::arg("resident"));
}
