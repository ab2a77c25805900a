// KeptCalls: a region of a model that is computed again in backward makes its calls between ranks once.
//
//   KeptCalls kept;
//   { const auto scope = kept.record();    y = layer(x); }    first forward: calls as always, and their results are
//   kept { const auto scope = kept.hand_out();  y = layer(x); }    recompute: the kept results, and no call
//
// In both y has the same bits and the same backward. It serves all calls of collectives.h and those made of them:
// TokenExchange, the layers of tensor_parallel.h, PendingSum, ring_shift(). Calls of a backward are made as always. A
// checkpointed layer of experts has three all_to_all in its forward, three in its recompute and two in its backward;
// with kept calls there is none in the recompute: 8 -> 5.
//
// It costs the memory of the results until the recompute takes them: for a layer of experts 2 elements of D for each
// row that this rank receives, and its counts. A result is handed out once, in the order of the calls; then nothing
// holds it here. What a recompute that ends early has not taken is dropped at the scope's end. A region that is
// recomputed a second time (retain_graph) makes its calls.
//
// The recompute makes the same calls in the same order. Else it throws kMismatch with both calls, before any rank is
// called; likewise if a kept result was written to in place since. Scopes are of their thread, and end in the reverse
// order of their beginning. Regions may be nested: a call is kept for each region around it that records.
//
// Ref: Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training", 2023,
// section 5.2 (communication-aware checkpointing).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace zeroth::libtorch {

class KeptCalls {
 public:
  struct Region;  ///< the results of one region
  /// Ends what began it. The thread that made it destroys it.
  class Scope {
   public:
    Scope(std::shared_ptr<Region> region, bool hands_out);
    ~Scope();
    Scope(Scope&& other) noexcept = default;
    Scope& operator=(Scope&&) = delete;
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::shared_ptr<Region> region_;  ///< null: it has been moved from
  };

  KeptCalls();
  /// Calls of this thread are kept from here on. Drops what was kept before.
  [[nodiscard]] Scope record() const;
  /// Calls of this thread get the kept results, until the scope ends. The second time it does nothing.
  [[nodiscard]] Scope hand_out() const;
  /// Results that are kept, and their bytes.
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::int64_t bytes() const;

 private:
  std::shared_ptr<Region> region_;
};

/// True in a scope of hand_out() of this thread: what a layer counts or draws in its forward, it has done.
[[nodiscard]] bool hands_out_calls();

}  // namespace zeroth::libtorch
