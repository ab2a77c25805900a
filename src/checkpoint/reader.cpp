#include "checkpoint/element_reader.h"

#include <zeroth/base/error.h>
#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/reader.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace zeroth {
namespace {

using detail::KnownFile;
using detail::RankEntry;
using detail::Source;

using Sources = std::map<std::string, std::vector<Source>>;

/// Files of a checkpoint, or of its base.
struct Part {
  std::string folder{};
  std::vector<CheckpointFile> files{};
  std::string label{};  ///< before the names of the files: "step-00000010/" of a base
  bool is_base = false;
};

std::vector<Part> parts_of(const std::string& checkpoint, const Manifest& manifest) {
  std::vector<Part> parts{{.folder = checkpoint, .files = manifest.files}};
  if (manifest.base.name.empty()) return parts;
  auto [path, base] = base_of(checkpoint, manifest);
  parts.push_back({.folder = path, .files = std::move(base.files), .label = manifest.base.name + "/", .is_base = true});
  return parts;
}

/// Keys of the weights that a base has for a checkpoint.
std::set<std::string> keys_of_base(const Manifest& manifest) {
  std::set<std::string> keys;
  for (const CheckpointParam& param : manifest.params) {
    if (!param.trainable) keys.insert(detail::state_key(param.name, "weight"));
  }
  return keys;
}

using Expected = std::map<std::string, CheckpointState>;

/// What there should be, by key: what the manifest says; and what files have of other states, which should be whole.
Expected expected_of(const Manifest& manifest, const Sources& sources) {
  Expected expected;
  for (const CheckpointParam& param : manifest.params) {
    for (const CheckpointState& state : param.states) expected[detail::state_key(param.name, state.name)] = state;
  }
  for (const CheckpointState& extra : manifest.extras) expected[detail::kExtraKey + extra.name] = extra;
  for (const auto& [key, parts] : sources) {
    const RankEntry& first = parts.front().entry;
    const bool of_one_rank = key.find('@', key.rfind('/') + 1) != std::string::npos;
    if (!of_one_rank) expected.try_emplace(key, CheckpointState{key, first.dtype, first.range.tensor_shape()});
  }
  return expected;
}

std::string what_of(const Error& error) {
  const ErrorContext& context = error.context();
  return error.message() + (context.got.empty() ? "" : ": " + context.got);
}

/// Chunks of the file whose bytes are others, as damage.
std::vector<Damage> damage_of(KnownFile& file) {
  std::vector<Damage> damage;
  const std::uint64_t bytes = file.file().bytes;
  for (std::uint64_t begin = 0; begin < bytes; begin += detail::kChunkBytes) {
    std::array<std::byte, 1> first{};
    try {
      file.read(begin, first);  // compares the whole chunk
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCheckpoint) throw;
      damage.push_back({.file = file.file().name,
                        .begin = begin,
                        .end = std::min<std::uint64_t>(begin + detail::kChunkBytes, bytes),
                        .what = error.message()});
    }
  }
  return damage;
}

/// What a file has, as far as that can be told, and what is wrong with it.
std::pair<std::vector<RankEntry>, std::vector<Damage>> examine(const Part& part, const CheckpointFile& about) {
  std::vector<RankEntry> entries;
  std::vector<Damage> damage;
  try {
    KnownFile file(part.folder, about);
    damage = damage_of(file);
    if (!damage.empty()) file.trust();  // a header of damaged bytes may still name what is hit
    try {
      entries = detail::read_header(file);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCheckpoint) throw;
      if (damage.empty()) damage.push_back({.end = about.bytes, .what = what_of(error)});
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCheckpoint && error.code() != ErrorCode::kIo) throw;
    damage.push_back({.end = about.bytes, .what = what_of(error)});
  }
  for (Damage& one : damage) one.file = part.label + about.name;
  return {std::move(entries), std::move(damage)};
}

/// Elements that are not there once, of a state whose files are whole.
std::optional<Damage> damage_of(const std::string& key, const CheckpointState& about,
                                const std::vector<Source>& sources) {
  Damage damage{.keys = {key}};
  for (const Source& source : sources) {
    if (source.entry.range.tensor_shape() == about.shape && source.entry.dtype == about.dtype) continue;
    damage.what = "a range of another tensor than the manifest's";
    return damage;
  }
  for (const Source& source : sources) {
    if (source.entry.range.order == sources.front().entry.range.order) continue;
    damage.what = "ranges in different orders of memory";
    return damage;
  }
  const std::int64_t elements = BoxRange::of_whole(about.shape, 0, 0).logical_elements();  // checked with the manifest
  const detail::Coverage coverage = detail::coverage_of(elements, sources);
  if (coverage.missing > 0) {
    damage.begin = static_cast<std::uint64_t>(coverage.first_missing);
    damage.end = damage.begin + static_cast<std::uint64_t>(coverage.missing);
    damage.what = std::to_string(coverage.missing) + " of " + std::to_string(elements) + " elements are in no file";
    return damage;
  }
  if (coverage.twice > 0) {
    damage.begin = static_cast<std::uint64_t>(coverage.first_twice);
    damage.end = damage.begin + static_cast<std::uint64_t>(coverage.twice);
    damage.what = std::to_string(coverage.twice) + " elements are there more than once";
    return damage;
  }
  return std::nullopt;
}

}  // namespace

struct CheckpointReader::State {
  std::string path;
  Manifest manifest;
  std::vector<KnownFile> files;
  std::vector<StoredRange> ranges;
  Sources sources;
  /// A state that is not row major in the files, whole: the last one that was asked for.
  std::string ordered_key;
  std::vector<std::byte> ordered;
};

