#include "bindings.h"
#include "engine_base.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/expert_log.h>
#include <zeroth/libtorch/tier_preview.h>

#include <ATen/core/grad_mode.h>
#include <pthread.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

using libtorch::EngineBase;
using libtorch::ModelDescription;
using libtorch::NamedBuffer;
using libtorch::NamedParameter;
using libtorch::UnitScope;

/// Objects inside objects that are worth following.
constexpr std::size_t kDeepest = 64;

/// zeroth._tree.parts: what lies inside an object that is no tuple, list or dict.
py::object& parts_of() {
  static auto* function =
      new py::object(py::module_::import("zeroth._tree").attr("parts"));  // outlives the interpreter
  return *function;
}

/// Tensors in a nest of Python objects, in order. `around`: the objects that `object` lies in; none of them is followed
/// again.
void collect(PyObject* object, std::vector<at::Tensor>& into, std::vector<PyObject*>& around) {
  if (THPVariable_Check(object)) {
    into.push_back(THPVariable_Unpack(object));
    return;
  }
  if (object == Py_None || PyBool_Check(object) || PyLong_Check(object) || PyFloat_Check(object) ||
      PyUnicode_Check(object) || PyBytes_Check(object) || std::ranges::find(around, object) != around.end()) {
    return;
  }
  if (around.size() > kDeepest) {
    throw Error(ErrorCode::kModel, "what goes into or comes out of a unit is nested too deeply",
                {.where = "python.unit", .expected = std::to_string(kDeepest) + " levels at most"});
  }
  around.push_back(object);
  if (PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) collect(PyTuple_GET_ITEM(object, i), into, around);
  } else if (PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) collect(PyList_GET_ITEM(object, i), into, around);
  } else if (PyDict_Check(object)) {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value) != 0) collect(value, into, around);
  } else {
    const py::object parts = parts_of()(py::reinterpret_borrow<py::object>(object));
    for (const py::handle part : parts) collect(part.ptr(), into, around);
  }
  around.pop_back();
}

void collect(const py::handle& object, std::vector<at::Tensor>& into) {
  std::vector<PyObject*> around;
  collect(object.ptr(), into, around);
}

using TensorPairs = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// `object` with other tensors in tuples, lists and dicts; itself where there is nothing to replace.
py::object replaced(const py::handle& object, const TensorPairs& others, std::size_t depth = 0) {
  PyObject* const pointer = object.ptr();
  if (THPVariable_Check(pointer)) {
    for (const auto& [from, to] : others) {
      if (from.is_same(THPVariable_Unpack(pointer))) return py::reinterpret_steal<py::object>(THPVariable_Wrap(to));
    }
    return py::reinterpret_borrow<py::object>(object);
  }
  bool changed = false;
  const auto inside = [&](const py::handle& value) {
    py::object now = replaced(value, others, depth + 1);
    changed = changed || !now.is(value);
    return now;
  };
  if (depth < kDeepest && (PyTuple_CheckExact(pointer) || PyList_CheckExact(pointer))) {
    py::list values;
    for (const py::handle value : object) values.append(inside(value));
    if (changed && PyTuple_CheckExact(pointer)) return py::tuple(values);
    if (changed) return values;
  } else if (depth < kDeepest && PyDict_CheckExact(pointer)) {
    py::dict values;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) values[key] = inside(value);
    if (changed) return values;
  }
  return py::reinterpret_borrow<py::object>(object);
}

using BufferTuple =
    std::tuple<py::dict, py::str, std::string, std::optional<at::Tensor>, bool>;  // `_buffers`, key; name; persistent

std::vector<NamedBuffer> named_buffers(const std::vector<BufferTuple>& buffers) {
  std::vector<NamedBuffer> result;
  for (const auto& [holder, key, name, tensor, persistent] : buffers)
    result.push_back({name, tensor.value_or(at::Tensor()), persistent});
  return result;
}

/// An engine, and the forwards of its units that are running.
class Engine {
 public:
  Engine(ModelDescription model, Config config, const World& world, libtorch::EngineOptions options)
      : running_(model.units.size()),
        base_(std::in_place, std::move(model), std::move(config), world, std::move(options)) {}

