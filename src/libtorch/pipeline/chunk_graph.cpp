#include "libtorch/pipeline/chunk_graph.h"

#include "libtorch/engine_hook.h"
#include "libtorch/torch_versions.h"

#include <zeroth/base/error.h>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

variable_list run(const edge_list& roots, const variable_list& gradients, bool keeps_graph, bool accumulates,
                  const edge_list& outputs) {
  return torch::autograd::Engine::get_default_engine().execute(roots, gradients, keeps_graph, /*create_graph=*/false,
                                                               accumulates, outputs);
}

bool is_product(const Node& node) {
  constexpr std::array<std::string_view, 6> kProducts{"AddmmBackward0", "MmBackward0",          "LinearBackward0",
                                                      "BmmBackward0",   "ConvolutionBackward0", "EmbeddingBackward0"};
  const std::string name = node.name();
  return std::ranges::find(kProducts, name) != kProducts.end();
}

/// True if hooks of the user's own are on a node, or on the tensor that it made. They are called once a backward, so
/// such a node cannot run in I and again in W.
bool has_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.post_hooks().empty() ||
         std::ranges::any_of(node.pre_hooks(),
                             [](const auto& hook) { return dynamic_cast<const EngineHook*>(hook.get()) == nullptr; });
}

/// The parameter that an edge leads to through views and casts of it alone; null if it leads elsewhere.
AccumulateGrad* parameter_behind(const Edge& edge) {
  constexpr std::array<std::string_view, 8> kViews{"TBackward0",       "TransposeBackward0",    "ViewBackward0",
                                                   "PermuteBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0",
                                                   "AliasBackward0",   "ToCopyBackward0"};
  Node* node = edge.function.get();
  while (node != nullptr) {
    if (auto* leaf = dynamic_cast<AccumulateGrad*>(node)) return leaf;
    const std::string name = node->name();
    if (std::ranges::find(kViews, name) == kViews.end() || node->num_outputs() != 1) return nullptr;
    node = node->next_edge(0).function.get();
  }
  return nullptr;
}

/// Stands before a parameter whose gradient I computes. I finds the gradient here, before the hooks of the parameter,
/// which W calls; and W hands it on in the place that the parameter's first use in the forward pass gives it. A
/// parameter that is a root of a run of its own comes before all operations: the engine of autograd takes
/// AccumulateGrad first. Then parameters of all units would come before the first product of the last unit.
class Handover : public Node {
 public:
  Handover(std::uint64_t sequence, const Edge& leaf) : Node(sequence, {leaf}) {
    add_input_metadata(static_cast<AccumulateGrad&>(*leaf.function).variable);
  }

  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
};

/// To take edges away, or to set one to a node that is no further from the leaves than its source is: Node's own
/// set_next_edge() refuses nodes that others lead to, for another edge could break their topological numbers.
edge_list& edges_of(Node& node) {
  return const_cast<edge_list&>(node.next_edges());  // the node is no constant
}

/// The nodes behind some edges, each once.
std::vector<NodePointer> nodes_behind(const edge_list& roots) {
  std::vector<NodePointer> nodes;
  std::unordered_set<const Node*> known;
  std::vector<NodePointer> next;
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && known.insert(edge.function.get()).second) next.push_back(edge.function);
  };
  for (const Edge& root : roots) visit(root);
  while (!next.empty()) {
    NodePointer node = std::move(next.back());
    next.pop_back();
    for (const Edge& edge : node->next_edges()) visit(edge);
    nodes.push_back(std::move(node));
  }
  return nodes;
}

}  // namespace

ChunkGraph::ChunkGraph(std::vector<at::Tensor> inputs, const std::vector<at::Tensor>& outputs)
    : inputs_(std::move(inputs)) {
  for (const at::Tensor& output : outputs) {
    wants_.push_back(output.defined() && output.requires_grad());
    if (wants_.back()) outputs_.push_back(torch::autograd::impl::gradient_edge(output));
  }
}

GradientUses ChunkGraph::uses() const {
  GradientUses uses;
  const auto count = [&uses](const Edge& edge) {
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get())) ++uses[leaf];
  };
  std::ranges::for_each(outputs_, count);
  for (const auto& node : nodes_behind(outputs_)) std::ranges::for_each(node->next_edges(), count);
  return uses;
}

ChunkGraph::Roots ChunkGraph::roots_for(const std::vector<at::Tensor>& gradients) const {
  ZR_CHECK(gradients.size() == wants_.size(), ErrorCode::kMismatch,
           "a chunk got gradients for another number of outputs",
           {.where = "libtorch.pipeline",
            .expected = std::to_string(wants_.size()),
            .got = std::to_string(gradients.size())});
  Roots roots;
  std::size_t edge = 0;
  for (std::size_t output = 0; output < wants_.size(); ++output) {
    if (!wants_[output]) continue;
    const Edge& root = outputs_[edge++];
    if (!gradients[output].defined()) continue;
    roots.edges.push_back(root);
    roots.gradients.push_back(gradients[output]);
  }
  return roots;
}

void ChunkGraph::backward(const std::vector<at::Tensor>& gradients) {
  const Roots roots = roots_for(gradients);
  if (!roots.edges.empty()) run(roots.edges, roots.gradients, /*keeps_graph=*/false, /*accumulates=*/true, {});
  input_gradients_.clear();
  for (at::Tensor& input : inputs_) {
    input_gradients_.push_back(input.defined() && input.requires_grad() ? input.grad() : at::Tensor());
    if (input.defined() && input.requires_grad()) input.mutable_grad().reset();
  }
  outputs_.clear();
  inputs_.clear();
}

