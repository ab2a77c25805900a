// UnevenJoin: how ranks that have run out of batches take part in what the others do.
//
// Before each batch every rank says whether it has another one. While some have none, the others say before each call
// in which all must take part which one comes: one small all_gather a call. Ranks without a batch do nothing but
// listen, and make that call with nothing of their own. As Horovod's join (docs/papers.md), for sharded parameters.
#pragma once

#include "engine/operation_table.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/zero/model_layout.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

/// What a rank says comes next.
struct Announcement {
  OperationId call{};
  int subject = -1;  ///< see Operation::Subject
  [[nodiscard]] bool operator==(const Announcement&) const = default;
};

class UnevenJoin {
 public:
  /// What ranks say before each batch: that they have one, or none.
  struct BatchCalls {
    OperationId batch{};
    OperationId no_batch{};
  };

  /// `sync` comes before each round: see Engine::sync(). All references outlive this.
  UnevenJoin(const Communicator& communicator, const ModelLayout& model, const OperationTable& operations,
             BatchCalls calls, std::function<void()> sync)
      : communicator_(communicator),
        model_(model),
        operations_(operations),
        calls_(calls),
        sync_(std::move(sync)),
        out_(static_cast<std::size_t>(communicator.size()), 0) {}

  /// Ranks without a batch, since the last round before a batch.
  [[nodiscard]] std::vector<int> out() const;
  [[nodiscard]] int num_out() const { return num_out_; }
  [[nodiscard]] bool is_out() const { return out_[static_cast<std::size_t>(communicator_.rank())] != 0; }

  /// Collective, blocks. Every rank is here: none is out. Says which ranks are from now on. Throws kMismatch.
  void begin_batch(bool has_batch);
  /// What this rank does next. Where it has a batch and some have none, they hear it: collective, blocks. Throws
  /// kMismatch where ranks with a batch do not say the same, and kUsage for what a rank without one cannot take part
  /// in.
  void announce(OperationId call, int subject = -1);
  /// Once a batch.
  void announce_backward(OperationId backward);
  /// Another batch, or step, begins.
  void forget_backward() { backward_announced_ = false; }
  /// Throws kUsage for what a rank without a batch cannot take part in.
  void require_joinable(OperationId call) const;
  /// On a rank that is out: what the others say; none if all listen. After the calls before a batch, which stand for
  /// some and for none have one, out() is anew.
  [[nodiscard]] std::optional<Announcement> listen();
  /// Nobody is out any more: an epoch is over, or given up.
  void end();

  /// This rank takes part in a micro-step for which it has no batch.
  void count_joined() { ++joined_; }
  /// Micro-steps of this step in which this rank had no batch.
  [[nodiscard]] int joined() const { return joined_; }
  [[nodiscard]] int take_joined() { return std::exchange(joined_, 0); }

 private:
  /// `own`: none on a rank that listens.
  [[nodiscard]] std::optional<Announcement> hold(std::optional<Announcement> own);
  [[nodiscard]] bool between_batches(Announcement said) const {
    return said.call == calls_.batch || said.call == calls_.no_batch;
  }
  [[nodiscard]] std::string describe(Announcement said) const;

  const Communicator& communicator_;
  const ModelLayout& model_;
  const OperationTable& operations_;
  BatchCalls calls_;
  std::function<void()> sync_;
  std::vector<std::uint8_t> out_;
  int num_out_ = 0;
  bool backward_announced_ = false;  ///< of this batch
  int joined_ = 0;
};

/// Throws kMismatch: `out` have no batch left after step `step`, the others have.
[[noreturn]] void throw_uneven(const std::vector<int>& out, std::int64_t step, const Communicator& communicator);

}  // namespace zeroth