  [[nodiscard]] EngineBase& base() {
    ZR_CHECK(base_.has_value(), ErrorCode::kUsage, "the engine is closed",
             {.where = "python.engine", .hint = "make a new one, or use it before close()"});
    return *base_;
  }
  void close(bool keep_parameters) {
    if (!base_) return;
    drop_forwards();
    if (keep_parameters) base_->release_parameters();
    base_.reset();
  }
  /// The module's buffers, and where it keeps them.
  void set_buffers(const std::vector<BufferTuple>& buffers) {
    std::vector<WatchedBuffer> watched;
    for (const auto& [holder, key, name, tensor, persistent] : buffers) {
      py::object value = holder[key];
      const auto same = [&value](const WatchedBuffer& one) { return one.value.is(value); };
      const auto before = std::ranges::find_if(buffers_, same);
      watched.push_back(
          {holder, key, std::move(value), buffers_.empty() || (before != buffers_.end() && before->written)});
    }
    base().set_buffers(named_buffers(buffers));
    buffers_ = std::move(watched);
  }
  /// Modules may have put other tensors in the place of buffers: running means that are computed anew, tables that
  /// grow.
  void refresh_buffers() {
    for (std::size_t index = 0; index < buffers_.size(); ++index) {
      WatchedBuffer& buffer = buffers_[index];
      PyObject* now = PyDict_GetItemWithError(buffer.holder.ptr(), buffer.key.ptr());
      if (now == nullptr) now = Py_None;
      if (now != buffer.value.ptr()) put_buffer(index, py::reinterpret_borrow<py::object>(now), /*written=*/false);
    }
  }
  /// Before rank 0's values are written to buffers: what a module put there may be in a graph, or the user's own, so it
  /// gets a copy.
  void own_buffers(bool are_shared) {
    if (!are_shared) return;
    const at::NoGradGuard no_grad;
    for (std::size_t index = 0; index < buffers_.size(); ++index) {
      WatchedBuffer& buffer = buffers_[index];
      if (buffer.written || !THPVariable_Check(buffer.value.ptr())) continue;
      auto copy =
          py::reinterpret_steal<py::object>(THPVariable_Wrap(THPVariable_Unpack(buffer.value.ptr()).detach().clone()));
      buffer.holder[buffer.key] = copy;
      put_buffer(index, std::move(copy), /*written=*/true);
    }
  }
  /// Returns the inputs for which the forward takes another tensor, each with that one.
  TensorPairs begin(std::size_t unit, const std::vector<at::Tensor>& inputs) {
    running_[unit].push_back(std::make_unique<UnitScope>(base().runtime(), static_cast<int>(unit)));
    TensorPairs others;
    for (const at::Tensor& input : inputs) {
      if (at::Tensor taken = running_[unit].back()->input(input); !taken.is_same(input))
        others.emplace_back(input, std::move(taken));
    }
    return others;
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
    py::dict holder;
    py::str key;
    py::object value;
    bool written;  ///< the engine may write to it
  };

  void put_buffer(std::size_t index, py::object value, bool written) {
    base().replace_buffer(index, THPVariable_Check(value.ptr()) ? THPVariable_Unpack(value.ptr()) : at::Tensor());
    buffers_[index].value = std::move(value);
    buffers_[index].written = written;
  }

  std::vector<WatchedBuffer> buffers_;
  std::vector<std::vector<std::unique_ptr<UnitScope>>> running_;  // by unit, innermost last
  std::optional<EngineBase> base_;
};

/// What a unit's module calls before and after its forward.
class UnitHooks {
 public:
  UnitHooks(std::shared_ptr<Engine> engine, std::size_t unit) : engine_(std::move(engine)), unit_(unit) {}

  /// Those of a copy of the module, which is in no engine: they do nothing.
  [[nodiscard]] static UnitHooks of_copy() { return {nullptr, 0}; }

  /// For the root. `watched`: dictionaries of modules, each with what it held, a tuple of its values or their number.
  /// Where one holds something else, `look_again(module)` raises for what the engine cannot follow, or gives what to
  /// watch from then on. Both are Python's, so that its collector sees through them.
  py::object before_root(py::list watched, const py::function& look_again, const py::handle& module,
                         const py::tuple& args, const py::dict& kwargs) {
    if (engine_ == nullptr) return py::none();
    if (std::ranges::any_of(watched, [](const py::handle& entry) { return changed(entry); })) {
      const py::list now = look_again(module);
      if (PyList_SetSlice(watched.ptr(), 0, PyList_GET_SIZE(watched.ptr()), now.ptr()) != 0)
        throw py::error_already_set();
    }
    engine_->refresh_buffers();
    return before(module, args, kwargs);
  }
  /// None, or the arguments that the forward takes instead.
  py::object before(const py::handle& module, const py::tuple& args, const py::dict& kwargs) {
    if (engine_ == nullptr) return py::none();
    std::vector<at::Tensor> inputs;
    if (unit_ == 0 || engine_->base().config().fp16.enabled) {
      collect(args, inputs);
      collect(kwargs, inputs);
    }
    if (unit_ == 0) require_device(inputs);
    const bool trains = unit_ == 0 && module.attr("training").cast<bool>();
    if (trains) engine_->own_buffers(engine_->base().shares_buffers());
    TensorPairs others;
    {
      const py::gil_scoped_release no_gil;
      if (trains) engine_->base().share_buffers();
      others = engine_->begin(unit_, inputs);
    }
    if (others.empty()) return py::none();
    return py::make_tuple(replaced(args, others), replaced(kwargs, others));
  }
  void after(const py::handle& /*module*/, const py::handle& /*args*/, const py::handle& output) {
    if (engine_ == nullptr) return;
    std::vector<at::Tensor> outputs;
    collect(output, outputs);
    const py::gil_scoped_release no_gil;
    engine_->end(unit_, outputs);
  }

