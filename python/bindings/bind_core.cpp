#include "bindings.h"
#include "group.h"
#include "place.h"

#include <zeroth/device/memory.h>
#include <zeroth/engine/config.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/settings.h>
#include <zeroth/engine/world.h>

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

using Bytes = std::map<std::string, std::uint64_t>;

/// Bytes by state; states without any are left out.
Bytes by_state(const MemorySnapshot& snapshot) {
  Bytes bytes;
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    if (snapshot.bytes[state] != 0)
      bytes[std::string(name_of(static_cast<MemoryState>(state)))] = snapshot.bytes[state];
  }
  return bytes;
}

ConfigOverride make_override(const std::string& pointer, const py::object& value, const std::string& origin) {
  using Problem = std::tuple<std::string, std::string, std::string, std::string>;  // of zeroth._config
  const auto [text, problems] = py::module_::import("zeroth._config")
                                    .attr("json_text")(value)
                                    .cast<std::pair<std::string, std::vector<Problem>>>();
  if (problems.empty()) return {.pointer = pointer, .json = text, .origin = origin};
  std::vector<ConfigProblem> listed;
  for (const auto& [inside, what, expected, got] : problems)
    listed.push_back({.pointer = pointer + inside, .origin = origin, .what = what, .expected = expected, .got = got});
  const std::size_t total = listed.size();
  throw ConfigError("an override", std::move(listed), total);
}

std::string repr_of(const auto& value) {
  return py::repr(py::cast(value)).template cast<std::string>();
}

std::string repr_of_offender(const FirstOffender& offender) {
  return "zeroth.FirstOffender(param=" + repr_of(offender.param) + ", rank=" + std::to_string(offender.rank) +
         ", micro_step=" + std::to_string(offender.micro_step) + ", count=" + std::to_string(offender.count) + ")";
}

/// Without `times`, which has a row for each rank, and without what does not count in a skipped step.
std::string repr_of_step(const StepResult& result) {
  if (!result.boundary) return "zeroth.StepResult(boundary=False)";
  std::string text =
      "zeroth.StepResult(step=" + std::to_string(result.step) + ", committed=" + (result.committed ? "True" : "False");
  if (!result.committed) text += ", reason=" + repr_of(result.reason) + ", cause=" + repr_of(name_of(result.cause));
  if (result.first_offender) text += ", first_offender=" + repr_of_offender(*result.first_offender);
  if (result.committed) {
    text += ", batches=" + std::to_string(result.batches) + ", grad_norm=" + repr_of(result.grad_norm);
    if (result.clip_coefficient != 1.0) text += ", clip_coefficient=" + repr_of(result.clip_coefficient);
    text += ", lr=" + repr_of(result.lr);
  }
  if (result.loss_scale != 1.0) text += ", loss_scale=" + repr_of(result.loss_scale);
  if (result.delayed) text += ", delayed=True";
  if (result.messages) text += ", messages=True";
  if (result.preempted) text += ", preempted=True";
  return text + ")";
}

}  // namespace

