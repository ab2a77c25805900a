// Shape letters: B batch, T sequence, V vocabulary.
#include "trainer.h"

#include "model.h"
#include "random.h"
#include "report.h"
#include "runner.h"
#include "sampling.h"
#include "weights.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/device/memory.h>
#include <zeroth/engine/settings.h>
#include <zeroth/libtorch/engine.h>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace gpt {
namespace {

using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::ErrorContext;
using Clock = std::chrono::steady_clock;

// Steps, from 1, in which the process is measured from outside: a few, for it takes milliseconds.
constexpr std::int64_t kMeasuredSteps = 3;

// Of --checkpoints, the newest.
constexpr int kKeptCheckpoints = 3;

// So many files are listed without being asked for.
constexpr std::size_t kListedFiles = 32;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Threads of torch's CPU kernels. Sums depend on their number, so it is the same on all ranks and at all
// stages.
int use_threads(int world_size) {
  const char* text = std::getenv("OMP_NUM_THREADS");
  const int share = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world_size);
  const int threads = text != nullptr ? std::atoi(text) : share;
  ZR_CHECK(threads > 0, ErrorCode::kEnvironment, "OMP_NUM_THREADS is no positive number",
           ErrorContext{.where = "zeroth-gpt", .which = "OMP_NUM_THREADS", .got = text != nullptr ? text : ""});
  at::set_num_threads(threads);
  return threads;
}

// In the dtype of the run, with the weights of --init or those of the seed; the ranks of a mesh's tp and sp share it.
Gpt make_model(const Options& options, const Settings& settings, const zeroth::World& world) {
  const std::string& dtype = settings.dtype;
  Gpt model(ModelOptions{.layers = options.layers,
                         .d_model = options.d_model,
                         .heads = options.heads,
                         .seq = options.seq,
                         .experts = options.experts,
                         .choices = options.choices,
                         .seed = options.seed,
                         .dtype = dtype == "fp64" ? torch::kFloat64 : torch::kFloat32});
  if (dtype == "bf16" || dtype == "fp16") {
    model->to(dtype == "bf16" ? torch::kBFloat16 : torch::kFloat16);
  }
  if (!options.init_path.empty()) {
    load_weights(model, options.init_path);
  }
  ZR_CHECK(settings.config.mesh.rows == 1, ErrorCode::kConfig, "a language model has no images",
           ErrorContext{.where = "zeroth-gpt",
                        .which = "/zeroth/mesh/rows",
                        .expected = "1",
                        .got = std::to_string(settings.config.mesh.rows)});
  const zeroth::MeshSpec axes = zeroth::mesh_of(settings.config, world.size());
  if (settings.config.mesh.ep > 1 || settings.config.mesh.sp > 1 || settings.config.mesh.tp > 1) {
    zeroth::Mesh mesh = world.mesh(axes, zeroth::make_comm_options(settings.config, world.size()));
    const auto of_experts = options.experts > 0 || settings.config.mesh.ep > 1
                                ? zeroth::libtorch::ExpertRanks::of_mesh(mesh, settings.config.experts)
                                : std::nullopt;
    if (of_experts) {
      model->share_experts(*of_experts);
    }
    if (mesh.size("tp") > 1) {
      model->share(zeroth::libtorch::RankGroup(mesh.axis("tp")));
    }
    if (mesh.size("sp") > 1) {
      model->share_sequence(zeroth::libtorch::RankGroup(mesh.axis("sp")));
    }
  }
  return model;
}

int data_rank_of(const Settings& settings, const zeroth::World& world) {
  const zeroth::MeshSpec axes = zeroth::mesh_of(settings.config, world.size());
  const zeroth::MeshPlace place(axes, world.rank(), world.size());
  const int ep = settings.config.mesh.ep;
  return place.coordinate("dp") * ep + (ep > 1 ? place.coordinate("ep") : 0);
}

NamedBytes by_name(const zeroth::MemorySnapshot& snapshot) {
  NamedBytes bytes;
  for (std::size_t state = 0; state < zeroth::kNumMemoryStates; ++state) {
    const auto kind = static_cast<zeroth::MemoryState>(state);
    bytes.emplace_back(zeroth::name_of(kind), snapshot[kind]);
  }
  bytes.emplace_back("total", snapshot.total());
  return bytes;
}

Batch make_batch(std::span<const std::uint8_t> text, std::span<const std::size_t> starts, std::int64_t seq) {
  Batch batch{.x_BT = torch::empty({static_cast<std::int64_t>(starts.size()), seq}, torch::kInt64)};
  batch.y_BT = torch::empty_like(batch.x_BT);
  auto* x = batch.x_BT.data_ptr<std::int64_t>();
  auto* y = batch.y_BT.data_ptr<std::int64_t>();
  for (const std::size_t start : starts) {
    const auto window = text.subspan(start, static_cast<std::size_t>(seq) + 1);
    x = std::copy(window.begin(), window.end() - 1, x);
    y = std::copy(window.begin() + 1, window.end(), y);
  }
  return batch;
}

