// Ranks as threads: memory is handed over as pointers, through a hub that all ranks share.
#pragma once

#include "comm/shm/segment_exchange.h"

#include <zeroth/comm/factory.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace zeroth {

class InprocHub {
 public:
  explicit InprocHub(int world_size) : world_size_(world_size) {}

  [[nodiscard]] int world_size() const { return world_size_; }
  /// Throws kMismatch if the rank has already been taken.
  void claim(int rank);
  /// Waits until all `size` ranks have brought their item under `key`, and gives all of them.
  [[nodiscard]] std::vector<detail::SharedSpan> gather(const std::string& key, int rank, int size,
                                                       detail::SharedSpan item, detail::FunctionRef<void()> check);

 private:
  struct Meeting {
    std::vector<std::optional<detail::SharedSpan>> items{};
    int arrived = 0;
    int left = 0;
  };
  int world_size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> claimed_ = std::vector<bool>(static_cast<std::size_t>(world_size_));
  std::map<std::string, Meeting> meetings_;
};

namespace detail {

class InprocExchange final : public SegmentExchange {
 public:
  InprocExchange(std::shared_ptr<InprocHub> hub, std::string token, int rank, int size);

  [[nodiscard]] std::string_view kind() const override { return "inproc"; }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.one_sided = true, .window_kind = ArenaKind::kPrivate, .separate_processes = false};
  }
  [[nodiscard]] std::vector<SharedSpan> exchange(const Arena& arena, FunctionRef<void()> check) override;
  [[nodiscard]] std::unique_ptr<SegmentExchange> split(const SubgroupSpec& spec, FunctionRef<void()> check) override;
  [[nodiscard]] std::unique_ptr<Liveness> watch(const std::vector<JobControl*>& controls) override;

 private:
  std::shared_ptr<InprocHub> hub_;
  std::string token_;
  int rank_;
  int size_;
  std::uint64_t meetings_ = 0;
};

}  // namespace detail
}  // namespace zeroth
