#include "bindings.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/libtorch/engine.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

using libtorch::EngineBase;
using libtorch::ModelDescription;
using libtorch::NamedParameter;
using libtorch::NamedBuffer;
using libtorch::UnitScope;

/// Objects inside objects that are worth following; deeper ones are a mistake, most likely a cycle.
constexpr int kDeepest = 64;

/// zeroth._tree.parts: what lies inside an object that is no tuple, list or dict.
py::object& parts_of() {
  static auto* function = new py::object(py::module_::import("zeroth._tree").attr("parts"));  // outlives the interpreter
  return *function;
}

/// Tensors in a nest of Python objects, in order.
void collect(PyObject* object, std::vector<at::Tensor>& into, int depth = 0) {
  if (depth > kDeepest) {
    throw Error(ErrorCode::kModel,
                "what goes into or comes out of a unit is nested too deeply",
                {.where = "python.unit", .expected = std::to_string(kDeepest) + " levels at most", .hint = "is there a cycle in it?"});
  }
  if (THPVariable_Check(object)) {
    into.push_back(THPVariable_Unpack(object));
  } else if (object == Py_None || PyBool_Check(object) || PyLong_Check(object) || PyFloat_Check(object) ||
             PyUnicode_Check(object) || PyBytes_Check(object)) {
    return;
  } else if (PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) collect(PyTuple_GET_ITEM(object, i), into, depth + 1);
  } else if (PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) collect(PyList_GET_ITEM(object, i), into, depth + 1);
  } else if (PyDict_Check(object)) {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value) != 0) collect(value, into, depth + 1);
  } else {
    const py::object parts = parts_of()(py::reinterpret_borrow<py::object>(object));
    for (const py::handle part : parts) collect(part.ptr(), into, depth + 1);
  }
}

/// An engine, and the forwards of its units that are running.
class Engine {
 public:
  Engine(ModelDescription model, Config config, const World& world, libtorch::EngineOptions options)
      : running_(model.units.size()), base_(std::in_place, std::move(model), std::move(config), world, std::move(options)) {}

  [[nodiscard]] EngineBase& base() {
    ZR_CHECK(base_.has_value(),
             ErrorCode::kUsage,
             "the engine is closed",
             {.where = "python.engine", .hint = "make a new one, or use it before close()"});
    return *base_;
  }
  void close(bool keep_parameters) {
    if (!base_) return;
    drop_forwards();
    if (keep_parameters) base_->release_parameters();
    base_.reset();
  }
  /// Where modules keep their buffers: `_buffers` and the key, in the order of the engine's.
  void watch_buffers(const std::vector<std::tuple<py::dict, py::str>>& places) {
    for (const auto& [dictionary, key] : places) buffers_.push_back({dictionary, key, dictionary[key]});
  }
  /// Modules may have put other tensors there: running means that are computed anew, tables that grow.
  void refresh_buffers() {
    for (std::size_t index = 0; index < buffers_.size(); ++index) {
      auto& [dictionary, key, known] = buffers_[index];
      PyObject* now = PyDict_GetItemWithError(dictionary.ptr(), key.ptr());
      if (now == nullptr) now = Py_None;
      if (now == known.ptr()) continue;
      known = py::reinterpret_borrow<py::object>(now);
      base().replace_buffer(index, THPVariable_Check(now) ? THPVariable_Unpack(now) : at::Tensor());
    }
  }
  void begin(std::size_t unit, std::vector<at::Tensor> inputs) {
    running_[unit].push_back(std::make_unique<UnitScope>(base().runtime(), static_cast<int>(unit), std::move(inputs)));
  }
  void end(std::size_t unit, const std::vector<at::Tensor>& outputs) {
    if (running_[unit].empty()) return;  // dropped: its forward failed before
    const std::unique_ptr<UnitScope> scope = std::move(running_[unit].back());
    running_[unit].pop_back();
    if (!outputs.empty()) scope->finish(outputs);
  }
  /// Forwards that ended without their hook (KeyboardInterrupt is no Exception to torch) left their scopes here.
  void drop_forwards() {
    for (auto& scopes : running_) scopes.clear();
  }

 private:
  struct WatchedBuffer {
    py::dict dictionary;
    py::str key;
    py::object known;
  };

