#include "bindings.h"
#include "rank_group.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/comm/received.h>
#include <zeroth/engine/settings.h>
#include <zeroth/engine/world.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

/// Rows of each rank, along dimension 0; none: equal parts.
using Counts = std::optional<std::vector<std::int64_t>>;
using MaybeTensor = std::optional<at::Tensor>;

constexpr const char* kDTypes = "float64, float32, bfloat16, float16, int64, int32 or uint8";

ReduceOp op_of(const std::string& name) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
    if (name == name_of(op)) return op;
  }
  throw Error(
      ErrorCode::kUsage, "there is no such reduction",
      {.where = "python.communicator", .which = "op", .expected = "sum, min or max", .got = "\"" + name + "\""});
}

/// A tensor of no dimension is a row of one element.
std::int64_t rows_of(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? 1 : tensor.size(0);
}
std::int64_t row_elements(const at::Tensor& tensor) {
  std::int64_t elements = 1;
  for (std::int64_t dim = 1; dim < tensor.dim(); ++dim) elements *= tensor.size(dim);
  return elements;
}
std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}
std::string text_of(const std::vector<std::int64_t>& counts) {
  std::string text;
  for (const std::int64_t count : counts) text += (text.empty() ? "[" : ", ") + std::to_string(count);
  return text.empty() ? "[]" : text + "]";
}

/// A group of ranks and its calls with tensors.
class Communicator {
 public:
  explicit Communicator(zeroth::Communicator group) : group_(std::move(group)) {}

  /// Throws kUsage in a forked child.
  [[nodiscard]] const libtorch::RankGroup& rank_group() const {
    require_owner();
    return rank_group_;
  }

  [[nodiscard]] int rank() const { return group_.rank(); }
  [[nodiscard]] int size() const { return group_.size(); }
  [[nodiscard]] const std::string& name() const { return group_.backend().group_name(); }

  [[nodiscard]] std::uint64_t received_bytes() const { return zeroth::received_bytes(group_); }
  [[nodiscard]] std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> received() const {
    std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> kinds;
    for (const auto& [kind, row] : received_by_kind(group_))
      kinds.emplace(kind, std::pair(row.calls + row.one_sided_calls, row.bytes + row.one_sided_bytes));
    return kinds;
  }
  void reset_received() const { zeroth::reset_received(group_); }

