// The update: walks this rank's ranges, finds runs of parameters that are alike, and hands blocks to the optimizer.
//
// Where states rest beside a device, the host makes the update, a pipeline over the slots of a DeviceBus:
//
//   piece j+2   sums (and parameters) cross the bus to a slot; sums that rest in host memory are there
//   piece j+1   the same, under way
//   piece j     its states come, the host updates it in the slot
//   piece j-1   new parameters cross the bus back
//
// An optimizer that needs to know of whole parameters goes through all pieces twice: measure(), then update().
//
// Where the optimizer's states are on the device, and sums or parameters rest beside it, the device makes the update:
//
//   piece j     sums and parameters cross to memory of a slot on the device, which updates them there
//   piece j-1   new parameters have come back, and go to where they rest
#pragma once

#include "engine/tensor_facts.h"
#include "zero/model_memory.h"

#include <zeroth/compute/kernels.h>
#include <zeroth/engine/engine.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace zeroth {

/// What an update does with sums of gradients.
struct UpdateTerms {
  double factor = 1.0;               ///< averages and clips
  std::vector<GroupHyper> groups{};  ///< indexed by ParamSpec::group
  double lr_factor = 1.0;            ///< of the groups' learning rates
};

class Updater {
 public:
  /// `host`: kernels of the host, for updates that it makes beside a device; on ranks of a CPU the same as `kernels`.
  Updater(const ModelLayout& layout, const Optimizer& optimizer, ModelMemory& memory, CommBackend& backend,
          Kernels& kernels, Kernels& host, Stream stream);

  /// On a device this is work of the stream; if states rest beside it, it blocks for all but the last copies. Updates
  /// every parameter with has_grad[param], its padding with it; the others keep value, moments and step count. Flats
  /// that update_flat() has updated are done already; from now on they are not. Where every rank updates everything,
  /// the sums are read in place from the ranks that own them (counted as all_gather): nobody writes its sums again
  /// before it knows of this rank's next backward.
  void update(const std::vector<bool>& has_grad, const UpdateTerms& terms);
  /// Where the optimizer has facts, before update(), and after set_tensors(): adds those of this rank's elements. Reads
  /// the sums, as update() does otherwise.
  void measure(const std::vector<bool>& has_grad, const UpdateTerms& terms, TensorFacts& facts);
  /// Between both, when facts are those of all ranks.
  void conclude(const std::vector<bool>& has_grad, const UpdateTerms& terms, const TensorFacts& facts);
  /// Numbers of parameters in TensorFacts. `counts`: no other rank with the same elements counts them.
  void set_tensors(std::vector<int> numbers, bool counts) {
    tensors_ = std::move(numbers);
    counts_ = counts;
  }
  /// The same of one flat, ahead of update().
  void update_flat(int flat, const std::vector<bool>& has_grad, const UpdateTerms& terms) {
    update_flats({&flat, 1}, has_grad, terms, nullptr);
  }
  /// update_flat() was called since the last update().
  [[nodiscard]] bool is_updated(int flat) const { return updated_[static_cast<std::size_t>(flat)]; }

  /// Keeps the sums of this step, those of update_range(), in ModelMemory::held(): update() and update_flat() read them
  /// there, until the end of update().
  void hold();
  /// Whether sums were put there from elsewhere.
  void set_held(bool is_held) { is_held_ = is_held; }

  /// Of the update after `committed` ones: whether the ranks' messages form states before it, and there are no sums.
  void begin_round(std::int64_t committed, bool from_messages) {
    committed_ = committed;
    from_messages_ = from_messages;
  }

  /// The next update reads these sums, one a flat, each of its whole flat and of this rank alone.
  void set_own_sums(std::vector<const std::byte*> sums) { own_sums_ = std::move(sums); }
  /// For step(), one a parameter.
  void set_rates(std::span<const double> rates, std::span<const std::int64_t> local_steps) {
    scales_.assign(rates.begin(), rates.end());
    local_steps_.assign(local_steps.begin(), local_steps.end());
  }

  /// What update_flat() has updated counts as that no more: after a step that was refused.
  void forget_updated();

  /// Masters take what was written to their parameters at rest, of all flats; an update does it by itself. See [Note:
  /// Writes to parameters of 16 bits].
  void take_all_writes();

  /// Starts to bring the states that the update goes on with: flats come in the order of the last one. Never blocks.
  void prefetch() { look_ahead({}, {}); }

  /// Updates so far, one a parameter.
  [[nodiscard]] const std::vector<std::int64_t>& updates() const { return steps_; }
  void set_updates(std::vector<std::int64_t> updates) { steps_ = std::move(updates); }