 private:
  [[nodiscard]] static bool changed(const py::handle& entry) {
    PyObject* const holder = PyTuple_GET_ITEM(entry.ptr(), 0);
    PyObject* const held = PyTuple_GET_ITEM(entry.ptr(), 1);
    if (!PyTuple_Check(held)) return PyDict_Size(holder) != PyLong_AsSsize_t(held);
    if (PyDict_Size(holder) != PyTuple_GET_SIZE(held)) return true;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    for (Py_ssize_t index = 0; PyDict_Next(holder, &position, &key, &value) != 0; ++index) {
      if (value != PyTuple_GET_ITEM(held, index)) return true;
    }
    return false;
  }

  /// Beside a GPU, what lists lengths or counts may stay on the CPU: functions of torch's want it there.
  void require_device(const std::vector<at::Tensor>& inputs) const {
    const c10::Device device = engine_->base().device();
    for (std::size_t index = 0; index < inputs.size(); ++index) {
      const at::Tensor& input = inputs[index];
      if (input.device() == device || (input.is_cpu() && input.dim() <= 1)) continue;
      throw Error(ErrorCode::kUsage, "an input is on another device than the parameters",
                  {.where = "python.forward",
                   .which = "input tensor " + std::to_string(index) + ", counted through nested arguments",
                   .expected = device.str(),
                   .got = input.device().str(),
                   .hint = "move it with .to(\"" + device.str() + "\"), or the model before the engine is built"});
    }
  }

  std::shared_ptr<Engine> engine_;
  std::size_t unit_;
};

pthread_t main_thread;

