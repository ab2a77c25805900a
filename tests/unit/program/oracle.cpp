#include "oracle.h"

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using Pair = std::pair<int, int>;  // chunk, micro-batch
using Queue = std::deque<std::string>;

/// The right value of a forward: f2(f1(f0(x3))).
std::string forward_value(int chunk, int m) {
  return chunk < 0 ? "x" + std::to_string(m) : "f" + std::to_string(chunk) + "(" + forward_value(chunk - 1, m) + ")";
}

/// The right gradient of a chunk's output.
std::string gradient_value(int chunk, int chunks, int m) {
  return chunk == chunks - 1 ? "loss" + std::to_string(m)
                             : "b" + std::to_string(chunk + 1) + "(" + gradient_value(chunk + 1, chunks, m) + ")";
}

struct Memory {
  std::map<Pair, std::string> inputs{};
  std::map<Pair, std::string> outputs{};
  std::map<Pair, std::string> output_gradients{};
  std::map<Pair, std::string> input_gradients{};
  std::set<Pair> weights_to_come{};
  std::set<Pair> recomputed{};
  std::set<Pair> flushed{};
  std::set<Pair> away{};  // activations on the host
  std::map<int, std::multiset<int>> gradients{};
  std::map<int, std::multiset<int>> reduced{};
  std::set<int> whole{};
  int steps = 0;
};

class Executor {
 public:
  explicit Executor(const StepProgram& program)
      : program_(program), memories_(program.actions.size()), next_(program.actions.size(), 0) {
    for (const std::vector<Action>& actions : program.actions) {
      for (const Action& action : actions) {
        if (action.kind == ActionKind::kUnshard || action.kind == ActionKind::kReshard) sharded_.insert(action.chunk);
        reduces_ = reduces_ || action.kind == ActionKind::kReduce;
        steps_ = steps_ || action.kind == ActionKind::kStep;
      }
    }
  }