  at::Tensor all_reduce(const at::Tensor& tensor, const std::string& op, const MaybeTensor& out,
                        std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kAllReduce, tag);
    call.op = op_of(op);
    call.counts = {tensor.numel()};
    give(call, tensor, "tensor");
    return take(call, out.value_or(tensor), out ? "out" : "tensor", tensor.numel());
  }
  at::Tensor all_gather(const at::Tensor& tensor, const Counts& counts, const MaybeTensor& out,
                        std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kAllGather, tag);
    give(call, tensor, "tensor");
    const std::vector<std::int64_t> rows = own_rows(call, counts, tensor);
    call.counts = elements_of(rows, tensor);
    return take(call, result(tensor, sum_of(rows), out), "out", sum_of(call.counts));
  }
  at::Tensor reduce_scatter(const at::Tensor& tensor, const std::string& op, const Counts& counts,
                            const MaybeTensor& out, std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kReduceScatter, tag);
    call.op = op_of(op);
    give(call, tensor, "tensor");
    const std::vector<std::int64_t> rows = all_rows(call, counts, tensor);
    call.counts = elements_of(rows, tensor);
    const auto own = static_cast<std::size_t>(rank());
    return take(call, result(tensor, rows[own], out), "out", call.counts[own]);
  }
  at::Tensor broadcast(const at::Tensor& tensor, int root, std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kBroadcast, tag);
    call.root = root;
    call.counts = {tensor.numel()};
    if (rank() == root) give(call, tensor, "tensor");
    return take(call, tensor, "tensor", tensor.numel());
  }
  MaybeTensor gather(const at::Tensor& tensor, int root, const Counts& counts, const MaybeTensor& out,
                     std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kGather, tag);
    call.root = root;
    give(call, tensor, "tensor");
    const std::vector<std::int64_t> rows = own_rows(call, counts, tensor);
    call.counts = elements_of(rows, tensor);
    if (rank() == root) return take(call, result(tensor, sum_of(rows), out), "out", sum_of(call.counts));
    if (out) refuse(call, "out", "only the root has a result", "None on other ranks", "a tensor");
    run({call});
    return std::nullopt;
  }
  at::Tensor scatter(const at::Tensor& out, int root, const MaybeTensor& tensor, const Counts& counts,
                     std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kScatter, tag);
    call.root = root;
    call.counts = elements_of(own_rows(call, counts, out), out);
    if (rank() == root) {
      if (!tensor.has_value()) refuse(call, "tensor", "the root has nothing to scatter", "a tensor", "None");
      give(call, *tensor, "tensor");
      require_elements(call, "tensor", *tensor, sum_of(call.counts));
    } else {
      if (tensor) refuse(call, "tensor", "only the root has something to scatter", "None on other ranks", "a tensor");
    }
    return take(call, out, "out", call.counts[static_cast<std::size_t>(rank())]);
  }
  at::Tensor all_to_all(const at::Tensor& tensor, const Counts& counts, const Counts& recv_counts,
                        const MaybeTensor& out, std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kAllToAll, tag);
    call.equal_parts = !counts && !recv_counts;
    give(call, tensor, "tensor");
    if (counts.has_value() != recv_counts.has_value())
      refuse(call, counts ? "recv_counts" : "counts", "parts of any size need both counts",
             "the rows for each rank and the rows from each rank", "None");
    const std::vector<std::int64_t> rows = all_rows(call, counts, tensor);
    const std::vector<std::int64_t> from = recv_counts.value_or(rows);
    require_one_a_rank(call, from, "recv_counts");
    call.counts = elements_of(rows, tensor);
    call.recv_counts = elements_of(from, tensor);
    return take(call, result(tensor, sum_of(from), out), "out", sum_of(call.recv_counts));
  }
  void send(const at::Tensor& tensor, int to, std::uint32_t tag) const { run({send_call(tensor, to, tag, "tensor")}); }
  at::Tensor recv(const at::Tensor& tensor, int source, std::uint32_t tag) const {
    run({recv_call(tensor, source, tag, "tensor")});
    written(tensor);
    return tensor;
  }
  at::Tensor send_recv(const at::Tensor& tensor, int to, const at::Tensor& out, int source, std::uint32_t tag) const {
    run({send_call(tensor, to, tag, "tensor"), recv_call(out, source, tag, "out")});
    written(out);
    return out;
  }
  void exchange(const std::vector<std::pair<at::Tensor, int>>& sent,
                const std::vector<std::pair<at::Tensor, int>>& received, std::uint32_t tag) const {
    std::vector<Collective> calls;
    calls.reserve(sent.size() + received.size());
    for (const auto& [tensor, to] : sent) calls.push_back(send_call(tensor, to, tag, "sent"));
    for (const auto& [tensor, source] : received) calls.push_back(recv_call(tensor, source, tag, "received"));
    run(calls);
    for (const auto& [tensor, source] : received) written(tensor);
  }
  void barrier(const std::string& name, std::uint32_t tag) const {
    Collective call = call_of(CollectiveKind::kBarrier, tag);
    call.name = name;
    run({call});
  }

 private:
  [[nodiscard]] static Collective call_of(CollectiveKind kind, std::uint32_t tag) {
    return {.kind = kind, .tag = {.unit = -1, .label = tag}};
  }
  [[nodiscard]] std::string who() const {
    return "rank " + std::to_string(rank()) + "/" + std::to_string(size()) + " of " + name();
  }
  [[noreturn]] void refuse(const Collective& call, const std::string& argument, const std::string& message,
                           std::string expected, std::string got, std::string hint = {}) const {
    throw Error(ErrorCode::kUsage, message,
                {.where = "python.communicator",
                 .who = who(),
                 .which = argument + " of " + std::string(name_of(call.kind)),
                 .expected = std::move(expected),
                 .got = std::move(got),
                 .hint = std::move(hint)});
  }
  /// Throws kUsage for what cannot be read or written as one array of a dtype.
  [[nodiscard]] DType require_array(const Collective& call, const at::Tensor& tensor, const char* argument) const {
    if (!tensor.defined()) refuse(call, argument, "a tensor is undefined", "a tensor", "an undefined one");
    if (tensor.layout() != at::kStrided)
      refuse(call, argument, "a tensor is not dense", "a strided tensor", c10::str(tensor.layout()),
             "pass tensor.to_dense()");
    if (!tensor.is_cpu())
      refuse(call, argument, "a tensor is on another device", "cpu", tensor.device().str(),
             "ranks exchange CPU memory: copy it with tensor.cpu()");
    const std::optional<DType> dtype = libtorch::dtype_of(tensor.scalar_type());
    if (!dtype.has_value())
      refuse(call, argument, "ranks do not exchange this dtype", kDTypes, c10::toString(tensor.scalar_type()),
             tensor.scalar_type() == at::kBool ? "pass tensor.view(torch.uint8)" : "convert it with tensor.to()");
    if (!tensor.is_contiguous() || tensor.is_neg())
      refuse(call, argument, "a tensor is not contiguous", "a contiguous tensor",
             c10::str("shape ", tensor.sizes(), " with strides ", tensor.strides()),
             "pass tensor.contiguous(), and copy a result back");
    if (tensor.requires_grad() && at::GradMode::is_enabled())
      refuse(call, argument, "no gradient flows through a call of a communicator",
             "a tensor that does not require grad", "requires_grad is true",
             "pass tensor.detach(), or make the call under torch.no_grad()");
    return *dtype;
  }
  void require_elements(const Collective& call, const char* argument, const at::Tensor& tensor,
                        std::int64_t elements) const {
    if (tensor.numel() != elements)
      refuse(call, argument, "a tensor has another number of elements than the call",
             std::to_string(elements) + " elements", c10::str(tensor.numel(), ", shape ", tensor.sizes()));
  }
  void require_one_a_rank(const Collective& call, const std::vector<std::int64_t>& counts, const char* argument) const {
    bool valid = counts.size() == static_cast<std::size_t>(size());
    for (const std::int64_t count : counts) valid = valid && count >= 0;
    if (!valid)
      refuse(call, argument, "counts are not one a rank", std::to_string(size()) + " numbers of rows, from 0",
             text_of(counts));
  }
  /// Rows of each rank, where `part` is this rank's.
  [[nodiscard]] std::vector<std::int64_t> own_rows(const Collective& call, const Counts& counts,
                                                   const at::Tensor& part) const {
    if (!counts) return std::vector<std::int64_t>(static_cast<std::size_t>(size()), rows_of(part));
    require_one_a_rank(call, *counts, "counts");
    const std::int64_t own = (*counts)[static_cast<std::size_t>(rank())];
    if (own != rows_of(part))
      refuse(call, "counts", "this rank's part has other rows than counts say",
             std::to_string(rows_of(part)) + " for rank " + std::to_string(rank()), text_of(*counts));
    return *counts;
  }
  /// Rows of each rank, where `whole` has them all.
  [[nodiscard]] std::vector<std::int64_t> all_rows(const Collective& call, const Counts& counts,
                                                   const at::Tensor& whole) const {
    const std::int64_t rows = rows_of(whole);
    if (counts) {
      require_one_a_rank(call, *counts, "counts");
      if (sum_of(*counts) != rows)
        refuse(call, "counts", "the rows of all ranks are not those of the tensor",
               std::to_string(rows) + " rows in all", text_of(*counts));
      return *counts;
    }
    if (rows % size() != 0)
      refuse(call, "tensor", "rows do not divide into equal parts", "a multiple of " + std::to_string(size()) + " rows",
             c10::str(rows, ", shape ", whole.sizes()), "pass the rows of each rank as counts");
    return std::vector<std::int64_t>(static_cast<std::size_t>(size()), rows / size());
  }
  [[nodiscard]] static std::vector<std::int64_t> elements_of(std::vector<std::int64_t> rows, const at::Tensor& like) {
    for (std::int64_t& count : rows) count *= row_elements(like);
    return rows;
  }
  /// `out`, or memory for so many rows like those of a tensor.
  [[nodiscard]] static at::Tensor result(const at::Tensor& like, std::int64_t rows, const MaybeTensor& out) {
    if (out) return *out;
    std::vector<std::int64_t> shape = like.sizes().vec();
    shape.empty() ? shape.push_back(rows) : static_cast<void>(shape[0] = rows);
    return at::empty(shape, like.options());
  }

  [[nodiscard]] bool gives(const Collective& call) const {
    if (call.kind == CollectiveKind::kRecv) return false;
    return rank() == call.root || (call.kind != CollectiveKind::kBroadcast && call.kind != CollectiveKind::kScatter);
  }
  void give(Collective& call, const at::Tensor& tensor, const char* argument) const {
    call.in_dtype = call.out_dtype = require_array(call, tensor, argument);
    call.send = static_cast<const std::byte*>(tensor.const_data_ptr());
  }
  void receive(Collective& call, const at::Tensor& tensor, const char* argument, std::int64_t elements) const {
    call.out_dtype = require_array(call, tensor, argument);
    if (!gives(call)) call.in_dtype = call.out_dtype;
    require_elements(call, argument, tensor, elements);
    call.recv = static_cast<std::byte*>(tensor.mutable_data_ptr());
  }
  /// Makes the call with a tensor for its result.
  at::Tensor take(Collective& call, const at::Tensor& tensor, const char* argument, std::int64_t elements) const {
    receive(call, tensor, argument, elements);
    run({call});
    written(tensor);
    return tensor;
  }
  [[nodiscard]] Collective send_call(const at::Tensor& tensor, int to, std::uint32_t tag, const char* argument) const {
    Collective call = call_of(CollectiveKind::kSend, tag);
    call.root = to;
    call.counts = {tensor.numel()};
    give(call, tensor, argument);
    return call;
  }
  [[nodiscard]] Collective recv_call(const at::Tensor& tensor, int from, std::uint32_t tag,
                                     const char* argument) const {
    Collective call = call_of(CollectiveKind::kRecv, tag);
    call.root = from;
    call.counts = {tensor.numel()};
    receive(call, tensor, argument, tensor.numel());
    return call;
  }
  static void written(const at::Tensor& tensor) {
    if (!tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
  }
  void require_owner() const {
    ZR_CHECK(::getpid() == owner_, ErrorCode::kUsage, "a forked child uses a communicator of its parent",
             {.where = "python.communicator",
              .who = who(),
              .hint = "make calls between ranks in the process that made the mesh"});
  }
  /// An exception that is no Error (Ctrl-C in a wait) separates this rank from the others for good: they hear of it.
  void run(std::initializer_list<Collective> calls) const { run(std::span(calls.begin(), calls.size())); }
  void run(std::span<const Collective> calls) const {
    require_owner();
    try {
      group_.batch(calls);
    } catch (const Error&) {
      throw;
    } catch (...) {
      if (size() > 1) {
        group_.backend().abort(
            Error(ErrorCode::kAborted, interrupted_text(), {.where = "python.communicator", .who = who()}));
      }
      throw;
    }
  }

  zeroth::Communicator group_;
  libtorch::RankGroup rank_group_{group_, &rethrow_as_python};
  pid_t owner_ = ::getpid();
};

