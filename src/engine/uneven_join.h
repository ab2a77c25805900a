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
  /// On a rank with a batch, while some have none. Collective, blocks. Throws kMismatch where ranks with a batch do not
  /// say the same.
  void announce(Announcement next);
  /// On a rank that is out: what the others say. After kBatch and kNoBatch, which stand for some and for none have one,
  /// out() is anew.
  [[nodiscard]] Announcement listen();
  /// Nobody is out any more: an epoch is over, or given up.
  void end();

 private:
  [[nodiscard]] Announcement hold(Announcement own);
  [[nodiscard]] std::string describe(Announcement said) const;

  const Communicator& communicator_;
  const ModelLayout& model_;
  std::function<void()> sync_;
  std::vector<std::uint8_t> out_;
  int num_out_ = 0;
};

}  // namespace zeroth