  std::vector<WatchedBuffer> buffers_;
  std::vector<std::vector<std::unique_ptr<UnitScope>>> running_;  // by unit, innermost last
  std::optional<EngineBase> base_;
};

/// What a unit's module calls before and after its forward.
class UnitHooks {
 public:
  UnitHooks(std::shared_ptr<Engine> engine, std::size_t unit) : engine_(std::move(engine)), unit_(unit) {}

  /// Watches dictionaries of modules: `_parameters`, `_modules`. When one has other values than now, `look_again(module)` raises for what
  /// the engine cannot follow, or gives the dictionaries to watch from then on.
  void watch(const std::vector<py::dict>& dictionaries, py::function look_again) {
    look_again_ = std::move(look_again);
    watched_.clear();
    for (const py::dict& dictionary : dictionaries) {
      watched_.push_back({dictionary, {}});
      for (const auto& [key, value] : dictionary) watched_.back().values.push_back(py::reinterpret_borrow<py::object>(value));
    }
  }

  void before(const py::handle& module, const py::tuple& args, const py::dict& kwargs) {
    if (unit_ == 0) look_at(module);
    std::vector<at::Tensor> inputs;
    collect(args.ptr(), inputs);
    collect(kwargs.ptr(), inputs);
    if (unit_ == 0) require_device(inputs);
    const bool trains = unit_ == 0 && module.attr("training").cast<bool>();
    const py::gil_scoped_release no_gil;
    if (trains) engine_->base().share_buffers();
    engine_->begin(unit_, std::move(inputs));
  }
  void after(const py::handle& /*module*/, const py::handle& /*args*/, const py::handle& output) {
    std::vector<at::Tensor> outputs;
    collect(output.ptr(), outputs);
    const py::gil_scoped_release no_gil;
    engine_->end(unit_, outputs);
  }

 private:
  struct Watched {
    py::dict dictionary;
    std::vector<py::object> values;

    [[nodiscard]] bool changed() const {
      if (dictionary.size() != values.size()) return true;
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t position = 0;
      for (const py::object& known : values) {
        if (PyDict_Next(dictionary.ptr(), &position, &key, &value) == 0 || value != known.ptr()) return true;
      }
      return false;
    }
  };

  void look_at(const py::handle& module) {
    engine_->refresh_buffers();
    if (std::ranges::none_of(watched_, &Watched::changed)) return;
    const py::function look_again = look_again_;
    watch(look_again(module).cast<std::vector<py::dict>>(), look_again);
  }

  /// Beside a GPU, what lists lengths or counts may stay on the CPU: functions of torch's want it there.
  void require_device(const std::vector<at::Tensor>& inputs) const {
    const c10::Device device = engine_->base().device();
    for (std::size_t index = 0; index < inputs.size(); ++index) {
      const at::Tensor& input = inputs[index];
      if (input.device() == device || (input.is_cpu() && input.dim() <= 1)) continue;
      throw Error(ErrorCode::kUsage,
                  "an input is on another device than the parameters",
                  {.where = "python.forward",
                   .which = "input tensor " + std::to_string(index) + ", counted through nested arguments",
                   .expected = device.str(),
                   .got = input.device().str(),
                   .hint = "move it with .to(\"" + device.str() + "\"), or the model before the engine is built"});
    }
  }

  std::shared_ptr<Engine> engine_;
  std::size_t unit_;
  std::vector<Watched> watched_;
  py::function look_again_;
};

std::thread::id main_thread;

/// Ends a wait with KeyboardInterrupt, or whatever the user's signal handler raises. Only the main thread runs handlers.
void check_signals() {
  if (std::this_thread::get_id() != main_thread) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  // Torch's own type: it crosses backward() unharmed, and is raised again as what it was.
  python_error error;
  error.persist();
  throw error;
}

/// In backward, on torch's way back to Python.
void rethrow_as_python(const Error& caught) {
  const py::gil_scoped_acquire gil;
  set_python_error(caught);
  python_error error;
  error.persist();
  throw error;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (python_error& error) {
    error.restore();
  }
}

LogLevel log_level_of(const std::string& name) {
  const std::pair<const char*, LogLevel> levels[] = {{"debug", LogLevel::kDebug},
                                                     {"info", LogLevel::kInfo},
                                                     {"warning", LogLevel::kWarning},
                                                     {"error", LogLevel::kError},
                                                     {"off", LogLevel::kOff}};
  for (const auto& [text, level] : levels) {
    if (name == text) return level;
  }
  throw Error(ErrorCode::kUsage,
              "there is no such log level",
              {.where = "python.engine", .which = "log_level", .expected = "debug, info, warning, error or off", .got = name});
}

