#include "bindings.h"
#include "rank_group.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/libtorch/kept_calls.h>
#include <zeroth/libtorch/router.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

template <class Value, std::size_t size>
Value value_named(const std::pair<const char*, Value> (&values)[size], const std::string& name, const char* which) {
  std::string known;
  for (const auto& [one, value] : values) {
    if (name == one) return value;
    known += (known.empty() ? "" : ", ") + std::string(one);
  }
  throw Error(ErrorCode::kUsage, "there is no such way",
              {.where = "libtorch.experts", .which = which, .expected = known, .got = "\"" + name + "\""});
}

py::tuple route(const at::Tensor& logits, std::int64_t choices, const std::string& score, bool renormalize,
                double scale, const std::optional<at::Tensor>& bias, std::int64_t groups, std::int64_t groups_kept) {
  using libtorch::RouterScore;
  const std::pair<const char*, RouterScore> scores[] = {{"softmax", RouterScore::kSoftmax},
                                                        {"sigmoid", RouterScore::kSigmoid}};
  const libtorch::RouterOptions options{.choices = choices,
                                        .score = value_named(scores, score, "score"),
                                        .renormalize = renormalize,
                                        .scale = scale,
                                        .bias = bias.value_or(at::Tensor()),
                                        .groups = groups,
                                        .groups_kept = groups_kept};
  libtorch::Routing routing;
  {
    const py::gil_scoped_release no_gil;
    routing = libtorch::route(logits, options);
  }
  return py::make_tuple(routing.experts, routing.weights, routing.scores);
}

at::Tensor keep_within(const at::Tensor& experts, const at::Tensor& weights, std::int64_t num_experts,
                       std::int64_t capacity, const std::string& by, std::uint64_t seed) {
  using libtorch::KeepBy;
  const std::pair<const char*, KeepBy> ways[] = {
      {"position", KeepBy::kPosition}, {"weight", KeepBy::kWeight}, {"draw", KeepBy::kDraw}};
  const KeepBy way = value_named(ways, by, "by");
  const py::gil_scoped_release no_gil;
  return libtorch::keep_within(experts, weights, num_experts, capacity, way, seed);
}

/// The ranks of a mesh that share experts; None if there are none.
std::optional<libtorch::ExpertRanks> ranks_of_mesh(const py::object& mesh, std::string over, const std::string& meet,
                                                   std::int64_t copies, int pieces, bool two_hops) {
  const ExpertsConfig config{
      .over = std::move(over), .meet = meet, .copies = copies, .pieces = pieces, .two_hops = two_hops};
  const libtorch::RankGroup::Rethrow rethrow = rank_group_of(mesh.attr("world")).rethrow();
  Mesh& axes = mesh.cast<Mesh&>();
  const py::gil_scoped_release no_gil;
  return libtorch::ExpertRanks::of_mesh(axes, config, rethrow);
}

libtorch::ExpertOptions options_of(const std::string& meet, std::int64_t copies, int pieces, bool two_hops) {
  return {.meet = meet_at_of(meet), .copies = copies, .pieces = pieces, .two_hops = two_hops};
}

/// None, an ExpertRanks, or a Communicator: the ranks of a layer's experts.
std::optional<libtorch::ExpertRanks> expert_ranks_of(const py::object& object) {
  if (object.is_none()) return {};
  if (py::isinstance<libtorch::ExpertRanks>(object)) return object.cast<libtorch::ExpertRanks>();
  return libtorch::ExpertRanks(rank_group_of(object));
}

