#include "bindings.h"

#include <zeroth/engine/transfer_report.h>

#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <string>

namespace zeroth::python {
namespace {

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

void bind_transfers(py::module_& module) {
  py::class_<StoreCounters>(module, "TransferCounters")
      .def_readonly("leases", &StoreCounters::leases)
      .def_readonly("reads", &StoreCounters::reads)
      .def_readonly("writes", &StoreCounters::writes)
      .def_readonly("read_bytes", &StoreCounters::read_bytes)
      .def_readonly("write_bytes", &StoreCounters::write_bytes)
      .def_readonly("prefetched", &StoreCounters::prefetched)
      .def_readonly("late", &StoreCounters::late)
      .def_readonly("on_demand", &StoreCounters::on_demand)
      .def_property_readonly(
          "waited_s", [](const StoreCounters& counters) { return seconds(std::chrono::nanoseconds(counters.wait_ns)); })
      .def_readonly("needed_bytes", &StoreCounters::needed_bytes)
      .def_readonly("spared_read_bytes", &StoreCounters::spared_read_bytes)
      .def_readonly("changed_bytes", &StoreCounters::changed_bytes)
      .def_readonly("spared_write_bytes", &StoreCounters::spared_write_bytes)
      .def_readonly("unused_bytes", &StoreCounters::unused_bytes)
      .def_readonly("ahead_bytes", &StoreCounters::ahead_bytes);

  py::class_<TransferTimes>(module, "TransferTimes")
      .def_property_readonly("in_flight_s", [](const TransferTimes& times) { return seconds(times.in_flight); })
      .def_property_readonly("waited_s", [](const TransferTimes& times) { return seconds(times.waited); })
      .def_property_readonly("hidden_share", &TransferTimes::hidden_share);

  py::class_<TransferRow>(module, "TransferRow")
      .def_property_readonly(
          "planned_read_bytes",
          [](const TransferRow& row) { return row.planned ? std::optional(row.planned->read_bytes) : std::nullopt; })
      .def_property_readonly(
          "planned_write_bytes",
          [](const TransferRow& row) { return row.planned ? std::optional(row.planned->write_bytes) : std::nullopt; })
      .def_readonly("last_step", &TransferRow::last_step)
      .def_readonly("all", &TransferRow::all);

  py::class_<TransferReport>(module, "TransferReport")
      .def_property_readonly("rows",
                             [](const TransferReport& report) {
                               std::map<std::string, TransferRow> rows;
                               for (const TransferRow& row : report.rows) rows[row.set] = row;
                               return rows;
                             })
      .def_readonly("last_step", &TransferReport::last_step)
      .def_readonly("all", &TransferReport::all)
      .def_readonly("activations_last_step", &TransferReport::activations_last_step)
      .def_readonly("activations_all", &TransferReport::activations_all)
      .def("__str__", [](const TransferReport& report) { return to_text(report); });
}

}  // namespace zeroth::python
