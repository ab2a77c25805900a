#include "libtorch/experts/row_moves.h"

#include "libtorch/experts/expert_ranks_state.h"
#include "libtorch/parallel/group_call.h"
#include "libtorch/parallel/kept_call.h"

#include <zeroth/comm/pending_points.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <utility>

namespace zeroth::libtorch {

/// One move: its messages, and the memory that they use.
struct RowFlight {
  ExpertRanks ranks;
  RowTraffic traffic{};
  bool is_backward = false;
  bool has_grad = false;
  at::Tensor sent{};   ///< of the host
  at::Tensor taken{};  ///< of the host
  at::Device device = at::kCPU;
  RegionCall call{};  ///< of a recompute that makes no calls
  std::unique_ptr<PendingPoints> points{};
  std::shared_ptr<RowFlight> reverse{};  ///< of the gradient, between its start and its end
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr CallName kCallRows{.call = "rows of experts", .number = 19};

CallName name_of_flight(const RowFlight& flight) {
  CallName name = kCallRows;
  name.is_backward = flight.is_backward;
  name.has_grad = flight.has_grad;
  return name;
}

at::Tensor rows_like(const at::Tensor& x, std::int64_t rows) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[0] = rows;
  return at::empty(shape, x.options());
}

/// Blocks of rows one after the other in another order: [outer][inner] -> [inner][outer]. sizes: of the blocks as they
/// lie.
at::Tensor transposed_blocks(const at::Tensor& rows, const std::vector<std::vector<std::int64_t>>& sizes) {
  std::vector<std::vector<at::Tensor>> blocks;
  std::int64_t begin = 0;
  for (const auto& of_outer : sizes) {
    auto& row = blocks.emplace_back();
    for (const std::int64_t size : of_outer) {
      row.push_back(rows.narrow(0, begin, size));
      begin += size;
    }
  }
  std::vector<at::Tensor> order;
  for (std::size_t inner = 0; inner < sizes.front().size(); ++inner)
    for (const auto& row : blocks) order.push_back(row[inner]);
  return at::cat(order);
}

/// Starts the messages of `sent` to the ranks of a group, and copies the own rows. Memory of the host.
std::unique_ptr<PendingPoints> start_messages(const at::Tensor& sent, const std::vector<std::int64_t>& given,
                                              const at::Tensor& taken, const std::vector<std::int64_t>& from,
                                              const RankGroup& group, const CallName& name) {
  const auto own = static_cast<std::size_t>(group.rank());
  taken.narrow(0, sum_of_sizes(SizeSpan(from).first(own)), from[own])
      .copy_(sent.narrow(0, sum_of_sizes(SizeSpan(given).first(own)), given[own]));
  std::unique_ptr<PendingPoints> points;
  with_name_of(group, name, sent, [&] { points = start_rows_of_ranks(sent, given, taken, from, group, name); });
  return points;
}

/// The first of two hops: rows for the same place in all nodes, to the rank of the own node in that place. Returns the
/// rows for the nodes, in their order, and how many they are; `from`: how many come from each node.
at::Tensor first_hop(const at::Tensor& sent, const RowFlight& flight, std::vector<std::int64_t>& for_nodes,
                     std::vector<std::int64_t>& from_nodes) {
  const Hops& hops = *flight.ranks.state().hops;
  const auto of_node = static_cast<std::size_t>(hops.inner.size());
  const auto nodes = static_cast<std::size_t>(hops.outer.size());
  const auto place = static_cast<std::size_t>(hops.inner.rank());
  const auto node = static_cast<std::size_t>(hops.outer.rank());
  const auto& pairs = flight.traffic.of_pairs;
  const auto rows = [&](std::size_t from_node, std::size_t from, std::size_t to_node, std::size_t to) {
    return pairs[from_node * of_node + from][to_node * of_node + to];
  };
  std::vector<std::vector<std::int64_t>> given(nodes, std::vector<std::int64_t>(of_node));
  std::vector<std::vector<std::int64_t>> came(of_node, std::vector<std::int64_t>(nodes));
  std::vector<std::int64_t> to_places(of_node, 0), from_places(of_node, 0);
  for_nodes.assign(nodes, 0);
  from_nodes.assign(nodes, 0);
  for (std::size_t to_node = 0; to_node < nodes; ++to_node) {
    for (std::size_t other = 0; other < of_node; ++other) {
      to_places[other] += given[to_node][other] = rows(node, place, to_node, other);
      from_places[other] += came[other][to_node] = rows(node, other, to_node, place);
      for_nodes[to_node] += rows(node, other, to_node, place);
      from_nodes[to_node] += rows(to_node, other, node, place);
    }
  }
  const at::Tensor by_place = transposed_blocks(sent, given);
  const at::Tensor arrived = rows_like(sent, sum_of_sizes(from_places));
  const CallName name = name_of_flight(flight);
  const auto points = start_messages(by_place, to_places, arrived, from_places, hops.inner, name);
  if (points) with_name_of(hops.inner, name, sent, [&] { points->wait(); });
  return transposed_blocks(arrived, came);
}

void start_flight(RowFlight& flight, const at::Tensor& x) {
  const RankGroup& group = flight.ranks.group();
  flight.sent = x.cpu().contiguous();
  flight.taken = rows_like(flight.sent, sum_of_sizes(flight.traffic.taken));
  if (!flight.traffic.of_pairs.empty()) {
    std::vector<std::int64_t> given, from;
    flight.sent = first_hop(flight.sent, flight, given, from);
    flight.points = start_messages(flight.sent, given, flight.taken, from, flight.ranks.state().hops->outer,
                                   name_of_flight(flight));
  } else {
    flight.points = start_messages(flight.sent, flight.traffic.given, flight.taken, flight.traffic.taken, group,
                                   name_of_flight(flight));
  }
}

/// The values; the flight keeps nothing.
at::Tensor end_flight(RowFlight& flight) {
  const RankGroup& group = flight.traffic.of_pairs.empty() ? flight.ranks.group() : flight.ranks.state().hops->outer;
  if (flight.points) with_name_of(group, name_of_flight(flight), flight.taken, [&] { flight.points->wait(); });
  flight.points.reset();
  flight.sent.reset();
  return std::exchange(flight.taken, {});
}

/// What goes through autograd between the start of a move and its end: no elements, so that it fits both ways. The
/// values lie in the flight.
at::Tensor ticket_of(const at::Tensor& x) {
  return at::empty({0}, x.options());
}

class TakeRows;

class StartRows : public torch::autograd::Function<StartRows> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const std::shared_ptr<RowFlight>& flight) {
    context->saved_data["flight"] = at::IValue::make_capsule(c10::make_intrusive<Kept>(flight));
    flight->call = RegionCall(name_of_flight(*flight), {x}, flight->ranks.group());
    if (!flight->call.hands_out()) start_flight(*flight, x);
    flight->device = x.device();
    return ticket_of(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients);