void bind_ranks(py::module_& module) {
  using libtorch::ExpertRanks;
  py::class_<ExpertRanks>(module, "ExpertRanks")
      .def(py::init(
               [](const py::object& group, const std::string& meet, std::int64_t copies, int pieces, bool two_hops) {
                 libtorch::RankGroup ranks = rank_group_of(group);
                 const libtorch::ExpertOptions options = options_of(meet, copies, pieces, two_hops);
                 const py::gil_scoped_release no_gil;
                 return ExpertRanks(std::move(ranks), options);
               }),
           py::arg("group"), py::kw_only(), py::arg("meet") = "experts", py::arg("copies") = 1, py::arg("pieces") = 1,
           py::arg("two_hops") = false)
      .def(
          "set_options",
          [](const ExpertRanks& self, const std::string& meet, std::int64_t copies, int pieces, bool two_hops) {
            const libtorch::ExpertOptions options = options_of(meet, copies, pieces, two_hops);
            const py::gil_scoped_release no_gil;
            self.set_options(options);
          },
          py::kw_only(), py::arg("meet"), py::arg("copies"), py::arg("pieces"), py::arg("two_hops"))
      .def_property_readonly("options",
                             [](const ExpertRanks& self) {
                               py::dict named;
                               named["meet"] = std::string(name_of(self.options().meet));
                               named["copies"] = self.options().copies;
                               named["pieces"] = self.options().pieces;
                               named["two_hops"] = self.options().two_hops;
                               return named;
                             })
      .def_static("of_mesh", &ranks_of_mesh, py::arg("mesh"), py::kw_only(), py::arg("over") = "ep",
                  py::arg("meet") = "experts", py::arg("copies") = 1, py::arg("pieces") = 1,
                  py::arg("two_hops") = false, py::keep_alive<0, 1>())
      .def("of_another_layer", &ExpertRanks::of_another_layer, py::keep_alive<0, 1>())
      .def("__deepcopy__", [](const ExpertRanks& self, const py::dict& /*memo*/) { return self.of_another_layer(); })
      .def_property_readonly("alike", [](const ExpertRanks& self) { return self.alike() ? self.alike()->size() : 1; })
      .def_property_readonly("axes", &ExpertRanks::axes)
      .def_property_readonly("rank", [](const ExpertRanks& self) { return self.group().rank(); })
      .def_property_readonly("size", [](const ExpertRanks& self) { return self.group().size(); })
      .def_property_readonly("pieces", &ExpertRanks::pieces);
}

