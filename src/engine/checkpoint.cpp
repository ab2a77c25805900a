// Engine::save() and Engine::load(): states of all ranks to files and back, by name and element.
#include "checkpoint/rank_file.h"
#include "engine/own_operations.h"
#include "engine/shard_group.h"
#include "engine/state_pieces.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/safetensors.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <utility>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;
using detail::KnownFile;
using detail::RankEntry;

constexpr std::size_t kPieceBytes = std::size_t{1} << 20U;
constexpr const char* kExtra = "extra/";  // keys of the caller's tensors

std::string random_name() {
  std::random_device random;
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "%08x%08x", random(), random());
  return text.data();
}

/// Doubles as hexadecimal text: what is read is what was written, to the bit.
std::string text_of(const GroupHyper& hyper) {
  const Json json{{"lr", hex_float(hyper.lr)},
                  {"beta1", hex_float(hyper.beta1)},
                  {"beta2", hex_float(hyper.beta2)},
                  {"eps", hex_float(hyper.eps)},
                  {"weight_decay", hex_float(hyper.weight_decay)},
                  {"momentum", hex_float(hyper.momentum)},
                  {"dampening", hex_float(hyper.dampening)},
                  {"nesterov", hyper.nesterov}};
  return json.dump();
}

GroupHyper hyper_of(const std::string& text, const std::string& where) {
  try {
    const Json json = Json::parse(text);
    const auto number = [&json](const char* name) {
      const auto said = json.at(name).get<std::string>();
      std::size_t read = 0;
      const double value = std::stod(said, &read);
      if (read != said.size()) throw std::invalid_argument(said);
      return value;
    };
    return {.lr = number("lr"),
            .beta1 = number("beta1"),
            .beta2 = number("beta2"),
            .eps = number("eps"),
            .weight_decay = number("weight_decay"),
            .momentum = number("momentum"),
            .dampening = number("dampening"),
            .nesterov = json.at("nesterov").get<bool>()};
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kCheckpoint, "hyper-parameters of a checkpoint cannot be read",
                {.where = "engine.load", .which = where, .got = error.what()});
  }
}

