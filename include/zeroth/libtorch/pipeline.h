// Pipeline: runs a StepProgram on a model that is cut into chunks, with an engine that has this rank's chunks.
//
//   for each action of this rank's list:
//     F   inputs of the chunk -> the front end's forward, as one forward of the engine's root unit -> outputs
//     B   gradients of the outputs -> autograd -> gradients of the inputs; the engine takes those of parameters
//     I,W the same in two parts: what the chunk before waits for, and the gradients of the weights
//     SEND_*, RECV_*   values between ranks, by StageLinks; sends go on while this rank computes
//     RECOMPUTE        F again, with the graph that B needs: F itself keeps its inputs alone
//     FLUSH, FETCH     what is kept for the backward of a micro-batch goes away, and comes back
//     UNSHARD, RESHARD a chunk's units may be gathered in between, or stay gathered (Reshard::kStep)
//     REDUCE           nothing: the engine was told before the chunk's last backward, which began it
//     V_*              rows of the head that all stages share, see SharedHead; what ranks combine goes by messages, so
//                      that only a rank that needs it waits
//     STEP             the engine's step()
//
// The executor knows no schedule, no ZeRO stage and no kind of model.
//
// [Note: Late gradients] A program that says how late the gradients of its chunks are (StepProgram::late) is one step
// that is run again and again. Its backwards, and what belongs to them, are of micro-batches of earlier steps:
//   - kept from step to step are inputs of chunks, each with the random numbers and buffers of then, and the gradients
//     that came at the end of the step before. A gradient that was scaled by another loss scale is scaled anew
//   - in the first steps a chunk has nothing to do backwards: its parameters, moments and counts of steps stay as they
//     are
//   - after a step that is skipped, and after a load, everything late is forgotten, and it begins anew. So no gradient
//     is of weights that a load has replaced, and one that was not finite spoils one step
//   - saves do not have it: a training that goes on from a checkpoint begins anew, too. Evaluations leave it alone
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/rank_group.h>
#include <zeroth/libtorch/saved_tensors.h>
#include <zeroth/program/step_program.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::libtorch {

/// What one chunk gives to the next. Any number of tensors of any shapes, which may change from micro-batch to
/// micro-batch.
struct ChunkValues {
  std::vector<at::Tensor> tensors{};
  std::string structure{};  ///< the front end's own text, for example how tensors lie in tuples; it travels along
};

/// Forward of a chunk on one micro-batch, on the caller's thread. Chunk 0 gets no values. The last chunk returns the
/// loss, one element, as its first tensor.
/// Where gradients are late, RECOMPUTE asks for a micro-batch of an earlier step by a negative number: with M of them a
/// step, -M to -1 are those of the step before. See PipelineOptions::aged.
using ChunkForward = std::function<ChunkValues(int chunk, int micro_batch, ChunkValues inputs)>;

/// A linear layer before a cross entropy, of which every stage has some rows (a program with V_ actions). The forward
/// of the last chunk then returns, in the place of the loss: the layer's input [..., features]; int64 [N] its rows that
/// count, as numbers in the flat order; int64 [N] their targets; float64 [3] factor and constant of the loss, and how
/// many pipelines have a part of it (1: it is whole), as those that share sequences have. The loss is the sum of factor
/// * sum of the cross entropies over them, and the constant. On other stages nobody needs the targets: they travel
/// along.
struct SharedHead {
  /// The engine's unit with this stage's rows, and nothing else. Of a head that is tied to an embedding, chunks on this
  /// stage may use it, too.
  int unit = 0;
  at::Tensor weight{};               ///< [own rows, features]
  at::Tensor bias{};                 ///< [own rows], or undefined
  std::vector<std::int64_t> rows{};  ///< of each stage; with `beside` of each of its ranks, stage after stage
  /// Ranks of a stage with the same inputs and targets, which share its rows once more. None: a stage is one rank.
  std::optional<RankGroup> beside{};
};

