#include "bindings.h"

#include <zeroth/base/error.h>
#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/manifest.h>
#include <zeroth/checkpoint/reader.h>
#include <zeroth/checkpoint/writer.h>
#include <zeroth/engine/safetensors.h>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

/// Memory of a tensor of bytes: contiguous, on the CPU.
std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  ZR_CHECK(tensor.is_contiguous() && tensor.is_cpu() && tensor.scalar_type() == at::kByte, ErrorCode::kUsage,
           "a tensor is no row of bytes",
           {.where = "python.checkpoint", .expected = "a contiguous uint8 tensor on the CPU"});
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}
std::span<const std::byte> const_bytes_of(const at::Tensor& tensor) {
  return bytes_of(tensor);
}

void bind_manifest(py::module_& module) {
  py::class_<CheckpointState>(module, "CheckpointState")
      .def(py::init([](std::string name, std::string dtype, std::vector<std::int64_t> shape) {
             return CheckpointState{.name = std::move(name), .dtype = std::move(dtype), .shape = std::move(shape)};
           }),
           py::arg("name"), py::arg("dtype"), py::arg("shape"))
      .def_readwrite("name", &CheckpointState::name)
      .def_readwrite("dtype", &CheckpointState::dtype)
      .def_readwrite("shape", &CheckpointState::shape);
  py::class_<CheckpointParam>(module, "CheckpointParam")
      .def(py::init())
      .def_readwrite("name", &CheckpointParam::name)
      .def_readwrite("shape", &CheckpointParam::shape)
      .def_readwrite("dtype", &CheckpointParam::dtype)
      .def_readwrite("trainable", &CheckpointParam::trainable)
      .def_readwrite("group", &CheckpointParam::group)
      .def_readwrite("updates", &CheckpointParam::updates)
      .def_readwrite("aliases", &CheckpointParam::aliases)
      .def_readwrite("states", &CheckpointParam::states);
  py::class_<CheckpointFile>(module, "CheckpointFile")
      .def_readonly("name", &CheckpointFile::name)
      .def_readonly("bytes", &CheckpointFile::bytes);
  py::class_<Manifest>(module, "Manifest")
      .def(py::init())
      .def_readonly("format", &Manifest::format)
      .def_readwrite("version", &Manifest::version)
      .def_readonly("run", &Manifest::run)
      .def_readwrite("step", &Manifest::step)
      .def_readonly("commit", &Manifest::commit)
      .def_readonly("world", &Manifest::world)
      .def_readwrite("plan", &Manifest::plan)
      .def_readwrite("optimizer", &Manifest::optimizer)
      .def_readwrite("configuration", &Manifest::configuration)
      .def_readwrite("groups", &Manifest::groups)
      .def_readwrite("params", &Manifest::params)
      .def_readwrite("extras", &Manifest::extras)
      .def_property_readonly("base", [](const Manifest& manifest) { return manifest.base.name; })
      .def_readonly("accumulation", &Manifest::accumulation)
      .def_readwrite("loss_scaler", &Manifest::loss_scaler)
      .def_readwrite("user", &Manifest::user)
      .def_readwrite("user_of_rank", &Manifest::user_of_rank)
      .def_readonly("files", &Manifest::files);
}

void bind_files(py::module_& module) {
  py::class_<StoredRange>(module, "StoredRange")
      .def_readonly("key", &StoredRange::key)
      .def_readonly("dtype", &StoredRange::dtype)
      .def_property_readonly("shape", [](const StoredRange& one) { return one.range.logical; })
      .def_readonly("file", &StoredRange::file)
      .def_readonly("begin", &StoredRange::begin)
      .def_readonly("bytes", &StoredRange::bytes);
  py::class_<Damage>(module, "Damage")
      .def_readonly("file", &Damage::file)
      .def_readonly("begin", &Damage::begin)
      .def_readonly("end", &Damage::end)
      .def_readonly("keys", &Damage::keys)
      .def_readonly("what", &Damage::what);
  py::class_<CheckpointReader>(module, "CheckpointReader")
      .def(py::init<const std::string&>(), py::arg("checkpoint"), NoGil())
      .def_property_readonly("manifest", &CheckpointReader::manifest)
      .def("ranges", &CheckpointReader::ranges)
      .def("has", &CheckpointReader::has, py::arg("key"))
      .def(
          "read",
          [](CheckpointReader& self, const std::string& key, std::int64_t begin, std::int64_t end,
             const at::Tensor& into) { self.read(key, begin, end, bytes_of(into)); },
          py::arg("key"), py::arg("begin"), py::arg("end"), py::arg("into"), NoGil());
  py::class_<CheckpointWriter>(module, "CheckpointWriter")
      .def(py::init<const std::string&, Manifest>(), py::arg("folder"), py::arg("manifest"), NoGil())
      .def_property_readonly("keys", &CheckpointWriter::keys)
      .def(
          "write", [](CheckpointWriter& self, const at::Tensor& data) { self.write(const_bytes_of(data)); },
          py::arg("data"), NoGil())
      .def(
          "commit",
          [](CheckpointWriter& self, int keep_last, int keep_every) {
            return self.commit({.keep_last = keep_last, .keep_every = keep_every});
          },
          py::arg("keep_last") = 0, py::arg("keep_every") = 0, NoGil());
  using Entry = std::tuple<std::string, std::string, std::vector<std::int64_t>, std::uint64_t>;
  py::class_<SafetensorsWriter>(module, "SafetensorsWriter")
      .def(py::init([](const std::string& path, const std::vector<Entry>& entries,
                       const std::map<std::string, std::string>& metadata) {
             std::vector<SafetensorsEntry> list;
             for (const auto& [name, dtype, shape, bytes] : entries)
               list.push_back({.name = name, .dtype = dtype, .shape = shape, .bytes = bytes});
             return std::make_unique<SafetensorsWriter>(path, std::move(list), metadata);
           }),
           py::arg("path"), py::arg("entries"), py::arg("metadata"))
      .def(
          "write", [](SafetensorsWriter& self, const at::Tensor& data) { self.write(const_bytes_of(data)); },
          py::arg("data"), NoGil())
      .def("commit", &SafetensorsWriter::commit, NoGil());
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_manifest(module);
  bind_files(module);
  module.def(
      "list_checkpoints",
      [](const std::string& folder) {
        std::vector<std::pair<std::int64_t, std::string>> list;
        for (const CheckpointEntry& entry : list_checkpoints(folder)) list.emplace_back(entry.step, entry.path);
        return list;
      },
      py::arg("folder"), NoGil());
  module.def("read_manifest", &read_manifest, py::arg("checkpoint"), NoGil());
  module.def("why_torn", &why_torn, py::arg("checkpoint"), NoGil());
  module.def("find_damage", &find_damage, py::arg("checkpoint"), NoGil());
  module.def(
      "prune_checkpoints",
      [](const std::string& folder, int keep_last, int keep_every, bool dry_run) {
        return prune_checkpoints(folder, {.keep_last = keep_last, .keep_every = keep_every}, dry_run);
      },
      py::arg("folder"), py::arg("keep_last"), py::arg("keep_every"), py::arg("dry_run"), NoGil());
}

}  // namespace zeroth::python