class Trainer {
 public:
  Trainer(const Options& options, const zeroth::World& world)
      : options_(options),
        world_(world),
        settings_(make_settings(options, world.size())),
        report_(world.rank(), options.json_path),
        threads_(use_threads(world.size())),
        corpus_(load_corpus(options.corpus, static_cast<std::size_t>(options.seq))),
        data_rank_(data_rank_of(settings_, world)),
        model_(make_model(options, settings_, world)),
        runner_(make_runner(model_, settings_, world, [this] { sample_memory(); })),
        engine_(runner_->engine()) {
    summary_.bigram_entropy = bigram_entropy(corpus_.held_out());
    summary_.world_size = world.size();
    summary_.zero_stage = settings_.config.zero.stage;
    summary_.parameters = model_->num_parameters();
    if (options_.target_bigram) {
      target_ = summary_.bigram_entropy;
    } else {
      target_ = options_.target_loss;
    }
  }

  /// True if the job was preempted.
  [[nodiscard]] bool run() {
    introduce();
    check_agreement("the text of --data (its digest)", corpus_.digest);
    check_agreement("the number of threads (OMP_NUM_THREADS)", static_cast<std::uint64_t>(threads_));
    resume();
    train_steps();
    if (preempted_) return true;
    if (options_.eval_windows > 0 && validated_step_ != summary_.steps) {
      validate();
    }
    if (options_.sample_bytes > 0) {
      report_.sample(options_.prompt, generate(), options_.temperature);
    }
    if (summary_.steps >= first_step_) save(summary_.steps);
    if (!options_.export_path.empty()) {
      engine_.export_safetensors(options_.export_path.string());
      report_.line("weights written to " + options_.export_path.string());
    }
    summarise();
    return false;
  }

 private:
  void save(std::int64_t step);
  void resume();
  void introduce();
  void check_agreement(const std::string& what, std::uint64_t value);
  void sample_memory();
  void train_steps();
  void add_traffic(const zeroth::libtorch::WireReport& before);
  StepRecord train_step(std::int64_t step);
  bool time_is_up(Clock::time_point start);
  bool validate();
  std::string generate();
  void summarise();

  Options options_;
  const zeroth::World& world_;
  Settings settings_;
  Report report_;
  int threads_;
  Corpus corpus_;
  int data_rank_;  // ranks that share layers or sequences have one batch
  Gpt model_;
  std::unique_ptr<Runner> runner_;
  zeroth::libtorch::EngineBase& engine_;
  std::optional<double> target_{};
  std::int64_t validated_step_ = -1;
  std::int64_t first_step_ = 1;
  std::int64_t saved_updates_ = -1;
  bool preempted_ = false;
  std::uint64_t pss_peak_ = 0;
  zeroth::libtorch::WireReport traffic_{};  // of training steps alone: validations and samples gather, too
  RunSummary summary_{};
};

void Trainer::introduce() {
  for (const std::string& note : settings_.notes) {
    report_.line(note);
  }
  if (options_.list_files || corpus_.files.size() <= kListedFiles) {
    for (const CorpusFile& file : corpus_.files) {
      report_.line(describe(file));
    }
  }
  report_.line(describe(corpus_));
  report_.introduce(options_, settings_, summary_, threads_);
}

// All ranks throw when one has another value; 24 bits, so that means over ranks are exact.
void Trainer::check_agreement(const std::string& what, std::uint64_t value) {
  const auto mine = static_cast<double>((value ^ (value >> 40U)) & 0xffffffU);
  const bool differs = engine_.average(mine) != mine;
  ZR_CHECK(
      engine_.average(differs ? 1.0 : 0.0) == 0.0, ErrorCode::kMismatch, "the ranks differ in " + what,
      ErrorContext{.where = "zeroth-gpt",
                   .who = "rank " + std::to_string(world_.rank()) + "/" + std::to_string(world_.size()),
                   .which = what,
                   .expected = "one value on all ranks",
                   .got = "on this rank " + std::to_string(value) + (differs ? "" : ", which may be the others' too"),
                   .hint = "give every rank the same arguments and the same files"});
}

void Trainer::sample_memory() {
  // All that stays is there from step 1 on; smaps is too slow to be read in every step.
  if (summary_.steps < kMeasuredSteps) pss_peak_ = std::max(pss_peak_, zeroth::pss_bytes());
}