void bind_load(py::module_& module) {
  using libtorch::ExpertLoad;
  py::class_<ExpertLoad>(module, "ExpertLoad")
      .def(py::init<std::int64_t>(), py::arg("num_experts"))
      .def("begin_step", &ExpertLoad::begin_step)
      .def(
          "add",
          [](ExpertLoad& self, const at::Tensor& experts, const py::iterable& objects) {
            std::vector<libtorch::RankGroup> groups;
            for (const py::handle& object : objects) groups.push_back(rank_group_of(object));
            const py::gil_scoped_release no_gil;
            self.add(experts, groups);
          },
          py::arg("experts"), py::arg("groups"))
      .def("balance_loss", &ExpertLoad::balance_loss, py::arg("scores"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("chosen", &ExpertLoad::chosen)
      .def_property_readonly("tokens", &ExpertLoad::tokens);
}

/// A context of Python for the scopes of one region. It may be entered again.
class KeptScopes {
 public:
  KeptScopes(libtorch::KeptCalls kept, bool hands_out) : kept_(std::move(kept)), hands_out_(hands_out) {}
  KeptScopes(const KeptScopes&) = delete;
  KeptScopes& operator=(const KeptScopes&) = delete;
  void enter() { scopes_.push_back(hands_out_ ? kept_.hand_out() : kept_.record()); }
  void exit(const py::args& /*error*/) { scopes_.pop_back(); }

 private:
  libtorch::KeptCalls kept_;
  bool hands_out_;
  std::vector<libtorch::KeptCalls::Scope> scopes_{};
};

void bind_kept_calls(py::module_& module) {
  using libtorch::KeptCalls;
  py::class_<KeptScopes>(module, "KeptScopes").def("__enter__", &KeptScopes::enter).def("__exit__", &KeptScopes::exit);
  py::class_<KeptCalls>(module, "KeptCalls")
      .def(py::init<>())
      .def("record", [](const KeptCalls& self) { return std::make_unique<KeptScopes>(self, false); })
      .def("hand_out", [](const KeptCalls& self) { return std::make_unique<KeptScopes>(self, true); })
      .def_property_readonly("bytes", &KeptCalls::bytes)
      .def_property_readonly("size", &KeptCalls::size);
  module.def("hands_out_calls", &libtorch::hands_out_calls);
}

}  // namespace

void bind_experts(py::module_& module) {
  using libtorch::TokenExchange;
  py::class_<TokenExchange>(module, "TokenExchange")
      .def(py::init([](const at::Tensor& experts, std::int64_t num_experts, const py::object& object) {
             std::optional<libtorch::ExpertRanks> ranks = expert_ranks_of(object);
             const py::gil_scoped_release no_gil;
             return TokenExchange(experts, num_experts, std::move(ranks));
           }),
           py::arg("experts"), py::arg("num_experts"), py::arg("ranks") = py::none())
      .def("send", &TokenExchange::send, py::arg("x"), py::call_guard<py::gil_scoped_release>())
      .def("bring", &TokenExchange::bring, py::arg("y"), py::arg("weights"), py::call_guard<py::gil_scoped_release>())
      .def(
          "through",
          [](const TokenExchange& self, const at::Tensor& x, const at::Tensor& weights, const py::function& compute) {
            const py::gil_scoped_release no_gil;
            return self.through(x, weights, [&](const at::Tensor& rows, const libtorch::ExpertRun& run) {
              const py::gil_scoped_acquire gil;
              return compute(rows, &run - self.runs().data(), run.rows).cast<at::Tensor>();
            });
          },
          py::arg("x"), py::arg("weights"), py::arg("compute"))
      .def("blocks_of_runs", &TokenExchange::blocks_of_runs, py::arg("parameter"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("experts_here", &TokenExchange::experts_here)
      .def_property_readonly("rows", &TokenExchange::rows)
      .def_property_readonly("expert_of_row", &TokenExchange::expert_of_row)
      .def_property_readonly("chosen", &TokenExchange::chosen);
  bind_load(module);
  bind_ranks(module);
  bind_kept_calls(module);
  module.def("route", &route, py::arg("logits"), py::arg("choices"), py::kw_only(), py::arg("score") = "softmax",
             py::arg("renormalize") = true, py::arg("scale") = 1.0, py::arg("bias") = py::none(), py::arg("groups") = 1,
             py::arg("groups_kept") = 1);
  module.def("expert_capacity", &libtorch::expert_capacity, py::arg("tokens"), py::arg("num_experts"),
             py::arg("choices"), py::arg("factor"), py::arg("least"));
  module.def("keep_within", &keep_within, py::arg("experts"), py::arg("weights"), py::arg("num_experts"),
             py::arg("capacity"), py::arg("by") = "position", py::arg("seed") = 0);
  module.def("router_z_loss", &libtorch::router_z_loss, py::arg("logits"), py::call_guard<py::gil_scoped_release>());
  using libtorch::ExpertMatrices;
  py::class_<ExpertMatrices>(module, "ExpertMatrices")
      .def(py::init([](const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
             return ExpertMatrices(weight, bias.value_or(at::Tensor()));
           }),
           py::arg("weight"), py::arg("bias"))
      .def("linear", &ExpertMatrices::linear, py::arg("x"), py::arg("expert"),
           py::call_guard<py::gil_scoped_release>());
  using libtorch::ExpertParts;
  py::class_<ExpertParts>(module, "ExpertParts")
      .def(py::init<const at::Tensor&>(), py::arg("stacked"))
      .def("part", &ExpertParts::part, py::arg("expert"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "grouped_linear",
      [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
         const std::vector<std::int64_t>& rows) {
        const py::gil_scoped_release no_gil;
        return libtorch::grouped_linear(x, weight, bias.value_or(at::Tensor()), rows);
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("rows"));
}

}  // namespace zeroth::python
