#include "report.h"

#include "sampling.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>

namespace gpt {
namespace {

using nlohmann::ordered_json;

// JSON has no infinity and no NaN: they become null, and loss_hex still tells them apart.
ordered_json number(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
}

ordered_json object(const NamedBytes& entries) {
  ordered_json result = ordered_json::object();
  for (const auto& [name, bytes] : entries) {
    result[name] = bytes;
  }
  return result;
}

std::optional<std::uint64_t> find(const NamedBytes& entries, const std::string& name) {
  const auto it = std::find_if(entries.begin(), entries.end(), [&](const auto& entry) { return entry.first == name; });
  return it == entries.end() ? std::nullopt : std::optional(it->second);
}

// 1234567 -> "1,234,567".
std::string grouped(std::uint64_t value) {
  std::string text = std::to_string(value);
  for (std::size_t i = text.size(); i > 3; i -= 3) {
    text.insert(i - 3, ",");
  }
  return text;
}

std::string cell(const NamedBytes& entries, const std::string& name) {
  const auto bytes = find(entries, name);
  return bytes ? grouped(*bytes) : "-";
}

// Names of both lists, those of the first in its order.
std::vector<std::string> names_of(const NamedBytes& first, const NamedBytes& second) {
  std::vector<std::string> names;
  for (const NamedBytes* entries : {&first, &second}) {
    for (const auto& entry : *entries) {
      if (std::find(names.begin(), names.end(), entry.first) == names.end()) {
        names.push_back(entry.first);
      }
    }
  }
  return names;
}

}  // namespace

Report::Report(int rank, const std::filesystem::path& json_path) : speaks_(rank == 0), json_path_(json_path) {
  if (!speaks_ || json_path.empty()) {
    return;
  }
  errno = 0;
  json_.open(json_path, std::ios::trunc);
  ZR_CHECK(json_.is_open(), zeroth::ErrorCode::kIo, "cannot write the records",
           zeroth::ErrorContext{
               .where = "zeroth-gpt --json", .which = json_path.string(), .got = zeroth::errno_text(errno)});
}

void Report::line(std::string_view text) {
  if (speaks_) {
    fmt::print("{}\n", text);
    std::fflush(stdout);
  }
}

void Report::introduce(const Options& options, const Settings& settings, const RunSummary& summary, int threads) {
  line(fmt::format("{} parameters: {} layers, width {}, {} heads, sequence {}, {}",
                   grouped(static_cast<std::uint64_t>(summary.parameters)), options.layers, options.d_model,
                   options.heads, options.seq, settings.dtype));
  const int sharing = summary.world_size / settings.data_ranks;
  const std::string ranks = sharing == 1 ? fmt::format("{} ranks", summary.world_size)
                                         : fmt::format("{} groups of {} ranks", settings.data_ranks, sharing);
  line(fmt::format("ZeRO-{}, {} x {} micro-steps x {} sequences = {} sequences a step, threads per rank: {}",
                   summary.zero_stage, ranks, settings.batch.accumulate, settings.batch.micro, settings.batch.train,
                   threads));
}

void Report::progress(const StepRecord& record, std::int64_t steps, double tokens_per_second) {
  if (speaks_) {
    line(fmt::format("step {}/{}  loss {:.4f}  {} tokens/s  grad norm {:.3f}  lr {:.2e}", record.step, steps,
                     record.loss, grouped(static_cast<std::uint64_t>(tokens_per_second)), record.grad_norm, record.lr));
  }
}

void Report::validation(std::int64_t step, double loss, double bigram_entropy) {
  if (speaks_) {
    line(fmt::format("step {}  validation loss {:.4f} nats/byte (bigram entropy of the held-out text: {:.4f})", step,
                     loss, bigram_entropy));
  }
}

void Report::sample(std::string_view prompt, std::string_view text, double temperature) {
  if (speaks_) {
    line(fmt::format("--- sample, temperature {}, after the prompt \"{}\" ---", temperature, printable(prompt)));
    line(printable(prompt) + printable(text));
    line("--- end of the sample ---");
  }
}

void Report::table(const RunSummary& summary) {
  if (!speaks_) {
    return;
  }
  line(fmt::format("ZeRO-{}, {} ranks, {} parameters: bytes of rank 0", summary.zero_stage, summary.world_size,
                   grouped(static_cast<std::uint64_t>(summary.parameters))));
  line(fmt::format("  {:<32} {:>16} {:>16}", "memory", "planned", "measured"));
  for (const std::string& name : names_of(summary.planned, summary.measured)) {
    line(fmt::format("  {:<32} {:>16} {:>16}", name, cell(summary.planned, name), cell(summary.measured, name)));
  }
  line(fmt::format("  {:<32} {:>16} {:>16}", "wire, all training steps", "formula", "counted"));
  for (const std::string& name : names_of(summary.wire, summary.wire_formula)) {
    line(fmt::format("  {:<32} {:>16} {:>16}", name, cell(summary.wire_formula, name), cell(summary.wire, name)));
  }
  line(fmt::format("  {:<32} {:>16} {:>16}", "control", "", grouped(summary.wire_control)));
  if (!summary.files.empty()) {
    line(fmt::format("  {:<32} {:>16} {:>16}", "files, last step", "formula", "counted"));
    for (const std::string& name : names_of(summary.files, summary.files_formula)) {
      line(fmt::format("  {:<32} {:>16} {:>16}", name, cell(summary.files_formula, name), cell(summary.files, name)));
    }
    const double rate = static_cast<double>(summary.files_moved) / 1e6 / std::max(summary.files_seconds, 1e-9);
    line(
        fmt::format("  files: {} MB/s while something was on its way, {:.0f} % of that time hidden behind the training",
                    grouped(static_cast<std::uint64_t>(rate + 0.5)), 100.0 * summary.files_hidden));
  }
  line(fmt::format("  ring slots in use at a time, most: {}; peak PSS of all ranks: {}", summary.live_slots,
                   zeroth::format_bytes(summary.pss_peak)));
}

void Report::write(const StepRecord& record) {
  ordered_json json = {{"step", record.step},
                       {"loss", number(record.loss)},
                       {"loss_hex", zeroth::hex_float(record.loss)},
                       {"grad_norm", number(record.grad_norm)},
                       {"lr", record.lr},
                       {"tokens", record.tokens},
                       {"seconds", record.seconds}};
  if (!record.committed) {
    json["skipped"] = record.reason;
  }
  append(json.dump());
}

void Report::write(const RunSummary& summary) {
  const ordered_json json = {
      {"final", true},
      {"steps", summary.steps},
      {"world_size", summary.world_size},
      {"zero_stage", summary.zero_stage},
      {"parameters", summary.parameters},
      {"seconds", summary.seconds},
      {"tokens_per_second", summary.tokens_per_second},
      {"last_loss_hex", summary.last_loss_hex},
      {"validation_loss", summary.validation_loss ? number(*summary.validation_loss) : ordered_json(nullptr)},
      {"bigram_entropy", summary.bigram_entropy},
      {"below_bigram_step",
       summary.below_bigram_step ? ordered_json(*summary.below_bigram_step) : ordered_json(nullptr)},
      {"target_reached", summary.target_reached},
      {"planned_bytes", object(summary.planned)},
      {"measured_bytes", object(summary.measured)},
      {"pss_peak_bytes", summary.pss_peak},
      {"wire_bytes", object(summary.wire)},
      {"wire_formula_bytes", object(summary.wire_formula)},
      {"wire_control_bytes", summary.wire_control},
      {"live_slots_peak", summary.live_slots},
      {"file_bytes", object(summary.files)},
      {"file_formula_bytes", object(summary.files_formula)},
      {"file_moved_bytes", summary.files_moved},
      {"file_seconds", summary.files_seconds},
      {"file_hidden_share", summary.files_hidden}};
  append(json.dump());
}

void Report::append(const std::string& record) {
  if (!json_.is_open()) {
    return;
  }
  errno = 0;
  json_ << record << '\n' << std::flush;
  ZR_CHECK(json_.good(), zeroth::ErrorCode::kIo, "cannot write a record",
           zeroth::ErrorContext{
               .where = "zeroth-gpt --json", .which = json_path_.string(), .got = zeroth::errno_text(errno)});
}

}  // namespace gpt