struct PipelineOptions {
  StepProgram program{};
  /// Of each chunk: the engine's units (numbers of ModelDescription::units) that its layers are. Only those of this
  /// rank's chunks are read.
  std::vector<std::vector<int>> units{};
  /// Of each chunk, or none: those of its units whose forward looks rows of a table up and does nothing else. I, which
  /// computes no gradients of weights, does not gather them.
  std::vector<std::vector<int>> tables{};
  ChunkForward forward{};
  /// The same where a RECOMPUTE follows: its graph is thrown away, so nothing need be saved for backward. Empty:
  /// `forward`. It must compute the same bits.
  ChunkForward forward_alone{};
  /// What forwards of a chunk may write, running statistics for example: always as many tensors in the same order.
  /// With a RECOMPUTE they are written once. Empty: nothing.
  std::function<std::vector<at::Tensor>(int chunk)> buffers{};
  /// Where gradients are late: a step has ended, and its micro-batches are now those of the step before, of which the
  /// front end keeps as many steps as its latest chunk needs; false: none of any earlier step is asked for any more.
  std::function<void(bool keep)> aged{};
  /// FLUSH and FETCH of what the front end's forward saved for backward. Empty: no program has them.
  std::function<void(const Action& action)> move{};
  /// FLUSH and FETCH of what a RECOMPUTE needs go there. Null: no program has them.
  std::shared_ptr<SavedTensors> saved{};
  /// See ModelDescription::buffer_owners: buffers that forwards of other stages than rank 0's write.
  std::map<std::string, int> buffer_owners{};
  /// Ranks of a stage that compute the same values, as those of tensor parallelism do: each sends its slice of large
  /// tensors to its counterpart, where they are gathered. For stages on different nodes. None: tensors are sent whole.
  std::optional<Communicator> copies{};
  /// For a program with V_ actions, and for no other.
  std::optional<SharedHead> head{};
};

/// Counts since the last reset, of this rank.
struct PipelineReport {
  std::uint64_t actions = 0;
  std::uint64_t sent_bytes = 0;  ///< of values and gradients, without their descriptions
  std::uint64_t received_bytes = 0;
  std::uint64_t descriptions = 0;      ///< of values whose form was new, sent
  std::uint64_t begun_anew = 0;        ///< times that late gradients were forgotten
  int live_peak = 0;                   ///< most (chunk, micro-batch) pairs with the graph of a forward
  std::uint64_t kept_peak_bytes = 0;   ///< most of inputs, and what else a RECOMPUTE needs, at a time
  std::uint64_t recomputed = 0;        ///< forwards that ran again
  std::uint64_t weights_deferred = 0;  ///< gradients of parameters that W computed
  std::uint64_t weights_whole = 0;     ///< that I computed and W gave to the engine
};

/// Throws kUsage, with the reason, for a program that no Pipeline of so many stages and micro-batches runs: verify()
/// refutes it, it has several steps, other actions than those above, or no STEP, or a late backward without RECOMPUTE.
void require_runnable(const StepProgram& program, int stages, int micro_batches);

/// Throws kUsage for a program with more than one micro-batch between UNSHARD and RESHARD of a chunk. Memory is planned
/// for it only where parameters are kept for a step (Reshard::kStep): else layers gather their units one after the
/// other.
void require_short_spans(const StepProgram& program);

/// One thread at a time; the engine's.
class Pipeline {
 public:
  /// `stages`: the ranks of the pipeline, in order of their stages. Collective over them, blocks. Throws kUsage as
  /// require_runnable() does, or if the program has not the chunks of the model, and kMismatch on all of them if they
  /// have different programs. `engine` must outlive it.
  Pipeline(EngineBase& engine, Communicator stages, PipelineOptions options);
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  ~Pipeline();

  struct Result {
    StepResult step{};
    double loss = 0.0;  ///< mean over micro-batches and ranks with batches of their own; the same on all ranks
  };
  /// One step: all actions of this rank. Collective over all ranks, blocks.
  Result train_batch();
  /// The forwards alone, without gradients; returns the mean loss on all ranks. Collective, blocks. `micro_batches`: 0
  /// as in training.
  double eval_batch(int micro_batches = 0);
  /// Logits [..., all rows] of the head that the stages share, on all of them, between two steps. `input`: the head's,
  /// [..., features], which the stage of the last chunk gives and the others leave undefined. Collective over the
  /// pipeline's ranks, blocks; at stage 3 over all ranks that have parts of the head. Wire: the input once to each
  /// stage, and each stage's logits to all others. Throws kUsage without a shared head and inside a step.
  [[nodiscard]] at::Tensor logits(const at::Tensor& input);

  /// The same in parts, for loops of the caller's own: begin(), run() of each of actions() in order, end().
  void begin();
  void run(const Action& action);
  [[nodiscard]] Result end();

  [[nodiscard]] const StepProgram& program() const;
  /// This rank's list.
  [[nodiscard]] const std::vector<Action>& actions() const;
  [[nodiscard]] int stage() const;
  /// The action that threw: "action 1B3 of step 4 (stage 1 of 2: the backward of chunk 1, micro-batch 3)"; "" if none
  /// has. After it every further step and evaluation is refused with kUsage: stages have run different parts of one.
  [[nodiscard]] std::string failed_action() const;
  [[nodiscard]] PipelineReport report() const;
  void reset_report();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroth::libtorch