/// What a rank has done, for all to hear: an error, or files.
std::string outcome_text(const Error* error, const std::vector<CheckpointFile>& files) {
  Json json = Json::object();
  if (error != nullptr) {
    json = {{"code", slug(error->code())}, {"text", error->what()}};
  } else {
    Json list = Json::array();
    for (const CheckpointFile& file : files)
      list.push_back({{"name", file.name}, {"bytes", file.bytes}, {"chunks", file.chunks}});
    json["files"] = std::move(list);
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Throws what the first rank that failed says, on every rank alike.
void throw_if_any_failed(const std::vector<std::string>& outcomes, const char* what) {
  std::vector<int> failed;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (Json::parse(outcomes[rank]).contains("code")) failed.push_back(static_cast<int>(rank));
  }
  if (failed.empty()) return;
  const Json first = Json::parse(outcomes[static_cast<std::size_t>(failed.front())]);
  throw Error(code_of_slug(first.at("code").get<std::string>()).value_or(ErrorCode::kIo), what,
              {.where = "engine.checkpoint",
               .who = ranks_text(failed) + " of " + std::to_string(outcomes.size()),
               .got = first.at("text").get<std::string>()});
}

/// Runs `work` and tells all ranks how it ended.
template <class Work>
std::vector<std::string> on_all_ranks(const Communicator& communicator, const char* what, const Work& work) {
  std::string outcome;
  try {
    outcome = outcome_text(nullptr, work());
  } catch (const Error& error) {
    outcome = outcome_text(&error, {});
  } catch (const std::bad_alloc& error) {
    const Error own = error_of(error);
    outcome = outcome_text(&own, {});
  }
  std::vector<std::string> outcomes = gather_texts(outcome, communicator);
  throw_if_any_failed(outcomes, what);
  return outcomes;
}

/// Elements [begin, end) of the box, as they lie in a file.
class PieceReader {
 public:
  PieceReader(const StatePiece& piece, Kernels& kernels, const Stream& stream)
      : piece_(piece), kernels_(kernels), stream_(stream) {}

  /// Calls write(bytes) for parts that make up piece.writes, in order.
  template <class Write>
  void each(const Write& write) {
    const std::size_t element = size_of(piece_.dtype);
    const auto step = static_cast<std::int64_t>(kPieceBytes / element);
    for (std::int64_t at = piece_.writes.begin; at < piece_.writes.end; at += step) {
      const std::int64_t n = std::min(step, piece_.writes.end - at);
      write(values(at, n));
    }
  }

 private:
  std::span<const std::byte> values(std::int64_t at, std::int64_t n) {
    const std::int64_t in_piece = at - piece_.has.begin;
    const std::size_t bytes = array_bytes(n, piece_.dtype);
    if (!piece_.halved) return on_host(piece_.data + array_bytes(in_piece, piece_.dtype), bytes, values_);
    const std::span<const std::byte> high =
        on_host(piece_.data + array_bytes(in_piece, DType::kBFloat16), array_bytes(n, DType::kBFloat16), high_);
    const std::span<const std::byte> low =
        on_host(reinterpret_cast<const std::byte*>(piece_.low + (at - piece_.low_range.begin)),
                static_cast<std::size_t>(n) * sizeof(std::int16_t), low_);
    masters_.resize(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      masters_[static_cast<std::size_t>(i)] = join_master(reinterpret_cast<const BFloat16*>(high.data())[i],
                                                          reinterpret_cast<const std::int16_t*>(low.data())[i]);
    }
    return std::as_bytes(std::span(masters_));
  }
  std::span<const std::byte> on_host(const std::byte* data, std::size_t bytes, std::vector<std::byte>& copy) {
    if (kernels_.on_host()) return {data, bytes};
    copy.resize(bytes);
    kernels_.copy(copy.data(), data, bytes, stream_);
    return copy;
  }

  const StatePiece& piece_;
  Kernels& kernels_;
  const Stream& stream_;
  std::vector<std::byte> values_;
  std::vector<std::byte> high_;
  std::vector<std::byte> low_;
  std::vector<float> masters_;
};

/// Puts values that came from a file where they belong.
void store(const StatePiece& piece, const std::vector<std::byte>& values, Kernels& kernels, const Stream& stream) {
  if (!piece.halved) return kernels.copy(piece.data, values.data(), values.size(), stream);
  const std::int64_t n = piece.has.size();
  std::vector<BFloat16> high(static_cast<std::size_t>(n));
  std::vector<std::int16_t> low(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    split_master(reinterpret_cast<const float*>(values.data())[i], high[at], low[at]);
  }
  kernels.copy(piece.data, high.data(), high.size() * sizeof(BFloat16), stream);
  const auto first = static_cast<std::size_t>(std::max<std::int64_t>(piece.low_range.begin - piece.has.begin, 0));
  kernels.copy(piece.low, low.data() + first, static_cast<std::size_t>(piece.low_range.size()) * sizeof(std::int16_t),
               stream);
  kernels.settle(stream);
}

/// A range in one of the files.
struct Source {
  std::size_t file = 0;
  RankEntry entry{};
};

/// Reads the elements of `has` from the files that have them. False if some are in none.
bool read_elements(const BoxRange& has, std::size_t element, const std::vector<Source>& sources,
                   std::vector<KnownFile>& files, std::vector<std::byte>& values) {
  struct Wanted {
    std::size_t file;
    std::uint64_t offset;
    std::size_t bytes;
    std::size_t at;
  };
  // Runs of all sources, by their first element.
  struct Known {
    Run run;
    const Source* source;
  };
  std::vector<Known> known;
  for (const Source& source : sources) {
    for (const Run& run : runs_of(source.entry.range)) known.push_back({run, &source});
  }
  std::ranges::sort(known, {}, [](const Known& one) { return one.run.logical; });
  std::vector<Wanted> wanted;
  for (const Run& run : runs_of(has)) {
    std::int64_t next = run.logical;
    const std::int64_t end = run.logical + run.count;
    auto at = std::ranges::upper_bound(known, next, {}, [](const Known& one) { return one.run.logical; });
    if (at != known.begin()) --at;
    for (; next < end; ++at) {
      while (at != known.end() && at->run.logical + at->run.count <= next) ++at;
      if (at == known.end() || at->run.logical > next) return false;
      const std::int64_t count = std::min(end, at->run.logical + at->run.count) - next;
      const std::int64_t in_source = at->run.local + (next - at->run.logical);
      wanted.push_back({.file = at->source->file,
                        .offset = at->source->entry.begin + static_cast<std::uint64_t>(in_source) * element,
                        .bytes = static_cast<std::size_t>(count) * element,
                        .at = static_cast<std::size_t>(run.local + (next - run.logical)) * element});
      next += count;
    }
  }
  std::ranges::sort(wanted, {}, [](const Wanted& one) { return std::pair(one.file, one.offset); });
  for (const Wanted& one : wanted) files[one.file].read(one.offset, std::span(values).subspan(one.at, one.bytes));
  return true;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::vector<std::string> extents;
  for (const std::int64_t extent : shape) extents.push_back(std::to_string(extent));
  return "[" + join(extents, ", ") + "]";
}

/// The first few of a list, for an error.
std::string few(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 10;
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + static_cast<std::ptrdiff_t>(std::min(kMost, names.size())));
  return join(first, ", ") + (names.size() > kMost ? " and " + std::to_string(names.size() - kMost) + " more" : "");
}

}  // namespace

