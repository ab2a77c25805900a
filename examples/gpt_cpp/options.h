// The command line of zeroth-gpt, and the configuration that follows from it and a configuration file. Knows
// no torch.
#pragma once

#include "data.h"

#include <zeroth/engine/config.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace gpt {

/// What only the trainer knows of; sizes in tokens (bytes of text), sequences or steps.
struct Options {
  std::int64_t layers = 4;
  std::int64_t d_model = 256;
  std::int64_t heads = 0;    ///< 0: one head for every 64 of the width
  std::int64_t experts = 0;  ///< MLPs of each block, of which a token has `choices`; 0: one for all
  std::int64_t choices = 2;
  std::int64_t seq = 128;

  CorpusOptions corpus{};
  bool list_files = false;

  std::int64_t steps = 100;
  std::uint64_t seed = 1;
  std::int64_t eval_every = 0;     ///< steps between validations; 0: at the end only
  std::int64_t eval_windows = 64;  ///< held-out windows of a validation; 0: never validate
  std::optional<double> target_loss{};
  bool target_bigram = false;  ///< the target is the bigram entropy of the held-out text
  double max_seconds = 0.0;    ///< of training; 0: no limit
  std::int64_t log_every = 10;
  std::int64_t sample_bytes = 0;  ///< of generated text at the end; 0: none
  std::string prompt = "def ";
  double temperature = 0.8;
  bool table = true;  ///< planned and measured memory and traffic at the end

  std::filesystem::path init_path{};  ///< of the initial weights; empty: drawn from the seed
  std::filesystem::path json_path{};
  std::filesystem::path export_path{};
  std::filesystem::path config_path{};
  std::filesystem::path checkpoints{};  ///< folder of checkpoints; empty: none
  std::int64_t save_every = 0;          ///< steps between checkpoints; 0: at the end only
  std::string resume{};                 ///< "auto": from the newest of `checkpoints`, if any; "": no; else a path

  // Arguments that override the configuration file.
  std::optional<int> zero_stage{};
  std::map<std::string, int> mesh{};  ///< sizes of axes: "pp", "dp", "ep", "sp", "tp"
  std::optional<std::int64_t> batch{};
  std::optional<std::int64_t> accumulate{};
  std::optional<double> lr{};
  std::optional<double> clip{};
  std::optional<std::string> offload_optimizer{};  ///< folder of files in which optimizer states rest
  std::optional<std::string> offload_param{};      ///< of files in which parameters rest
  std::optional<int> memory_limit_mib{};
  std::optional<std::string> dtype{};  ///< "fp32", "bf16", "fp16" or "fp64"
};

/// A parsed command line: options to run with, or a text to print (--help, --version) and leave with success.
struct CommandLine {
  Options options{};
  std::optional<std::string> help{};
};

/// @throws zeroth::Error kUsage with the argument's name: unknown, malformed, out of range, or contradicting
/// another.
[[nodiscard]] CommandLine parse_command_line(int argc, const char* const* argv);

/// What the engine runs with.
struct Settings {
  zeroth::Config config{};
  zeroth::BatchSizes batch{};  ///< sequences: a step, a rank's micro-step; micro-steps of a step
  int data_ranks = 1;          ///< ranks, or groups of ranks that share layers or sequences, with batches of their own
  int stages = 1;              ///< of a pipeline
  std::string dtype{};         ///< "fp32", "bf16", "fp16" or "fp64"
  std::vector<std::string> notes{};  ///< which argument replaced which value of the file
};

/// Merges the configuration file (if any), the arguments, which win, and the trainer's defaults for what
/// neither says; "auto" in the file counts as not said where the trainer has a value.
/// @throws zeroth::Error kIo, kConfig: what zeroth::Config says about the file, and batch sizes that do not
/// fit the world.
[[nodiscard]] Settings make_settings(const Options& options, int world_size);

}  // namespace gpt