void ChunkGraph::backward_inputs(const std::vector<at::Tensor>& gradients) {
  Roots roots = roots_for(gradients);
  edge_list wanted;  // of inputs; at products with weights; of all other parameters
  std::vector<std::size_t> input_at;
  std::unordered_set<const Node*> of_inputs;
  for (std::size_t index = 0; index < inputs_.size(); ++index) {
    if (!inputs_[index].defined() || !inputs_[index].requires_grad()) continue;
    wanted.push_back(torch::autograd::impl::gradient_edge(inputs_[index]));
    of_inputs.insert(wanted.back().function.get());
    input_at.push_back(index);
  }
  find_late(roots.edges, of_inputs);
  wanted.insert(wanted.end(), late_edges_.begin(), late_edges_.end());
  const variable_list found =
      roots.edges.empty() ? variable_list(wanted.size())
                          : run(roots.edges, roots.gradients, /*keeps_graph=*/true, /*accumulates=*/false, wanted);
  input_gradients_.assign(inputs_.size(), at::Tensor());
  for (std::size_t at = 0; at < input_at.size(); ++at) input_gradients_[input_at[at]] = found[at];
  late_gradients_.assign(found.begin() + static_cast<std::ptrdiff_t>(input_at.size()), found.end());
  keep_late_alone(roots.edges, of_inputs);
  outputs_.clear();
  inputs_.clear();
}

/// Of the graph W needs the products and what leads from them to parameters. Their edges to the rest are cut, so that W
/// does not go on there, and the rest frees what it saved.
void ChunkGraph::keep_late_alone(const edge_list& roots, const std::unordered_set<const Node*>& of_inputs) {
  std::unordered_set<const Node*> late;  // products, and what stands before parameters whose gradients I computed
  for (const Edge& edge : late_edges_) late.insert(edge.function.get());
  for (const auto& node : nodes_behind(roots)) {
    if (parameter_behind({node, 0}) != nullptr) continue;
    if (!late.contains(node.get())) {
      node->release_variables();
      continue;
    }
    for (Edge& next : edges_of(*node)) {
      const Node* const leaf = next.is_valid() ? parameter_behind(next) : nullptr;
      if (leaf == nullptr || of_inputs.contains(leaf)) next = Edge();
    }
  }
}

void ChunkGraph::find_late(edge_list& roots, const std::unordered_set<const Node*>& of_inputs) {
  late_edges_.clear();
  const std::vector<NodePointer> nodes = nodes_behind(roots);
  std::unordered_map<const Node*, NodePointer> leaves;
  struct Uses {
    bool by_products = true;  // and by nothing else
    std::uint64_t first = 0;  // sequence number of the first use in the forward pass
  };
  std::unordered_map<const Node*, Uses> parameters;
  const auto parameter_of = [&](const Edge& edge) -> const Node* {
    const Node* leaf = edge.is_valid() ? parameter_behind(edge) : nullptr;
    return leaf == nullptr || of_inputs.contains(leaf) ? nullptr : leaf;
  };
  const auto note = [&](const Edge& edge, std::uint64_t sequence, bool by_product) {
    const Node* const leaf = parameter_of(edge);
    if (leaf == nullptr) return;
    Uses& uses = parameters.try_emplace(leaf, Uses{.first = sequence}).first->second;
    uses.by_products = uses.by_products && by_product;
    uses.first = std::min(uses.first, sequence);
  };
  std::unordered_set<const Node*> products;  // that run in two parts
  for (const auto& node : nodes) {
    if (is_product(*node) && !has_hooks(*node)) products.insert(node.get());
    if (dynamic_cast<AccumulateGrad*>(node.get()) != nullptr) leaves.emplace(node.get(), node);
    if (parameter_behind({node, 0}) != nullptr) continue;  // a view of a parameter is no use of it
    for (const Edge& edge : node->next_edges()) note(edge, node->sequence_nr(), products.contains(node.get()));
  }
  for (const Edge& root : roots) note(root, at::sequence_number::peek(), /*by_product=*/false);
  for (const auto& node : nodes) {
    const bool is_late =
        products.contains(node.get()) && std::ranges::any_of(node->next_edges(), [&](const Edge& edge) {
          const Node* const leaf = parameter_of(edge);
          return leaf != nullptr && parameters.at(leaf).by_products;
        });
    if (is_late) late_edges_.emplace_back(node, 0);
  }
  std::unordered_map<const Node*, Edge> handovers;
  for (const auto& [leaf, uses] : parameters) {
    (uses.by_products ? deferred_ : whole_) += 1;
    if (uses.by_products) continue;
    const Edge handover(make_node<Handover>(uses.first, Edge(leaves.at(leaf), 0)), 0);
    handovers.emplace(leaf, handover);
    late_edges_.push_back(handover);
  }
  const auto lead_to_handover = [&](Edge& edge) {
    const auto found = handovers.find(edge.function.get());
    if (found != handovers.end()) edge = found->second;
  };
  for (const auto& node : nodes) std::ranges::for_each(edges_of(*node), lead_to_handover);
  std::ranges::for_each(roots, lead_to_handover);
}

void ChunkGraph::backward_weights() {
  edge_list edges;
  variable_list gradients;
  for (std::size_t at = 0; at < late_edges_.size(); ++at) {
    if (!late_gradients_[at].defined()) continue;
    edges.push_back(late_edges_[at]);
    gradients.push_back(late_gradients_[at]);
  }
  if (!edges.empty()) run(edges, gradients, /*keeps_graph=*/false, /*accumulates=*/true, {});
  late_edges_.clear();
  late_gradients_.clear();
}

std::vector<at::Tensor> ChunkGraph::take_input_gradients() {
  return std::exchange(input_gradients_, {});
}

}  // namespace zeroth::libtorch
