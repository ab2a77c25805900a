// GradientStore: from local gradients to this rank's reduced shard, one-sided.
//
//   grad_ready -> bucket slot (shared) --publish--> every owner pulls its range from all ranks, in rank order -> reduced shard
//
// One reduction event is one published bucket: reduction_code(backward, event). A bucket is published when all expected
// parameters of its unit have fired, when its slot's ring position is needed by another unit, or at the end of backward; what was
// not touched is zero. A later arrival opens a further event of the same backward. An owner knows for each rank whether it took
// part in an event: it has published it, or it has published a later one, or it has closed the backward. So nobody waits for a
// rank that takes another path through the model, until the step is judged.
//
// The list of events does not depend on the plan, and each sum is formed in rank order: ((g0 + g1) + g2) ..., then added to
// what earlier events of the step left. Hence the same bits under every plan.
//
// Deadlock freedom: a rank that waits for a slot says so (pressure). Where ranks that wait are in each other's way, owners copy the
// ranges of their slots aside (spill); ranks that go through the model in one order never need it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <kernels/norm/norm.h>
#include <zeroth/base/tensor_view.h>
#include <zeroth/comm/backend.h>
#include <zeroth/device/device.h>
#include <zeroth/zero/kernel_context.h>
#include <zeroth/zero/model_memory.h>

namespace zeroth {

/// First non-finite local gradient of a step.
struct Offender {
  int param = -1;            ///< -1: none
  std::int64_t micro_step = 0;
  std::uint64_t count = 0;   ///< non-finite elements of that gradient
};

/// Calls of an engine that all ranks make together.
enum class Meeting : std::uint8_t { kStep, kAverage, kBarrier, kBuffers, kExport };

class GradientStore {
 public:
  GradientStore(const ModelLayout& model,
                const ShardingPlan& plan,
                int micro_steps,
                ModelMemory& memory,
                CommBackend& backend,
                Stream reduce_stream,
                KernelContext kernels,
                MemoryLedger& ledger);

  /// A gradient of a whole parameter has arrived: `grad` is dense, in accumulation dtype or the parameter's own. It is copied (or
  /// added, if the parameter's bucket already holds one) before this returns. May wait for a slot.
  void add(int param, ConstTensorView grad);
  /// All expected gradients of the unit have arrived: publishes its bucket. Nothing to do if the bucket is not open.
  void close_unit(int unit);
  /// End of backward: publishes what is open, and that nothing more comes. Does not wait for peers.
  void close_backward();
  /// Which of the step's micro-steps (from 0) is running; with reduction per step only the last one publishes.
  void set_micro_step(int micro_step) { micro_step_ = micro_step; }

  /// Blocks until all ranks have come to this call, and reduces meanwhile: a rank that is still in backward may need this one to take
  /// its gradients. Comes before every matched call but that of complete(), which has its own. Throws kMismatch if another rank comes to another call.
  void meet(Meeting what);
  /// Blocks until every reduction event of all closed backwards has arrived in the reduced shards. Ends the step's accumulation:
  /// the next event stores instead of adding.
  void complete();
  /// Call after the update: forgets touched parameters and offenders.
  void begin_step();

  /// Whether any gradient of the parameter arrived on this rank since begin_step().
  [[nodiscard]] bool touched(int param) const { return touched_[static_cast<std::size_t>(param)]; }
  /// Whether this rank's reduced shard of the flat holds the sums of this step (valid after complete()).
  [[nodiscard]] bool has_sums(int flat) const { return has_sums_[static_cast<std::size_t>(flat)]; }
  /// Sum of squares of the flat's reduced shard, each times the flat's grad_factor (valid after complete(), if has_sums()).
  [[nodiscard]] const kernels::NormAccumulator& norm(int flat) const { return norms_[static_cast<std::size_t>(flat)]; }
  [[nodiscard]] const Offender& offender() const { return offender_; }
  /// Backwards closed since begin_step().
  [[nodiscard]] std::uint64_t backwards_in_step() const { return backward_ & (kBackwardsPerStep - 1); }
  [[nodiscard]] std::uint64_t spills() const { return spills_; }

 private:
  struct FlatState {
    bool open = false;                  ///< the bucket holds gradients that are not published
    std::uint64_t events = 0;           ///< events published in this backward
    std::uint64_t last_code = 0;        ///< code of the last published event
    std::vector<bool> filled{};         ///< one a segment: the bucket holds a gradient of it
    std::uint64_t next_backward = 0;    ///< owner: next event to reduce
    std::uint64_t next_event = 0;
    bool active = false;                ///< owner: in active_
  };
  static constexpr std::uint64_t kBackwardsPerStep = std::uint64_t{1} << 20U;
  enum class Part : std::uint8_t { kPublished, kAbsent, kUnknown };

  void open(int flat);
  void publish(int flat);
  void advance_backward(std::uint64_t next);
  void wait_for_slot(int unit, std::size_t slot);
  void wait(const std::string& what, const std::function<bool()>& done);
  void announce(std::atomic<std::uint64_t>& word, std::uint64_t value);
  [[nodiscard]] std::uint64_t news() const;
  [[nodiscard]] bool consumed_by_all(int flat) const;
  void progress(int flat);
  void progress_active();
  void progress_all();
  [[nodiscard]] std::vector<int> stuck_ranks() const;
  void serve_pressure();
  void spill(int flat, int source, std::uint64_t code);
  [[nodiscard]] Part part_of(int source, int flat, std::uint64_t backward, std::uint64_t event) const;
  void reduce_event(int flat, std::uint64_t code);
  [[nodiscard]] bool owns(int flat) const { return model_.flat(flat).shard(memory_.rank()).size() > 0; }
  [[nodiscard]] bool publishes_now() const;
  FlatState& state(int flat) { return flats_[static_cast<std::size_t>(flat)]; }

  const ModelLayout& model_;
  const ShardingPlan& plan_;
  int micro_steps_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Stream reduce_stream_;
  KernelContext kernels_;
  MemoryLedger& ledger_;
  std::vector<FlatState> flats_;
  std::vector<int> ring_positions_;
  std::vector<int> slot_holder_;        ///< unit whose published bucket may still lie in the slot, -1
  std::vector<int> ring_open_;          ///< unit with an open bucket at each ring position, -1
  std::vector<int> active_;             ///< owned flats that this rank has published and not yet reduced
  std::vector<int> trainable_flats_;
  std::vector<bool> touched_;
  std::vector<bool> has_sums_;
  std::vector<kernels::NormAccumulator> norms_;  ///< one a flat, of its last event
  Offender offender_;
  std::uint64_t backward_ = 0;          ///< step << 20 | backward within the step
  int micro_step_ = 0;
  std::uint64_t spills_ = 0;
  std::uint64_t meetings_ = 0;
  struct Spill {
    std::vector<std::byte> bytes;
    MemoryHold hold;
  };
  std::map<std::tuple<int, std::uint64_t, int>, Spill> spilled_;  ///< (flat, code, source)
};

}  // namespace zeroth