/// What a load has read, before anything is changed.
struct Engine::StatesRead {
  std::vector<StatePiece> pieces{};
  std::vector<std::vector<std::byte>> values{};  ///< one a piece
  std::vector<GroupHyper> groups{};
  std::vector<std::int64_t> updates{};  ///< one a parameter; -1: not there
};

void Engine::require_between_steps(const char* where) const {
  ZR_CHECK(!had_backward_ && micro_step_ == 0, ErrorCode::kUsage, "a checkpoint in the middle of a step",
           {.where = where,
            .expected = "a call after the last micro-step's step(), before the next backward",
            .got = std::to_string(micro_step_) + " of " + std::to_string(settings_.micro_steps) + " micro-steps",
            .hint = "call step() or zero_grad() first"});
}

std::vector<StatePiece> Engine::pieces_of(const ShardGroup& group) const {
  std::vector<StatePiece> pieces = state_pieces(group.layout(), group.memory(), group.writes_states(), rank());
  for (StatePiece& piece : pieces) piece.param = group.part().params[static_cast<std::size_t>(piece.param)];
  return pieces;
}

Manifest Engine::describe_states() const {
  Manifest manifest{.version = settings_.version,
                    .step = committed_steps_,
                    .world = world(),
                    .plan = settings_.plan.name,
                    .optimizer = std::string(optimizer_->name()),
                    .configuration = settings_.configuration};
  for (const GroupHyper& group : settings_.groups) manifest.groups.push_back(text_of(group));
  for (const ParamSpec& spec : layout_.params) {
    manifest.params.push_back({.name = spec.name,
                               .shape = spec.logical_shape.empty() ? spec.shape : spec.logical_shape,
                               .dtype = safetensors_dtype(spec.dtype),
                               .trainable = spec.trainable,
                               .group = spec.group,
                               .aliases = spec.aliases});
  }
  for (const auto& group : groups_) {
    for (std::size_t index = 0; index < group->part().params.size(); ++index) {
      manifest.params[static_cast<std::size_t>(group->part().params[index])].updates = group->updates()[index];
    }
    for (const StatePiece& piece : pieces_of(*group)) {
      if (piece.state.find('@') != std::string::npos) continue;  // of every rank's own
      std::vector<CheckpointState>& states = manifest.params[static_cast<std::size_t>(piece.param)].states;
      states.push_back({.name = piece.state, .dtype = safetensors_dtype(piece.dtype), .shape = piece.has.logical});
    }
  }
  return manifest;
}

std::string Engine::save(const std::string& folder, const SaveOptions& options) {
  require_between_steps("engine.save");
  return together([&] {
    sync(own_->save);
    // Rank 0 makes the folder, and all hear where.
    std::optional<PendingCheckpoint> pending;
    std::string said;
    const std::string run = random_name();
    if (rank() == 0) {
      try {
        pending.emplace(folder, committed_steps_, run);
        said = outcome_text(nullptr, {{.name = pending->path()}});
      } catch (const Error& error) {
        said = outcome_text(&error, {});
      }
    }
    said = broadcast_text(std::move(said), 0, communicator_);
    throw_if_any_failed({said}, "a checkpoint could not be begun");
    const std::string path = Json::parse(said).at("files").at(0).at("name");

    const std::vector<std::string> outcomes = on_all_ranks(communicator_, "a checkpoint could not be written", [&] {
      return std::vector<CheckpointFile>{
          write_states((std::filesystem::path(path) / rank_file_name(rank())).string(), options)};
    });
    const std::vector<std::string> users = gather_texts(options.user_of_rank, communicator_);
    const std::string states_of_ranks = describe_all_params();
    std::string ended;
    if (rank() == 0) {
      try {
        Manifest manifest = describe_states();
        add_params_of_others(manifest, states_of_ranks);
        manifest.run = run;
        manifest.user = options.user;
        manifest.user_of_rank = users;
        for (const ExtraTensor& extra : options.extras) manifest.extras.push_back(extra.about);
        for (const std::string& outcome : outcomes) {
          const Json file = Json::parse(outcome).at("files").at(0);
          manifest.files.push_back({.name = file.at("name"),
                                    .bytes = file.at("bytes"),
                                    .chunks = file.at("chunks").get<std::vector<std::uint64_t>>()});
        }
        pending->commit(to_text(manifest), options.retention);
        ended = outcome_text(nullptr, {{.name = pending->final_path()}});
      } catch (const Error& error) {
        ended = outcome_text(&error, {});
      }
    }
    ended = broadcast_text(std::move(ended), 0, communicator_);
    throw_if_any_failed({ended}, "a checkpoint could not be committed");
    return Json::parse(ended).at("files").at(0).at("name").get<std::string>();
  });
}

