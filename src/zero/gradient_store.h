// GradientStore: reduces the local gradients of all ranks into this rank's reduced shard.
//
//   grad_ready -> bucket slot --publish--> GradientExchange: the sum of all ranks, in rank order -> reduced shard
//
// A bucket is published in one of four cases: all expected gradients of its unit have come; the unit's backward is over
// and some have not come; another unit needs the ring position of its slot; the backward ends. Missing gradients count
// as zero. A later gradient opens a further event of the same backward.
//
// The list of events does not depend on the plan. Each sum is formed in rank order, ((g0 + g1) + g2) ..., and then
// added to the sum of earlier events of the step. So the bits are the same under every plan.
//
// If ranks read each other's memory (Capabilities::one_sided), a rank may use other units than the others: gradients
// that it does not have count as zero. Otherwise every reduction is a collective: a rank may leave out parameters,
// but other units are kMismatch by name.
#pragma once

#include "zero/model_memory.h"

#include <kernels/norm/norm.h>
#include <zeroth/base/tensor_view.h>
#include <zeroth/comm/backend.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>
#include <zeroth/zero/operation_id.h>

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
  /// Borrows all references, which must outlive it. `host`: kernels of the host, see ReducedShards.
  GradientStore(const ModelLayout& model, const ShardingPlan& plan, int micro_steps, ModelMemory& memory,
                CommBackend& backend, Stream reduce_stream, Kernels& kernels, Kernels& host, MemoryLedger& ledger);
  GradientStore(const GradientStore&) = delete;
  GradientStore& operator=(const GradientStore&) = delete;
  ~GradientStore();

  /// Takes the gradient of a whole parameter: dense, in the accumulation dtype or the parameter's own. It is copied
  /// into the bucket, or added if the bucket already holds one, before this returns. May block for a bucket slot. If
  /// the gradient has the accumulation dtype, or is added, a 16-bit bucket (bucket_dtypes()) becomes a wide one for
  /// this event, beyond the plan.
  void add(int param, ConstTensorView grad);
  /// Publishes the unit's bucket, because all its expected gradients have come. Does nothing if the bucket is not open.
  /// `last`: they are the last of this rank in the step, on which other ranks may rely: add() throws kUsage for a
  /// further one. Not after steer().
  void close_unit(int unit, bool last = false);
  /// Closes the unit early: gradients still missing count as zero. A flat with an expected parameter is published even
  /// if none of its gradients has come in this backward. `expected`: one entry per parameter of the model.
  void end_unit(int unit, const std::vector<bool>& expected);
  /// Ends the backward: publishes all open buckets and the end of the backward. Waits for other ranks only where
  /// reductions are collectives.
  void close_backward();
  /// For matched reductions, instead of add(): takes part in the reduction of the flat with this rank's gradients of
  /// earlier micro-steps, or zeros. Blocks.
  void take_part(int flat);
  /// `hook` is called with the flat before each matched reduction of a bucket; never if reads_peers().
  void set_before_reduce(std::function<void(int flat)> hook) { before_reduce_ = std::move(hook); }
  /// `hook` is called before this rank blocks until others have taken or published gradients; only if reads_peers().
  void set_before_wait(std::function<void()> hook);
  /// `step`: the operation that complete() is part of; `names`: of all operations, for errors. Before the first sync().
  void set_operations(OperationId step, OperationNames names);
  /// Sets the running micro-step, from 0. With kPerStep only the last micro-step publishes.
  void set_micro_step(int micro_step) {
    find_offender();
    micro_step_ = micro_step;
  }

  /// From now on the caller says of each backward which units have all gradients of a micro-step after it, and which of
  /// them all of the step; the number of the micro-step says nothing any more. See Engine::steer().
  /// `at_end`: reductions wait for complete(), whatever the policy: ranks of several stages take part, which would wait
  /// for each other inside of their backwards; or it is not known yet whose gradients are summed. It needs
  /// ReductionPolicy::kPerStep and several micro-steps.
  void steer(bool at_end) {
    steered_ = true;
    at_end_ = at_end;
  }
  /// Before complete(), after steer(at_end): this rank's gradients of the step are zeros, finite ones.
  void leave_out();
  void begin_part(int micro_step);
  void add_to_part(int unit, bool last);

  /// Blocks until all ranks have come to this call, and reduces meanwhile, because a rank in backward may wait until
  /// this one has taken its gradients. It must come before every collective except complete(), which calls it itself.
  /// Throws kMismatch if another rank comes to another call. `name` is for errors; with collectives ranks compare it.
  void sync(OperationId what, std::string_view name = {});
  /// Blocks until all reduction events of all closed backwards are summed into the reduced shards. Collective. Further
  /// backwards of the step add to the sums, and it must be called again; but where sub-groups have joined their sums
  /// (Degrees::sums_groups()), add() throws kUsage until begin_step(), and a further call does nothing.
  void complete();
  /// Whether the sums of the flat that this rank's update reads are final, before complete(): all ranks have closed the
  /// unit with their last gradients, and the sums are where share_sums() would leave them. Takes what has been
  /// published. Never blocks for other ranks. False where it cannot be known before complete().
  [[nodiscard]] bool are_final(int flat);
  /// After complete(), if gradients are replicated: makes the reduced shards of all ranks readable through
  /// ModelMemory::peer_reduced(). Collective, blocks.
  void share_sums();
  /// Number of backwards that were closed. Ranks may differ inside a step.
  [[nodiscard]] std::uint64_t backwards() const { return backward_; }
  /// Between micro-steps: blocks until this rank has the sums of all backwards before number `backwards`, the most that
  /// any rank has closed, and closes its own up to there. After a sync().
  void complete_backwards(std::uint64_t backwards);
  /// What a step has gathered so far, between micro-steps and after complete_backwards(): sums over the ranks (this
  /// rank's ModelMemory::micro_step_part(), in the accumulation dtype), null where there are none; and gradients of
  /// this rank that no event has taken yet (ReductionPolicy::kPerStep): where in the bucket, in `dtype`.
  [[nodiscard]] std::byte* sums_so_far(int flat);
  struct Waiting {
    const std::byte* data = nullptr;
    DType dtype = DType::kFloat32;
  };
  [[nodiscard]] Waiting waiting(int param);
  /// Puts back what an earlier engine had: `has_grad` one a parameter; sums that were written to restore_sums().
  [[nodiscard]] std::byte* restore_sums(int flat);
  void restored(const std::vector<bool>& has_grad, const std::vector<int>& flats);

  /// From this step on gradients stay with their rank, in its buckets, whose dtype must be that of sums: nothing is
  /// reduced, and has_sums() is false. Between steps; the same on all ranks.
  void keep_own(bool keeps) { keeps_own_ = keeps; }
  /// After complete(), with keep_own(): this rank's gradients of the flat, its padding and missing ones zero.
  [[nodiscard]] const std::byte* own_gradients(int flat);
  /// Adds the squares of all of them, each times its flat's grad_factor and `factor`.
  void add_own_norm(kernels::NormAccumulator& norm, double factor);

  /// Call it after the update: forgets which parameters have a gradient, and the offender.
  void begin_step();

  /// True if the ranks that sum a micro-step read each other's gradients; false if they make collectives.
  [[nodiscard]] bool reads_peers() const { return memory_.are_local(memory_.degrees().gradient); }
  /// True if a gradient of the parameter has come on this rank since begin_step().
  [[nodiscard]] bool has_grad(int param) const { return has_grad_[static_cast<std::size_t>(param)]; }
  /// True if this rank's reduced shard of the flat holds the sums of this step (valid after complete()).
  [[nodiscard]] bool has_sums(int flat) const;
  /// Sum of squares of the flat's reduced shard, each element times the flat's grad_factor. Valid after complete() if
  /// has_sums().
  [[nodiscard]] const kernels::NormAccumulator& norm(int flat) const;
  /// Of the micro-steps before the running one, and after complete() of all.
  [[nodiscard]] const Offender& offender() const { return offender_; }
  /// The first parameter whose gradient did not fit its 16-bit bucket; -1: none.
  [[nodiscard]] int first_wide() const { return first_wide_; }
  /// Number of buckets of other ranks that were copied aside because ranks waited for each other's slots.
  [[nodiscard]] std::uint64_t spills() const;
  /// Bytes of control blocks and staging of the groups that were split from the backend.
  [[nodiscard]] std::size_t transport_bytes() const;

 private:
  struct FlatState {
    bool open = false;               ///< the bucket holds gradients that are not published
    bool published = false;          ///< in this step
    bool last = false;               ///< what was published is the last of this step
    std::uint64_t published_in = 0;  ///< number of the backward of the last event, from 1
    DType dtype = DType::kFloat32;   ///< of the open bucket
    std::vector<bool> filled{};      ///< one a segment: the bucket holds a gradient of it
  };

  /// Looks what the kernels have found in the gradients of the running micro-step.
  void find_offender();
  [[nodiscard]] std::int64_t* nonfinite(int param) {
    return reinterpret_cast<std::int64_t*>(nonfinite_.bytes.data()) + param;
  }
  void open(int flat);
  /// Moves the open bucket to memory beyond the plan, in the accumulation dtype.
  void widen(int flat);
  void publish(int flat, bool last = false);
  /// Blocks until no rank needs the content of the unit's bucket slot. Sums that lie there are moved away.
  void take_slot(int unit);
  [[nodiscard]] bool publishes_now(int unit) const;
  FlatState& state(int flat) { return flats_[static_cast<std::size_t>(flat)]; }

  const ModelLayout& model_;
  const ShardingPlan& plan_;
  int micro_steps_;
  ModelMemory& memory_;
  Stream reduce_stream_;
  Kernels& kernels_;
  std::vector<int> slot_holder_;  ///< unit whose bucket or sums may still lie in the slot; -1: none
  std::unique_ptr<ReducedShards> shards_;
  OperationId step_{};
  OperationNames operations_;
  std::unique_ptr<GradientExchange> exchange_;
  std::vector<FlatState> flats_;
  std::vector<int> ring_positions_;
  std::vector<int> ring_open_;  ///< unit with an open bucket at each ring position, -1
  std::vector<int> trainable_flats_;
  std::vector<bool> has_grad_;
  std::function<void(int flat)> before_reduce_;
  Scratch nonfinite_;         ///< elements, one word a parameter, and one that nobody looks at
  std::vector<int> arrived_;  ///< parameters whose gradients have come in this micro-step, in order
  Offender offender_;
  int first_wide_ = -1;
  bool joined_ = false;          ///< sums of sub-groups are one: nothing can be added any more
  bool reduced_before_ = false;  ///< an earlier backward of this step had reductions
  std::uint64_t backward_ = 0;   ///< step << 20 | backward within the step
  int micro_step_ = 0;
  bool steered_ = false;
  bool keeps_own_ = false;
  bool at_end_ = false;        ///< reductions wait for complete()
  bool ending_ = false;        ///< complete() makes them
  std::vector<bool> in_part_;  ///< one a unit, after steer(): complete in the running backward
  std::vector<bool> last_;     ///< one a unit, after steer(): it has no further backward in this step
};

}  // namespace zeroth