void bind_core(py::module_& module) {
  py::class_<ConfigOverride>(module, "ConfigOverride")
      .def(py::init(&make_override), py::arg("pointer"), py::arg("value"), py::arg("origin") = "an override")
      .def("__repr__", [](const ConfigOverride& one) { return one.origin + ": " + one.pointer + " = " + one.json; });
  using Overrides = std::vector<ConfigOverride>;

  py::class_<Config>(module, "Config")
      .def_static(
          "from_file",
          [](const std::filesystem::path& path, const Overrides& overrides) {
            return Config::from_file(path, overrides);
          },
          py::arg("path"), py::arg("overrides") = Overrides{})
      .def_static(
          "from_json",
          [](const std::string& text, const std::string& origin, const Overrides& overrides) {
            return Config::from_json_text(text, origin, overrides);
          },
          py::arg("text"), py::arg("origin") = "a dict", py::arg("overrides") = Overrides{})
      .def("to_json", &Config::to_json)
      .def("describe", &Config::describe)
      .def("__eq__", [](const Config& one, const Config& other) { return one == other; })
      .def("__repr__", [](const Config& config) { return "zeroth.Config(" + config.to_json() + ")"; })
      .def_property_readonly("zero_stage", [](const Config& config) { return config.zero.stage; })
      .def_property_readonly("optimizer_type", [](const Config& config) { return config.optimizer.type; })
      .def_property_readonly("fp16_auto_cast", [](const Config& config) { return config.fp16_auto_cast; })
      .def_property_readonly("bf16_auto_cast", [](const Config& config) { return config.bf16_auto_cast; })
      .def_property_readonly("input_dtype",
                             [](const Config& config) -> std::optional<std::string> {
                               const std::optional<DType> dtype = config.input_dtype();
                               return dtype ? std::optional(std::string(name_of(*dtype))) : std::nullopt;
                             })
      .def(
          "mesh",
          [](const Config& config, int world) {
            py::dict axes;
            for (const MeshAxis& axis : mesh_of(config, world).axes) axes[py::str(axis.name)] = axis.size;
            return axes;
          },
          py::arg("world"))
      .def(
          "micro_steps", [](const Config& config, int world) { return micro_steps_of(config, world); },
          py::arg("world"))
      .def(
          "batch_sizes",
          [](const Config& config, int world) {
            const BatchSizes sizes = config.resolve(data_ranks_of(config, world));
            py::dict named;
            named["train_batch_size"] = sizes.train;
            named["train_micro_batch_size_per_gpu"] = sizes.micro;
            named["gradient_accumulation_steps"] = sizes.accumulate;
            return named;
          },
          py::arg("world"))
      .def_property_readonly("sequence",
                             [](const Config& config) {
                               py::dict keys;
                               keys["method"] = config.mesh.method;
                               keys["order"] = config.mesh.order;
                               keys["ulysses"] = config.mesh.ulysses;
                               return keys;
                             })
      .def_property_readonly("experts",
                             [](const Config& config) {
                               py::dict keys;
                               keys["over"] = config.experts.over;
                               keys["meet"] = config.experts.meet;
                               keys["copies"] = config.experts.copies;
                               keys["pieces"] = config.experts.pieces;
                               keys["two_hops"] = config.experts.two_hops;
                               return keys;
                             })
      .def_property_readonly("pipeline",
                             [](const Config& config) {
                               py::dict keys;
                               keys["schedule"] = config.pipeline.schedule;
                               keys["chunks"] = config.pipeline.chunks;
                               keys["split"] = config.pipeline.split;
                               keys["scatter"] = config.pipeline.scatter;
                               keys["unshard"] = unshard_of(config);
                               keys["vocabulary"] = config.pipeline.vocabulary;
                               keys["recompute"] = config.pipeline.recompute;
                               keys["checkpoint_interval"] = config.pipeline.checkpoint_interval;
                               return keys;
                             })
      .def_property_readonly("activations",
                             [](const Config& config) {
                               py::dict keys;
                               keys["device"] = std::string(config.activations.tier());
                               keys["saved"] = config.activations.saved;
                               keys["min_bytes"] = config.activations.min_bytes;
                               keys["choice"] = config.activations.choice;
                               keys["memory_bytes"] = config.activations.memory_bytes;
                               keys["nvme_path"] = config.activations.nvme_path;
                               keys["prefetch"] = config.activations.prefetch;
                               keys["buffer_bytes"] = config.activations.buffer_bytes;
                               keys["piece_bytes"] = config.offload.stripe_bytes;
                               keys["io"] = config.offload.io;
                               keys["direct"] = config.offload.direct;
                               return keys;
                             })
      .def_property_readonly("updates_inside_backward",
                             [](const Config& config) { return config.update.inside_backward; })
      .def_property_readonly("norms", [](const Config& config) { return config.mesh.norms; })
      .def_property_readonly("verify", [](const Config& config) { return config.mesh.verify; })
      .def_property_readonly("gradient_accumulation_steps",
                             [](const Config& config) { return config.gradient_accumulation_steps; })
      .def_property_readonly("train_micro_batch_size_per_gpu",
                             [](const Config& config) { return config.train_micro_batch_size_per_gpu; });

  py::class_<World>(module, "World")
      .def_static("from_environment", &world_from_environment)
      .def_static("from_group", &world_from_group, py::arg("group") = py::none())
      .def(
          "abort",
          [](const World& world, const py::object& why) {
            const Error cause = error_of_python(why).value_or(
                Error(ErrorCode::kAborted, py::str(why).cast<std::string>(),
                      {.where = "python.world",
                       .who = "rank " + std::to_string(world.rank()) + "/" + std::to_string(world.size())}));
            const py::gil_scoped_release no_gil;
            world.abort(cause);
          },
          py::arg("why"))
      .def(
          "find_places",
          [](const World& world, int signal, int pipe, std::vector<std::string> skipped, std::string here) {
            world.activity()->set_locator(make_locator({signal, pipe, std::move(skipped), std::move(here)}));
          },
          py::arg("signal"), py::arg("pipe"), py::arg("skipped"), py::arg("here"))
      .def(
          "ends_by", [](const World& world, std::string how) { world.activity()->ends_by(std::move(how)); },
          py::arg("how"))
      .def("spare", [](const World& world) { world.activity()->spare(); })
      .def(
          "write_trace",
          [](const World& world, const std::string& path) {
            world.activity()->recorder().write(path, world.rank(), world.size());
          },
          py::arg("path"), py::call_guard<py::gil_scoped_release>())
      .def("site", &World::site, py::arg("count"))
      .def_property_readonly("num_sites", &World::num_sites)
      .def_property_readonly("site_index", &World::site_index)
      .def_property_readonly("is_job_of_its_own", [](const World& world) { return world.place().has_value(); })
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("local_rank", &World::local_rank)
      .def_property_readonly("backend", &World::backend_name)
      .def_property_readonly("origin", &World::origin)
      .def("__repr__", [](const World& world) {
        return "zeroth.World(rank=" + std::to_string(world.rank()) + ", size=" + std::to_string(world.size()) +
               ", backend='" + world.backend_name() + "')";
      });

  py::class_<FirstOffender>(module, "FirstOffender")
      .def_readonly("param", &FirstOffender::param)
      .def_readonly("rank", &FirstOffender::rank)
      .def_readonly("micro_step", &FirstOffender::micro_step)
      .def_readonly("count", &FirstOffender::count)
      .def("__repr__", &repr_of_offender);
  py::class_<StepTimes>(module, "StepTimes")
      .def_readonly("between_us", &StepTimes::between_us)
      .def_readonly("forward_us", &StepTimes::forward_us)
      .def_readonly("backward_us", &StepTimes::backward_us)
      .def_readonly("step_us", &StepTimes::step_us)
      .def_readonly("waited_us", &StepTimes::waited_us)
      .def_property_readonly("computed_us", &StepTimes::computed_us);
  py::class_<StepResult>(module, "StepResult")
      .def_readonly("boundary", &StepResult::boundary)
      .def_readonly("committed", &StepResult::committed)
      .def_readonly("delayed", &StepResult::delayed)
      .def_readonly("messages", &StepResult::messages)
      .def_readonly("reason", &StepResult::reason)
      .def_property_readonly("cause", [](const StepResult& result) { return name_of(result.cause); })
      .def_readonly("step", &StepResult::step)
      .def_readonly("batches", &StepResult::batches)
      .def_readonly("left_out", &StepResult::left_out)
      .def_readonly("grad_norm", &StepResult::grad_norm)
      .def_readonly("clip_coefficient", &StepResult::clip_coefficient)
      .def_readonly("lr", &StepResult::lr)
      .def_readonly("loss_scale", &StepResult::loss_scale)
      .def_readonly("preempted", &StepResult::preempted)
      .def_readonly("first_offender", &StepResult::first_offender)
      .def_readonly("times", &StepResult::times)
      .def("__repr__", &repr_of_step);

  py::class_<MemoryReport>(module, "MemoryReport")
      .def_property_readonly("planned", [](const MemoryReport& report) { return by_state(report.planned); })
      .def_property_readonly("measured_peak", [](const MemoryReport& report) { return by_state(report.measured_peak); })
      .def_property_readonly("live", [](const MemoryReport& report) { return by_state(report.live); })
      .def_readonly("construction_peak", &MemoryReport::construction_peak)
      .def_readonly("live_gathered_peak", &MemoryReport::live_gathered_peak)
      .def_readonly("live_slots_peak", &MemoryReport::live_slots_peak)
      .def_readonly("overflow_slots", &MemoryReport::overflow_slots)
      .def_readonly("order_deviations", &MemoryReport::order_deviations)
      .def_readonly("demand_fetches", &MemoryReport::demand_fetches)
      .def_readonly("bus_down", &MemoryReport::bus_down)
      .def_readonly("bus_up", &MemoryReport::bus_up)
      .def_readonly("spills", &MemoryReport::spills)
      .def_readonly("resident", &MemoryReport::resident)
      .def_readonly("transport", &MemoryReport::transport)
      .def_readonly("pss", &MemoryReport::pss)
      .def_readonly("residency_choice", &MemoryReport::residency_choice)
      .def_readonly("activation_choice", &MemoryReport::activation_choice)
      .def_readonly("planned_files", &MemoryReport::planned_files)
      .def_readonly("measured_files", &MemoryReport::measured_files)
      .def_readonly("activation_files", &MemoryReport::activation_files)
      .def_readonly("checkpoint_copy", &MemoryReport::checkpoint_copy)
      .def_readonly("compute_copies", &MemoryReport::compute_copies)
      .def("__str__", [](const MemoryReport& report) { return to_text(report); });
}

}  // namespace zeroth::python