CheckpointReader::CheckpointReader(const std::string& checkpoint) : state_(std::make_unique<State>()) {
  state_->path = checkpoint;
  state_->manifest = read_manifest(checkpoint);
  const std::set<std::string> of_base = keys_of_base(state_->manifest);
  for (const Part& part : parts_of(checkpoint, state_->manifest)) {
    for (const CheckpointFile& file : part.files) {
      const std::size_t index = state_->files.size();
      state_->files.emplace_back(part.folder, file);
      for (RankEntry& entry : detail::read_header(state_->files.back())) {
        if (part.is_base && !of_base.contains(entry.key)) continue;
        add(index, part.label + file.name, std::move(entry));
      }
    }
  }
}

void CheckpointReader::add(std::size_t index, const std::string& file, detail::RankEntry entry) {
  state_->ranges.push_back({.key = entry.key,
                            .dtype = entry.dtype,
                            .range = entry.range,
                            .file = file,
                            .begin = entry.begin,
                            .bytes = entry.bytes});
  std::vector<Source>& sources = state_->sources[entry.key];
  const bool alike = sources.empty() || (sources.front().entry.range.logical == entry.range.logical &&
                                         sources.front().entry.range.order == entry.range.order &&
                                         sources.front().entry.dtype == entry.dtype);
  ZR_CHECK(alike, ErrorCode::kCheckpoint, "files of a checkpoint say different things of one state",
           {.where = "checkpoint", .which = state_->path + ", " + entry.key});
  sources.push_back({.file = index, .entry = std::move(entry)});
}

CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;
CheckpointReader& CheckpointReader::operator=(CheckpointReader&&) noexcept = default;
CheckpointReader::~CheckpointReader() = default;

const Manifest& CheckpointReader::manifest() const {
  return state_->manifest;
}

std::vector<StoredRange> CheckpointReader::ranges() const {
  return state_->ranges;
}

bool CheckpointReader::has(const std::string& key) const {
  return state_->sources.contains(key);
}

void CheckpointReader::read(const std::string& key, std::int64_t begin, std::int64_t end, std::span<std::byte> into) {
  const auto found = state_->sources.find(key);
  ZR_CHECK(found != state_->sources.end(), ErrorCode::kUsage, "a checkpoint has no such state",
           {.where = "checkpoint.read", .which = state_->path + ", " + key});
  const RankEntry& first = found->second.front().entry;
  const BoxRange range = BoxRange::of_whole(first.range.tensor_shape(), begin, end);
  const std::uint64_t element = detail::bytes_of_dtype(first.dtype);
  ZR_CHECK(range.is_valid() && static_cast<std::uint64_t>(end - begin) == into.size() / element &&
               into.size() % element == 0,
           ErrorCode::kUsage, "a range is none of a state, or does not fit its memory",
           {.where = "checkpoint.read",
            .which = state_->path + ", " + key,
            .expected = std::to_string(range.logical_elements()) + " elements of " + std::to_string(element) + " bytes",
            .got = "[" + std::to_string(begin) + ", " + std::to_string(end) + ") into " + std::to_string(into.size()) +
                   " bytes"});
  const auto read_all_of = [&](const BoxRange& wanted, std::span<std::byte> to) {
    ZR_CHECK(detail::read_elements(wanted, static_cast<std::size_t>(element), found->second, state_->files, to),
             ErrorCode::kCheckpoint, "a checkpoint lacks elements of a state",
             {.where = "checkpoint.read", .which = state_->path + ", " + key});
  };
  if (first.range.order.empty()) return read_all_of(range, into);
  if (state_->ordered_key != key) {
    const BoxRange whole = BoxRange::of_whole(range.logical, 0, range.logical_elements());
    state_->ordered_key.clear();
    state_->ordered.resize(static_cast<std::size_t>(whole.end) * element);
    read_all_of(whole, state_->ordered);
    state_->ordered_key = key;
  }
  std::ranges::copy(std::span(state_->ordered).subspan(static_cast<std::size_t>(begin) * element, into.size()),
                    into.begin());
}

std::vector<Damage> find_damage(const std::string& checkpoint) {
  const Manifest manifest = read_manifest(checkpoint);
  std::vector<Damage> all;
  std::vector<Part> parts{{.folder = checkpoint, .files = manifest.files}};
  try {
    parts = parts_of(checkpoint, manifest);
  } catch (const Error& error) {  // the base is gone, or torn
    if (error.code() != ErrorCode::kCheckpoint && error.code() != ErrorCode::kIo) throw;
    all.push_back({.file = manifest.base.name, .what = error.message()});
  }
  const std::set<std::string> of_base = keys_of_base(manifest);
  Sources sources;
  std::size_t index = 0;
  for (const Part& part : parts) {
    for (const CheckpointFile& about : part.files) {
      auto [entries, damage] = examine(part, about);
      if (part.is_base) std::erase_if(entries, [&](const RankEntry& entry) { return !of_base.contains(entry.key); });
      for (Damage& one : damage) {
        for (const RankEntry& entry : entries) {
          if (entry.begin < one.end && one.begin < entry.begin + entry.bytes) one.keys.push_back(entry.key);
        }
      }
      for (RankEntry& entry : entries) sources[entry.key].push_back({.file = index, .entry = std::move(entry)});
      std::ranges::move(damage, std::back_inserter(all));
      ++index;
    }
  }
  // What a file without a good header has had cannot be told from what was never there.
  for (const auto& [key, about] : expected_of(manifest, sources)) {
    if (std::optional<Damage> damage = damage_of(key, about, sources[key])) all.push_back(std::move(*damage));
  }
  return all;
}

}  // namespace zeroth
