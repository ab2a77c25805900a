// SharedHeadRun: what the V_ actions of a program do with a stage's rows of the head.
//
//   V_INPUT   the stage of the last chunk sends the layer's input and the targets to all others
//   V_S       logits of the own rows; of each token their maximum, the sum of exponentials, the target's logit if it is
//             here. One barrier: softmax over the own rows times the rows, and the rows of the targets, too
//   V_SUM     these go to all stages; what is the input's gradient up to factors goes to the last chunk's stage
//   V_T       the loss, and the gradients of the own rows; with two barriers the own part of the input's gradient
//   V_GRAD    that part goes to the last chunk's stage
//   B, I      of the last chunk begins with the sum of these parts
//
// No stage waits for what it does not need: a message is taken where its values are used. Sums are formed in the order
// of the stages. Where ranks of a stage share its rows once more, each sends what it has to its counterparts in the
// other stages, and they sum up what came: in V_T the scores, before the backward the gradient of the input. Ref: Yeung
// et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys 2025, algorithms 1 and 2; the loss is
// that of Shoeybi et al. 2019, "Megatron-LM", section 3.
#pragma once

#include "libtorch/pipeline/chunk_graph.h"
#include "libtorch/pipeline/stage_links.h"
#include "libtorch/runtime.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/program/step_program.h>

#include <map>
#include <memory>
#include <vector>

namespace zeroth::libtorch {

class SharedHeadRun {
 public:
  /// `stage`: this rank's. Throws kUsage for a head that does not fit the program.
  SharedHeadRun(std::shared_ptr<Runtime> runtime, StageLinks& links, SharedHead head, const StepProgram& program,
                int stage);
  SharedHeadRun(const SharedHeadRun&) = delete;
  SharedHeadRun& operator=(const SharedHeadRun&) = delete;
  ~SharedHeadRun();

  /// A step or an evaluation begins.
  void begin(bool trains);
  /// On the stage of the last chunk: what its forward returned. Throws kModel if it is no input of the head. Returns
  /// that input, for the chunk's graph.
  [[nodiscard]] at::Tensor take_output(const std::vector<at::Tensor>& outputs, const Action& action);
  /// A V_ action. `part`: of what its backward is, if it has one.
  void run(const Action& action, const zeroth::Engine::BackwardPart& part);
  /// On the stage of the last chunk: the gradient of its output.
  [[nodiscard]] at::Tensor input_gradient(int micro_batch);
  /// Of an evaluation: takes the scores of all stages.
  void finish_scores();
  /// Sum of the losses since begin(), the same on all stages; where pipelines have parts of them, the mean over these
  /// pipelines is that sum.
  [[nodiscard]] double losses() const { return losses_; }
  void forget() noexcept;
  /// See Pipeline::logits().
  [[nodiscard]] at::Tensor logits(const at::Tensor& input, const Communicator& stages);

 private:
  struct State;

  [[nodiscard]] bool is_root() const { return stage_ == root_; }
  [[nodiscard]] State& state_of(int micro_batch);
  void send_input(int micro_batch);
  void compute_scores(int micro_batch);
  void send_scores(int micro_batch);
  /// Takes the scores of all other stages, once.
  void combine(int micro_batch);
  void compute_gradients(int micro_batch, const zeroth::Engine::BackwardPart& part);
  void send_gradient(int micro_batch);
  /// This rank's rows, or those of its counterpart in another stage: where they are in SharedHead::rows.
  [[nodiscard]] std::size_t number_of(int stage) const;
  [[nodiscard]] std::int64_t begin_of(int stage) const;
  /// What gradients begin with: the factor of the loss, and the loss scale.
  [[nodiscard]] double scaled_factor(const State& state) const;

  std::shared_ptr<Runtime> runtime_;
  StageLinks& links_;
  SharedHead head_;
  int stage_;
  int stages_;
  int root_;  ///< the stage of the last chunk
  std::int64_t vocabulary_ = 0;
  bool two_barriers_;
  bool keeps_gathered_;  ///< from the first use of a step to the last, as UNSHARD and RESHARD of chunks
  int last_micro_batch_ = -1;
  bool trains_ = true;
  bool gathered_ = false;
  double losses_ = 0.0;
  std::map<int, std::unique_ptr<State>> states_;  ///< by micro-batch
};

/// Forwards of an evaluation with the scores of the head: those of a micro-batch stand some forwards after its own, so
/// that stages do not wait for each other.
void add_scores(StepProgram& forwards);

}  // namespace zeroth::libtorch
