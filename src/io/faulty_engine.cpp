#include "io/engine.h"
#include "io/memory.h"

#include <zeroth/io/faults.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace zeroth {

IoFaults::IoFaults(std::vector<IoFault> faults, std::uint64_t seed)
    : faults_(std::move(faults)), state_(seed * 0x9e3779b97f4a7c15U + 1) {}

/// xorshift64*
std::uint64_t IoFaults::draw(std::uint64_t bound) {
  state_ ^= state_ >> 12U;
  state_ ^= state_ << 25U;
  state_ ^= state_ >> 27U;
  return (state_ * 0x2545f4914f6cdd1dU >> 16U) % bound;
}

const IoFault* IoFaults::next() {
  ++transfers_;
  constexpr std::uint64_t kParts = 1'000'000;
  for (const IoFault& fault : faults_) {
    const bool hit = fault.at > 0 ? fault.at == transfers_
                                  : draw(kParts) < static_cast<std::uint64_t>(fault.probability * double{kParts});
    if (!hit) continue;
    ++counts_[static_cast<std::size_t>(fault.kind)];
    return &fault;
  }
  return nullptr;
}

namespace detail {
namespace {

constexpr std::size_t kBlock = 4096;

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<IoFaults> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}

  std::string_view name() const override { return inner_->name(); }
  int depth() const override { return inner_->depth(); }

  std::size_t start(std::span<const Transfer> transfers) override {
    std::size_t taken = 0;
    for (const Transfer& transfer : transfers) {
      const IoFault* const fault = faults_->next();
      if (fault != nullptr && fault->kind == IoFaultKind::kRefuse) break;
      if (fault != nullptr && fault->kind == IoFaultKind::kErrno) {
        held_.push_back({.end = {.id = transfer.id, .result = -fault->error_number}, .due = SteadyClock::now()});
      } else if (!pass_on(transfer, fault)) {
        break;
      }
      ++taken;
    }
    return taken;
  }

  std::size_t reap(std::span<TransferEnd> ends, Milliseconds wait) override {
    const Deadline deadline(wait);
    for (;;) {
      std::size_t found = take_held(ends);
      const Milliseconds pause =
          found > 0 || wait.count() == 0 ? Milliseconds{0} : std::min(deadline.slice(), time_to_held());
      if (found < ends.size()) {
        const std::size_t more = inner_->reap(ends.subspan(found), pause);
        found += see(ends.subspan(found, more));
      }
      if (found > 0 || deadline.passed()) return found;
    }
  }

 private:
  struct Held {
    TransferEnd end{};
    SteadyClock::time_point due{};
  };
  struct Marked {
    Transfer transfer{};
    IoFaultKind kind = IoFaultKind::kFlip;
    Milliseconds delay{0};
    AlignedMemory copy{};  ///< what is written in place of the caller's bytes
  };

  [[nodiscard]] bool pass_on(Transfer transfer, const IoFault* fault) {
    if (fault == nullptr) return inner_->start({&transfer, 1}) == 1;
    if (fault->kind == IoFaultKind::kShort) {
      transfer.bytes =
          std::clamp(transfer.bytes / 2 / kBlock * kBlock, std::min(kBlock, transfer.bytes), transfer.bytes);
      return inner_->start({&transfer, 1}) == 1;
    }
    Marked marked{.transfer = transfer, .kind = fault->kind, .delay = fault->delay};
    if (fault->kind == IoFaultKind::kFlip && transfer.op == IoOp::kWrite) {
      marked.copy = AlignedMemory(transfer.bytes);
      std::memcpy(marked.copy.data(), transfer.data, transfer.bytes);
      flip({marked.copy.data(), transfer.bytes});
      transfer.data = marked.copy.data();
    }
    if (inner_->start({&transfer, 1}) != 1) return false;
    marked_.insert_or_assign(transfer.id, std::move(marked));
    return true;
  }

  void flip(std::span<std::byte> bytes) {
    const std::uint64_t bit = faults_->draw(8 * bytes.size());
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
  }

  /// Of what the inner engine has ended, what may be seen now comes to the front.
  [[nodiscard]] std::size_t see(std::span<TransferEnd> ends) {
    std::size_t seen = 0;
    for (const TransferEnd end : ends) {
      const auto found = marked_.find(end.id);
      if (found == marked_.end()) {
        ends[seen++] = end;
        continue;
      }
      const Marked& marked = found->second;
      if (marked.kind == IoFaultKind::kDelay) {
        held_.push_back({.end = {.id = end.id, .result = end.result}, .due = SteadyClock::now() + marked.delay});
      } else {
        if (marked.transfer.op == IoOp::kRead && end.result > 0)
          flip({marked.transfer.data, static_cast<std::size_t>(end.result)});
        ends[seen++] = end;
      }
      marked_.erase(found);
    }
    return seen;
  }

  [[nodiscard]] std::size_t take_held(std::span<TransferEnd> ends) {
    std::size_t found = 0;
    const auto now = SteadyClock::now();
    std::erase_if(held_, [&](const Held& held) {
      if (held.due > now || found == ends.size()) return false;
      ends[found++] = held.end;
      return true;
    });
    return found;
  }

  [[nodiscard]] Milliseconds time_to_held() const {
    Milliseconds time = kWaitSlice;
    for (const Held& held : held_) {
      const auto left = std::chrono::ceil<Milliseconds>(held.due - SteadyClock::now());
      time = std::clamp(left, Milliseconds{1}, time);
    }
    return time;
  }

  std::unique_ptr<IoEngine> inner_;
  std::shared_ptr<IoFaults> faults_;
  std::vector<Held> held_;
  std::map<std::uint64_t, Marked> marked_;
};

}  // namespace

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner, std::shared_ptr<IoFaults> faults) {
  return std::make_unique<FaultyEngine>(std::move(inner), std::move(faults));
}

}  // namespace detail
}  // namespace zeroth