using UnitTuple = std::tuple<std::string, std::uintptr_t, std::string>;  // path, id of the module, class
using TensorTuple = std::tuple<std::string, at::Tensor>;
using BufferTuple = std::tuple<std::string, at::Tensor, bool>;  // persistent
using GroupTuple = std::tuple<std::optional<double>, std::optional<double>>;  // lr, weight decay

std::vector<NamedBuffer> named_buffers(std::vector<BufferTuple> tensors) {
  std::vector<NamedBuffer> result;
  for (auto& [name, tensor, persistent] : tensors) result.push_back({std::move(name), std::move(tensor), persistent});
  return result;
}

/// A parameter in a group may train, now or later.
std::vector<NamedParameter> named_parameters(std::vector<TensorTuple> tensors, const std::map<std::string, int>& group_of) {
  std::vector<NamedParameter> result;
  for (auto& [name, tensor] : tensors) result.push_back({name, std::move(tensor), group_of.contains(name)});
  return result;
}

/// Whether the dictionary of a parameter's hooks has entries, without the GIL: torch takes it to find that there are none. The hook that is
/// asked about keeps the dictionary.
std::function<bool()> has_entries(PyObject* dictionary) {
  return [used = &reinterpret_cast<PyDictObject*>(dictionary)->ma_used] { return __atomic_load_n(used, __ATOMIC_RELAXED) != 0; };
}

std::shared_ptr<Engine> make_engine(const std::vector<UnitTuple>& units,
                                    std::vector<TensorTuple> parameters,
                                    std::vector<BufferTuple> buffers,
                                    const std::vector<GroupTuple>& groups,
                                    const std::map<std::string, int>& group_of,
                                    Config config,
                                    const World& world,
                                    const std::string& log_level,
                                    double progress_every_s,
                                    std::string json_log,
                                    const std::map<std::string, py::dict>& hooks) {
  std::vector<libtorch::UnitPath> paths;
  for (const auto& [path, identity, type] : units) {
    paths.push_back({.path = path, .identity = reinterpret_cast<const void*>(identity), .type = type});
  }
  libtorch::EngineOptions options{.log_level = log_level_of(log_level),
                                  .progress_every = Milliseconds(static_cast<std::int64_t>(progress_every_s * 1000)),
                                  .json_log = std::move(json_log),
                                  .guard_gradients = true,
                                  .rethrow = &rethrow_as_python};
  std::map<std::string, PyObject*> hook_dicts;
  for (const auto& [name, dictionary] : hooks) hook_dicts.emplace(name, dictionary.ptr());
  options.earlier_hooks = [hook_dicts](const std::string& name) {
    const auto found = hook_dicts.find(name);
    return found != hook_dicts.end() ? has_entries(found->second) : nullptr;
  };
  for (const auto& [lr, weight_decay] : groups) options.groups.push_back({.lr = lr, .weight_decay = weight_decay});
  const py::gil_scoped_release no_gil;
  ModelDescription model = libtorch::describe_model(
      paths, named_parameters(std::move(parameters), group_of), named_buffers(std::move(buffers)), [&group_of](const std::string& name, const at::Tensor&) {
        const auto found = group_of.find(name);
        return found != group_of.end() ? found->second : 0;
      });
  return std::make_shared<Engine>(std::move(model), std::move(config), world, std::move(options));
}

}  // namespace