StepRecord Trainer::train_step(std::int64_t step) {
  const auto start = Clock::now();
  const auto seq = static_cast<std::size_t>(options_.seq);
  const auto [result, loss] = runner_->train([&](std::int64_t micro_step) {
    const BatchKey key{options_.seed, step, micro_step, data_rank_};
    const auto starts =
        train_windows(corpus_.train().size(), seq, static_cast<std::size_t>(settings_.batch.micro), key);
    return make_batch(corpus_.train(), starts, options_.seq);
  });
  preempted_ = result.preempted;
  StepRecord record;
  record.step = step;
  record.loss = loss;
  record.grad_norm = result.grad_norm;
  record.lr = result.lr;
  record.tokens = settings_.batch.train * options_.seq;
  record.seconds = seconds_since(start);
  record.committed = result.committed;
  record.reason = result.reason;
  return record;
}

// Batches are drawn from --seed, the step and the rank: the step is the position in the data.
void Trainer::save(std::int64_t step) {
  if (options_.checkpoints.empty() || engine_.core().committed_steps() == saved_updates_) {
    return;  // a step that was skipped is no other state
  }
  const std::string user = "{\"client\": {\"step\": " + std::to_string(step) + "}}";
  const std::string path =
      engine_.save(options_.checkpoints.string(), {.retention = {.keep_last = kKeptCheckpoints}, .user = user});
  saved_updates_ = engine_.core().committed_steps();
  report_.line("checkpoint written to " + path);
}

void Trainer::resume() {
  if (options_.resume.empty()) {
    return;
  }
  const bool newest = options_.resume == "auto";
  const zeroth::LoadReport loaded =
      engine_.load(newest ? options_.checkpoints.string() : options_.resume, {.if_any = newest});
  if (loaded.path.empty()) {
    report_.line("no checkpoint to go on from: training from the beginning");
    return;
  }
  saved_updates_ = loaded.manifest.step;
  summary_.steps = nlohmann::json::parse(loaded.user).at("client").at("step").get<std::int64_t>();
  first_step_ = summary_.steps + 1;
  report_.line("goes on from " + loaded.path + ", step " + std::to_string(first_step_));
}

// The mean over ranks of the time: one answer on all of them.
bool Trainer::time_is_up(Clock::time_point start) {
  return options_.max_seconds > 0.0 && engine_.average(seconds_since(start)) > options_.max_seconds;
}

void Trainer::train_steps() {
  const auto start = Clock::now();
  double window_seconds = 0.0;  // of the steps since the last progress line
  std::int64_t window_tokens = 0;
  std::int64_t tokens = 0;  // without the first step, which also warms up
  for (std::int64_t step = first_step_; step <= options_.steps; ++step) {
    const zeroth::libtorch::WireReport before = engine_.wire_report();
    const StepRecord record = train_step(step);
    add_traffic(before);
    report_.write(record);
    summary_.steps = step;
    summary_.last_loss_hex = zeroth::hex_float(record.loss);
    window_seconds += record.seconds;
    window_tokens += record.tokens;
    if (step > first_step_) {
      summary_.seconds += record.seconds;
      tokens += record.tokens;
      summary_.tokens_per_second = static_cast<double>(tokens) / summary_.seconds;
    }
    if (!record.committed) {
      report_.line("step " + std::to_string(step) + " skipped: " + record.reason);
    }
    if (options_.log_every > 0 && (step % options_.log_every == 0 || step == first_step_)) {
      report_.progress(record, options_.steps, static_cast<double>(window_tokens) / window_seconds);
      window_seconds = 0.0;
      window_tokens = 0;
    }
    if (preempted_ || (options_.save_every > 0 && step % options_.save_every == 0)) {
      save(step);
    }
    if (preempted_) {
      break;
    }
    if (options_.eval_every > 0 && step % options_.eval_every == 0 && validate()) {
      break;
    }
    if (time_is_up(start)) {
      report_.line("step " + std::to_string(step) + ": --max-seconds is over");
      break;
    }
  }
}

void Trainer::add_traffic(const zeroth::libtorch::WireReport& before) {
  const zeroth::libtorch::WireReport now = engine_.wire_report();
  traffic_.all_gather += now.all_gather - before.all_gather;
  traffic_.reduce_scatter += now.reduce_scatter - before.reduce_scatter;
  traffic_.control += now.control - before.control;
}

