// Ranks as processes of one host: memory is handed over as sealed memfds, through rank 0 of the group.
#pragma once

#include "comm/rendezvous/rendezvous.h"
#include "comm/shm/segment_exchange.h"

#include <zeroth/comm/factory.h>

#include <memory>
#include <string>

namespace zeroth::detail {

class ShmExchange final : public SegmentExchange {
 public:
  /// Blocks until all ranks are there.
  ShmExchange(RendezvousSpec spec, CommOptions options, std::shared_ptr<SystemCalls> system, FunctionRef<void()> check);

  [[nodiscard]] std::string_view kind() const override { return "shm"; }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.one_sided = true, .window_kind = ArenaKind::kShared, .separate_processes = true};
  }
  [[nodiscard]] std::vector<SharedSpan> exchange(const Arena& arena, FunctionRef<void()> check) override;
  [[nodiscard]] std::unique_ptr<SegmentExchange> split(const SubgroupSpec& spec, FunctionRef<void()> check) override;
  [[nodiscard]] std::unique_ptr<PrivateMemory> private_memory() const override {
    return std::make_unique<PrivateMemory>(rendezvous_.pids, system_);
  }
  [[nodiscard]] std::unique_ptr<Liveness> watch(const std::vector<JobControl*>& controls) override;

 private:
  struct Offers;
  [[nodiscard]] Offers collect(const Arena& arena, FunctionRef<void()> check);
  [[nodiscard]] Offers offer(const Arena& arena, FunctionRef<void()> check);
  [[noreturn]] void lost(int rank) const;

  RendezvousSpec spec_;
  CommOptions options_;
  std::shared_ptr<SystemCalls> system_;
  Rendezvous rendezvous_;
};

/// Tries memfd_create and pidfd_open: what the kernel or container refuses, if anything.
[[nodiscard]] Refusal probe_system_calls(SystemCalls& system);

}  // namespace zeroth::detail
