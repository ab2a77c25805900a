#include <zeroth/device/memory.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace zeroth {

std::string_view name_of(MemoryState state) noexcept {
  switch (state) {
    case MemoryState::kParameter:
      return "parameters";
    case MemoryState::kMaster:
      return "masters";
    case MemoryState::kOptimizer:
      return "optimizer";
    case MemoryState::kBucket:
      return "buckets";
    case MemoryState::kReduced:
      return "reduced";
    case MemoryState::kGathered:
      return "gathered";
    case MemoryState::kOverflow:
      return "overflow";
    case MemoryState::kControl:
      return "control";
    case MemoryState::kStaging:
      return "staging";
    case MemoryState::kOther:
      return "other";
  }
  return "other";
}

std::uint64_t MemorySnapshot::total() const {
  return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
}

MemoryHold::MemoryHold(std::shared_ptr<MemoryLedger> ledger, Tag tag, std::size_t bytes)
    : ledger_(std::move(ledger)), tag_(tag), bytes_(bytes) {
  ledger_->acquire(tag_, bytes_);
}

MemoryHold::MemoryHold(MemoryHold&& other) noexcept
    : ledger_(std::move(other.ledger_)), tag_(other.tag_), bytes_(std::exchange(other.bytes_, 0)) {}

MemoryHold& MemoryHold::operator=(MemoryHold&& other) noexcept {
  if (this != &other) {
    release();
    ledger_ = std::move(other.ledger_);
    tag_ = other.tag_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

MemoryHold::~MemoryHold() {
  release();
}

void MemoryHold::release() noexcept {
  if (ledger_) ledger_->release(tag_, bytes_);
  ledger_.reset();
  bytes_ = 0;
}

void MemoryLedger::acquire(Tag tag, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto state = static_cast<std::size_t>(tag.state);
  live_.bytes[state] += bytes;
  state_peaks_.bytes[state] = std::max(state_peaks_.bytes[state], live_.bytes[state]);
  if (live_.total() > at_peak_.total()) at_peak_ = live_;
}

void MemoryLedger::release(Tag tag, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  live_.bytes[static_cast<std::size_t>(tag.state)] -= bytes;
}

MemorySnapshot MemoryLedger::live() const {
  const std::lock_guard lock(mutex_);
  return live_;
}

MemorySnapshot MemoryLedger::at_peak() const {
  const std::lock_guard lock(mutex_);
  return at_peak_;
}

MemorySnapshot MemoryLedger::state_peaks() const {
  const std::lock_guard lock(mutex_);
  return state_peaks_;
}

void MemoryLedger::reset_peak() {
  const std::lock_guard lock(mutex_);
  at_peak_ = live_;
  state_peaks_ = live_;
}

}  // namespace zeroth