 private:
  struct Run {
    Range range;  ///< flat coordinates, inside the update range
    int group = 0;
    std::int64_t step = 0;
    int param = 0;  ///< the first
  };
  [[nodiscard]] std::vector<Run> runs_of(int flat, const std::vector<bool>& has_grad) const;
  /// Of a range inside one parameter: its rows, if a state has an entry for each; else all of it.
  [[nodiscard]] std::vector<Range> blocks_of(int flat, const Range& range) const;
  /// A part of a run whose sums lie together, and whose states come together.
  struct Piece {
    int flat = 0;
    Range range{};
    std::int64_t step = 0;
    int group = 0;
    int param = 0;                    ///< the first
    const std::byte* sums = nullptr;  ///< null: the update needs none
    bool beside_device = false;       ///< where the sums are
  };
  /// One pipeline over the pieces of all of them: the first pass, if there are facts to be added to, or the update.
  void update_flats(std::span<const int> flats, const std::vector<bool>& has_grad, const UpdateTerms& terms,
                    TensorFacts* facts);
  /// Flats that update_flat() has not updated.
  [[nodiscard]] std::vector<int> flats_left() const;
  [[nodiscard]] bool reads_sums() const { return !own_sums_.empty() || (!from_messages_ && !is_measured_); }
  void add_pieces(int flat, const Run& run, std::vector<Piece>& pieces);
  /// The sums of pieces rest in host memory beside a device.
  [[nodiscard]] bool sums_beside_device() const {
    return is_held_ ? memory_.held_beside_device() : memory_.sums_leave_device();
  }
  /// Where the sums of `owner` begin.
  [[nodiscard]] const std::byte* sums_of(int flat, int owner);
  void count_sums(int owner, std::size_t bytes);
  /// Where the update of a piece reads and writes what is not in its view.
  struct Place {
    std::byte* param = nullptr;
    const std::byte* sums = nullptr;
    DType dtype = DType::kFloat32;  ///< of the sums
  };
  void update_piece(const Piece& piece, const StateView& view, const Place& place, double factor,
                    const GroupHyper& hyper);
  /// Calls body(first, end) for parts of a range of the flat, in which blocks of kernels::kNormBlock elements of the
  /// flat are whole but for the first and the last: the same blocks for every split of the range that a shard may have.
  void for_measured(const Range& range, Kernels& kernels, const std::function<void(Range)>& body);
  /// The first pass over one such part.
  void measure_part(const Piece& piece, const Range& part, const StepBlock& block, Kernels& kernels);
  /// Entries of the tensor that has the element, in states of tensors: reads or writes them, one a state.
  void move_tensor_states(int flat, std::int64_t element, std::vector<double>& values, bool write);
  /// A run lies in one tensor.
  [[nodiscard]] bool separates_tensors() const { return has_facts_ || has_entries_of_tensors_; }
  /// A caller may have written to the flat's parameters where they rest, and its masters know nothing of it.
  [[nodiscard]] bool takes_writes(int flat) const;
  /// A piece whose sums and parameters, if they are on the device, are on the bus.
  struct Crossing {
    BusSlot slot;
    std::size_t param_at = 0;         ///< in the slot
    const std::byte* sums = nullptr;  ///< in the slot, or where they rest
    DType dtype = DType::kFloat32;    ///< of the sums
  };
  /// A piece that the device has updated in memory of a slot, and the lease on where its parameters rest.
  struct Return {
    BusSlot slot;
    std::size_t param_at = 0;  ///< in the slot
    Piece piece{};
    std::shared_ptr<StateView> view{};
  };
  /// Starts as many crossings of `next` as there are slots.
  void cross_ahead(std::span<const Piece> next);
  Crossing cross(const Piece& piece, BusSlot slot);
  void update_beside_device(std::span<const Piece> next, const StateView& view, double factor, const GroupHyper& hyper);
  /// The device makes the update of what comes to it. Memory of slots on the device is written in the stream of
  /// reductions alone, after what reads it there.
  void update_on_device(const Piece& piece, const std::shared_ptr<StateView>& view, double factor,
                        const GroupHyper& hyper);
  /// Blocks until new parameters are where they rest, of all pieces but the last `left`.
  void take_back(std::size_t left);
  /// The update reads the parameter, which is on the device.
  [[nodiscard]] bool brings_parameter(int flat) const;
  /// Starts to bring the states of `next`, the rest of `flats`, and of flats after these.
  void look_ahead(std::span<const Piece> next, std::span<const int> flats);

  const ModelLayout& layout_;
  const Optimizer& optimizer_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Kernels& kernels_;
  Kernels& host_;
  Stream stream_;  ///< of reductions
  Stream up_;      ///< of new parameters, on their way to the device
  std::size_t num_states_;
  bool has_facts_;
  bool has_entries_of_tensors_;  ///< states with one entry for each parameter or row: a block lies in one of them
  bool has_entries_of_rows_;
  std::vector<std::int64_t> steps_;  ///< updates so far, one a parameter
  bool is_held_ = false;
  bool from_messages_ = false;
  std::int64_t committed_ = 0;
  bool is_measured_ = false;      ///< measure() has used the sums
  TensorFacts* facts_ = nullptr;  ///< null: this is not the first pass
  std::vector<int> tensors_;      ///< one a parameter, if the optimizer has facts
  bool counts_ = true;
  std::vector<double> scales_;  ///< one a parameter: StepBlock::scale
  std::vector<std::int64_t> local_steps_;
  std::vector<const std::byte*> own_sums_;  ///< empty: sums are those of all ranks
  /// Numbers that the device writes in the first pass: of a fact of a tensor.
  struct Measured {
    int tensor = 0;
    std::size_t fact = 0;
    std::span<const double> blocks{};
  };
  std::vector<Measured> measured_;
  std::vector<Scratch> measured_words_;
  std::vector<bool> updated_;    ///< one a flat: ahead of update()
  std::vector<int> order_;       ///< flats, as they were updated
  std::vector<int> last_order_;  ///< of the last update
  std::deque<Crossing> crossings_;
  std::deque<Return> returns_;
};

}  // namespace zeroth