MeshSpec spec_of(const py::dict& axes) {
  MeshSpec spec;
  for (const auto& [name, size] : axes) {
    ZR_CHECK(py::isinstance<py::str>(name) && PyLong_Check(size.ptr()) != 0 && PyBool_Check(size.ptr()) == 0,
             ErrorCode::kUsage, "an axis of a mesh is a name and a number of ranks",
             {.where = "python.world",
              .which = py::repr(name).cast<std::string>(),
              .expected = "axes such as {\"dp\": 2, \"tp\": 2}",
              .got = py::repr(size).cast<std::string>()});
    int overflow = 0;
    const long ranks = PyLong_AsLongAndOverflow(size.ptr(), &overflow);
    constexpr long kMost = 1 << 20;  // beyond every world: the mesh refuses it by name
    spec.axes.push_back({.name = name.cast<std::string>(),
                         .size = static_cast<int>(overflow != 0 ? kMost : std::clamp(ranks, -1L, kMost))});
  }
  return spec;
}

Mesh make_mesh(const py::object& self, const py::dict& axes, const std::optional<Config>& config) {
  MeshSpec spec = spec_of(axes);
  // As for an engine's world: who waits for this rank can see its line, and hears what ends it.
  py::module_::import("zeroth._place").attr("announce")(self);
  py::module_::import("zeroth._ending").attr("follow")(self);
  const auto& world = self.cast<const World&>();
  const py::gil_scoped_release no_gil;
  return world.mesh(std::move(spec), config ? make_comm_options(*config, world.size()) : CommOptions{});
}

}  // namespace

