// GradientExchange: how the buckets that ranks publish become reduced shards. Two ways, by the capability of the
// transport among the ranks that sum a micro-step: one_sided_exchange.cpp where they read each other's memory,
// matched_exchange.cpp where they make collectives. The same sums in the same order, so the same bits.
#pragma once

#include "zero/gradient_store.h"
#include "zero/reduced_shards.h"

#include <zeroth/comm/backend.h>
#include <zeroth/device/device.h>

#include <cstdint>
#include <memory>

namespace zeroth {

class GradientExchange {
 public:
  GradientExchange() = default;
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;
  virtual ~GradientExchange() = default;

  /// Blocks until nobody needs what `unit` has published in its bucket slot. `skip(flat)` is true for flats that have
  /// published nothing which still lies there.
  virtual void await_slot(int unit, const std::function<bool(int flat)>& skip) = 0;
  /// The flat's bucket, that of `dtype`, is full: everybody may take it. One reduction event. Other ranks' may have
  /// another dtype.
  /// `last`: this rank publishes the flat no more in this step.
  virtual void publish(int flat, DType dtype, bool last) = 0;
  /// `hook` is called before this rank blocks for memory or words of others; never by matched exchanges.
  virtual void set_before_wait(std::function<void()> hook) = 0;
  /// A good moment to take what has been published: a unit is closed.
  virtual void progress() = 0;
  /// This rank publishes nothing more in its backwards before number `next`.
  virtual void close_backward(std::uint64_t next) = 0;
  /// See GradientStore::sync().
  virtual void sync(OperationId what, std::string_view name) = 0;
  /// Blocks until this rank has the sums of all backwards before number `next`, of all ranks or those of its sub-group.
  virtual void await_sums(std::uint64_t next) = 0;
  /// After that, with sums at ModelMemory::micro_step_sums(): blocks until this rank's shards hold those of all
  /// sub-groups of ranks. Nobody changes his before the commit vote.
  virtual void combine_sums(std::uint64_t next) = 0;
  /// Replicated gradients: makes all shards readable through ModelMemory::peer_reduced().
  virtual void share_sums() = 0;
  /// Whether all sums that this rank's update reads are final and where update and peers read them. Never blocks. Only
  /// events that were published as the last of their ranks make it true before await_sums().
  [[nodiscard]] virtual bool are_final(int flat) = 0;
  virtual void begin_step() = 0;
  /// Sums of earlier events of the step came from elsewhere: they are at ModelMemory::micro_step_sums().
  virtual void restored(int flat) = 0;
  [[nodiscard]] virtual std::uint64_t spills() const = 0;
  /// Control blocks and staging of groups inside the backend's.
  [[nodiscard]] virtual std::size_t transport_bytes() const = 0;
};

/// What both ways work on; all outlive the exchange.
struct ExchangeContext {
  const ModelLayout& model;
  ModelMemory& memory;
  CommBackend& backend;
  Stream reduce_stream;
  MemoryLedger& ledger;
  ReducedShards& shards;
  Kernels& kernels;
  const OperationNames& operations;  ///< for errors; may be empty
};

[[nodiscard]] std::unique_ptr<GradientExchange> make_one_sided_exchange(const ExchangeContext& context);
[[nodiscard]] std::unique_ptr<GradientExchange> make_matched_exchange(const ExchangeContext& context);

}  // namespace zeroth
