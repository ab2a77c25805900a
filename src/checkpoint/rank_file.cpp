#include "checkpoint/rank_file.h"

#include "checkpoint/json_values.h"

#include <zeroth/base/error.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <utility>

namespace zeroth::detail {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // as the format's own reader
constexpr const char* kMetadata = "__metadata__";
constexpr const char* kRanges = "zeroth";
constexpr const char* kOf = "of";  // of a further range of a state: its key

Json to_json(const BoxRange& range) {
  Json json{{"range", {range.begin, range.end}}, {"logical", range.logical}};
  if (!range.order.empty()) json["order"] = range.order;
  if (range.shape == range.logical) return json;
  json["offset"] = range.offset;
  json["shape"] = range.shape;
  if (!range.viewed.empty()) json["tensor"] = range.viewed;
  return json;
}

BoxRange range_of(const Json& json) {
  BoxRange range{.logical = whole_numbers(json.at("logical"))};
  range.shape = json.contains("shape") ? whole_numbers(json.at("shape")) : range.logical;
  range.offset =
      json.contains("offset") ? whole_numbers(json.at("offset")) : std::vector<std::int64_t>(range.logical.size(), 0);
  range.begin = whole_number(json.at("range").at(0));
  range.end = whole_number(json.at("range").at(1));
  if (json.contains("tensor")) range.viewed = whole_numbers(json.at("tensor"));
  if (json.contains("order")) {
    for (const Json& dim : json.at("order")) range.order.push_back(small_number(dim));
  }
  return range;
}

std::vector<RankEntry> parse(const std::string& text, std::uint64_t data, std::uint64_t bytes) {
  const Json json = Json::parse(text);
  require(json.is_object(), "no object");
  const Json ranges = Json::parse(json.at(kMetadata).at(kRanges).get<std::string>());
  std::vector<RankEntry> entries;
  for (const auto& [key, about] : json.items()) {
    if (key == kMetadata) continue;
    const Json& own = ranges.at(key);
    RankEntry entry{.key = own.contains(kOf) ? own.at(kOf).get<std::string>() : key,
                    .dtype = about.at("dtype"),
                    .range = range_of(own)};
    const std::uint64_t begin = count_of(about.at("data_offsets").at(0));
    const std::uint64_t end = count_of(about.at("data_offsets").at(1));
    const std::uint64_t element = bytes_of_dtype(entry.dtype);
    require(element > 0, key + ": an unknown dtype " + entry.dtype);
    require(entry.range.is_valid(), key + ": a range that is none of its tensor");
    require(begin <= end && end <= bytes - data &&
                static_cast<std::uint64_t>(entry.range.size()) == (end - begin) / element &&
                (end - begin) % element == 0,
            key + ": bytes that do not fit its range");
    entry.begin = data + begin;
    entry.bytes = end - begin;
    entries.push_back(std::move(entry));
  }
  // One after the other, and nothing beside them.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> spans;
  for (const RankEntry& entry : entries) spans.emplace_back(entry.begin, entry.begin + entry.bytes);
  std::ranges::sort(spans);
  std::uint64_t next = data;
  for (const auto& [begin, end] : spans) {
    require(begin == next, "tensors overlap, or there is room between them");
    next = end;
  }
  require(next == bytes, "there are bytes behind the last tensor");
  return entries;
}

}  // namespace

std::string state_key(const std::string& param, const std::string& state) {
  return param + "/" + state;
}

std::uint64_t bytes_of_dtype(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t, std::less<>> kBytes{
      {"C64", 8},         {"F64", 8},     {"F32", 4},         {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"F8_E4M3FNUZ", 1}, {"F8_E8M0", 1}, {"F8_E5M2FNUZ", 1}, {"I64", 8}, {"I32", 4},  {"I16", 2},     {"I8", 1},
      {"U64", 8},         {"U32", 4},     {"U16", 2},         {"U8", 1},  {"BOOL", 1}};
  const auto found = kBytes.find(dtype);
  return found == kBytes.end() ? 0 : found->second;
}

std::string make_header(std::vector<RankEntry>& entries) {
  Json json = Json::object();
  Json ranges = Json::object();
  std::uint64_t next = 0;
  for (RankEntry& entry : entries) {
    entry.begin = next;
    entry.bytes = static_cast<std::uint64_t>(entry.range.size()) * bytes_of_dtype(entry.dtype);
    next += entry.bytes;
    // Several boxes of one tensor have further names, and say which tensor it is.
    ZR_CHECK(!json.contains(entry.key) || entry.range.shape != entry.range.logical, ErrorCode::kUsage,
             "two states of one name cannot be written to one file", {.where = "checkpoint", .which = entry.key});
    std::string name = entry.key;
    for (int number = 2; json.contains(name); ++number) name = entry.key + "#" + std::to_string(number);
    json[name] = {{"dtype", entry.dtype}, {"shape", {entry.range.size()}}, {"data_offsets", {entry.begin, next}}};
    ranges[name] = to_json(entry.range);
    if (name != entry.key) ranges[name][kOf] = entry.key;
  }
  std::string text;
  try {
    json[kMetadata] = {{kRanges, ranges.dump()}, {"format", "pt"}};
    text = json.dump();
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kUsage, "a name of a state is not UTF-8", {.where = "checkpoint", .got = error.what()});
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts at a multiple of 8
  const auto length = static_cast<std::uint64_t>(text.size());
  std::string header(reinterpret_cast<const char*>(&length), sizeof length);
  header += text;
  for (RankEntry& entry : entries) entry.begin += header.size();
  return header;
}

std::vector<RankEntry> read_header(KnownFile& file) {
  const std::uint64_t bytes = file.file().bytes;
  try {
    std::uint64_t length = 0;
    require(bytes >= sizeof length, "it is too short for a header");
    file.read(0, std::as_writable_bytes(std::span(&length, 1)));
    require(length <= kMostHeaderBytes && length <= bytes - sizeof length, "its header is longer than the file");
    std::string text(static_cast<std::size_t>(length), '\0');
    file.read(sizeof length, std::as_writable_bytes(std::span(text)));
    return parse(text, sizeof length + length, bytes);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kCheckpoint, "a file of the checkpoint has no good header",
                {.where = "checkpoint", .which = file.file().name, .got = error.what()});
  }
}

}  // namespace zeroth::detail
