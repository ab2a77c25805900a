// GradientStore: from local gradients to this rank's reduced shard.
//
//   grad_ready -> bucket slot --publish--> GradientExchange: the sum of all ranks, in rank order -> reduced shard
//
// A bucket is published when all expected parameters of its unit have fired, when the unit's backward is over without
// some of them, when its slot's ring position is needed by another unit, or at the end of backward; what has no
// gradient is zero. A later arrival opens a further event of the same backward.
//
// The list of events does not depend on the plan, and each sum is formed in rank order: ((g0 + g1) + g2) ..., then
// added to what earlier events of the step left. Hence the same bits under every plan.
//
// Where peers read each other's memory (Capabilities::one_sided), a rank may take another path through the model than
// the others: what it does not touch counts as zero. Elsewhere every reduction is a matched call: a parameter may be
// left out, and a path through other units is kMismatch by name.
#pragma once

#include "zero/model_memory.h"

#include <kernels/norm/norm.h>
#include <zeroth/base/tensor_view.h>
#include <zeroth/comm/backend.h>
#include <zeroth/device/device.h>
#include <zeroth/zero/kernel_context.h>
#include <zeroth/zero/sync_point.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth {

/// First non-finite local gradient of a step.
struct Offender {
  int param = -1;  ///< -1: none
  std::int64_t micro_step = 0;
  std::uint64_t count = 0;  ///< non-finite elements of that gradient
};

class GradientExchange;
class ReducedShards;

class GradientStore {
 public:
  GradientStore(const ModelLayout& model, const ShardingPlan& plan, int micro_steps, ModelMemory& memory,
                CommBackend& backend, Stream reduce_stream, KernelContext kernels, MemoryLedger& ledger);
  GradientStore(const GradientStore&) = delete;
  GradientStore& operator=(const GradientStore&) = delete;
  ~GradientStore();

  /// A gradient of a whole parameter has arrived: `grad` is dense, in accumulation dtype or the parameter's own. It is
  /// copied (or added, if the parameter's bucket already holds one) before this returns. May wait for a slot. In
  /// accumulation dtype, or added, it makes a 16-bit bucket (bucket_dtypes()) a wide one for this event, beyond the
  /// plan.
  void add(int param, ConstTensorView grad);
  /// All expected gradients of the unit have arrived: publishes its bucket. Nothing to do if the bucket is not open.
  void close_unit(int unit);
  /// No more comes of the unit for now, though not all that was expected has: publishes its bucket, with zeros for what
  /// is missing, also where nothing has come of a flat in this backward that has an expected parameter (one a parameter
  /// of the model).
  void end_unit(int unit, const std::vector<bool>& expected);
  /// End of backward: publishes what is open, and that nothing more comes. Does not wait for peers.
  void close_backward();
  /// Instead of add(), where reductions are matched calls: this rank's part in the flat's, with what it has of earlier
  /// micro-steps or zeros.
  void take_part(int flat);
  /// Called with the flat before each matched call for a bucket, and not where reads_peers().
  void set_before_reduce(std::function<void(int flat)> hook) { before_reduce_ = std::move(hook); }
  /// Which of the step's micro-steps (from 0) is running; with reduction per step only the last one publishes.
  void set_micro_step(int micro_step) { micro_step_ = micro_step; }

  /// Blocks until all ranks have come to this call, and reduces meanwhile: a rank that is still in backward may need
  /// this one to take its gradients. Comes before every matched call but that of complete(), which has its own. Throws
  /// kMismatch if another rank comes to another call. `name` is the caller's, for errors; where calls are matched it is
  /// compared, too.
  void sync(SyncPoint what, std::string_view name = {});
  /// Blocks until every reduction event of all closed backwards has arrived in the reduced shards. Ends the step's
  /// accumulation: the next event stores instead of adding.
  void complete();
  /// After complete(), where gradients are replicated: makes every rank's reduced shards readable through
  /// ModelMemory::peer_reduced(). Collective, blocks.
  void share_sums();
  /// Call after the update: forgets which parameters have a gradient, and offenders.
  void begin_step();

  /// The ranks that sum a micro-step read each other's gradients; else they make matched calls.
  [[nodiscard]] bool reads_peers() const { return memory_.are_local(memory_.degrees().gradient); }
  /// Whether any gradient of the parameter arrived on this rank since begin_step().
  [[nodiscard]] bool has_grad(int param) const { return has_grad_[static_cast<std::size_t>(param)]; }
  /// Whether this rank's reduced shard of the flat holds the sums of this step (valid after complete()).
  [[nodiscard]] bool has_sums(int flat) const;
  /// Sum of squares of the flat's reduced shard, each times the flat's grad_factor (valid after complete(), if
  /// has_sums()).
  [[nodiscard]] const kernels::NormAccumulator& norm(int flat) const;
  [[nodiscard]] const Offender& offender() const { return offender_; }
  /// The first parameter whose gradient did not fit its 16-bit bucket, -1.
  [[nodiscard]] int first_wide() const { return first_wide_; }
  /// Buckets of other ranks that were copied aside because ranks stood in each other's way.
  [[nodiscard]] std::uint64_t spills() const;
  /// Control blocks and staging of groups inside the backend's.
  [[nodiscard]] std::size_t transport_bytes() const;

 private:
  struct FlatState {
    bool open = false;               ///< the bucket holds gradients that are not published
    bool published = false;          ///< in this step
    std::uint64_t published_in = 0;  ///< number of the backward of the last event, from 1
    DType dtype = DType::kFloat32;   ///< of the open bucket
    std::vector<bool> filled{};      ///< one a segment: the bucket holds a gradient of it
  };

  void open(int flat);
  /// Moves the open bucket to memory beyond the plan, in the accumulation dtype.
  void widen(int flat);
  void publish(int flat);
  /// Blocks until nobody needs what lies in the unit's bucket slot; sums that lie there make room.
  void take_slot(int unit);
  [[nodiscard]] bool publishes_now() const;
  FlatState& state(int flat) { return flats_[static_cast<std::size_t>(flat)]; }

  const ModelLayout& model_;
  const ShardingPlan& plan_;
  int micro_steps_;
  ModelMemory& memory_;
  KernelContext kernels_;
  std::vector<int> slot_holder_;  ///< unit whose bucket, published or not, or whose sums may still lie in the slot, -1
  std::unique_ptr<ReducedShards> shards_;
  std::unique_ptr<GradientExchange> exchange_;
  std::vector<FlatState> flats_;
  std::vector<int> ring_positions_;
  std::vector<int> ring_open_;  ///< unit with an open bucket at each ring position, -1
  std::vector<int> trainable_flats_;
  std::vector<bool> has_grad_;
  std::function<void(int flat)> before_reduce_;
  Offender offender_;
  int first_wide_ = -1;
  bool reduced_before_ = false;  ///< an earlier backward of this step had reductions
  std::uint64_t backward_ = 0;   ///< step << 20 | backward within the step
  int micro_step_ = 0;
};

}  // namespace zeroth
