#include "checkpoint/files.h"
#include "checkpoint/json_values.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/checkpoint/manifest.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <limits>
#include <set>
#include <string_view>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;
using detail::require;
using detail::small_number;
using detail::whole_number;

constexpr std::string_view kDigestMember = ",\n\"digest\": \"";
constexpr std::string_view kCommitMember = ",\n \"commit\": ";
constexpr std::string_view kEnd = "\"}\n";
constexpr std::size_t kDigits = 16;
constexpr std::size_t kMostParams = 10'000'000;
constexpr int kMostRanks = 1 << 20;
constexpr std::size_t kMostDimensions = 64;
constexpr std::int64_t kMostCommits = std::int64_t{1} << 53U;

std::string hex(std::uint64_t value) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text(kDigits, '0');
  for (std::size_t digit = kDigits; digit-- > 0; value >>= 4U) text[digit] = kHex[value & 0xfU];
  return text;
}

std::uint64_t unhex(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != kDigits || error != std::errc{} || end != text.data() + text.size())
    throw std::invalid_argument("a digest is no 16 hexadecimal digits");
  return value;
}

Json to_json(const CheckpointState& state) {
  return {{"name", state.name}, {"dtype", state.dtype}, {"shape", state.shape}};
}

Json to_json(const CheckpointParam& param) {
  Json states = Json::array();
  for (const CheckpointState& state : param.states) states.push_back(to_json(state));
  return {{"name", param.name},           {"shape", param.shape},       {"dtype", param.dtype},
          {"trainable", param.trainable}, {"group", param.group},       {"updates", param.updates},
          {"aliases", param.aliases},     {"states", std::move(states)}};
}

Json to_json(const CheckpointFile& file) {
  std::string chunks;
  for (const std::uint64_t chunk : file.chunks) chunks += hex(chunk);
  return {{"name", file.name}, {"bytes", file.bytes}, {"chunks", std::move(chunks)}};
}

std::vector<std::int64_t> shape_of(const Json& json) {
  std::vector<std::int64_t> shape = detail::whole_numbers(json);
  require(shape.size() <= kMostDimensions, "a tensor has too many dimensions");
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) {
    require(extent >= 0 && !__builtin_mul_overflow(elements, extent, &elements) &&
                elements <= std::numeric_limits<std::int64_t>::max() / 16,
            "a tensor has an impossible shape");
  }
  return shape;
}

CheckpointState state_of(const Json& json) {
  return {.name = json.at("name"), .dtype = json.at("dtype"), .shape = shape_of(json.at("shape"))};
}

CheckpointParam param_of(const Json& json) {
  CheckpointParam param{.name = json.at("name"),
                        .shape = shape_of(json.at("shape")),
                        .dtype = json.at("dtype"),
                        .trainable = json.at("trainable"),
                        .group = small_number(json.at("group")),
                        .updates = whole_number(json.at("updates")),
                        .aliases = json.at("aliases")};
  for (const Json& state : json.at("states")) param.states.push_back(state_of(state));
  return param;
}

CheckpointFile file_of(const Json& json) {
  CheckpointFile file{.name = json.at("name"), .bytes = detail::count_of(json.at("bytes"))};
  require(!file.name.empty() && file.name.find('/') == std::string::npos && file.name != "." && file.name != ".." &&
              file.name.find('\0') == std::string::npos,
          "a file has a name that leads elsewhere");
  const auto chunks = json.at("chunks").get<std::string>();
  const std::uint64_t count = file.bytes / detail::kChunkBytes + (file.bytes % detail::kChunkBytes != 0 ? 1 : 0);
  require(chunks.size() % kDigits == 0 && chunks.size() / kDigits == count,
          "a file has not as many digests as its size asks for");
  for (std::size_t at = 0; at < chunks.size(); at += kDigits)
    file.chunks.push_back(unhex(std::string_view(chunks).substr(at, kDigits)));
  return file;
}

