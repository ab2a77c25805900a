// MessageRound: what the ranks of a shard group exchange in the place of sums of gradients, where the optimizer says so
// (SignMessages): after the commit vote, flat by flat, before the update.
//
// A step that is skipped has exchanged nothing, so errors and momenta are those of the step before.
#pragma once

#include "engine/level_choice.h"
#include "engine/updater.h"
#include "zero/gradient_store.h"
#include "zero/model_memory.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/zero/message_reduction.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace zeroth {

class MessageRound {
 public:
  /// Borrows all but the communicator. `make`: the reduction of each flat, by `compression`; where that is adaptive,
  /// one for each level.
  MessageRound(const ModelLayout& layout, const Optimizer& optimizer, ModelMemory& memory, GradientStore& gradients,
               const Communicator& communicator, Kernels& kernels, Stream stream, const MakeReduction& make,
               const CompressionOptions& compression);

  /// From the next step on, which follows `committed` ones. Between steps.
  void set(std::int64_t committed);
  /// This step's gradients stay with their ranks, and exchange() follows.
  [[nodiscard]] bool is_on() const { return messages_.has_value(); }
  /// Each rank updates with its own gradients in this step, and exchange() sends nothing.
  [[nodiscard]] bool is_local() const { return messages_ && !messages_->exchanges; }
  /// Collective, blocks. `has_grad`: one a parameter, on any rank; parameters that ranks have updated by themselves
  /// since the last exchange are set in it, too. `updates`: one a parameter, before this one. The factor of `terms`
  /// makes a mean of a sum over ranks and micro-steps.
  void exchange(std::vector<bool>& has_grad, const UpdateTerms& terms, std::span<const std::int64_t> updates);
  /// Of this update, after exchange(), one a parameter.
  [[nodiscard]] const std::vector<double>& rates() const { return rates_; }
  [[nodiscard]] const std::vector<std::int64_t>& local_steps() const { return local_steps_; }
  /// After the update: what was exchanged counts as that.
  void end_update(const std::vector<bool>& has_grad);
  /// Parameters of ranks differ until the next exchange.
  [[nodiscard]] bool has_local_steps() const;
  /// Bytes of a step with messages, of all trainable flats.
  [[nodiscard]] MessageWire wire() const;

 private:
  /// Where a state of this rank begins; null for an empty piece.
  [[nodiscard]] std::byte* place_of(int flat, int state) const;
  /// Of one flat; null: it does not train.
  [[nodiscard]] MessageReduction* reduction_of(int flat) const;
  void choose_levels();
  /// Before the first message: other ranks have updated their parts of what messages begin with.
  void gather_states();
  void zero_errors();
  /// Of a message; counts the update's rate.
  [[nodiscard]] MessageFactors factors_of(int param, bool has_grad, const UpdateTerms& terms, std::int64_t step);

  const ModelLayout& layout_;
  const Optimizer& optimizer_;
  ModelMemory& memory_;
  GradientStore& gradients_;
  Communicator communicator_;  ///< of states, where they rest
  Kernels& kernels_;
  Stream stream_;
  std::vector<std::vector<std::unique_ptr<MessageReduction>>> reductions_;  ///< one a flat and level
  std::unique_ptr<LevelChoice> choice_;                                     ///< null: there is one level
  std::int64_t every_ = 1;
  bool has_chosen_ = false;
  std::optional<SignMessages> messages_;
  std::int64_t committed_ = 0;
  std::vector<double> rates_;              ///< one a parameter: sums since the last exchange
  std::vector<std::int64_t> local_steps_;  ///< the same: updates
  bool gathers_first_ = false;
};

}  // namespace zeroth
