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

// What the target would launch for buffers of these dimensions: ((grid), threads, rows, chunks, groups, dims, (finish
// grid), finish's threads along y). A ValueError is what the target returns.
nb::tuple PlanLaunch(int64_t version, const std::string& source, const Numbers& launch, const Numbers& sizes,
                     const Numbers& arguments, const Numbers& finish, const Numbers& finish_arguments,
                     const std::vector<Numbers>& buffer_dims, int64_t resident) {
  auto integers = [](const Numbers& numbers) { return Integers{numbers.data(), numbers.size()}; };
  auto check = [](const Error& error) {
    if (error.failure()) throw nb::value_error(error.message().c_str());
  };
  Plan plan;
  check(DecodePlan({version, source, integers(launch), integers(sizes), integers(arguments), integers(finish),
                    integers(finish_arguments)},
                   &plan));
  if (buffer_dims.size() > kMaxBuffers) throw nb::value_error("too many buffers");
  Buffers buffers;
  for (const Numbers& dims : buffer_dims) {
    buffers.Append({nullptr, dims.data(), static_cast<int>(dims.size())});
  }
  Launches launches;
  check(SizeLaunches(plan, buffers, resident, &launches));
  auto tuple = [](const Grid& grid) { return nb::make_tuple(grid.x, grid.y, grid.z); };
  nb::list dims;
  for (int k = 0; k < plan.sizes.size; ++k) dims.append(launches.dims[k]);
  return nb::make_tuple(tuple(launches.grid), plan.threads, launches.rows, launches.chunks, launches.groups,
                        nb::tuple(dims), tuple(launches.finish_grid), launches.finish_threads_y);
}

}  // namespace
}  // namespace jaxnorm

NB_MODULE(_launcher, m) {
  // Compared with the installed jaxlib before anything is registered: see jaxnorm/_lib.py.
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("types", [] {
    nb::dict types, state;
    state["type_id"] = nb::capsule(static_cast<const void*>(jaxnorm::RowProgramStateId()));
    state["type_info"] = nb::capsule(static_cast<const void*>(jaxnorm::RowProgramStateInfo()));
    types["row_program_state"] = state;
    return types;
  });
  m.def("targets", [] {
    nb::dict targets, stages;
    stages["instantiate"] = jaxnorm::Handler(jaxnorm::RowProgramInstantiate);
    stages["execute"] = jaxnorm::Handler(jaxnorm::RowProgramExecute);
    targets["row_program"] = stages;
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
      list.append(nb::make_tuple(gpu.name, gpu.architecture, gpu.multiprocessors, gpu.shared_bytes));
    }
    return nb::make_tuple(list, gpus.reason);
  });
  m.def("compile", &jaxnorm::CompileInPython, nb::arg("source"), nb::arg("architecture"));
  m.def("plan_launch", &jaxnorm::PlanLaunch, nb::arg("version"), nb::arg("source"), nb::arg("launch"), nb::arg("sizes"),
        nb::arg("arguments"), nb::arg("finish"), nb::arg("finish_arguments"), nb::arg("buffer_dims"),
        nb::arg("resident"));
}