/// Ends a wait with KeyboardInterrupt, or whatever the user's signal handler raises. Only the main thread runs
/// handlers.
void check_signals() {
  if (pthread_equal(pthread_self(), main_thread) == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  // Torch's own type: it crosses backward() unharmed, and is raised again as what it was.
  python_error error;
  error.persist();
  const std::string kind = PyExceptionClass_Name(error.type);
  error.message = error.message.empty() ? kind : kind + ": " + error.message;  // for the other ranks
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
  throw Error(
      ErrorCode::kUsage, "there is no such log level",
      {.where = "python.engine", .which = "log_level", .expected = "debug, info, warning, error or off", .got = name});
}

using UnitTuple = std::tuple<std::string, std::uintptr_t, std::string, int>;  // path, id of the module, class, uses
using TensorTuple = std::tuple<std::string, at::Tensor>;

/// The keys of zeroth._hypers, of which a group may leave some out.
libtorch::ParamGroup param_group(const py::dict& values) {
  libtorch::ParamGroup group;
  const auto take = [&values](const char* name, auto& field) {
    if (values.contains(name)) field = values[name].template cast<typename std::decay_t<decltype(field)>::value_type>();
  };
  take("lr", group.lr);
  take("weight_decay", group.weight_decay);
  take("betas", group.betas);
  take("eps", group.eps);
  take("momentum", group.momentum);
  take("dampening", group.dampening);
  take("nesterov", group.nesterov);
  return group;
}

/// Those that the optimizer has, in the order of torch's.
py::dict values_of(const GroupHyper& hyper, const std::string& optimizer) {
  py::dict values;
  values["lr"] = hyper.lr;
  if (optimizer == "SGD") {
    values["momentum"] = hyper.momentum;
    values["dampening"] = hyper.dampening;
    values["nesterov"] = hyper.nesterov;
  } else {
    values["betas"] = py::make_tuple(hyper.beta1, hyper.beta2);
    if (optimizer != "Lion") values["eps"] = hyper.eps;
  }
  values["weight_decay"] = hyper.weight_decay;
  return values;
}

/// A parameter in a group, or among `later`, may train now or later.
std::vector<NamedParameter> named_parameters(std::vector<TensorTuple> tensors,
                                             const std::map<std::string, int>& group_of,
                                             const std::set<std::string>& later,
                                             const std::map<std::string, libtorch::ParameterBox>& boxes) {
  std::vector<NamedParameter> result;
  for (auto& [name, tensor] : tensors) {
    const auto box = boxes.find(name);
    const bool may_train = group_of.contains(name) || later.contains(name);
    result.push_back({name, std::move(tensor), may_train, box != boxes.end() ? box->second : libtorch::ParameterBox{}});
  }
  return result;
}

/// Whether the dictionary of a parameter's hooks has entries, without the GIL: torch takes it to find that there are
/// none. The hook that is asked about keeps the dictionary.
std::function<bool()> has_entries(PyObject* dictionary) {
  return [used = &reinterpret_cast<PyDictObject*>(dictionary)->ma_used] {
    return __atomic_load_n(used, __ATOMIC_RELAXED) != 0;
  };
}

std::vector<libtorch::UnitPath> unit_paths(const std::vector<UnitTuple>& units) {
  std::vector<libtorch::UnitPath> paths;
  for (const auto& [path, identity, type, uses] : units) {
    paths.push_back({.path = path, .identity = reinterpret_cast<const void*>(identity), .type = type, .uses = uses});
  }
  return paths;
}

std::shared_ptr<Engine> make_engine(const std::vector<UnitTuple>& units, std::string units_hint,
                                    std::vector<TensorTuple> parameters, const std::vector<BufferTuple>& buffers,
                                    const std::vector<py::dict>& groups, const std::map<std::string, int>& group_of,
                                    Config config, const World& world, const std::string& log_level,
                                    double progress_every_s, std::string json_log,
                                    const std::map<std::string, py::dict>& hooks,
                                    const std::set<std::string>& trainable_later, const py::object& initial,
                                    const std::map<std::string, libtorch::ParameterBox>& boxes) {
  libtorch::EngineOptions options{.log_level = log_level_of(log_level),
                                  .progress_every = Milliseconds(static_cast<std::int64_t>(progress_every_s * 1000)),
                                  .json_log = std::move(json_log),
                                  .units_hint = std::move(units_hint),
                                  .guard_gradients = true,
                                  .front_end = libtorch::FrontEnd::kPython,
                                  .rethrow = &rethrow_as_python};
  std::map<std::string, PyObject*> hook_dicts;
  for (const auto& [name, dictionary] : hooks) hook_dicts.emplace(name, dictionary.ptr());
  options.earlier_hooks = [hook_dicts](const std::string& name) {
    const auto found = hook_dicts.find(name);
    return found != hook_dicts.end() ? has_entries(found->second) : nullptr;
  };
  for (const py::dict& group : groups) options.groups.push_back(param_group(group));
  if (!initial.is_none()) {
    options.initial_value = [&initial](const std::string& name) {  // while the engine is built
      const py::gil_scoped_acquire gil;
      const py::object made = initial(name);
      return made.is_none() ? at::Tensor() : made.cast<at::Tensor>();
    };
  }
  const py::gil_scoped_release no_gil;
  ModelDescription model = libtorch::describe_model(
      unit_paths(units), named_parameters(std::move(parameters), group_of, trainable_later, boxes),
      named_buffers(buffers), [&group_of](const std::string& name, const at::Tensor&) {
        const auto found = group_of.find(name);
        return found != group_of.end() ? found->second : 0;
      });
  return std::make_shared<Engine>(std::move(model), std::move(config), world, std::move(options));
}

using TierTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;  // device, host, files

/// Bytes by state, and the table as text.
std::pair<std::map<std::string, TierTuple>, std::string> preview_tiers(
    const std::vector<UnitTuple>& units, std::vector<TensorTuple> parameters,
    const std::map<std::string, libtorch::ParameterBox>& boxes, const Config& config, int rank, int world) {
  ModelDescription model =
      libtorch::describe_model(unit_paths(units), named_parameters(std::move(parameters), {}, {}, boxes), {},
                               [](const std::string&, const at::Tensor&) { return 0; });
  const TierTable table = libtorch::preview_tiers(std::move(model), config, {}, rank, world);
  std::map<std::string, TierTuple> rows;
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    const TierBytes& row = table.rows[state];
    if (row == TierBytes{}) continue;
    rows.emplace(name_of(static_cast<MemoryState>(state)), TierTuple(row.device, row.host, row.files));
  }
  return {std::move(rows), to_text(table)};
}

SaveOptions save_options(const std::string& user, const std::string& user_of_rank, int keep_last, int keep_every,
                         bool overwrite, const std::string& frozen) {
  ZR_CHECK(frozen == "copy" || frozen == "once", ErrorCode::kUsage, "there is no such way to save frozen weights",
           {.where = "python.save", .which = "frozen", .expected = "\"copy\" or \"once\"", .got = frozen});
  return {.retention = {.keep_last = keep_last, .keep_every = keep_every},
          .user = user,
          .user_of_rank = user_of_rank,
          .frozen = frozen == "once" ? Frozen::kOnce : Frozen::kCopy,
          .overwrite = overwrite};
}

/// A step that `end` ends, with or without its last micro-steps.
StepResult end_step(Engine& engine, StepResult (EngineBase::*end)()) {
  if (engine.base().step_shares_buffers()) {
    engine.refresh_buffers();
    engine.own_buffers(true);
  }
  const py::gil_scoped_release no_gil;
  engine.drop_forwards();
  return (engine.base().*end)();
}

const char* name_of(Next next) {
  switch (next) {
    case Next::kBatch:
      return "batch";
    case Next::kEnd:
      return "end";
    case Next::kStep:
      break;
  }
  return "step";
}

}  // namespace