CheckpointBase base_of(const Json& json) {
  CheckpointBase base{.name = json.at("name"), .run = json.at("run")};
  const bool plain = std::ranges::all_of(
      base.name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-'; });
  require(plain && !base.name.empty(), "the name of the base is none of a checkpoint");
  return base;
}

template <class Named>
void require_different(const std::vector<Named>& all, const char* what) {
  std::set<std::string_view> names;
  for (const Named& one : all) require(names.insert(one.name).second, what);
}

bool is_known(int format) {
  return format == kCheckpointFormat || format == kOrderedFormat;
}

Manifest parse(std::string_view text) {
  const Json json = Json::parse(text);
  Manifest manifest{.format = small_number(json.at("format"))};
  if (!is_known(manifest.format)) return manifest;
  manifest.version = json.at("version");
  manifest.run = json.at("run");
  manifest.step = whole_number(json.at("step"));
  manifest.world = small_number(json.at("world"));
  manifest.plan = json.at("plan");
  manifest.optimizer = json.at("optimizer");
  manifest.configuration = json.at("configuration");
  manifest.groups = json.at("groups").get<std::vector<std::string>>();
  // Not in the first files of this format.
  manifest.loss_scaler = json.value("loss_scaler", "");
  manifest.accumulation = json.value("accumulation", "");
  manifest.update = json.value("update", "");
  manifest.local = json.value("local", "");
  if (json.contains("commit")) manifest.commit = whole_number(json.at("commit"));
  if (json.contains("base")) manifest.base = base_of(json.at("base"));
  manifest.user = json.at("user");
  manifest.user_of_rank = json.at("user_of_rank").get<std::vector<std::string>>();
  require(manifest.step >= 0 && manifest.world >= 1 && manifest.world <= kMostRanks && manifest.commit <= kMostCommits,
          "a number cannot be");
  const Json& params = json.at("params");
  require(params.is_array() && params.size() <= kMostParams, "there are too many parameters");
  for (const Json& param : params) manifest.params.push_back(param_of(param));
  for (const Json& extra : json.at("extras")) manifest.extras.push_back(state_of(extra));
  for (const Json& file : json.at("files")) manifest.files.push_back(file_of(file));
  require(manifest.files.size() == static_cast<std::size_t>(manifest.world), "there is not one file a rank");
  require_different(manifest.params, "two parameters have one name");
  require_different(manifest.extras, "two tensors have one name");
  require_different(manifest.files, "two files have one name");
  require(manifest.user_of_rank.size() == manifest.files.size(), "there is not one entry of the user's a rank");
  return manifest;
}

[[noreturn]] void refuse(const std::string& what, const std::string& where, std::string got, const char* hint) {
  throw Error(ErrorCode::kCheckpoint, what,
              {.where = "checkpoint", .which = where, .got = std::move(got), .hint = hint});
}

}  // namespace

std::string to_text(const Manifest& manifest) {
  Json json = {{"format", manifest.format},
               {"version", manifest.version},
               {"run", manifest.run},
               {"step", manifest.step},
               {"world", manifest.world},
               {"plan", manifest.plan},
               {"optimizer", manifest.optimizer},
               {"configuration", manifest.configuration},
               {"groups", manifest.groups},
               {"loss_scaler", manifest.loss_scaler},
               {"accumulation", manifest.accumulation},
               {"user", manifest.user},
               {"user_of_rank", manifest.user_of_rank}};
  if (!manifest.update.empty()) json["update"] = manifest.update;
  if (!manifest.local.empty()) json["local"] = manifest.local;
  if (!manifest.base.name.empty()) json["base"] = {{"name", manifest.base.name}, {"run", manifest.base.run}};
  Json params = Json::array();
  for (const CheckpointParam& param : manifest.params) params.push_back(to_json(param));
  json["params"] = std::move(params);
  Json extras = Json::array();
  for (const CheckpointState& extra : manifest.extras) extras.push_back(to_json(extra));
  json["extras"] = std::move(extras);
  Json files = Json::array();
  for (const CheckpointFile& file : manifest.files) files.push_back(to_json(file));
  json["files"] = std::move(files);
  if (manifest.commit > 0) json["commit"] = manifest.commit;  // last: commit_in() finds it there
  std::string text;
  try {
    text = json.dump(1, ' ');
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kUsage, "a name or a text of the checkpoint is not UTF-8",
                {.where = "checkpoint", .got = error.what()});
  }
  text.pop_back();  // the closing brace comes after the digest
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const std::string digest = hex(digest64(text));
  return text + std::string(kDigestMember) + digest + std::string(kEnd);
}

std::int64_t commit_in(std::string_view tail) {
  const std::size_t digest = kDigestMember.size() + kDigits + kEnd.size();
  if (tail.size() < digest || !tail.ends_with(kEnd)) return -1;
  if (!tail.substr(tail.size() - digest).starts_with(kDigestMember)) return -1;
  const std::string_view before = tail.substr(0, tail.size() - digest);
  const std::size_t digits = before.find_last_not_of("0123456789") + 1;
  if (digits == before.size() || !before.substr(0, digits).ends_with(kCommitMember)) return 0;
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(before.data() + digits, before.data() + before.size(), number);
  return error == std::errc{} && number <= kMostCommits ? number : -1;
}

Manifest manifest_of(const std::string& text, const std::string& where) {
  const std::size_t tail = kDigestMember.size() + kDigits + kEnd.size();
  const std::string_view all(text);
  const bool whole =
      all.size() > tail && all.ends_with(kEnd) && all.substr(all.size() - tail, kDigestMember.size()) == kDigestMember;
  if (!whole) refuse("a manifest is torn", where, std::to_string(text.size()) + " bytes", "take an older checkpoint");
  const std::string_view body = all.substr(0, all.size() - tail);
  Manifest manifest;
  try {
    const std::uint64_t said = unhex(all.substr(all.size() - kEnd.size() - kDigits, kDigits));
    require(said == digest64(body), "its digest is not that of its text");
    manifest = parse(text);
  } catch (const std::exception& error) {
    refuse("a manifest is corrupt", where, error.what(), "take an older checkpoint");
  }
  if (!is_known(manifest.format)) {
    throw Error(ErrorCode::kCheckpoint, "a checkpoint has another format",
                {.where = "checkpoint",
                 .which = where,
                 .expected = std::to_string(kCheckpointFormat) + " or " + std::to_string(kOrderedFormat),
                 .got = std::to_string(manifest.format),
                 .hint = "load it with the version of Zeroth that wrote it, or a newer one"});
  }
  return manifest;
}

}  // namespace zeroth
