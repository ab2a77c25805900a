#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/mixed.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kLongestText = std::size_t{1} << 20U;
constexpr int kVersion = 1;

std::optional<CollectiveKind> kind_of(std::string_view name) {
  for (std::size_t kind = 0; kind < kNumCollectiveKinds; ++kind) {
    if (name_of(static_cast<CollectiveKind>(kind)) == name) return static_cast<CollectiveKind>(kind);
  }
  return std::nullopt;
}

std::vector<std::string> kinds_with_rows() {
  std::vector<std::string> names;
  for (std::size_t kind = 0; kind < kNumCollectiveKinds; ++kind) {
    if (static_cast<CollectiveKind>(kind) != CollectiveKind::kRecv)
      names.emplace_back(name_of(static_cast<CollectiveKind>(kind)));
  }
  return names;
}

/// What a key of a row holds; `row` is for errors.
const Json& member(const Json& row, const char* key, const std::string& which, std::string_view where) {
  const auto found = row.find(key);
  ZR_CHECK(found != row.end(), ErrorCode::kConfig, "a row of the call table lacks a key",
           {.where = std::string(where), .which = which, .expected = key});
  return *found;
}

CallTable::Row row_of(const Json& row, std::size_t index, std::string_view where) {
  const std::string which = fmt::format("row {}", index);
  ZR_CHECK(row.is_object(), ErrorCode::kConfig, "a row of the call table is no object",
           {.where = std::string(where), .which = which, .got = row.type_name()});
  for (const auto& [key, value] : row.items()) {
    ZR_CHECK(key == "call" || key == "up_to_bytes" || key == "backend", ErrorCode::kConfig,
             "a row of the call table has a key that is not known",
             {.where = std::string(where), .which = which, .expected = "call, up_to_bytes, backend", .got = key});
  }
  const Json& call = member(row, "call", which, where);
  const Json& backend = member(row, "backend", which, where);
  const std::optional<CollectiveKind> kind = call.is_string() ? kind_of(call.get<std::string>()) : std::nullopt;
  ZR_CHECK(kind && *kind != CollectiveKind::kRecv, ErrorCode::kConfig,
           "a row of the call table is of no call that has one",
           {.where = std::string(where),
            .which = which,
            .expected = "one of " + join(kinds_with_rows(), ", "),
            .got = call.dump()});
  ZR_CHECK(backend.is_string() && !backend.get<std::string>().empty(), ErrorCode::kConfig,
           "a row of the call table names no backend",
           {.where = std::string(where), .which = which, .got = backend.dump()});
  CallTable::Row result{.kind = *kind, .up_to_bytes = CallTable::kNoBound, .backend = backend.get<std::string>()};
  if (const auto bound = row.find("up_to_bytes"); bound != row.end()) {
    ZR_CHECK(bound->is_number_unsigned(), ErrorCode::kConfig, "a row of the call table has a bound that is no size",
             {.where = std::string(where), .which = which, .expected = "bytes, a whole number", .got = bound->dump()});
    result.up_to_bytes = bound->get<std::uint64_t>();
  }
  return result;
}

}  // namespace

std::uint64_t table_bytes(const Collective& call) {
  if ((call.kind == CollectiveKind::kAllToAll && !call.equal_parts) || is_point_to_point(call.kind))
    return CallTable::kNoBound;
  std::uint64_t elements = 0;
  for (const std::int64_t count : call.counts) elements += static_cast<std::uint64_t>(count);
  return elements * size_of(call.out_dtype);
}

CallTable::CallTable(std::vector<Row> rows) : rows_(std::move(rows)) {
  for (std::size_t kind = 0; kind < kNumCollectiveKinds; ++kind) {
    const auto wanted = static_cast<CollectiveKind>(kind);
    std::vector<const Row*> of_kind;
    for (const Row& row : rows_) {
      if (row.kind == wanted) of_kind.push_back(&row);
    }
    if (of_kind.empty()) continue;
    const ErrorContext context{.where = "comm.table", .which = std::string(name_of(wanted))};
    ZR_CHECK(wanted != CollectiveKind::kRecv, ErrorCode::kConfig, "receives go where sends go", context);
    ZR_CHECK(of_kind.size() == 1 || (wanted != CollectiveKind::kSend && wanted != CollectiveKind::kBarrier),
             ErrorCode::kConfig,
             "such calls have one row: barriers are of no size, and of messages that run side by side those on one "
             "backend would wait for those on another",
             context);
    ZR_CHECK(of_kind.back()->up_to_bytes == kNoBound, ErrorCode::kConfig,
             "the last row of a call has a bound: nobody makes larger ones", context);
    const bool rising = std::ranges::adjacent_find(of_kind, [](const Row* one, const Row* next) {
                          return one->up_to_bytes >= next->up_to_bytes;
                        }) == of_kind.end();
    ZR_CHECK(rising, ErrorCode::kConfig, "the rows of a call do not go from small to large", context);
  }
}

CallTable CallTable::from_json(std::string_view text, std::string_view where) {
  const auto context = [where](std::string expected, std::string got) {
    return ErrorContext{.where = std::string(where),
                        .expected = std::move(expected),
                        .got = std::move(got),
                        .hint = "zeroth-bench comm --tune FILE makes such a table"};
  };
  ZR_CHECK(text.size() <= kLongestText, ErrorCode::kConfig, "the call table is too long",
           context(format_bytes(kLongestText), format_bytes(text.size())));
  const Json document = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  ZR_CHECK(document.is_object(), ErrorCode::kConfig, "the call table is no JSON object",
           context("an object", document.is_discarded() ? "no JSON" : document.type_name()));
  const auto version = document.find("zeroth_calls");
  ZR_CHECK(
      version != document.end() && *version == kVersion, ErrorCode::kConfig,
      "this is no call table that this version reads",
      context(fmt::format("\"zeroth_calls\": {}", kVersion), version == document.end() ? "none" : version->dump()));
  const auto rows = document.find("rows");
  ZR_CHECK(rows != document.end() && rows->is_array(), ErrorCode::kConfig, "the call table has no rows",
           context("\"rows\": [...]", "none"));
  std::vector<Row> read;
  for (const Json& row : *rows) read.push_back(row_of(row, read.size(), where));
  return CallTable(std::move(read));
}

std::string CallTable::to_json() const {
  Json document{{"zeroth_calls", kVersion}, {"rows", Json::array()}};
  for (const Row& row : rows_) {
    Json entry{{"call", name_of(row.kind)}};
    if (row.up_to_bytes != kNoBound) entry["up_to_bytes"] = row.up_to_bytes;
    entry["backend"] = row.backend;
    document["rows"].push_back(std::move(entry));
  }
  return document.dump(2) + "\n";
}

std::string_view CallTable::backend_of(CollectiveKind kind, std::uint64_t bytes) const {
  if (kind == CollectiveKind::kRecv) kind = CollectiveKind::kSend;
  for (const Row& row : rows_) {
    if (row.kind == kind && bytes <= row.up_to_bytes) return row.backend;
  }
  return "";
}

}  // namespace zeroth