CheckpointFile Engine::write_states(const std::string& path, const SaveOptions& options) {
  std::vector<StatePiece> pieces;
  for (const auto& group : groups_) {
    for (StatePiece& piece : pieces_of(*group)) {
      if (piece.writes.size() > 0) pieces.push_back(std::move(piece));
    }
  }
  std::vector<RankEntry> entries;
  for (const StatePiece& piece : pieces) {
    BoxRange range = piece.has;
    range.begin = piece.writes.begin;
    range.end = piece.writes.end;
    entries.push_back({.key = piece.key(layout_.params[static_cast<std::size_t>(piece.param)]),
                       .dtype = safetensors_dtype(piece.dtype),
                       .range = std::move(range)});
  }
  if (rank() == 0) {
    for (const ExtraTensor& extra : options.extras) {
      std::int64_t elements = 1;
      for (const std::int64_t extent : extra.about.shape) elements *= extent;
      const std::uint64_t element = detail::bytes_of_dtype(extra.about.dtype);
      ZR_CHECK(element > 0 && static_cast<std::uint64_t>(elements) * element == extra.data.size(), ErrorCode::kUsage,
               "a tensor for a checkpoint has bytes that do not fit it",
               {.where = "engine.save", .which = extra.about.name, .got = std::to_string(extra.data.size())});
      entries.push_back({.key = kExtra + extra.about.name,
                         .dtype = extra.about.dtype,
                         .range = BoxRange::of_whole(extra.about.shape, 0, elements)});
    }
  }
  const std::string header = detail::make_header(entries);
  std::uint64_t bytes = header.size();
  for (const RankEntry& entry : entries) bytes += entry.bytes;
  detail::NewFile file(path, bytes);
  file.write(std::as_bytes(std::span(header)));
  for (const StatePiece& piece : pieces) {
    PieceReader(piece, *kernels_, resources_->gather_stream).each([&file](std::span<const std::byte> part) {
      file.write(part);
    });
  }
  if (rank() == 0) {
    for (const ExtraTensor& extra : options.extras) file.write(extra.data);
  }
  return file.finish();
}

std::string Engine::describe_all_params() {
  // Ranks whose groups have other parameters (stages of a pipeline) name theirs; else nobody has to.
  const bool alike = std::ranges::all_of(groups_, [](const auto& group) { return group->has_all_ranks(); });
  if (alike) return "";
  Json json = Json::array();
  const Manifest own = describe_states();
  Manifest bare{.world = 1, .params = own.params, .user_of_rank = {""}, .files = {{.name = "none"}}};
  const std::vector<std::string> all = gather_texts(to_text(bare), communicator_);
  for (const std::string& text : all) json.push_back(text);
  return json.dump();
}

void Engine::add_params_of_others(Manifest& manifest, const std::string& all) {
  if (all.empty()) return;
  std::set<std::string> names;
  for (const CheckpointParam& param : manifest.params) names.insert(param.name);
  for (const Json& text : Json::parse(all)) {
    for (CheckpointParam& param : manifest_of(text.get<std::string>(), "a rank's parameters").params) {
      if (names.insert(param.name).second) manifest.params.push_back(std::move(param));
    }
  }
}

