#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ side of zeroth; private, see _C.pyi";
  module.attr("torch_version") = ZEROTH_TORCH_VERSION;
  zeroth::python::bind_errors(module);
  zeroth::python::bind_core(module);
  zeroth::python::bind_transfers(module);
  zeroth::python::bind_activations(module);
  zeroth::python::bind_checkpoint(module);
  zeroth::python::bind_comm(module);
  zeroth::python::bind_engine(module);
  zeroth::python::bind_experts(module);
  zeroth::python::bind_gate(module);
  zeroth::python::bind_host_table(module);
  zeroth::python::bind_parallel(module);
  zeroth::python::bind_pipeline(module);
}
