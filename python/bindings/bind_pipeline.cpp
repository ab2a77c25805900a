#include "bindings.h"
#include "engine_base.h"
#include "rank_group.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/program/cut.h>
#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/verify.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

using libtorch::ChunkValues;
using libtorch::Pipeline;
using Tensors = std::vector<std::optional<at::Tensor>>;

Tensors to_python(const std::vector<at::Tensor>& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  return result;
}

/// A function of Python that goes with the GIL.
std::shared_ptr<py::object> owned(py::object function) {
  return {new py::object(std::move(function)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

/// A forward of Python, which is called with the GIL.
libtorch::ChunkForward forward_of(py::object function) {
  if (function.is_none()) return {};
  return [held = owned(std::move(function))](int chunk, int micro_batch, ChunkValues inputs) {
    const py::gil_scoped_acquire gil;
    const auto [tensors, structure] = (*held)(chunk, micro_batch, to_python(inputs.tensors), inputs.structure)
                                          .cast<std::pair<Tensors, std::string>>();
    ChunkValues values{.structure = structure};
    for (const std::optional<at::Tensor>& tensor : tensors) values.tensors.push_back(tensor.value_or(at::Tensor()));
    return values;
  };
}

std::function<std::vector<at::Tensor>(int)> buffers_of(py::object function) {
  if (function.is_none()) return {};
  return [held = owned(std::move(function))](int chunk) {
    const py::gil_scoped_acquire gil;
    return (*held)(chunk).cast<std::vector<at::Tensor>>();
  };
}

std::function<void(bool)> aged_of(py::object function) {
  if (function.is_none()) return {};
  return [held = owned(std::move(function))](bool keep) {
    const py::gil_scoped_acquire gil;
    (*held)(keep);
  };
}

std::function<void(const Action&)> move_of(py::object function) {
  if (function.is_none()) return {};
  return [held = owned(std::move(function))](const Action& action) {
    const py::gil_scoped_acquire gil;
    (*held)(action.kind == ActionKind::kFlush, action.chunk, action.micro_batch);
  };
}

std::string make_program(const std::string& schedule, int ranks, int micro_batches, int chunks,
                         const std::string& unshard, bool step, bool recompute, bool offload,
                         const std::string& vocabulary) {
  const StepProgram program = make_schedule(schedule, {.ranks = ranks,
                                                       .micro_batches = micro_batches,
                                                       .chunks_per_rank = chunks,
                                                       .inexact = true});  // who names one asks for it
  const std::map<std::string, Gathers> gathers{
      {"none", Gathers::kNone}, {"micro_batch", Gathers::kPerMicroBatch}, {"step", Gathers::kKept}};
  const std::map<std::string, Vocabulary> vocabularies{{"whole", Vocabulary::kNone},
                                                       {"two_barriers", Vocabulary::kTwoBarriers},
                                                       {"one_barrier", Vocabulary::kOneBarrier}};
  return to_text(lower(program, {.gathers = gathers.at(unshard),
                                 .step = step,
                                 .recompute = recompute,
                                 .offload_activations = offload,
                                 .vocabulary = vocabularies.at(vocabulary)}));
}

std::optional<Communicator> communicator_of(const py::object& group) {
  if (group.is_none()) return std::nullopt;
  return rank_group_of(group).communicator();
}

/// The unit, the weight, the bias or None, the rows, and the group of ranks that share those of a stage or None.
using SplitHead = std::tuple<int, at::Tensor, std::optional<at::Tensor>, std::vector<std::int64_t>, py::object>;

std::optional<libtorch::SharedHead> head_of(std::optional<SplitHead> head) {
  if (!head) return std::nullopt;
  auto [unit, weight, bias, rows, beside] = std::move(*head);
  libtorch::SharedHead result{
      .unit = unit, .weight = std::move(weight), .bias = bias.value_or(at::Tensor()), .rows = std::move(rows)};
  if (!beside.is_none()) result.beside = rank_group_of(beside);
  return result;
}

py::tuple result_of(const Pipeline::Result& result) {
  return py::make_tuple(result.step, result.loss);
}

}  // namespace

void bind_pipeline(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("schedule_names", &schedule_names);
  module.def("make_program", &make_program, py::arg("schedule"), py::arg("ranks"), py::arg("micro_batches"),
             py::arg("chunks") = 0, py::arg("unshard") = "none", py::arg("step") = true, py::arg("recompute") = false,
             py::arg("offload") = false, py::arg("vocabulary") = "whole");
  module.def("verify_program", [](const std::string& text) { verify(parse_program(text)); }, py::arg("text"));
  module.def(
      "runnable_program",
      [](const std::string& text, int stages, int micro_batches, bool keeps) {
        const StepProgram program = parse_program(text);
        libtorch::require_runnable(program, stages, micro_batches);
        if (!keeps) libtorch::require_short_spans(program);
        return to_text(program);
      },
      py::arg("text"), py::arg("stages"), py::arg("micro_batches"), py::arg("keeps"));
  module.def("cut_evenly", &cut_evenly, py::arg("layers"), py::arg("chunks"));
  module.def("late_of_chunk", [](const std::string& text) { return parse_program(text).late; }, py::arg("text"));
  module.def(
      "rank_of_chunk", [](const std::string& text) { return parse_program(text).rank_of_chunk; }, py::arg("text"));

  py::class_<Pipeline>(module, "Pipeline")
      .def(py::init([](const py::object& engine, const py::object& stages, const std::string& program,
                       std::vector<std::vector<int>> units, py::object forward, const py::object& copies,
                       std::map<std::string, int> buffer_owners, py::object forward_alone, py::object buffers,
                       py::object move, std::shared_ptr<libtorch::SavedTensors> saved, std::optional<SplitHead> head,
                       std::vector<std::vector<int>> tables, py::object aged) {
             return std::make_unique<Pipeline>(
                 engine_base_of(engine), rank_group_of(stages).communicator(),
                 libtorch::PipelineOptions{.program = parse_program(program),
                                           .units = std::move(units),
                                           .tables = std::move(tables),
                                           .forward = forward_of(std::move(forward)),
                                           .forward_alone = forward_of(std::move(forward_alone)),
                                           .buffers = buffers_of(std::move(buffers)),
                                           .aged = aged_of(std::move(aged)),
                                           .move = move_of(std::move(move)),
                                           .saved = std::move(saved),
                                           .buffer_owners = std::move(buffer_owners),
                                           .copies = communicator_of(copies),
                                           .head = head_of(std::move(head))});
           }),
           py::arg("engine"), py::arg("stages"), py::arg("program"), py::arg("units"), py::arg("forward"),
           py::arg("copies") = py::none(), py::arg("buffer_owners") = std::map<std::string, int>(),
           py::arg("forward_alone") = py::none(), py::arg("buffers") = py::none(), py::arg("move") = py::none(),
           py::arg("saved") = py::none(), py::arg("head") = py::none(),
           py::arg("tables") = std::vector<std::vector<int>>(), py::arg("aged") = py::none(), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("train_batch",
           [](Pipeline& self) {
             const Pipeline::Result result = [&] {
               const py::gil_scoped_release no_gil;
               return self.train_batch();
             }();
             return result_of(result);
           })
      .def("eval_batch", &Pipeline::eval_batch, py::arg("micro_batches") = 0, NoGil())
      .def(
          "logits",
          [](Pipeline& self, const std::optional<at::Tensor>& input) {
            return self.logits(input.value_or(at::Tensor()));
          },
          py::arg("input"), NoGil())
      .def("begin", &Pipeline::begin, NoGil())
      .def(
          "run", [](Pipeline& self, const std::string& action) { self.run(parse_action(action)); }, py::arg("action"),
          NoGil())
      .def("end",
           [](Pipeline& self) {
             const Pipeline::Result result = [&] {
               const py::gil_scoped_release no_gil;
               return self.end();
             }();
             return result_of(result);
           })
      .def_property_readonly("program", [](const Pipeline& self) { return to_text(self.program()); })
      .def_property_readonly("actions",
                             [](const Pipeline& self) {
                               std::vector<std::string> texts;
                               for (const Action& action : self.actions()) texts.push_back(to_text(action));
                               return texts;
                             })
      .def_property_readonly("stage", &Pipeline::stage)
      .def_property_readonly("failed_action", &Pipeline::failed_action)
      .def("report",
           [](const Pipeline& self) {
             const libtorch::PipelineReport report = self.report();
             py::dict values;
             values["actions"] = report.actions;
             values["sent_bytes"] = report.sent_bytes;
             values["received_bytes"] = report.received_bytes;
             values["descriptions"] = report.descriptions;
             values["begun_anew"] = report.begun_anew;
             values["live_peak"] = report.live_peak;
             values["kept_peak_bytes"] = report.kept_peak_bytes;
             values["recomputed"] = report.recomputed;
             values["weights_deferred"] = report.weights_deferred;
             values["weights_whole"] = report.weights_whole;
             return values;
           })
      .def("reset_report", &Pipeline::reset_report);
}

}  // namespace zeroth::python