LoadReport Engine::load(const std::string& path, const LoadOptions& options) {
  require_between_steps("engine.load");
  return together([&] {
    sync(own_->load);
    for (const auto& group : groups_) group->complete_uses();
    LoadReport report;
    // Rank 0 chooses, and all read the same one.
    std::string said;
    if (rank() == 0) {
      try {
        report = choose_checkpoint(path, options);
        Json json = Json::object();
        json["path"] = report.path;
        json["skipped"] = report.skipped;
        said = json.dump();
      } catch (const Error& error) {
        said = outcome_text(&error, {});
      }
    }
    said = broadcast_text(std::move(said), 0, communicator_);
    throw_if_any_failed({said}, "no checkpoint could be loaded");
    report.path = Json::parse(said).at("path").get<std::string>();
    report.skipped = Json::parse(said).at("skipped").get<std::vector<std::string>>();

    if (report.path.empty()) return report;

    // First everything is read and compared, then everything is changed, on all ranks or on none.
    StatesRead read;
    (void)on_all_ranks(communicator_, "a checkpoint could not be loaded, and nothing was changed", [&] {
      report.manifest = read_manifest(report.path);
      read = read_states(report, options);
      return std::vector<CheckpointFile>{};
    });
    take_states(read, report.manifest);
    report.user = report.manifest.user;
    if (report.manifest.world == world())
      report.user_of_rank = report.manifest.user_of_rank[static_cast<std::size_t>(rank())];
    return report;
  });
}

LoadReport Engine::choose_checkpoint(const std::string& path, const LoadOptions& options) {
  namespace fs = std::filesystem;
  LoadReport report;
  std::error_code error;
  if (fs::exists(fs::path(path) / kManifestFile, error)) {
    (void)read_manifest(path);
    report.path = path;
    return report;
  }
  for (const CheckpointEntry& entry : list_checkpoints(path)) {
    try {
      (void)read_manifest(entry.path);
      report.path = entry.path;
      return report;
    } catch (const Error& bad) {
      report.skipped.push_back(entry.path + ": " + bad.what());
    }
  }
  if (options.if_any && report.skipped.empty()) return report;
  throw Error(ErrorCode::kCheckpoint, "there is no checkpoint",
              {.where = "engine.load",
               .which = path,
               .expected = "a checkpoint, or a folder with checkpoints",
               .got = report.skipped.empty() ? "none" : zeroth::join(report.skipped, "; ")});
}

/// A group gets the hyper-parameters that its parameters had: groups may be numbered in another way there.
std::vector<GroupHyper> Engine::hypers_of(const Manifest& manifest,
                                          const std::map<std::string, const CheckpointParam*>& params,
                                          const std::string& path, const LoadOptions& options) const {
  std::vector<GroupHyper> groups = settings_.groups;
  std::vector<int> theirs(groups.size(), -1);
  for (const ParamSpec& spec : layout_.params) {
    const auto found = params.find(spec.name);
    if (found == params.end()) continue;
    int& group = theirs[static_cast<std::size_t>(spec.group)];
    const int said = found->second->group;
    ZR_CHECK(said >= 0 && static_cast<std::size_t>(said) < manifest.groups.size(), ErrorCode::kCheckpoint,
             "a parameter of a checkpoint is in no group", {.where = "engine.load", .which = path + ", " + spec.name});
    ZR_CHECK(group < 0 || group == said || !options.strict ||
                 manifest.groups[static_cast<std::size_t>(group)] == manifest.groups[static_cast<std::size_t>(said)],
             ErrorCode::kCheckpoint, "parameters of one group had different hyper-parameters",
             {.where = "engine.load",
              .which = path + ", " + spec.name,
              .expected = manifest.groups[static_cast<std::size_t>(std::max(group, 0))],
              .got = manifest.groups[static_cast<std::size_t>(said)],
              .hint = "build the engine with the same parameter groups; strict = false takes those of the first"});
    if (group < 0) group = said;
  }
  for (std::size_t group = 0; group < groups.size(); ++group) {
    if (theirs[group] >= 0) groups[group] = hyper_of(manifest.groups[static_cast<std::size_t>(theirs[group])], path);
  }
  return groups;
}

