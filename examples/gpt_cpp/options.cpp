#include "options.h"

#include <zeroth/base/error.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

namespace gpt {
namespace {

using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::ErrorContext;

[[noreturn]] void usage_error(const std::string& message, const std::string& which, const std::string& got = {}) {
  throw Error(
      ErrorCode::kUsage, message,
      ErrorContext{.where = "zeroth-gpt", .which = which, .got = got, .hint = "zeroth-gpt --help lists all arguments"});
}

void add_model_arguments(CLI::App& app, Options& options) {
  const auto size = CLI::Range(std::int64_t{1}, std::int64_t{1} << 20);
  app.add_option("--layers", options.layers, "transformer blocks")->check(size)->capture_default_str();
  app.add_option("--d-model", options.d_model, "model width")->check(size)->capture_default_str();
  app.add_option("--experts", options.experts, "MLPs of each block, of which a token goes to a few; 0: one for all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--choices", options.choices, "experts of a token")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--heads", options.heads, "attention heads; 0: d-model / 64")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--seq", options.seq, "sequence length in bytes of text")->check(size)->capture_default_str();
  app.add_option("--init", options.init_path, "begin with the weights of this safetensors file");
}

void add_data_arguments(CLI::App& app, Options& options) {
  app.add_option("--data", options.corpus.folder, "folder with text files, read recursively")->required();
  app.add_option("--suffix", options.corpus.suffixes, "take only files whose names end so; may be repeated")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--exclude", options.corpus.exclude, "leave out files and folders of this name; may be repeated")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--list-files", options.list_files,
               "print name, size and xxHash3 of every file (few are printed anyway)");
}

void add_run_arguments(CLI::App& app, Options& options, std::string& target) {
  const auto count = CLI::Range(std::int64_t{0}, std::int64_t{1} << 40);
  app.add_option("--steps", options.steps, "most steps to train")->check(count)->capture_default_str();
  app.add_option("--seed", options.seed, "of initial values, batches and the sample")->capture_default_str();
  app.add_option("--eval-every", options.eval_every, "steps between validations; 0: at the end only")
      ->check(count)
      ->capture_default_str();
  app.add_option("--eval-windows", options.eval_windows, "held-out sequences of a validation; 0: never validate")
      ->check(count)
      ->capture_default_str();
  app.add_option("--target,--target-loss", target,
                 "stop when the validation loss is below this number, or below \"bigram\": the bigram "
                 "entropy of the held-out text");
  app.add_option("--max-seconds", options.max_seconds, "stop training after this time; 0: no limit")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--log-every", options.log_every, "steps between progress lines; 0: none")
      ->check(count)
      ->capture_default_str();
  app.add_option("--sample", options.sample_bytes, "bytes of text to generate at the end")
      ->check(count)
      ->capture_default_str();
  app.add_option("--prompt", options.prompt, "beginning of the generated text")->capture_default_str();
  app.add_option("--temperature", options.temperature, "of the generated text; 0: the likeliest byte")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag("!--no-train-table", options.table, "leave out the table of memory and traffic at the end");
  app.add_option("--json", options.json_path, "write one JSON record a step and a final one to this file");
  app.add_option("--export", options.export_path, "write the trained weights to this safetensors file");
  app.add_option("--checkpoints", options.checkpoints, "save checkpoints in this folder");
  app.add_option("--save-every", options.save_every, "steps between checkpoints; 0: at the end only")
      ->check(count)
      ->capture_default_str();
  app.add_option("--resume", options.resume,
                 "go on from this checkpoint; \"auto\": the newest of --checkpoints, if there is one");
}