// Loss over the fixed held-out windows, which the ranks share; every rank runs as many forwards as the
// others. True when the target is reached.
bool Trainer::validate() {
  const auto windows = held_out_windows(corpus_.held_out().size(), static_cast<std::size_t>(options_.seq),
                                        static_cast<std::size_t>(options_.eval_windows));
  const auto data_ranks = static_cast<std::size_t>(settings_.data_ranks);
  const auto batch_size = static_cast<std::size_t>(settings_.batch.micro);
  std::vector<std::size_t> mine;
  for (auto i = static_cast<std::size_t>(data_rank_); i < windows.size(); i += data_ranks) {
    mine.push_back(windows[i]);
  }
  const std::size_t most = (windows.size() + data_ranks - 1) / data_ranks;
  std::vector<Batch> batches;
  for (std::size_t begin = 0; begin < most; begin += batch_size) {
    const std::size_t count = begin < mine.size() ? std::min(batch_size, mine.size() - begin) : 0;
    // A rank whose windows are used up runs one more for company, at no weight.
    const auto starts = count > 0 ? std::span(mine).subspan(begin, count) : std::span(windows).first(1);
    batches.push_back(make_batch(corpus_.held_out(), starts, options_.seq));
    batches.back().weight = static_cast<double>(count);
  }
  const double loss = runner_->evaluate(batches, static_cast<double>(windows.size()));
  summary_.validation_loss = loss;
  summary_.target_reached = target_ && loss < *target_;
  validated_step_ = summary_.steps;
  if (loss < summary_.bigram_entropy && !summary_.below_bigram_step) {
    summary_.below_bigram_step = summary_.steps;
  }
  report_.validation(summary_.steps, loss, summary_.bigram_entropy);
  return summary_.target_reached;
}

// All ranks run the same forwards (the parameters are spread over them) and draw the same bytes.
std::string Trainer::generate() {
  const std::uint64_t key = key_of(options_.seed, zeroth::digest64("sample"));
  std::vector<std::int64_t> tokens;
  for (const char c : options_.prompt) {
    tokens.push_back(static_cast<unsigned char>(c));
  }
  std::string text;
  for (std::int64_t i = 0; i < options_.sample_bytes; ++i) {
    const auto length = std::min(static_cast<std::int64_t>(tokens.size()), options_.seq);
    const torch::Tensor x_BT = torch::from_blob(tokens.data() + (static_cast<std::int64_t>(tokens.size()) - length),
                                                {1, length}, torch::kInt64);
    const torch::Tensor logits_V = runner_->logits(x_BT).select(1, length - 1).flatten().to(torch::kFloat64);
    const std::span<const double> logits(logits_V.data_ptr<double>(), static_cast<std::size_t>(logits_V.numel()));
    const double random = unit_interval(mix64(key + static_cast<std::uint64_t>(i)));
    const std::size_t byte = sample_index(logits, options_.temperature, random);
    tokens.push_back(static_cast<std::int64_t>(byte));
    text += static_cast<char>(byte);
  }
  return text;
}

void Trainer::summarise() {
  const zeroth::MemoryReport memory = engine_.memory_report();
  summary_.planned = by_name(memory.planned);
  summary_.measured = by_name(memory.measured_peak);
  if (memory.planned_files + memory.measured_files > 0) {
    summary_.planned.emplace_back("on disk", memory.planned_files);
    summary_.measured.emplace_back("on disk", memory.measured_files);
  }
  summary_.live_slots = static_cast<std::uint64_t>(memory.live_slots_peak);
  pss_peak_ = std::max(pss_peak_, memory.pss);
  summary_.pss_peak = static_cast<std::uint64_t>(engine_.average(static_cast<double>(pss_peak_)) * world_.size());

  const zeroth::WireBytes step = engine_.wire_report().planned_per_step;
  const auto steps = static_cast<std::uint64_t>(std::max<std::int64_t>(0, summary_.steps - first_step_ + 1));
  summary_.wire = {{"all_gather", traffic_.all_gather}, {"reduce_scatter", traffic_.reduce_scatter}};
  summary_.wire_formula = {
      {"all_gather", steps * (step.gather_parameters + step.gather_gradients + step.publish_parameters)},
      {"reduce_scatter", steps * step.reduce_gradients}};
  summary_.wire_control = traffic_.control;
  const zeroth::TransferReport files = engine_.core().transfer_report();
  for (const zeroth::TransferRow& row : files.rows) {
    if (!row.planned) {
      continue;
    }
    summary_.files.emplace_back(row.set + ", read", row.last_step.needed_bytes);
    summary_.files.emplace_back(row.set + ", written", row.last_step.changed_bytes);
    summary_.files_formula.emplace_back(row.set + ", read", row.planned->read_bytes);
    summary_.files_formula.emplace_back(row.set + ", written", row.planned->write_bytes);
    summary_.files_moved += row.all.read_bytes + row.all.write_bytes;
  }
  summary_.files_seconds = std::chrono::duration<double>(files.all.in_flight).count();
  summary_.files_hidden = files.all.hidden_share();
  if (options_.table) {
    report_.table(summary_);
  }
  report_.write(summary_);
}

}  // namespace

bool train(const Options& options, const zeroth::World& world) {
  return Trainer(options, world).run();
}

}  // namespace gpt