  std::string run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (std::size_t rank = 0; rank < memories_.size(); ++rank) {
        while (next_[rank] < program_.actions[rank].size()) {
          const std::optional<std::string> fault = take(rank, program_.actions[rank][next_[rank]]);
          if (!fault) break;  // it waits
          if (!fault->empty()) return *fault;
          ++next_[rank];
          moved = true;
        }
      }
    }
    return judge();
  }

 private:
  using Outcome = std::optional<std::string>;

  bool has(std::size_t rank, int chunk) const { return chunk >= 0 && chunk < program_.chunks() && home(chunk) == rank; }
  std::size_t home(int chunk) const {
    return static_cast<std::size_t>(program_.rank_of_chunk[static_cast<std::size_t>(chunk)]);
  }

  Outcome take(std::size_t rank, const Action& action) {
    Memory& memory = memories_[rank];
    if (memory.steps > 0) return "something comes after the step";
    if (action.kind == ActionKind::kStep) {
      ++memory.steps;
      return "";
    }
    if (!has(rank, action.chunk)) return "a chunk of another rank";
    const Pair pair{action.chunk, action.micro_batch};
    if (action.micro_batch >= 0 && (action.kind == ActionKind::kUnshard || action.kind == ActionKind::kReshard ||
                                    action.kind == ActionKind::kReduce))
      return "not of one micro-batch";
    const bool of_micro_batch = action.micro_batch >= 0 && action.micro_batch < program_.micro_batches;
    switch (action.kind) {
      case ActionKind::kUnshard:
        return memory.whole.insert(action.chunk).second ? "" : "gathered twice";
      case ActionKind::kReshard:
        return memory.whole.erase(action.chunk) == 1 ? "" : "given back twice";
      case ActionKind::kReduce:
        if (memory.reduced.contains(action.chunk)) return "reduced twice";
        memory.reduced[action.chunk] = memory.gradients[action.chunk];
        return "";
      default:
        break;
    }
    if (!of_micro_batch) return "no micro-batch";
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
      case ActionKind::kRecompute:
        return compute(rank, memory, action, pair);
      case ActionKind::kFlush:
        if (memory.recomputed.contains(pair) || memory.input_gradients.contains(pair))
          return "moved away after its use";
        if (!memory.flushed.insert(pair).second) return "moved away twice";
        return memory.outputs.contains(pair) && memory.away.insert(pair).second ? "" : "nothing to move away";
      case ActionKind::kFetch:
        return memory.away.erase(pair) == 1 ? "" : "nothing to fetch";
      default:
        return exchange(rank, memory, action, pair);
    }
  }

  Outcome compute(std::size_t rank, Memory& memory, const Action& action, const Pair& pair) {
    const auto [chunk, m] = pair;
    const bool reads = action.kind != ActionKind::kBackwardWeight;
    if (reads && sharded_.contains(chunk) && !memory.whole.contains(chunk)) return "no parameters";
    if (memory.away.contains(pair)) return "activations are away";
    if (action.kind == ActionKind::kForward) {
      const std::string input = chunk == 0 ? forward_value(-1, m) : memory.inputs[pair];
      const std::string output = "f" + std::to_string(chunk) + "(" + input + ")";
      if (output != forward_value(chunk, m)) return "a forward of wrong values";
      if (!memory.outputs.emplace(pair, output).second) return "a forward twice";
      if (has(rank, chunk + 1)) memory.inputs[{chunk + 1, m}] = output;
      return "";
    }
    if (!memory.outputs.contains(pair)) return "no forward";
    if (action.kind == ActionKind::kRecompute) {
      if (memory.input_gradients.contains(pair)) return "recomputed too late";
      return memory.recomputed.insert(pair).second ? "" : "recomputed twice";
    }
    if (action.kind == ActionKind::kBackwardWeight) {
      if (memory.weights_to_come.erase(pair) == 0) return "no I";
      memory.gradients[chunk].insert(m);
      return "";
    }
    const std::string gradient =
        chunk == program_.chunks() - 1 ? "loss" + std::to_string(m) : memory.output_gradients[pair];
    if (gradient != gradient_value(chunk, program_.chunks(), m)) return "a backward of wrong values";
    const std::string result = "b" + std::to_string(chunk) + "(" + gradient + ")";
    if (!memory.input_gradients.emplace(pair, result).second) return "a backward twice";
    if (has(rank, chunk - 1)) memory.output_gradients[{chunk - 1, m}] = result;
    if (action.kind == ActionKind::kBackward) {
      memory.gradients[chunk].insert(m);
    } else {
      memory.weights_to_come.insert(pair);
    }
    return "";
  }

  Outcome exchange(std::size_t rank, Memory& memory, const Action& action, const Pair& pair) {
    const bool forward = action.kind == ActionKind::kSendForward || action.kind == ActionKind::kRecvForward;
    const bool sends = action.kind == ActionKind::kSendForward || action.kind == ActionKind::kSendBackward;
    const int other = forward == sends ? pair.first + 1 : pair.first - 1;
    if (other < 0 || other >= program_.chunks() || home(other) == rank) return "a message to nobody";
    if (sends) {
      const auto& values = forward ? memory.outputs : memory.input_gradients;
      const auto value = values.find(pair);
      if (value == values.end()) return "nothing to send";
      queues_[{rank, home(other), forward}].push_back(value->second);
      return "";
    }
    Queue& queue = queues_[{home(other), rank, forward}];
    if (queue.empty()) return std::nullopt;
    auto& values = forward ? memory.inputs : memory.output_gradients;
    if (!values.emplace(pair, queue.front()).second) return "received twice";
    queue.pop_front();
    return "";
  }

  std::string judge() const {
    for (std::size_t rank = 0; rank < memories_.size(); ++rank) {
      if (next_[rank] < program_.actions[rank].size()) return "rank " + std::to_string(rank) + " waits for ever";
    }
    for (const auto& [ends, queue] : queues_) {
      if (!queue.empty()) return "a message is left";
    }
    std::multiset<int> all;
    for (int m = 0; m < program_.micro_batches; ++m) all.insert(m);
    for (int chunk = 0; chunk < program_.chunks(); ++chunk) {
      const Memory& memory = memories_[home(chunk)];
      const auto gradients = memory.gradients.find(chunk);
      if (gradients == memory.gradients.end() || gradients->second != all) return "gradients are missing";
      const auto reduced = memory.reduced.find(chunk);
      if (reduces_ && (reduced == memory.reduced.end() || reduced->second != all)) return "gradients are not reduced";
    }
    for (const Memory& memory : memories_) {
      if (!memory.whole.empty()) return "parameters are left";
      if (!memory.away.empty()) return "activations are left on the host";
      if (memory.steps != (steps_ ? 1 : 0)) return "a step is missing";
    }
    return "";
  }

  const StepProgram& program_;
  std::vector<Memory> memories_;
  std::vector<std::size_t> next_;
  std::map<std::tuple<std::size_t, std::size_t, bool>, Queue> queues_{};
  std::set<int> sharded_{};
  bool reduces_ = false;
  bool steps_ = false;
};

}  // namespace

std::string run_by_queues(const StepProgram& program) {
  return Executor(program).run();
}

}  // namespace zeroth::test