void add_engine_arguments(CLI::App& app, Options& options, std::string& mesh) {
  app.add_option("--config", options.config_path, "Zeroth configuration (JSON); the arguments below win over it");
  app.add_option("--zero-stage", options.zero_stage, "0, 1, 2 or 3 (default 3)")->check(CLI::Range(0, 3));
  app.add_option(
      "--mesh", mesh,
      "the ranks as a grid, say \"dp=2,tp=2\": tp neighbours share the matrices of each layer, sp ranks each "
      "sequence, pp ranks the layers, and have one batch; ep ranks have other experts; with pp a step has --accumulate "
      "micro-batches (default: dp "
      "alone)");
  app.add_option("--batch", options.batch, "sequences per rank and micro-step (default 8)")->check(CLI::PositiveNumber);
  app.add_option("--accumulate", options.accumulate, "micro-steps of a step (default 1)")->check(CLI::PositiveNumber);
  app.add_option("--dtype", options.dtype, "fp32, bf16, fp16 or fp64 (default fp32)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16", "fp64"}));
  app.add_option("--lr", options.lr, "highest learning rate (default 0.001)")->check(CLI::NonNegativeNumber);
  app.add_option("--clip", options.clip, "clip gradients to this norm (default 1); 0: off")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--offload-optimizer", options.offload_optimizer,
                 "optimizer states and masters rest in files in this folder");
  app.add_option("--offload-param", options.offload_param,
                 "parameters rest in files in this folder, and come for each use");
  app.add_option("--memory-limit", options.memory_limit_mib, "MiB of all ranks' plans together; more is an error")
      ->check(CLI::PositiveNumber);
}

void read_target(const std::string& target, Options& options) {
  if (target.empty()) {
    return;
  }
  if (target == "bigram") {
    options.target_bigram = true;
    return;
  }
  double value = 0.0;
  if (!CLI::detail::lexical_cast(target, value)) {
    usage_error("a target is a number or \"bigram\"", "--target", target);
  }
  options.target_loss = value;
}

// "dp=2,tp=2"; every axis once.
std::map<std::string, int> read_mesh(const std::string& text) {
  constexpr int kMost = 1 << 20;
  std::map<std::string, int> axes;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const std::size_t equals = std::min(part.find('='), part.size());
    const std::string name = part.substr(0, equals);
    const char* const digits = part.data() + std::min(equals + 1, part.size());
    const char* const last = part.data() + part.size();
    int size = 0;
    const auto [stop, error] = std::from_chars(digits, last, size);
    const bool is_size = error == std::errc() && stop == last && size >= 1 && size <= kMost;
    const bool is_axis = name == "pp" || name == "dp" || name == "ep" || name == "sp" || name == "tp";
    if (!is_axis || !is_size || !axes.emplace(name, size).second) {
      usage_error("a mesh is a list of the axes pp, dp, ep, sp and tp with their sizes, as \"dp=2,tp=2\"", "--mesh",
                  text);
    }
    begin = end + 1;
  }
  return axes;
}

void check_combinations(Options& options) {
  if (options.heads == 0) {
    options.heads = std::max<std::int64_t>(1, options.d_model / 64);
  }
  if (options.d_model % options.heads != 0 || options.d_model / options.heads % 2 != 0) {
    usage_error("the width does not divide into heads of an even width (rotary positions turn pairs)", "--heads",
                fmt::format("--d-model {} --heads {}", options.d_model, options.heads));
  }
  if (options.experts > 0 && options.choices > options.experts) {
    usage_error("a token cannot have more experts than there are", "--choices",
                fmt::format("--experts {} --choices {}", options.experts, options.choices));
  }
  const bool has_target = options.target_bigram || options.target_loss.has_value();
  if (options.eval_windows == 0 && (has_target || options.eval_every > 0)) {
    usage_error("a target and --eval-every need validations", "--eval-windows", "0");
  }
  if (has_target && options.eval_every == 0) {
    options.eval_every = 10;
  }
  if (options.checkpoints.empty() && (options.save_every > 0 || options.resume == "auto")) {
    usage_error("there is no folder for checkpoints", "--checkpoints");
  }
  if (options.sample_bytes > 0 && options.prompt.empty()) {
    usage_error("generated text needs a beginning", "--prompt", "an empty text");
  }
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  Options& options = line.options;
  std::string target;
  std::string mesh;
  CLI::App app(
      "Trains a byte-level GPT on the text of a folder, with ZeRO 0-3 over the ranks that started it.\n"
      "  zeroth-run -n 2 zeroth-gpt --data FOLDER --steps 200 --sample 400",
      "zeroth-gpt");
  // A script's user has the last word.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_data_arguments(app, options);
  add_model_arguments(app, options);
  add_run_arguments(app, options, target);
  add_engine_arguments(app, options, mesh);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.help = app.help();
    return line;
  } catch (const CLI::ParseError& error) {
    usage_error(error.what(), "the command line");
  }
  read_target(target, options);
  if (app.count("--mesh") > 0) {
    options.mesh = read_mesh(mesh);
  }
  check_combinations(options);
  return line;
}

}  // namespace gpt
