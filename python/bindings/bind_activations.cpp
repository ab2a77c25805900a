#include "bindings.h"
#include "engine_base.h"

#include <zeroth/device/memory.h>
#include <zeroth/engine/world.h>
#include <zeroth/io/io_queue.h>
#include <zeroth/libtorch/saved_tensors.h>
#include <zeroth/offload/activation_store.h>
#include <zeroth/program/activation_plan.h>

#include <malloc.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth::python {
namespace {

using libtorch::SavedTensor;
using libtorch::SavedTensors;
using NoGil = py::call_guard<py::gil_scoped_release>;

std::shared_ptr<ActivationStore> open_store(const std::vector<std::string>& folders, int prefetch,
                                            std::size_t buffer_bytes, std::size_t piece_bytes, const std::string& io,
                                            bool direct) {
  const std::optional<IoEngineKind> engine = io == "probe" ? IoEngineKind::kAuto : io_engine_of(io);
  ZR_CHECK(engine.has_value(), ErrorCode::kUsage, "there is no such engine of files",
           {.where = "python.activations",
            .which = "io",
            .expected = "probe, io_uring, aio or threads",
            .got = "\"" + io + "\""});
  return ActivationStore::open({.folders = folders,
                                .access = direct ? FileAccess::kDirect : FileAccess::kBuffered,
                                .piece_bytes = piece_bytes,
                                .slots = ActivationStore::slots_in(buffer_bytes, piece_bytes),
                                .prefetch = prefetch,
                                .io = {.engine = *engine}});
}

std::map<std::string, std::uint64_t> report(const SavedTensors& saved) {
  const libtorch::SavedTensorCounters tensors = saved.counters();
  std::map<std::string, std::uint64_t> result{
      {"moved", tensors.moved}, {"shared", tensors.shared}, {"kept", tensors.kept}};
  const ActivationCounters counters = saved.store() ? saved.store()->counters() : ActivationCounters{};
  result["bytes_moved"] = counters.put_bytes;
  result["bytes_restored"] = counters.get_bytes;
  result["bytes_written"] = counters.write_bytes;
  result["bytes_read"] = counters.read_bytes;
  result["restored"] = counters.gets;
  result["on_demand"] = counters.on_demand;
  result["wait_ns"] = counters.wait_ns;
  result["live"] = counters.live_blocks;
  result["live_bytes"] = counters.live_bytes;
  result["peak_live_bytes"] = counters.peak_live_bytes;
  result["file_bytes"] = saved.store() ? saved.store()->measured_file_bytes() : 0;
  return result;
}

using UnitTuple = std::tuple<std::string, std::uint64_t, std::uint64_t, double, double, double>;

/// Choices by name, the costs in seconds and bytes, and the table.
py::dict plan(const std::vector<UnitTuple>& tuples, double write_bytes_per_s, double read_bytes_per_s,
              std::uint64_t memory_bytes) {
  std::vector<ActivationUnit> units;
  for (const auto& [name, saved, input, forward, backward, recompute] : tuples)
    units.push_back({name, saved, input, forward, backward, recompute});
  ActivationPlan made;
  {
    const py::gil_scoped_release no_gil;
    made = plan_activations(units, {.write_bytes_per_s = write_bytes_per_s, .read_bytes_per_s = read_bytes_per_s},
                            memory_bytes);
  }
  py::list choices;
  for (const ActivationChoice choice : made.choices) choices.append(std::string(name_of(choice)));
  py::dict result;
  result["choices"] = choices;
  result["step_s"] = made.cost.step_s();
  result["resident_bytes"] = made.cost.resident_bytes;
  result["moved_bytes"] = made.cost.moved_bytes;
  result["exact"] = made.exact;
  result["text"] = to_text(made, units, memory_bytes);
  return result;
}

}  // namespace

void bind_activations(py::module_& module) {
  py::class_<ActivationStore, std::shared_ptr<ActivationStore>>(module, "ActivationStore");
  module.def("open_activation_store", &open_store, py::kw_only(), py::arg("folders"), py::arg("prefetch"),
             py::arg("buffer_bytes"), py::arg("piece_bytes"), py::arg("io"), py::arg("direct"), NoGil());
  module.def(
      "activation_store_of", [](const py::object& engine) { return engine_base_of(engine).core().activations(); },
      py::arg("engine"));

  module.def(
      "free_bytes_of_rank",
      [](const World& world) {
        return available_memory_bytes() / static_cast<std::uint64_t>(std::max(1, world.ranks_on_host()));
      },
      py::arg("world"));
  module.def("return_heap", [] { return ::malloc_trim(0) != 0; }, NoGil());
  module.def("plan_activations", &plan, py::kw_only(), py::arg("units"), py::arg("write_bytes_per_s"),
             py::arg("read_bytes_per_s"), py::arg("memory_bytes"));

  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(module, "SavedTensor")
      .def("unpack", &SavedTensor::unpack, NoGil())
      .def_property_readonly("moved", &SavedTensor::moved);
  py::class_<SavedTensors, std::shared_ptr<SavedTensors>>(module, "SavedTensors")
      .def(py::init([](std::shared_ptr<ActivationStore> store, std::size_t min_bytes) {
             return SavedTensors::create(std::move(store), min_bytes);
           }),
           py::arg("store").none(true), py::arg("min_bytes"))
      .def("keep", &SavedTensors::keep, py::arg("tensors"))
      .def("pack", &SavedTensors::pack, py::arg("tensor"), py::arg("move"), NoGil())
      .def("report", &report, NoGil())
      .def("reset_counters", [](SavedTensors& self) {
        const py::gil_scoped_release no_gil;
        self.reset_counters();
        if (self.store()) self.store()->reset_counters();
      });
}

}  // namespace zeroth::python
