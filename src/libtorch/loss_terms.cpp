#include "libtorch/loss_terms.h"

#include "libtorch/loss_scale.h"
#include "libtorch/parallel/part_of_loss.h"

#include <zeroth/base/error.h>

#include <ATen/TensorOperators.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// A program whose loss has more nodes past the model is left alone.
constexpr std::size_t kMostNodes = 100'000;

/// What gradients through a node get to.
struct Reach {
  bool weights = false;  ///< parameters of the engine, past its forward
  bool others = false;  ///< nodes of a forward, calls between ranks, functions of the program's own, products with data
};

bool ends_with_digit(std::string_view name) {
  return !name.empty() && name.back() >= '0' && name.back() <= '9';
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::ranges::any_of(names, [&](std::string_view one) { return name.starts_with(one); });
}

/// A look-up, or a product in which not all factors have a gradient.
bool takes_data(const Node& node, std::string_view name) {
  if (is_one_of(name, {"Embedding", "IndexBackward", "IndexSelect", "Gather", "NllLoss", "Take"})) return true;
  if (!is_one_of(name, {"Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Dot", "Conv", "Linear"})) return false;
  const std::size_t factors = std::min<std::size_t>(node.num_outputs(), 2);
  for (std::size_t edge = node.num_outputs() - factors; edge < node.num_outputs(); ++edge) {
    if (!node.next_edge(edge).is_valid()) return true;
  }
  return false;
}

/// Its inputs are added, each times a constant at most.
bool adds_up(const Node& node, std::string_view name) {
  if (LossScale::is_entry(node)) return true;
  if (is_one_of(name, {"Add", "Sub", "Sum", "Mean", "Neg", "Stack", "Cat", "View", "Reshape", "Squeeze", "Unsqueeze",
                       "Select", "ToCopy", "Alias", "Expand"})) {
    return !is_one_of(name, {"Addmm", "Addmv", "Addcmul", "Addcdiv"});
  }
  const auto inputs = std::ranges::count_if(node.next_edges(), [](const Edge& edge) { return edge.is_valid(); });
  return inputs == 1 && is_one_of(name, {"Mul", "Div"});
}

/// Divides the gradient of one input of a node.
class PartOfEdge final : public torch::autograd::FunctionPostHook {
 public:
  PartOfEdge(std::size_t edge, double parts) : edge_(edge), parts_(parts) {}
  variable_list operator()(const variable_list& gradients, const variable_list& /*of_outputs*/) override {
    variable_list own = gradients;
    if (edge_ < own.size() && own[edge_].defined()) own[edge_] = own[edge_] / parts_;
    return own;
  }
  [[nodiscard]] std::size_t edge() const { return edge_; }

 private:
  std::size_t edge_;
  double parts_;
};

/// Hooks are added once, also where two terms share a node.
void divide(Node& node, std::size_t edge, double parts) {
  const bool has_it = std::ranges::any_of(node.post_hooks(), [edge](const auto& hook) {
    const auto* ours = dynamic_cast<const PartOfEdge*>(hook.get());
    return ours != nullptr && ours->edge() == edge;
  });
  if (!has_it) node.add_post_hook(std::make_unique<PartOfEdge>(edge, parts));
}

int axis_ranks(const Config& config, std::string_view axis) {
  const std::array<std::pair<std::string_view, int>, 3> known{
      {{"tp", config.mesh.tp}, {"sp", config.mesh.sp}, {"ep", config.mesh.ep}}};
  const auto found = std::ranges::find(known, axis, &std::pair<std::string_view, int>::first);
  return found == known.end() ? 1 : found->second;
}

}  // namespace

/// The nodes of a loss up to the forwards, inputs before the nodes that use them.
struct LossTerms::Walk {
  OfForward of_forward;
  std::unordered_map<Node*, Reach> reach{};
  struct Leaf {
    Node* node;
    std::size_t edge;
    std::size_t param;
  };
  std::vector<Leaf> leaves{};
  bool meets_forward = false;
};

LossTerms::LossTerms(const ModelDescription& model, const Config& config)
    : model_(model), sequence_ranks_(config.mesh.sp * config.mesh.rows) {
  for (std::size_t param = 0; param < model.tensors.size(); ++param) {
    params_.emplace(model.tensors[param].unsafeGetTensorImpl(), param);
    double times = sequence_ranks_;
    if (param < model.axes.size()) {
      const ParamAxes& axes = model.axes[param];
      for (const std::string& axis : axes.summed) times *= axis_ranks(config, axis);
      // Ranks with other boxes do not add up what they have, but the mean is over all that have batches.
      const auto differ = [&](std::string_view axis) {
        return axes.distinct == axis || std::ranges::find(axes.further, axis) != axes.further.end();
      };
      for (const std::string_view axis : {"ep", "sp"})
        if (differ(axis)) times /= axis_ranks(config, axis);
    }
    times_.push_back(times);
    any_ = any_ || times != 1;
  }
}

