#include "engine/startup_check.h"

#include "engine/odd_rank.h"

#include <zeroth/base/text.h>
#include <zeroth/engine/config.h>

#include <algorithm>
#include <limits>
#include <sstream>

namespace zeroth {
namespace {

constexpr std::string_view kConfigurationLine = "configuration ";
constexpr std::string_view kVersionLine = "version ";
constexpr std::string_view kLibrariesLine = "libraries ";

/// One line for each thing that must agree, in a form that people can compare.
std::string describe(const ModelLayout& model, const EngineSettings& settings) {
  std::ostringstream text;
  text << kVersionLine << settings.version << "\n";
  text << kLibrariesLine << (settings.libraries.empty() ? "none" : settings.libraries) << "\n";
  text << kConfigurationLine << settings.configuration << "\n";
  text << "plan " << name_of(settings.plan.parameter) << " " << name_of(settings.plan.gradient) << " "
       << name_of(settings.plan.optimizer) << " " << name_of(settings.plan.policy) << " reshard "
       << name_of(settings.plan.reshard) << " ring_slots " << settings.plan.ring_slots
       << (settings.plan.narrow_buckets ? "" : " wide buckets") << " parameter_degree "
       << settings.plan.parameter_degree << " optimizer_degree " << settings.plan.optimizer_degree;
  if (settings.plan.gradient_degree != 0) text << " gradient_degree " << settings.plan.gradient_degree;
  text << "\n";
  text << "micro_steps " << settings.micro_steps << "\n";
  text << "gradient_clipping " << hex_float(settings.gradient_clipping) << "\n";
  text << "optimizer " << settings.optimizer.type << (settings.optimizer.momentum ? " with momentum" : "") << "\n";
  text << "max_nonfinite_steps " << settings.max_nonfinite_steps << "\n";
  text << "scales_loss " << settings.scales_loss << "\n";
  text << "uneven " << static_cast<int>(settings.uneven) << "\n";
  text << "threads " << settings.threads << "\n";
  text << "schedule " << name_of(settings.schedule.kind) << " " << settings.schedule.warmup_steps << " "
       << settings.schedule.total_steps << " from " << hex_float(settings.schedule.warmup_start)
       << (settings.schedule.logarithmic ? " along a logarithm" : "") << " to " << hex_float(settings.schedule.floor)
       << "\n";
  for (std::size_t group = 0; group < settings.groups.size(); ++group) {
    const GroupHyper& hyper = settings.groups[group];
    text << "group " << group << " lr " << hex_float(hyper.lr) << " betas " << hex_float(hyper.beta1) << " "
         << hex_float(hyper.beta2) << " eps " << hex_float(hyper.eps) << " weight_decay "
         << hex_float(hyper.weight_decay) << " momentum " << hex_float(hyper.momentum) << " dampening "
         << hex_float(hyper.dampening) << (hyper.nesterov ? " nesterov" : "") << "\n";
  }
  for (std::size_t param = 0; param < model.params.size(); ++param) {
    text << "parameter " << model.describe_param(static_cast<int>(param)) << "\n";
  }
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// Every rank's text, in rank order.
std::vector<std::string> gather_texts(const std::string& own, const Communicator& communicator) {
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> sizes(world);
  const auto own_size = static_cast<std::int64_t>(own.size());
  communicator.all_gather(std::span(&own_size, 1), std::span(sizes));
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) {
    ZR_CHECK(size >= 0 && size <= kMost, ErrorCode::kMismatch, "a rank's description has an absurd size",
             {.where = "engine.startup",
              .who = "rank " + std::to_string(&size - sizes.data()) + "/" + std::to_string(world),
              .expected = "at most " + std::to_string(kMost) + " bytes",
              .got = std::to_string(size)});
    total += size;
  }
  std::vector<std::uint8_t> all(static_cast<std::size_t>(total));
  communicator.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(own.data()), own.size()), std::span(all),
                          sizes);
  std::vector<std::string> texts;
  std::size_t offset = 0;
  for (const std::int64_t size : sizes) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + offset, static_cast<std::size_t>(size));
    offset += static_cast<std::size_t>(size);
  }
  return texts;
}

}  // namespace

