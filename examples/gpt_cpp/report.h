// What a run tells: lines for people on stdout and records for programs in a JSON-lines file, both from rank
// 0 only. Knows no torch.
#pragma once

#include "options.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gpt {

/// One committed or skipped optimizer step.
struct StepRecord {
  std::int64_t step = 0;   ///< from 1
  double loss = 0.0;       ///< nats per byte, mean over micro-steps and ranks
  double grad_norm = 0.0;  ///< of the averaged gradient, before clipping
  double lr = 0.0;
  std::int64_t tokens = 0;  ///< of this step, all ranks and micro-steps together
  double seconds = 0.0;     ///< wall time of this step
  bool committed = true;    ///< false: no weight was changed
  std::string reason{};     ///< why not
};

using NamedBytes = std::vector<std::pair<std::string, std::uint64_t>>;

/// The end of a run. Bytes are those of rank 0, unless said otherwise.
struct RunSummary {
  std::int64_t steps = 0;
  double seconds = 0.0;  ///< of training, without the first step (warm-up), validations and sample
  double tokens_per_second = 0.0;
  std::string last_loss_hex{};
  std::optional<double> validation_loss{};
  double bigram_entropy = 0.0;
  bool target_reached = false;
  int world_size = 1;
  int zero_stage = 0;
  std::int64_t parameters = 0;
  std::optional<std::int64_t> below_bigram_step{};  ///< first validation below the bigram entropy
  NamedBytes planned{};                             ///< by state, and their total
  NamedBytes measured{};                            ///< the same at the moment of the largest total
  std::uint64_t pss_peak =
      0;              ///< each rank's highest proportional set size after a forward, backward or step; their sum
  NamedBytes wire{};  ///< received in training steps, by kind
  NamedBytes wire_formula{};       ///< the plan's formula for the same steps
  std::uint64_t wire_control = 0;  ///< received in training steps beside them: commit votes, averages
  std::uint64_t live_slots = 0;    ///< most ring slots in use at a time
  NamedBytes files{};          ///< of the last step, asked of files by kind: what moved, and what was still in memory
  NamedBytes files_formula{};  ///< the plan's formula for a step
  std::uint64_t files_moved = 0;  ///< in all steps, in both directions
  double files_seconds = 0.0;     ///< in which a transfer was on its way, in all steps
  double files_hidden = 1.0;      ///< the part of them in which the training did not wait
};

class Report {
 public:
  /// @param json_path empty: no records. @throws zeroth::Error kIo: cannot be written (on rank 0).
  Report(int rank, const std::filesystem::path& json_path);

  /// Prints a line.
  void line(std::string_view text);
  /// Size of the model and how it is trained.
  void introduce(const Options& options, const Settings& settings, const RunSummary& summary, int threads);
  /// "step 20/300  loss 2.7182  5,432 tokens/s  grad norm 0.81  lr 1.0e-03".
  void progress(const StepRecord& record, std::int64_t steps, double tokens_per_second);
  /// "step 20  validation loss 2.5012 (bigram entropy 2.3957)".
  void validation(std::int64_t step, double loss, double bigram_entropy);
  /// The generated text under a heading.
  void sample(std::string_view prompt, std::string_view text, double temperature);
  /// Planned and measured bytes by tag, bytes on the wire by kind against their formula.
  void table(const RunSummary& summary);
  /// Appends {step, loss, loss_hex, grad_norm, lr, tokens, seconds} (a skipped step: with "skipped") and
  /// flushes.
  void write(const StepRecord& record);
  /// Appends the final record {final, ...} and flushes.
  void write(const RunSummary& summary);

 private:
  void append(const std::string& record);

  bool speaks_;
  std::filesystem::path json_path_;
  std::ofstream json_{};
};

}  // namespace gpt
