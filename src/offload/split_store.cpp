#include "offload/checks.h"

#include <zeroth/base/error.h>
#include <zeroth/offload/stores.h>

#include <utility>

namespace zeroth {
namespace {

class SplitStore final : public StateStore {
 public:
  SplitStore(std::unique_ptr<StateStore> first, std::unique_ptr<StateStore> second, const std::vector<bool>& in_second)
      : first_(std::move(first)), second_(std::move(second)) {
    int of_first = 0;
    int of_second = 0;
    for (const bool second_has_it : in_second)
      parts_.push_back({second_has_it ? second_.get() : first_.get(), second_has_it ? of_second++ : of_first++});
    ZR_CHECK(of_first == first_->num_blocks() && of_second == second_->num_blocks(), ErrorCode::kUsage,
             "two stores have other blocks than the table that splits them",
             {.where = "offload.split",
              .expected = std::to_string(of_first) + " and " + std::to_string(of_second),
              .got = std::to_string(first_->num_blocks()) + " and " + std::to_string(second_->num_blocks())});
  }

  [[nodiscard]] int num_blocks() const override { return static_cast<int>(parts_.size()); }
  bool prefetch(int block) override {
    const Part& part = part_of(block);
    return part.store->prefetch(part.block);
  }
  /// The lease is the part's: it goes back there.
  [[nodiscard]] StateLease acquire(int block, Access access) override {
    const Part& part = part_of(block);
    return part.store->acquire(part.block, access);
  }
  void flush() override {
    first_->flush();
    second_->flush();
  }
  [[nodiscard]] std::uint64_t resting_bytes(Tier tier) const override {
    return first_->resting_bytes(tier) + second_->resting_bytes(tier);
  }
  [[nodiscard]] std::string file_access() const override {
    return first_->file_access().empty() ? second_->file_access() : first_->file_access();
  }
  [[nodiscard]] std::uint64_t measured_file_bytes() const override {
    return first_->measured_file_bytes() + second_->measured_file_bytes();
  }
  [[nodiscard]] std::uint64_t slot_bytes() const override { return first_->slot_bytes() + second_->slot_bytes(); }
  [[nodiscard]] StoreCounters counters() const override {
    StoreCounters both = first_->counters();
    both += second_->counters();
    return both;
  }

 private:
  struct Part {
    StateStore* store;
    int block;
  };
  [[nodiscard]] const Part& part_of(int block) const { return parts_[offload::checked_block(block, parts_.size())]; }
  void give_back(int, Access) noexcept override {}  // no lease is its own

  std::unique_ptr<StateStore> first_;
  std::unique_ptr<StateStore> second_;
  std::vector<Part> parts_;
};

}  // namespace

std::unique_ptr<StateStore> make_split_store(std::unique_ptr<StateStore> first, std::unique_ptr<StateStore> second,
                                             const std::vector<bool>& in_second) {
  return std::make_unique<SplitStore>(std::move(first), std::move(second), in_second);
}

}  // namespace zeroth
