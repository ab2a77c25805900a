// What the files of the shim share. The shim holds no logic of training: it turns Python objects into the C++ API's and
// back, and releases the GIL around everything that may wait for another rank.
#pragma once

#include <zeroth/base/error.h>

#include <pybind11/pybind11.h>

#include <optional>

namespace zeroth::python {

namespace py = pybind11;

/// zeroth.Error with the attributes code, message, where, who, which, expected, got, hint; ConfigError below it.
void bind_errors(py::module_& module);
/// Makes it the exception that Python raises next. With the GIL.
void set_python_error(const Error& error);
/// Throws it in backward, on torch's way back to Python. Takes the GIL.
void rethrow_as_python(const Error& error);
/// What a zeroth.Error was made of, by C++ or by make_error(); none for any other object.
[[nodiscard]] std::optional<Error> error_of_python(const py::handle& object);
void bind_activations(py::module_& module);  ///< saved tensors of autograd in files; includes torch
void bind_core(py::module_& module);         ///< Config, World, StepResult, MemoryReport
void bind_checkpoint(py::module_& module);   ///< Manifest, CheckpointReader, CheckpointWriter; includes torch
void bind_comm(py::module_& module);         ///< Mesh and Communicator. It includes torch, as bind_engine() does.
void bind_host_table(py::module_& module);   ///< HostRows: rows of a table in host memory; includes torch
void bind_engine(py::module_& module);       ///< Engine and the hooks of its units
void bind_experts(py::module_& module);      ///< tokens to their experts and back
void bind_gate(py::module_& module);         ///< gates of experts, and their balance
void bind_parallel(py::module_& module);     ///< what models call between ranks, with gradients
void bind_pipeline(py::module_& module);     ///< Pipeline, and programs as text; includes torch
void bind_transfers(py::module_& module);    ///< TransferReport and what it consists of

}  // namespace zeroth::python