void require_same_structure(const ModelLayout& model, const EngineSettings& settings,
                            const Communicator& communicator) {
  const std::string own = describe(model, settings);
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> digests(world);
  const auto digest = static_cast<std::int64_t>(digest64(own) >> 1U);
  communicator.all_gather(std::span(&digest, 1), std::span(digests));
  const auto [usual, odd] = find_odd_rank(digests);
  if (odd < 0) return;

  const std::vector<std::string> texts = gather_texts(own, communicator);
  const std::vector<std::string> expected = lines_of(texts[static_cast<std::size_t>(usual)]);
  const std::vector<std::string> got = lines_of(texts[static_cast<std::size_t>(odd)]);
  const std::string who = "rank " + std::to_string(odd) + "/" + std::to_string(world);
  const std::string usual_rank = "rank " + std::to_string(usual);
  const std::string odd_rank = "rank " + std::to_string(odd);
  for (std::size_t line = 0; line < std::max(expected.size(), got.size()); ++line) {
    const std::string ours = line < expected.size() ? expected[line] : "nothing more";
    const std::string theirs = line < got.size() ? got[line] : "nothing more";
    if (ours == theirs) continue;
    if (ours.starts_with(kVersionLine) && theirs.starts_with(kVersionLine)) {
      throw Error(ErrorCode::kMismatch, "ranks run different versions of Zeroth",
                  {.where = "engine",
                   .who = who,
                   .expected = ours + " (" + usual_rank + ")",
                   .got = theirs + " (" + odd_rank + ")",
                   .hint = "install the same version on every host; zeroth doctor --hosts names the odd one"});
    }
    if (ours.starts_with(kLibrariesLine) && theirs.starts_with(kLibrariesLine)) {
      throw Error(ErrorCode::kMismatch, "ranks compute with different versions of a library",
                  {.where = "engine",
                   .who = who,
                   .expected = ours.substr(kLibrariesLine.size()) + " (" + usual_rank + ")",
                   .got = theirs.substr(kLibrariesLine.size()) + " (" + odd_rank + ")",
                   .hint = "install the same versions on every host, with a Zeroth that was built against them"});
    }
    if (ours.starts_with(kConfigurationLine) && theirs.starts_with(kConfigurationLine)) {
      throw Error(ErrorCode::kMismatch, "ranks do not have the same configuration",
                  {.where = "engine",
                   .who = who,
                   .which = join(shared_differences(ours.substr(kConfigurationLine.size()),
                                                    theirs.substr(kConfigurationLine.size())),
                                 "; "),
                   .expected = "the values of " + usual_rank + " (\"here\")",
                   .got = "those of " + odd_rank + " (\"there\")",
                   .hint = "start every rank with the same configuration file and arguments"});
    }
    throw Error(ErrorCode::kMismatch, "ranks do not train the same thing",
                {.where = "engine",
                 .who = who,
                 .expected = ours + " (" + usual_rank + ")",
                 .got = theirs + " (" + odd_rank + ")",
                 .hint = "build the same model from the same configuration on every rank"});
  }
  throw Error(ErrorCode::kInternal, "ranks' digests differ but their descriptions do not", {.where = "engine"});
}

void require_plan_fits(const ModelLayout& model, const EngineSettings& settings,
                       std::span<const StateDeclaration> states, const Communicator& communicator) {
  const auto world = static_cast<std::size_t>(communicator.size());
  const auto own = static_cast<std::int64_t>(
      std::min<std::uint64_t>(settings.memory_limit_bytes > 0 ? settings.memory_limit_bytes : available_memory_bytes(),
                              std::uint64_t{std::numeric_limits<std::int64_t>::max()}));
  std::vector<std::int64_t> limits(world);
  communicator.all_gather(std::span(&own, 1), std::span(limits));
  const auto least = std::ranges::min_element(limits);
  const auto limit = static_cast<std::uint64_t>(*least);

  const auto need = [&](const ShardingPlan& plan) {
    std::uint64_t total = 0;
    for (int rank = 0; rank < communicator.size(); ++rank) {
      total += plan_memory(model, plan, rank, states, settings.micro_steps).total();
    }
    return total;
  };
  const std::uint64_t asked = need(settings.plan);
  if (asked <= limit) return;

  std::string table;
  std::string fits;
  for (ShardingPlan plan : all_zero_plans(settings.plan.axes)) {
    plan.policy = settings.plan.policy;
    plan.ring_slots = settings.plan.ring_slots;
    plan.prefetch_units = settings.plan.prefetch_units;
    plan.narrow_buckets = settings.plan.narrow_buckets;
    std::vector<Reshard> choices{settings.plan.reshard};
    if (plan.gathers_parameters() && plan.reshard != settings.plan.reshard) choices.push_back(plan.reshard);
    for (const Reshard reshard : choices) {
      plan.reshard = reshard;
      const std::uint64_t bytes = need(plan);
      const std::string name = plan.name + (choices.size() > 1 ? " with reshard " + std::string(name_of(reshard)) : "");
      table += (table.empty() ? "" : ", ") + name + " " + format_bytes(bytes);
      if (bytes <= limit && fits.empty()) fits = name;
    }
  }
  throw Error(ErrorCode::kOutOfMemory, "the plan does not fit the memory that is there",
              {.where = "engine.plan",
               .who = "rank " + std::to_string(least - limits.begin()) + "/" + std::to_string(world),
               .which = settings.plan.name + " on " + std::to_string(world) + " ranks",
               .expected = "at most " + format_bytes(limit) + " for all ranks, activations not counted",
               .got = format_bytes(asked) + " [" + table + "]",
               .hint = fits.empty() ? "no ZeRO stage fits: use more hosts or a smaller model"
                                    : "smallest change that fits: " + fits});
}

}  // namespace zeroth