void bind_engine(py::module_& module) {
  main_thread = std::this_thread::get_id();
  set_interrupt_check(&check_signals);
  py::register_exception_translator(&translate);
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init(&make_engine),
           py::arg("units"),
           py::arg("parameters"),
           py::arg("buffers"),
           py::arg("groups"),
           py::arg("group_of"),
           py::arg("config"),
           py::arg("world"),
           py::arg("log_level"),
           py::arg("progress_every_s"),
           py::arg("json_log"),
           py::arg("hooks"))
      .def("open_backward", [](Engine& self, const at::Tensor& loss) { return self.base().open_backward(loss); }, NoGil())
      .def("close_backward", [](Engine& self, std::uint64_t seen) { self.base().close_backward(seen); }, NoGil())
      .def(
          "fail_backward",
          [](Engine& self) {
            self.drop_forwards();  // of a checkpoint that computed again
            self.base().fail_backward();
          },
          NoGil())
      .def("drop_forwards", &Engine::drop_forwards, NoGil())
      .def("zero_grad", [](Engine& self) { self.base().zero_grad(); }, NoGil())
      .def(
          "step",
          [](Engine& self) {
            self.drop_forwards();
            return self.base().step();
          },
          NoGil())
      .def("average", [](Engine& self, double value) { return self.base().average(value); }, NoGil())
      .def("barrier", [](Engine& self) { self.base().core().barrier(); }, NoGil())
      .def("watch_buffers", &Engine::watch_buffers, py::arg("places"))
      .def("export_safetensors",
           [](Engine& self, const std::string& path) {
             self.refresh_buffers();
             const py::gil_scoped_release no_gil;
             self.base().export_safetensors(path);
           })
      .def("memory_report", [](Engine& self) { return self.base().memory_report(); }, NoGil())
      .def("wire_report",
           [](Engine& self) {
             const libtorch::WireReport report = self.base().wire_report();
             const WireBytes& planned = report.planned_per_step;
             return std::map<std::string, std::uint64_t>{{"planned_all_gather", planned.total() - planned.reduce_gradients},
                                                         {"planned_reduce_scatter", planned.reduce_gradients},
                                                         {"all_gather", report.all_gather},
                                                         {"reduce_scatter", report.reduce_scatter},
                                                         {"control", report.control}};
           })
      .def("reset_counters", [](Engine& self) { self.base().reset_counters(); })
      .def("close", &Engine::close, py::arg("keep_parameters"), NoGil())
      .def_property_readonly("device", [](Engine& self) { return self.base().device(); })
      .def_property_readonly("rank", [](Engine& self) { return self.base().rank(); })
      .def_property_readonly("world_size", [](Engine& self) { return self.base().world_size(); })
      .def_property_readonly("steps", [](Engine& self) { return self.base().core().committed_steps(); })
      .def_property_readonly("config", [](Engine& self) { return self.base().config(); })
      .def_property_readonly("learning_rates", [](Engine& self) { return self.base().core().learning_rates(); })
      .def(
          "set_group",
          [](Engine& self, int group, double lr, double weight_decay) {
            zeroth::Engine& core = self.base().core();
            const std::vector<GroupHyper>& groups = core.settings().groups;
            GroupHyper hyper = groups.at(static_cast<std::size_t>(group));
            hyper.lr = lr;
            hyper.weight_decay = weight_decay;
            core.set_group(group, hyper);
          },
          py::arg("group"),
          py::arg("lr"),
          py::arg("weight_decay"))
      .def_property_readonly("groups",
                             [](Engine& self) {
                               std::vector<std::tuple<double, double>> groups;  // lr, weight decay
                               for (const GroupHyper& hyper : self.base().core().settings().groups) {
                                 groups.emplace_back(hyper.lr, hyper.weight_decay);
                               }
                               return groups;
                             })
      .def_property_readonly("has_schedule",
                             [](Engine& self) { return self.base().core().settings().schedule.kind != LearningRateSchedule::Kind::kConstant; })
      .def_property_readonly("gathers_parameters",
                             [](Engine& self) { return self.base().core().settings().plan.gathers_parameters(); })
      .def_property_readonly("units", [](Engine& self) {
        std::vector<std::tuple<std::string, bool, std::vector<std::string>>> result;
        const ModelLayout& layout = self.base().core().layout();
        for (const UnitSpec& unit : layout.units) {
          std::vector<std::string> names;
          for (const int param : unit.params) names.push_back(layout.params[static_cast<std::size_t>(param)].name);
          result.emplace_back(unit.name, unit.repeated, std::move(names));
        }
        return result;
      });

  py::class_<UnitHooks>(module, "UnitHooks")
      .def(py::init<std::shared_ptr<Engine>, std::size_t>(), py::arg("engine"), py::arg("unit"))
      .def("watch", &UnitHooks::watch, py::arg("dictionaries"), py::arg("look_again"))
      .def("before", &UnitHooks::before)
      .def("after", &UnitHooks::after);
}

}  // namespace zeroth::python