void LossTerms::walk(Walk& walk, Node* root) const {
  struct Open {
    Node* node;
    std::size_t next = 0;
  };
  std::vector<Open> path;
  const auto enter = [&](Node* node) {
    if (walk.reach.contains(node) || walk.reach.size() >= kMostNodes) return;
    Reach& reach = walk.reach[node];
    const std::string name = node->name();
    const bool of_forward = walk.of_forward(*node);
    walk.meets_forward = walk.meets_forward || of_forward;
    const bool known = ends_with_digit(name) || LossScale::is_entry(*node);  // torch's own
    if (of_forward || !known || takes_data(*node, name)) {
      reach.others = true;  // what is behind it does not matter
    } else {
      path.push_back({node});
    }
  };
  enter(root);
  while (!path.empty()) {
    Open& open = path.back();
    if (open.next == open.node->num_outputs()) {
      Reach all;
      for (std::size_t edge = 0; edge < open.node->num_outputs(); ++edge) {
        Node* const input = open.node->next_edge(edge).function.get();
        if (input == nullptr) continue;
        if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(input)) {
          const auto param = params_.find(leaf->variable.unsafeGetTensorImpl());
          if (param == params_.end()) continue;
          all.weights = true;
          walk.leaves.push_back({open.node, edge, param->second});
        } else if (const auto found = walk.reach.find(input); found != walk.reach.end()) {
          all.weights = all.weights || found->second.weights;
          all.others = all.others || found->second.others;
        }
      }
      walk.reach[open.node] = all;
      path.pop_back();
      continue;
    }
    Node* const input = open.node->next_edge(open.next++).function.get();
    if (input != nullptr && dynamic_cast<const AccumulateGrad*>(input) == nullptr) enter(input);
  }
}

at::Tensor LossTerms::part(const at::Tensor& term, const OfForward& of_forward) const {
  ZR_CHECK(term.defined() && term.is_floating_point(), ErrorCode::kUsage, "this is no term of a loss",
           {.where = "libtorch.part_of_loss",
            .expected = "a tensor of floating-point values",
            .got = term.defined() ? c10::toString(term.scalar_type()) : "an undefined tensor"});
  if (!any_ || !term.requires_grad()) return term;
  const at::Tensor own = term.is_leaf() ? term * 1 : term;
  Walk found{.of_forward = of_forward};
  walk(found, own.grad_fn().get());
  ZR_CHECK(sequence_ranks_ == 1 || !found.meets_forward, ErrorCode::kUsage,
           "a term of what the model's forward gave is no term that every rank has whole",
           {.where = "libtorch.part_of_loss",
            .expected = "a term of weights alone, or a sum over this rank's tokens and their count",
            .got = "no count, and " + std::to_string(sequence_ranks_) + " ranks that share each sequence",
            .hint = "part_of_loss(sum, count=...), with the sum over the tokens that this rank has; the loss that the "
                    "model itself returns is added as it is"});
  for (const Walk::Leaf& leaf : found.leaves) {
    if (const double parts = times_[leaf.param] / sequence_ranks_; parts != 1) divide(*leaf.node, leaf.edge, parts);
  }
  return with_part_of_gradient(own, sequence_ranks_);  // also for one: plain() knows the node
}

std::string LossTerms::plain(const at::Tensor& loss, const OfForward& of_forward) const {
  Node* const root = loss.grad_fn().get();
  if (root == nullptr) return "";
  Walk found{.of_forward = of_forward};
  walk(found, root);
  if (found.leaves.empty() || found.reach.size() >= kMostNodes) return "";
  // From the loss down through sums, and all of what is of weights alone.
  std::vector<Node*> open{root};
  std::unordered_set<Node*> seen{root}, terms;
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    const Reach& reach = found.reach[node];
    if (!reach.weights || (reach.others && !adds_up(*node, node->name()))) continue;
    terms.insert(node);
    for (const Edge& edge : node->next_edges()) {
      Node* const input = edge.function.get();
      if (found.reach.contains(input) && seen.insert(input).second) open.push_back(input);
    }
  }
  std::vector<bool> named(times_.size());
  std::string first;
  double times = 1;
  std::size_t others = 0;
  for (const Walk::Leaf& leaf : found.leaves) {
    if (!terms.contains(leaf.node) || named[leaf.param] || times_[leaf.param] == 1) continue;
    named[leaf.param] = true;
    if (first.empty()) {
      first = model_.params[leaf.param].name;
      times = times_[leaf.param];
    } else {
      ++others;
    }
  }
  if (first.empty()) return "";
  return "a term of the loss is computed from weights alone, past the model's forward, and every rank adds it whole: "
         "its gradient counts " +
         c10::str(times) + " times; which: " + first + (others > 0 ? " and " + std::to_string(others) + " more" : "") +
         "; hint: loss + engine.part_of_loss(term), also in the place of a division by hand";
}

}  // namespace zeroth::libtorch
