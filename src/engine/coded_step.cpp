#include "engine/coded_step.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/engine.h>

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <utility>

namespace zeroth {

CodedStep::CodedStep(const Communicator& job, int stragglers)
    : code_(gradient_code(job.size(), stragglers)),
      ranks_(std::shared_ptr<CommBackend>(job.backend().split(0, job.rank(), "gradient code"))),
      received_(static_cast<std::size_t>(job.size()), kUnknown),
      known_(received_),
      receiving_(received_.size()) {}

CodedStep::~CodedStep() {
  if (std::uncaught_exceptions() > 0) return;
  for (const auto& one : receiving_) {
    try {
      if (one && own_ != kUnknown) one->wait();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the job has ended
    }
  }
}

std::vector<int> CodedStep::chunks() const {
  std::vector<int> chunks;
  for (const CodedChunk& one : code_.rows[static_cast<std::size_t>(ranks_.rank())]) chunks.push_back(one.chunk);
  return chunks;
}

void CodedStep::begin() {
  if (std::exchange(begun_, true)) return;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    if (rank != ranks_.rank())
      receiving_[place] = ranks_.start_recv(std::span(&received_[place], 1), rank, {.unit = -1, .label = step_});
  }
}

bool CodedStep::has_all(int& missing) const {
  for (int first = 0; first < code_.workers; first += code_.stragglers + 1) {
    const auto begin = known_.begin() + first;
    if (std::find(begin, begin + code_.stragglers + 1, std::uint8_t{kComplete}) != begin + code_.stragglers + 1)
      continue;
    missing = first;
    return false;
  }
  return true;
}

bool CodedStep::is_decided() {
  if (decided_) return true;
  begin();
  for (std::size_t rank = 0; rank < known_.size(); ++rank) {
    if (known_[rank] == kUnknown && receiving_[rank] && receiving_[rank]->done()) known_[rank] = received_[rank];
  }
  int missing = -1;
  return decided_ = has_all(missing);
}

void CodedStep::announce(bool complete) {
  begin();
  own_ = complete ? kComplete : kLeftOut;
  known_[static_cast<std::size_t>(ranks_.rank())] = own_;
  std::vector<Collective> sends;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (rank != ranks_.rank())
      sends.push_back(
          Communicator::send_call(std::span<const std::uint8_t>(&own_, 1), rank, {.unit = -1, .label = step_}));
  }
  if (!sends.empty()) sending_ = ranks_.start(sends);
}

CodedStep::Summed CodedStep::end() {
  ZR_ASSERT(own_ != kUnknown, "a step of a gradient code ends after this rank has announced");
  for (std::size_t rank = 0; rank < known_.size(); ++rank) {
    if (!receiving_[rank]) continue;
    receiving_[rank]->wait();
    known_[rank] = received_[rank];
  }
  if (sending_) sending_->wait();
  Summed summed;
  if (has_all(summed.missing)) {
    for (int first = 0; first < code_.workers; first += code_.stragglers + 1) {
      const auto found = std::find(known_.begin() + first, known_.end(), std::uint8_t{kComplete});
      summed.own = summed.own || found - known_.begin() == ranks_.rank();
    }
  }
  for (int rank = 0; rank < code_.workers; ++rank) {
    if (known_[static_cast<std::size_t>(rank)] == kLeftOut) summed.left_out.push_back(rank);
  }
  for (auto& one : receiving_) one.reset();
  sending_.reset();
  std::ranges::fill(known_, std::uint8_t{kUnknown});
  own_ = kUnknown;
  begun_ = decided_ = false;
  ++step_;
  return summed;
}

void require_code_fits(const EngineSettings& settings, int world, int data_ranks, bool has_messages) {
  const int share = settings.stragglers + 1;
  const auto refuse = [&](const std::string& what, const std::string& expected, const std::string& got,
                          const char* hint) {
    throw Error(ErrorCode::kConfig, what,
                {.where = "engine",
                 .which = "/zeroth/gradient_code/stragglers, " + std::to_string(settings.stragglers),
                 .expected = expected,
                 .got = got,
                 .hint = hint});
  };
  if (settings.stragglers < 0 || world % share != 0) {
    refuse("ranks do not make whole groups with the same chunks of a batch",
           "a number of ranks that " + std::to_string(share) + " divides", std::to_string(world) + " ranks",
           "of each stragglers + 1 ranks all but one may be late");
  }
  if (settings.micro_steps != share) {
    refuse("a rank has one micro-step for each chunk of its gradient code", std::to_string(share) + " micro-steps",
           std::to_string(settings.micro_steps), "set gradient_accumulation_steps to stragglers + 1");
  }
  if (data_ranks != world) {
    refuse("ranks that compute on one batch together cannot be late alone", "ranks with batches of their own",
           std::to_string(data_ranks) + " batches on " + std::to_string(world) + " ranks",
           "leave out tensor, sequence and pipeline parallelism");
  }
  if (settings.shard_groups.size() > 1) {
    refuse("groups of parameters of their own beside a gradient code", "one group of all ranks",
           std::to_string(settings.shard_groups.size()), "");
  }
  if (settings.plan.gathers_parameters()) {
    refuse("parameters are gathered in each micro-step, also by ranks that leave some out", "ZeRO stage 0, 1 or 2",
           settings.plan.name, "");
  }
  if (has_messages || settings.plan.codes.any()) {
    refuse("lossy sums of gradients beside a gradient code, which is exact",
           "an optimizer that sums gradients as they are",
           has_messages ? settings.optimizer.type : "zero_quantized_gradients", "");
  }
  if (settings.update.inside_backward || settings.update.delayed_after) {
    refuse("an update before all ranks know whose gradients count", "neither inside_backward nor delayed_after", "",
           "");
  }
  if (settings.uneven == Uneven::kJoin) {
    refuse("ranks without a batch beside a gradient code", "zeroth.uneven = error or drop", "join", "");
  }
}

void throw_none_complete(int first, const EngineSettings& settings, int world) {
  throw Error(ErrorCode::kUsage, "no rank of some that have the same micro-batches has run all of them",
              {.where = "engine.step",
               .who = "ranks " + std::to_string(first) + " to " + std::to_string(first + settings.stragglers) + " of " +
                      std::to_string(world),
               .expected = std::to_string(settings.micro_steps) + " micro-steps on one of them",
               .hint = "call backward() and step() for each of Engine::chunks(), until a result is a boundary"});
}

}  // namespace zeroth
