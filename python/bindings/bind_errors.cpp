#include "bindings.h"

#include <zeroth/base/error.h>
#include <zeroth/base/error_place.h>
#include <zeroth/engine/config.h>

#include <pybind11/stl.h>

#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

// Owned for the life of the interpreter: a translator may run at any time.
PyObject* error_type = nullptr;
PyObject* config_error_type = nullptr;

/// See _ending.stay_on_top(). It is not there yet while the package is imported.
void prepare_the_end(const char* text) {
  PyObject* const module = PyDict_GetItemString(PyImport_GetModuleDict(), "zeroth._ending");
  if (module == nullptr || PyObject_HasAttrString(module, "stay_on_top") == 0) return;
  const py::object done = py::reinterpret_steal<py::object>(PyObject_CallMethod(module, "stay_on_top", "s", text));
  if (!done) PyErr_Clear();
}

py::object to_python(PyObject* type, const Error& error) {
  py::object instance = py::reinterpret_borrow<py::object>(type)(error.what());
  instance.attr("code") = std::string(slug(error.code()));
  instance.attr("exit_code") = exit_code(error.code());
  instance.attr("message") = error.message();
  const ErrorContext& context = error.context();
  const ErrorPlace place = place_of(context);
  instance.attr("rank") = py::cast(place.rank);
  instance.attr("step") = py::cast(place.step);
  instance.attr("op") = place.op;
  instance.attr("where") = context.where;
  instance.attr("who") = context.who;
  instance.attr("which") = context.which;
  instance.attr("expected") = context.expected;
  instance.attr("got") = context.got;
  instance.attr("hint") = context.hint;
  prepare_the_end(error.what());
  return instance;
}

void raise(PyObject* type, const Error& error) {
  PyErr_SetObject(type, to_python(type, error).ptr());
}

ErrorCode code_of(const std::string& text) {
  if (const std::optional<ErrorCode> code = code_of_slug(text)) return *code;
  throw Error(ErrorCode::kInternal, "there is no such error code", {.where = "python.errors", .got = text});
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const ConfigError& error) {
    raise(config_error_type, error);
  } catch (const Error& error) {
    raise(error_type, error);
  }
}

PyObject* new_type(py::module_& module, const char* name, const char* text, PyObject* base) {
  PyObject* type = PyErr_NewExceptionWithDoc((std::string("zeroth.") + name).c_str(), text, base, nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.attr(name) = py::reinterpret_borrow<py::object>(type);
  return type;
}

/// Of a document that is not JSON yet. pointer, what, expected, got
using ProblemTuple = std::tuple<std::string, std::string, std::string, std::string>;
py::object make_config_error(const std::string& origin, const std::vector<ProblemTuple>& problems) {
  constexpr std::size_t kMostListed = 50;  // as of a document
  std::vector<ConfigProblem> listed;
  for (const auto& [pointer, what, expected, got] : problems) {
    if (listed.size() == kMostListed) break;
    listed.push_back({.pointer = pointer, .origin = origin, .what = what, .expected = expected, .got = got});
  }
  return to_python(config_error_type, ConfigError(origin, std::move(listed), problems.size()));
}

}  // namespace

std::optional<Error> error_of_python(const py::handle& object) {
  if (PyObject_IsInstance(object.ptr(), error_type) != 1 || !py::hasattr(object, "hint"))
    return std::nullopt;  // the last that to_python() sets
  const auto text = [&object](const char* name) { return py::str(object.attr(name)).cast<std::string>(); };
  return Error(code_of(text("code")), text("message"),
               {.where = text("where"),
                .who = text("who"),
                .which = text("which"),
                .expected = text("expected"),
                .got = text("got"),
                .hint = text("hint")});
}

void set_python_error(const Error& error) {
  raise(error_type, error);
}

void bind_errors(py::module_& module) {
  error_type = new_type(module, "Error",
                        "Everything that Zeroth refuses or reports: code, exit_code, message, rank, step, op, where, "
                        "who, which, expected, got, hint.",
                        PyExc_RuntimeError);
  config_error_type =
      new_type(module, "ConfigError", "Everything that is wrong with a configuration, at once.", error_type);
  py::register_exception_translator(&translate);
  module.def("make_config_error", &make_config_error, py::arg("origin"), py::arg("problems"));
  module.def(
      "make_error",
      [](const std::string& code, const std::string& message, std::string where, std::string who, std::string which,
         std::string expected, std::string got, std::string hint) {
        const Error error(code_of(code), message,
                          {.where = std::move(where),
                           .who = std::move(who),
                           .which = std::move(which),
                           .expected = std::move(expected),
                           .got = std::move(got),
                           .hint = std::move(hint)});
        return to_python(error.code() == ErrorCode::kConfig ? config_error_type : error_type, error);
      },
      py::arg("code"), py::arg("message"), py::kw_only(), py::arg("where") = "", py::arg("who") = "",
      py::arg("which") = "", py::arg("expected") = "", py::arg("got") = "", py::arg("hint") = "");
}

}  // namespace zeroth::python
