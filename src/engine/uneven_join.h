// UnevenJoin: how ranks that have run out of batches take part in what the others do.
//
// Before each batch every rank says whether it has another one. While some have none, the others say before each call
// in which all must take part which one comes: one small all_gather a call. Ranks without a batch do nothing but
// listen, and make that call with nothing of their own. As Horovod's join (docs/papers.md), for sharded parameters.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/zero/model_layout.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

/// What a rank says comes next. Those from kEpoch on: what all do next.
enum class NextCall : std::uint8_t {
  kListen,
  kBatch,
  kNoBatch,
  kEpoch,
  kGather,
  kReduce,
  kBackward,
  kStep,
  kDiscard,
  kAverage,
  kBarrier,
  kBuffers,
  kExport,
  kClose
};

struct Announcement {
  NextCall call = NextCall::kListen;
  int what = -1;  ///< unit of kGather, flat of kReduce, digest of a barrier's name
  [[nodiscard]] bool operator==(const Announcement&) const = default;
};

class UnevenJoin {
 public:
  /// `sync` comes before each round: see Engine::sync(). Both outlive this.
  UnevenJoin(const Communicator& communicator, const ModelLayout& model, std::function<void()> sync)
      : communicator_(communicator),
        model_(model),
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
  void announce(NextCall call, int what = -1);
  /// Once a batch.
  void announce_backward();
  /// Another batch, or step, begins.
  void forget_backward() { backward_announced_ = false; }
  /// Throws kUsage for what a rank without a batch cannot take part in.
  void require_joinable(NextCall call) const;
  /// On a rank that is out: what the others say. After kBatch and kNoBatch, which stand for some and for none have one,
  /// out() is anew.
  [[nodiscard]] Announcement listen();
  /// Nobody is out any more: an epoch is over, or given up.
  void end();

  /// This rank takes part in a micro-step for which it has no batch.
  void count_joined() { ++joined_; }
  /// Micro-steps of this step in which this rank had no batch.
  [[nodiscard]] int take_joined() { return std::exchange(joined_, 0); }

 private:
  [[nodiscard]] Announcement hold(Announcement own);
  [[nodiscard]] std::string describe(Announcement said) const;

  const Communicator& communicator_;
  const ModelLayout& model_;
  std::function<void()> sync_;
  std::vector<std::uint8_t> out_;
  int num_out_ = 0;
  bool backward_announced_ = false;  ///< of this batch
  int joined_ = 0;
};

/// Throws kMismatch: `out` have no batch left after step `step`, the others have.
[[noreturn]] void throw_uneven(const std::vector<int>& out, std::int64_t step, const Communicator& communicator);

}  // namespace zeroth