libtorch::RankGroup rank_group_of(const py::handle& object) {
  if (!py::isinstance<Communicator>(object))
    throw py::type_error("group: expected a zeroth.Communicator, such as mesh.axis(\"tp\"), not " +
                         py::repr(py::type::of(object)).cast<std::string>());
  return object.cast<const Communicator&>().rank_group();
}

void bind_comm(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<Communicator>(module, "Communicator")
      .def("all_reduce", &Communicator::all_reduce, py::arg("tensor"), py::arg("op") = "sum", py::kw_only(),
           py::arg("out") = py::none(), py::arg("tag") = 0, NoGil())
      .def("all_gather", &Communicator::all_gather, py::arg("tensor"), py::kw_only(), py::arg("counts") = py::none(),
           py::arg("out") = py::none(), py::arg("tag") = 0, NoGil())
      .def("reduce_scatter", &Communicator::reduce_scatter, py::arg("tensor"), py::arg("op") = "sum", py::kw_only(),
           py::arg("counts") = py::none(), py::arg("out") = py::none(), py::arg("tag") = 0, NoGil())
      .def("broadcast", &Communicator::broadcast, py::arg("tensor"), py::arg("root"), py::kw_only(), py::arg("tag") = 0,
           NoGil())
      .def("gather", &Communicator::gather, py::arg("tensor"), py::arg("root"), py::kw_only(),
           py::arg("counts") = py::none(), py::arg("out") = py::none(), py::arg("tag") = 0, NoGil())
      .def("scatter", &Communicator::scatter, py::arg("out"), py::arg("root"), py::arg("tensor") = py::none(),
           py::kw_only(), py::arg("counts") = py::none(), py::arg("tag") = 0, NoGil())
      .def("all_to_all", &Communicator::all_to_all, py::arg("tensor"), py::kw_only(), py::arg("counts") = py::none(),
           py::arg("recv_counts") = py::none(), py::arg("out") = py::none(), py::arg("tag") = 0, NoGil())
      .def("send", &Communicator::send, py::arg("tensor"), py::arg("to"), py::kw_only(), py::arg("tag") = 0, NoGil())
      .def("recv", &Communicator::recv, py::arg("tensor"), py::arg("source"), py::kw_only(), py::arg("tag") = 0,
           NoGil())
      .def("send_recv", &Communicator::send_recv, py::arg("tensor"), py::arg("to"), py::arg("out"), py::arg("source"),
           py::kw_only(), py::arg("tag") = 0, NoGil())
      .def("exchange", &Communicator::exchange, py::arg("sent"), py::arg("received"), py::kw_only(), py::arg("tag") = 0,
           NoGil())
      .def("barrier", &Communicator::barrier, py::arg("name") = "", py::kw_only(), py::arg("tag") = 0, NoGil())
      .def_property_readonly("received_bytes", &Communicator::received_bytes)
      .def("received", &Communicator::received)
      .def("reset_received", &Communicator::reset_received)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      // A copy of a module that ranks share is shared by the same ranks.
      .def("__deepcopy__", [](py::object self, const py::object& /*memo*/) { return self; })
      .def("__repr__", [](const Communicator& self) {
        return "zeroth.Communicator(rank=" + std::to_string(self.rank()) + ", size=" + std::to_string(self.size()) +
               ", name='" + self.name() + "')";
      });

  // A mesh keeps its world, and a communicator its mesh: the world is told of an exception that ends the script.
  py::class_<Mesh>(module, "Mesh")
      .def(
          "axis", [](const Mesh& self, const std::string& name) { return Communicator(self.axis(name)); },
          py::arg("name"), py::keep_alive<0, 1>())
      .def(
          "axes",
          [](Mesh& self, const std::vector<std::string>& names) {
            const py::gil_scoped_release no_gil;
            return Communicator(self.axes(names));
          },
          py::arg("names"), py::keep_alive<0, 1>())
      .def_property_readonly("world", py::cpp_function([](const Mesh& self) { return Communicator(self.world()); },
                                                       py::keep_alive<0, 1>()))
      .def("received", &Mesh::received)
      .def("reset_received", &Mesh::reset_received)
      .def("size", &Mesh::size, py::arg("axis"))
      .def("coordinate", &Mesh::coordinate, py::arg("axis"))
      .def_property_readonly("sizes",
                             [](const Mesh& self) {
                               py::dict sizes;
                               for (const MeshAxis& axis : self.spec().axes) sizes[py::str(axis.name)] = axis.size;
                               return sizes;
                             })
      .def("__repr__", [](const Mesh& self) { return "zeroth.Mesh(" + describe(self.spec()) + ")"; });

  auto world = py::reinterpret_borrow<py::class_<World>>(module.attr("World"));
  world.def("mesh", &make_mesh, py::arg("axes"), py::arg("config") = py::none(), py::keep_alive<0, 1>());
}

}  // namespace zeroth::python