Engine::StatesRead Engine::read_states(LoadReport& report, const LoadOptions& options) {
  const Manifest& manifest = report.manifest;
  std::vector<KnownFile> files;
  std::map<std::string, std::vector<Source>> sources;
  for (std::size_t index = 0; index < manifest.files.size(); ++index) {
    files.emplace_back(report.path, manifest.files[index]);
    for (RankEntry& entry : detail::read_header(files.back()))
      sources[entry.key].push_back({.file = index, .entry = std::move(entry)});
  }
  std::map<std::string, const CheckpointParam*> params;
  for (const CheckpointParam& param : manifest.params) params[param.name] = &param;

  StatesRead read;
  std::vector<std::string> other_shapes;
  for (const auto& group : groups_) {
    for (StatePiece& piece : pieces_of(*group)) {
      const ParamSpec& spec = layout_.params[static_cast<std::size_t>(piece.param)];
      const std::string key = piece.key(spec);
      const bool of_this_rank = piece.state.find('@') != std::string::npos;
      if (of_this_rank && manifest.world != world()) continue;  // nobody's: the ranks are others
      const auto found = sources.find(key);
      if (found == sources.end()) {
        report.missing.push_back(key);
        continue;
      }
      const RankEntry& first = found->second.front().entry;
      if (first.range.logical != piece.has.logical || first.dtype != safetensors_dtype(piece.dtype)) {
        other_shapes.push_back(key + ": " + first.dtype + " " + shape_text(first.range.logical) + " there, " +
                               safetensors_dtype(piece.dtype) + " " + shape_text(piece.has.logical) + " here");
        continue;
      }
      std::vector<std::byte> values(array_bytes(piece.has.size(), piece.dtype));
      if (!read_elements(piece.has, size_of(piece.dtype), found->second, files, values)) {
        throw Error(ErrorCode::kCheckpoint, "a checkpoint lacks elements of a state",
                    {.where = "engine.load", .which = report.path + ", " + key});
      }
      read.values.push_back(std::move(values));
      read.pieces.push_back(std::move(piece));
    }
  }
  ZR_CHECK(other_shapes.empty(), ErrorCode::kCheckpoint, "a checkpoint has states of other shapes or dtypes",
           {.where = "engine.load", .which = report.path, .got = few(other_shapes)});
  std::set<std::string> own;
  for (const ParamSpec& spec : layout_.params) own.insert(spec.name);
  const bool whole_model = std::ranges::all_of(groups_, [](const auto& group) { return group->has_all_ranks(); });
  for (const CheckpointParam& param : manifest.params) {
    if (whole_model && !own.contains(param.name)) report.unexpected.push_back(param.name);
  }
  ZR_CHECK(!options.strict || (report.missing.empty() && report.unexpected.empty()), ErrorCode::kCheckpoint,
           "a checkpoint is of another model or optimizer",
           {.where = "engine.load",
            .which = report.path,
            .expected = "every parameter and state of this one, and no others",
            .got = (report.missing.empty() ? "" : "missing " + few(report.missing)) +
                   (report.missing.empty() || report.unexpected.empty() ? "" : "; ") +
                   (report.unexpected.empty() ? "" : "beyond the model " + few(report.unexpected)),
            .hint = "strict = false keeps what is there for what is missing"});
  read.groups = hypers_of(manifest, params, report.path, options);
  for (const CheckpointState& extra : manifest.extras) {
    const auto found = sources.find(kExtra + extra.name);
    ZR_CHECK(found != sources.end(), ErrorCode::kCheckpoint, "a checkpoint lacks a tensor of its manifest",
             {.where = "engine.load", .which = report.path + ", " + extra.name});
    const Source& source = found->second.front();
    LoadedExtra loaded{.about = extra, .data = std::vector<std::byte>(static_cast<std::size_t>(source.entry.bytes))};
    files[source.file].read(source.entry.begin, loaded.data);
    report.extras.push_back(std::move(loaded));
  }
  read.updates.assign(layout_.params.size(), -1);
  for (std::size_t param = 0; param < layout_.params.size(); ++param) {
    const auto found = params.find(layout_.params[param].name);
    if (found != params.end()) read.updates[param] = found->second->updates;
  }
  return read;
}

void Engine::take_states(const StatesRead& read, const Manifest& manifest) {
  for (std::size_t index = 0; index < read.pieces.size(); ++index)
    store(read.pieces[index], read.values[index], *kernels_, resources_->gather_stream);
  settings_.groups = read.groups;
  for (const auto& group : groups_) {
    std::vector<std::int64_t> updates = group->updates();
    for (std::size_t index = 0; index < updates.size(); ++index) {
      const std::int64_t said = read.updates[static_cast<std::size_t>(group->part().params[index])];
      if (said >= 0) updates[index] = said;
    }
    group->set_updates(std::move(updates));
  }
  committed_steps_ = manifest.step;
  kernels_->settle(resources_->gather_stream);
  communicator_.barrier("the states of a checkpoint");
  for (const auto& group : groups_) group->parameters().publish();
  kernels_->settle(resources_->gather_stream);
}

}  // namespace zeroth