EngineBase& engine_base_of(const py::handle& object) {
  return object.cast<Engine&>().base();
}

void rethrow_as_python(const Error& caught) {
  const py::gil_scoped_acquire gil;
  set_python_error(caught);
  python_error error;
  error.persist();
  throw error;
}

void bind_engine(py::module_& module) {
  // Python's, which need not be the one that imports this.
  main_thread = static_cast<pthread_t>(
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>());
  set_interrupt_check(&check_signals);
  py::register_exception_translator(&translate);
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<libtorch::ParameterBox>(module, "ParameterBox",
                                     "What a rank's parameter is of the parameter of the whole model.")
      .def(py::init([](std::vector<std::int64_t> logical_shape, std::vector<std::int64_t> offset, std::string distinct,
                       int copies, std::vector<std::string> summed, int parts, int parts_dim, std::vector<int> stages,
                       std::vector<std::string> names, std::vector<std::string> further) {
             return libtorch::ParameterBox{std::move(logical_shape),
                                           std::move(offset),
                                           parts,
                                           parts_dim,
                                           {.distinct = std::move(distinct),
                                            .copies = copies,
                                            .further = std::move(further),
                                            .summed = std::move(summed),
                                            .stages = std::move(stages)},
                                           std::move(names)};
           }),
           py::arg("logical_shape") = std::vector<std::int64_t>(), py::arg("offset") = std::vector<std::int64_t>(),
           py::arg("distinct") = "", py::arg("copies") = 1, py::arg("summed") = std::vector<std::string>(),
           py::arg("parts") = 1, py::arg("parts_dim") = 0, py::arg("stages") = std::vector<int>(),
           py::arg("names") = std::vector<std::string>(), py::arg("further") = std::vector<std::string>(),
           "logical_shape, offset: the whole tensor, and where the parameter begins in it; empty: it is the whole. "
           "distinct: the axis along which ranks have other boxes; copies: so many neighbours have the same. summed: "
           "axes along which ranks have parts of the gradient. parts: the box is of each of so many equal blocks of "
           "dimension parts_dim. stages: of a pipeline that use the parameter; empty: all. names: of the whole tensor, "
           "where a rank has several boxes of it; empty: those of the parameter. further: more axes along which ranks "
           "have other boxes.")
      .def_readonly("logical_shape", &libtorch::ParameterBox::logical_shape)
      .def_readonly("offset", &libtorch::ParameterBox::offset)
      .def_property_readonly("distinct", [](const libtorch::ParameterBox& box) { return box.axes.distinct; })
      .def_property_readonly("copies", [](const libtorch::ParameterBox& box) { return box.axes.copies; })
      .def_property_readonly("further", [](const libtorch::ParameterBox& box) { return box.axes.further; })
      .def_property_readonly("summed", [](const libtorch::ParameterBox& box) { return box.axes.summed; })
      .def_readonly("parts", &libtorch::ParameterBox::parts)
      .def_readonly("parts_dim", &libtorch::ParameterBox::parts_dim)
      .def_property_readonly("stages", [](const libtorch::ParameterBox& box) { return box.axes.stages; })
      .def_readonly("names", &libtorch::ParameterBox::names);

  py::class_<libtorch::Gathered>(module, "Gathered").def("finish", &libtorch::Gathered::finish, NoGil());

  module.def("preview_tiers", &preview_tiers, py::arg("units"), py::arg("parameters"), py::arg("boxes"),
             py::arg("config"), py::arg("rank"), py::arg("world"), NoGil());

  py::class_<SaveHandle>(module, "SaveHandle", "A save that runs behind the training: Engine.save(async_=True).")
      .def_property_readonly("path", &SaveHandle::path, "Final name of the checkpoint; it is there after wait().")
      .def("done", &SaveHandle::done,
           "True when the save has ended, well or not. Never blocks; ranks may differ until wait() or the next save.")
      .def("wait", &SaveHandle::wait, NoGil(),
           "Collective and blocking: returns the path when the checkpoint is on the disk. Raises the error of the save "
           "on all ranks, once; \"\" if an earlier call has raised it.")
      .def("finish", &SaveHandle::finish, NoGil(),
           "Blocks until the save has ended, on this rank only. Tells nothing and raises nothing.");

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init(&make_engine), py::arg("units"), py::arg("units_hint"), py::arg("parameters"), py::arg("buffers"),
           py::arg("groups"), py::arg("group_of"), py::arg("config"), py::arg("world"), py::arg("log_level"),
           py::arg("progress_every_s"), py::arg("json_log"), py::arg("hooks"), py::arg("trainable_later"),
           py::arg("initial"), py::arg("boxes"))
      .def(
          "open_backward",
          [](Engine& self, const at::Tensor& loss, const std::optional<at::Tensor>& gradient) {
            const std::uint64_t seen = self.base().open_backward(loss);
            const at::Tensor first = self.base().first_gradient(loss, gradient.value_or(at::Tensor()));
            return std::pair(seen, first.defined() ? std::optional(first) : std::nullopt);
          },
          py::arg("loss"), py::arg("gradient"), NoGil())
      .def(
          "close_backward", [](Engine& self, std::uint64_t seen) { self.base().close_backward(seen); }, NoGil())
      .def(
          "fail_backward",
          [](Engine& self) {
            self.drop_forwards();  // of a checkpoint that computed again
            self.base().fail_backward();
          },
          NoGil())
      .def(
          "part_of_loss", [](Engine& self, const at::Tensor& term) { return self.base().part_of_loss(term); },
          py::arg("term"), NoGil())
      .def("drop_forwards", &Engine::drop_forwards, NoGil())
      .def(
          "note_experts",
          [](Engine& self, double entropy, std::string layer, std::int64_t dropped) {
            libtorch::note_experts(*self.base().runtime(), entropy, std::move(layer), dropped);
          },
          py::arg("entropy"), py::arg("layer"), py::arg("dropped"))
      .def(
          "gathered",
          [](Engine& self, const std::vector<at::Tensor>& parameters, int writers) {
            return std::make_unique<libtorch::Gathered>(self.base().gathered(parameters, {.rank = writers}));
          },
          py::arg("parameters"), py::arg("writers"), NoGil())
      .def(
          "read_states",
          [](Engine& self, const std::string& kind, const std::vector<std::string>& names,
             const std::vector<int>& ranks, bool partial) {
            std::vector<std::pair<std::string, at::Tensor>> tensors;
            self.base().read_states({.kind = kind, .names = names, .ranks = ranks, .partial = partial},
                                    [&tensors](const std::string& name, at::Tensor tensor) {
                                      tensors.emplace_back(name, std::move(tensor));
                                    });
            return tensors;
          },
          py::arg("kind"), py::arg("names"), py::arg("ranks"), py::arg("partial"), NoGil())
      .def(
          "local_states",
          [](Engine& self, const std::string& kind) {
            std::vector<std::tuple<std::string, at::Tensor, std::vector<std::int64_t>, std::int64_t, std::int64_t>> all;
            for (libtorch::LocalState& one : self.base().local(kind)) {
              all.emplace_back(one.name, std::move(one.values), one.range.logical, one.range.begin, one.range.end);
            }
            return all;
          },
          py::arg("kind"), NoGil())
      .def(
          "load_state_dict",
          [](Engine& self, const std::vector<std::pair<std::string, at::Tensor>>& values, bool strict) {
            self.drop_forwards();
            self.refresh_buffers();
            self.own_buffers(true);
            const py::gil_scoped_release no_gil;
            libtorch::WeightReport report = self.base().load_state_dict(values, strict);
            return std::pair(std::move(report.missing), std::move(report.unexpected));
          },
          py::arg("values"), py::arg("strict"))
      .def(
          "load_mapped",
          [](Engine& self, const std::vector<std::pair<std::string, at::Tensor>>& values, bool strict,
             const std::string& failure) {
            self.drop_forwards();
            self.refresh_buffers();
            self.own_buffers(true);
            const py::gil_scoped_release no_gil;
            libtorch::WeightReport report = self.base().load_mapped(values, strict, failure);
            return std::pair(std::move(report.missing), std::move(report.unexpected));
          },
          py::arg("values"), py::arg("strict"), py::arg("failure"))
      .def(
          "local_updates",
          [](Engine& self, const std::string& method, int steps, double outer_lr, double outer_momentum, bool nesterov,
             int fragments, int delay, double keep_local, const std::string& payload, int block, double gap_scale,
             double clip, const std::string& lost_sites) {
            self.drop_forwards();
            self.base().local_updates({.method = local_method_of(method),
                                       .steps = steps,
                                       .outer_lr = outer_lr,
                                       .outer_momentum = outer_momentum,
                                       .nesterov = nesterov,
                                       .fragments = fragments,
                                       .delay = delay,
                                       .keep_local = keep_local,
                                       .payload = local_payload_of(payload),
                                       .block = block,
                                       .gap_scale = gap_scale,
                                       .clip = clip,
                                       .lost_sites = lost_sites_of(lost_sites)});
          },
          py::kw_only(), py::arg("method"), py::arg("steps"), py::arg("outer_lr"), py::arg("outer_momentum"),
          py::arg("nesterov"), py::arg("fragments"), py::arg("delay"), py::arg("keep_local"), py::arg("payload"),
          py::arg("block"), py::arg("gap_scale"), py::arg("clip"), py::arg("lost_sites"), NoGil())
      .def("local_report",
           [](Engine& self) {
             const LocalReport report = self.base().local_report();
             py::dict found;
             found["sites"] = report.sites;
             found["site"] = report.site;
             found["present"] = report.present;
             found["joined"] = report.joined;
             found["step"] = report.step;
             found["exchanges"] = report.exchanges;
             found["received_bytes"] = report.received_bytes;
             found["bytes_per_exchange"] = report.bytes_per_exchange;
             found["offsets"] = report.offsets;
             return found;
           })
      .def(
          "add_average", [](Engine& self, const std::string& name) { self.base().add_average(name); }, py::arg("name"),
          NoGil())
      .def(
          "update_average",
          [](Engine& self, const std::string& name, double decay) { self.base().update_average(name, decay); },
          py::arg("name"), py::arg("decay"), NoGil())
      .def(
          "swap_average",
          [](Engine& self, const std::string& name) {
            self.drop_forwards();
            self.base().swap_average(name);
          },
          py::arg("name"), NoGil())
      .def(
          "zero_grad",
          [](Engine& self) {
            self.drop_forwards();
            self.base().zero_grad();
          },
          NoGil())
      .def(
          "flush_update",
          [](Engine& self) {
            self.drop_forwards();
            self.base().flush_update();
          },
          NoGil())
      .def("step", [](Engine& self) { return end_step(self, &EngineBase::step); })
      .def("end_accumulation", [](Engine& self) { return end_step(self, &EngineBase::end_accumulation); })
      .def(
          "begin_epoch", [](Engine& self) { self.base().begin_epoch(); }, NoGil())
      .def("begin_batch",
           [](Engine& self, bool has_batch) {
             if (!has_batch) {  // it shares buffers with those that have one
               self.refresh_buffers();
               self.own_buffers(self.base().shares_buffers());
             }
             const py::gil_scoped_release no_gil;
             self.drop_forwards();
             return name_of(self.base().begin_batch(has_batch));
           })
      .def(
          "join", [](Engine& self) { return name_of(self.base().join()); }, NoGil())
      .def(
          "average",
          [](Engine& self, double value, const std::string& name) { return self.base().average(value, name); },
          py::arg("value"), py::arg("name") = "", NoGil())
      .def(
          "barrier", [](Engine& self, const std::string& name) { self.base().core().barrier(name); },
          py::arg("name") = "", NoGil())
      .def("set_buffers", &Engine::set_buffers, py::arg("buffers"))
      .def(
          "save",
          [](Engine& self, const std::string& folder, const std::string& user, const std::string& user_of_rank,
             int keep_last, int keep_every, const std::string& frozen, bool overwrite) {
            self.refresh_buffers();
            const py::gil_scoped_release no_gil;
            return self.base().save(folder, save_options(user, user_of_rank, keep_last, keep_every, overwrite, frozen));
          },
          py::arg("folder"), py::arg("user"), py::arg("user_of_rank"), py::arg("keep_last"), py::arg("keep_every"),
          py::arg("frozen"), py::arg("overwrite"))
      .def(
          "save_async",
          [](Engine& self, const std::string& folder, const std::string& user, const std::string& user_of_rank,
             int keep_last, int keep_every, const std::string& frozen, bool overwrite) {
            self.refresh_buffers();
            const py::gil_scoped_release no_gil;
            return self.base().save_async(folder,
                                          save_options(user, user_of_rank, keep_last, keep_every, overwrite, frozen));
          },
          py::arg("folder"), py::arg("user"), py::arg("user_of_rank"), py::arg("keep_last"), py::arg("keep_every"),
          py::arg("frozen"), py::arg("overwrite"))
      .def(
          "load",
          [](Engine& self, const std::string& path, bool strict, bool if_any, bool hypers,
             const std::map<std::string, std::string>& names) {
            self.drop_forwards();
            self.refresh_buffers();
            LoadReport report;
            {
              const py::gil_scoped_release no_gil;
              report = self.base().load(path, {.strict = strict, .if_any = if_any, .hypers = hypers, .names = names});
            }
            py::dict found;
            found["path"] = report.path;
            found["step"] = report.manifest.step;
            found["micro_step"] = self.base().core().micro_step();
            found["world"] = report.manifest.world;
            found["user"] = report.user;
            found["user_of_rank"] = report.user_of_rank;
            found["missing"] = report.missing;
            found["unexpected"] = report.unexpected;
            found["skipped"] = report.skipped;
            return found;
          },
          py::arg("path"), py::arg("strict"), py::arg("if_any"), py::arg("hypers"), py::arg("names"))
      .def("export_safetensors",
           [](Engine& self, const std::string& path) {
             self.refresh_buffers();
             const py::gil_scoped_release no_gil;
             self.base().export_safetensors(path);
           })
      .def(
          "memory_report", [](Engine& self) { return self.base().memory_report(); }, NoGil())
      .def(
          "transfer_report", [](Engine& self) { return self.base().core().transfer_report(); }, NoGil())
      .def(
          "trace_transfers", [](Engine& self, bool on) { self.base().core().trace_transfers(on); }, py::arg("on"))
      .def(
          "transfer_trace", [](Engine& self) { return self.base().core().transfer_trace(); }, NoGil())
      .def("wire_report",
           [](Engine& self) {
             const libtorch::WireReport report = self.base().wire_report();
             const WireBytes& planned = report.planned_per_step;
             return std::map<std::string, std::uint64_t>{
                 {"planned_all_gather", planned.total() - planned.reduce_gradients},
                 {"planned_reduce_scatter", planned.reduce_gradients},
                 {"all_gather", report.all_gather},
                 {"reduce_scatter", report.reduce_scatter},
                 {"between_nodes", report.between_nodes},
                 {"between_sites", report.between_sites},
                 {"control", report.control}};
           })
      .def("reset_counters", [](Engine& self) { self.base().reset_counters(); })
      .def(
          "set_activation_choice",
          [](Engine& self, std::string choice) { self.base().core().set_activation_choice(std::move(choice)); },
          py::arg("choice"))
      .def("close", &Engine::close, py::arg("keep_parameters"), NoGil())
      .def_property_readonly("device", [](Engine& self) { return self.base().device(); })
      .def_property_readonly("rank", [](Engine& self) { return self.base().rank(); })
      .def_property_readonly("world_size", [](Engine& self) { return self.base().world_size(); })
      .def_property_readonly("steps", [](Engine& self) { return self.base().core().committed_steps(); })
      .def_property_readonly("config", [](Engine& self) { return self.base().config(); })
      .def_property_readonly("has_gradients", [](Engine& self) { return self.base().core().has_gradients(); })
      .def_property_readonly("micro_step", [](Engine& self) { return self.base().core().micro_step(); })
      .def_property_readonly("ends_step", [](Engine& self) { return self.base().core().ends_step(); })
      .def_property_readonly("chunks", [](Engine& self) { return self.base().core().chunks(); })
      .def_property_readonly("loss_scale", [](Engine& self) { return self.base().core().loss_scale(); })
      .def_property_readonly("learning_rates", [](Engine& self) { return self.base().core().learning_rates(); })
      .def(
          "set_group",
          [](Engine& self, int group, const py::dict& values) {
            zeroth::Engine& core = self.base().core();
            const GroupHyper& before = core.settings().groups.at(static_cast<std::size_t>(group));
            core.set_group(group, libtorch::hyper_of(param_group(values), before));
          },
          py::arg("group"), py::arg("values"))
      .def_property_readonly("groups",
                             [](Engine& self) {
                               const std::string& optimizer = self.base().config().optimizer.type;
                               py::list groups;
                               for (const GroupHyper& hyper : self.base().core().settings().groups)
                                 groups.append(values_of(hyper, optimizer));
                               return groups;
                             })
      .def_property_readonly("has_schedule",
                             [](Engine& self) {
                               return self.base().core().settings().schedule.kind !=
                                      LearningRateSchedule::Kind::kConstant;
                             })
      .def_property_readonly("trains", [](Engine& self) { return self.base().core().trains(); })
      .def_property_readonly("state_kinds", [](Engine& self) { return self.base().core().state_kinds(); })
      .def_property_readonly("applied_average", [](Engine& self) { return self.base().core().applied_average(); })
      .def_property_readonly("state_batches", [](Engine& self) { return self.base().core().state_batches(); })
      .def_property_readonly("aliases",
                             [](Engine& self) {
                               std::map<std::string, std::string> names;
                               for (const ParamSpec& spec : self.base().core().layout().params) {
                                 names[spec.tensor_name()] = spec.tensor_name();
                                 for (const std::string& alias : spec.aliases) names[alias] = spec.tensor_name();
                               }
                               return names;
                             })
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

  module.def("why_without_memory", &libtorch::why_without_memory, py::arg("tensor"));
  module.def(
      "require_memory",
      [](const py::handle& storage) {
        if (THPStorage_Check(storage.ptr())) libtorch::require_memory(THPStorage_Unpack(storage.ptr()));
      },
      py::arg("storage"));

  py::class_<UnitHooks>(module, "UnitHooks")
      .def(py::init<std::shared_ptr<Engine>, std::size_t>(), py::arg("engine"), py::arg("unit"))
      .def("before_root", &UnitHooks::before_root)
      .def("before", &UnitHooks::before)
      .def("after", &UnitHooks::after)
      .def(
          "__deepcopy__", [](const UnitHooks& /*self*/, const py::dict& /*memo*/) { return UnitHooks::of_copy(); },
          py::arg("memo"))
      .def(
          "__reduce_ex__",
          [](const UnitHooks& /*self*/, int /*protocol*/) -> py::object {
            throw Error(ErrorCode::kUsage, "a module inside an engine cannot be pickled",
                        {.where = "python.engine",
                         .hint = "save its state_dict() (stages 0 to 2), engine.export_safetensors(path), or the "
                                 "module after close()"});
          },
          py::arg("protocol"));
}

}  // namespace zeroth::python