  struct Kept final : torch::CustomClassHolder {
    explicit Kept(std::shared_ptr<RowFlight> kept) : flight(std::move(kept)) {}
    std::shared_ptr<RowFlight> flight;
  };
  static std::shared_ptr<RowFlight> kept_in(AutogradContext* context) {
    return static_cast<const Kept&>(*context->saved_data["flight"].toCapsule()).flight;
  }
};

class TakeRows : public torch::autograd::Function<TakeRows> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*ticket*/,
                            const std::shared_ptr<RowFlight>& flight) {
    context->saved_data["flight"] = at::IValue::make_capsule(c10::make_intrusive<StartRows::Kept>(flight));
    return flight->call.keep(flight->call.hands_out() ? flight->call.kept()[0]
                                                      : end_flight(*flight).to(flight->device));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::shared_ptr<RowFlight> flight = StartRows::kept_in(context);
    MovingRows moving{.flight = std::make_shared<RowFlight>(RowFlight{
                          .ranks = flight->ranks, .traffic = flight->traffic.reversed(), .is_backward = true})};
    flight->reverse = moving.flight;
    moving.flight->has_grad = at::GradMode::is_enabled() && gradients[0].requires_grad();
    return {StartRows::apply(gradients[0], std::as_const(moving.flight)), at::Tensor()};
  }
};

variable_list StartRows::backward(AutogradContext* context, const variable_list& gradients) {
  const std::shared_ptr<RowFlight> reverse = std::exchange(kept_in(context)->reverse, nullptr);
  return {TakeRows::apply(gradients[0], reverse), at::Tensor()};
}

}  // namespace

RowTraffic RowTraffic::reversed() const {
  RowTraffic traffic{.given = taken, .taken = given, .of_pairs = of_pairs};
  for (std::size_t from = 0; from < of_pairs.size(); ++from)
    for (std::size_t to = 0; to < of_pairs.size(); ++to) traffic.of_pairs[from][to] = of_pairs[to][from];
  return traffic;
}

MovingRows start_rows(const at::Tensor& x, RowTraffic traffic, const ExpertRanks& ranks) {
  require_exchangeable(x, ranks.group(), kCallRows);
  MovingRows moving{.flight = std::make_shared<RowFlight>(RowFlight{.ranks = ranks, .traffic = std::move(traffic)})};
  moving.flight->has_grad = at::GradMode::is_enabled() && x.requires_grad();
  moving.rows = StartRows::apply(x, std::as_const(moving.flight));
  return moving;
}

at::Tensor take_rows_of(const MovingRows& moving) {
  return TakeRows::apply(moving.rows, std::as_const(moving.flight));
}

}  // namespace zeroth::libtorch
