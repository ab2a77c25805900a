// The operations that an engine has by itself: a row each. Front ends add theirs with Engine::add_operation().
#pragma once

#include "engine/operation_table.h"
#include "engine/shard_group.h"
#include "engine/uneven_join.h"

#include <zeroth/engine/engine.h>

#include <functional>
#include <optional>
#include <utility>

namespace zeroth {

struct Engine::OwnOperations {
  explicit OwnOperations(Engine& owner) : engine(owner) {}
  OwnOperations(const OwnOperations&) = delete;
  OwnOperations& operator=(const OwnOperations&) = delete;

  Engine& engine;

  // Before a batch, see UnevenJoin.
  OperationId batch =
      row({.name = "the next batch", .join = part([this](int) { engine.forget_order(); }), .offered = false});
  OperationId no_batch = row({.name = "the end of its batches", .join = end_of_epoch(), .offered = false});
  OperationId epoch = row({.name = "another epoch", .join = end_of_epoch(), .offered = false});

  // Calls of the stores, where they are matched.
  OperationId gather = row({.name = "the parameters",
                            .subject = Operation::Subject::kFlat,
                            .join = part([this](int flat) {
                              const auto [group, index] = engine.flat_at(flat);
                              group.parameters().take_part(group.layout().flat(index).unit);
                            }),
                            .offered = false});
  OperationId reduce = row({.name = "the gradients",
                            .subject = Operation::Subject::kFlat,
                            .join = part([this](int flat) {
                              const auto [group, index] = engine.flat_at(flat);
                              group.gradients().take_part(index);
                            }),
                            .offered = false});
  // One-sided: nobody has to wait for gradients of this rank. Else its part in each reduction is yet to come.
  OperationId backward = row({.name = "backward", .join = part([this](int) { close_backward(/*one_sided=*/true); })});

  // Calls of a script.
  OperationId step = row({.name = "step()", .join = [this](int) { return std::optional(join_step()); }});
  OperationId end_accumulation = row({.name = "end_accumulation()", .join = [this](int) {
                                        engine.joins_short_step_ = true;
                                        return std::optional(Next::kStep);
                                      }});
  OperationId discard = row({.name = "zero_grad()", .join = part([this](int) {
                                                      engine.had_backward_ = true;
                                                      engine.discard_gradients();
                                                    })});
  OperationId average = row({.name = "average()", .join = part([this](int) { (void)engine.sum_over_ranks(0.0); })});
  OperationId save = row({.name = "save()"});
  OperationId await_save = row({.name = "the wait for a save"});
  OperationId load = row({.name = "load()"});
  OperationId read = row({.name = "a read of states"});
  OperationId write = row({.name = "a write of weights"});
  OperationId average_weights = row({.name = "an average of weights"});
  OperationId local_updates = row({.name = "local updates"});
  OperationId flush = row({.name = "flush_update()"});
  OperationId barrier = row({.name = "barrier()", .join = part([this](int) { engine.barrier(); })});

 private:
  OperationId row(Operation operation) const { return engine.operations_->add(std::move(operation)); }

  /// The engine's part, after which the rank listens again.
  template <class Part>
  static std::function<std::optional<Next>(int)> part(Part take_part) {
    return [take_part](int subject) -> std::optional<Next> {
      take_part(subject);
      return std::nullopt;
    };
  }
  std::function<std::optional<Next>(int)> end_of_epoch() {
    return [this](int) {
      engine.end_uneven_join();
      engine.enter(Phase::kBetweenSteps);
      return std::optional(Next::kEnd);
    };
  }
  void close_backward(bool one_sided) const {
    for (const auto& group : engine.groups_) {
      if (group->gradients().reads_peers() == one_sided) group->gradients().close_backward();
    }
  }
  Next join_step() const {
    close_backward(/*one_sided=*/false);
    engine.uneven_join_->count_joined();
    engine.had_backward_ = true;
    return Next::kStep;
  }
};

}  // namespace zeroth
