#include "support/model_calls.h"

#include <zeroth/comm/communicator.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

enum class CallKind : std::uint8_t { kSum, kExchange, kMessage, kBarrier };

struct ModelCall {
  CallKind kind = CallKind::kSum;
  int group = 0;
  std::size_t elements = 1;
  std::vector<int> places{};  ///< of each rank: where it makes the call
};

/// What all ranks do in every micro-step.
struct Program {
  int units = 1;
  std::vector<std::vector<int>> groups{};  ///< color of each rank; -1: in no group
  std::vector<ModelCall> calls{};          ///< in the order in which every rank makes its own
  std::vector<std::vector<int>> delays{};  ///< of each rank: microseconds at each place
};

int below(std::mt19937_64& random, int limit) {
  return static_cast<int>(random() % static_cast<std::uint64_t>(limit));
}

Program draw(std::mt19937_64& random, int world, int units) {
  Program program{.units = units};
  const int visits = 2 * units + 1;  // of a forward and a backward, and its end
  const auto ranks = static_cast<std::size_t>(world);
  for (int group = 1 + below(random, 3); group > 0; --group) {
    std::vector<int> colors;
    for (int rank = 0; rank < world; ++rank) colors.push_back(below(random, 3) - (below(random, 4) == 0 ? 3 : 0));
    program.groups.push_back(std::move(colors));
  }
  const int calls = 1 + below(random, 8);
  std::vector<std::vector<int>> places(ranks);
  for (std::vector<int>& own : places) {
    for (int call = 0; call < calls; ++call) own.push_back(below(random, visits));
    std::ranges::sort(own);
  }
  for (int index = 0; index < calls; ++index) {
    ModelCall call{
        .kind = static_cast<CallKind>(below(random, 4)),
        .group = below(random, static_cast<int>(program.groups.size())),
        .elements = below(random, 6) == 0 ? std::size_t{5'000} : static_cast<std::size_t>(1 + below(random, 40))};
    for (const std::vector<int>& own : places) call.places.push_back(own[static_cast<std::size_t>(index)]);
    program.calls.push_back(std::move(call));
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    std::vector<int> delays(static_cast<std::size_t>(visits));
    for (int& delay : delays) delay = below(random, 6) == 0 ? below(random, 150) : 0;
    program.delays.push_back(std::move(delays));
  }
  return program;
}

void check(bool holds, const char* what) {
  ZR_CHECK(holds, ErrorCode::kInternal, what, {.where = "test.model_calls"});
}

/// One rank's groups, and where it is.
class Runner {
 public:
  Runner(std::shared_ptr<const Program> program, CommBackend& world)
      : program_(std::move(program)), rank_(world.rank()) {
    for (std::size_t group = 0; group < program_->groups.size(); ++group) {
      const int color = program_->groups[group][static_cast<std::size_t>(rank_)];
      groups_.emplace_back(world.split(color, rank_, "model" + std::to_string(group)));
    }
  }

  void visit(bool backward, int unit) {
    if (!backward && unit == 0) next_ = 0;  // a forward begins
    const int place = place_of(backward, unit);
    const auto rank = static_cast<std::size_t>(rank_);
    if (const int delay = program_->delays[rank][static_cast<std::size_t>(place)]; delay > 0)
      std::this_thread::sleep_for(std::chrono::microseconds{delay});
    while (next_ < program_->calls.size() && program_->calls[next_].places[rank] <= place) make(next_++);
  }

 private:
  /// Forward: root, blocks; backward: root, blocks from the last one on, end.
  [[nodiscard]] int place_of(bool backward, int unit) const {
    const int units = program_->units;
    if (!backward) return unit;
    if (unit == ToyTraining::kEndOfBackward) return 2 * units;
    return unit == 0 ? units : 2 * units - unit;
  }

  void make(std::size_t index) {
    const ModelCall& call = program_->calls[index];
    const std::shared_ptr<CommBackend>& group = groups_[static_cast<std::size_t>(call.group)];
    if (!group) return;
    const Communicator comm(group);
    const auto own = static_cast<float>(comm.rank());
    const auto size = static_cast<std::size_t>(comm.size());
    switch (call.kind) {
      case CallKind::kSum: {
        std::vector<float> data(call.elements, own + 1.0F);
        comm.all_reduce(std::span(data));
        return check(data.back() == static_cast<float>(size * (size + 1) / 2), "a sum of the model is wrong");
      }
      case CallKind::kExchange: {
        const std::vector<float> given(call.elements * size, own);
        std::vector<float> taken(given.size());
        comm.all_to_all(std::span<const float>(given), std::span(taken));
        return check(taken.front() == 0.0F && taken.back() == static_cast<float>(size - 1), "an exchange is wrong");
      }
      case CallKind::kMessage: {
        // Down the line, as between stages of a pipeline.
        std::vector<float> data(call.elements, 1.0F);
        if (comm.rank() > 0) comm.recv(std::span(data), comm.rank() - 1);
        for (float& value : data) value += 1.0F;
        if (comm.rank() + 1 < comm.size()) comm.send(std::span<const float>(data), comm.rank() + 1);
        return check(data.back() == own + 2.0F, "a message of the model is wrong");
      }
      case CallKind::kBarrier:
        return comm.barrier();
    }
  }

  std::shared_ptr<const Program> program_;
  int rank_;
  std::vector<std::shared_ptr<CommBackend>> groups_;
  std::size_t next_ = 0;
};

}  // namespace

ToyTraining training_of_programs(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  ToyTraining training{.reports_memory = false};
  training.model = {.inputs = 3, .width = 6 + below(random, 8), .blocks = 3 + below(random, 3), .batch = 1};
  training.model.reuse_last = below(random, 4) == 0;
  training.model.tie_first_two = below(random, 4) == 0;
  training.world = 2 + below(random, 3);
  training.steps = 1 + below(random, 2);
  training.micro_steps = 1 + below(random, 2);
  training.timeout = Milliseconds{20'000};
  if (below(random, 2) == 0) training.skip = random_paths(seed);
  return training;
}

void add_calls(ToyTraining& training, std::uint64_t program) {
  std::mt19937_64 random(program * 7919 + 1);
  training.plan = zero_plan(1 + below(random, 3), {"dp"});
  training.plan.ring_slots = 1 + below(random, 2);
  training.transport = below(random, 4) == 0 ? ThreadTransport::kMixed : ThreadTransport::kMemory;
  training.mode = below(random, 3) == 0 ? ExecutionMode::kChaos : ExecutionMode::kInline;
  training.chaos_seed = program;
  const auto drawn = std::make_shared<const Program>(draw(random, training.world, training.model.blocks + 1));
  training.visitor = [drawn](CommBackend& world) -> ToyModel::Visitor {
    const auto runner = std::make_shared<Runner>(drawn, world);
    return [runner](bool backward, int unit) { runner->visit(backward, unit); };
  };
}

std::string text_of(const ToyTraining& training) {
  return training.plan.name + ", " + std::to_string(training.world) + " ranks, " +
         (training.mode == ExecutionMode::kChaos ? "chaos" : "inline") +
         (training.transport == ThreadTransport::kMixed ? ", mixed" : "");
}

}  // namespace zeroth::test
