// A JSON text as a tree with the line of each key: strict but for Infinity and NaN, bounded in size and depth.
#pragma once

#include "engine/config/problems.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace zeroth::config {

inline constexpr std::size_t kMaxDocumentBytes = std::size_t{16} << 20;
inline constexpr std::size_t kMaxDepth = 32;

struct Document {
  nlohmann::json root = nlohmann::json::object();
  std::map<std::string, std::string, std::less<>> origins{};  ///< of each member, by JSON pointer: "zero3.json:4"

  /// Origin of the nearest member at or above `pointer`, else `otherwise`.
  [[nodiscard]] std::string origin_of(std::string_view pointer, std::string_view otherwise) const;
};

/// "/a/b" + "c~/d" -> "/a/b/c~0~1d".
[[nodiscard]] std::string child_pointer(std::string_view pointer, std::string_view name);
/// The text of a regular file. Throws ConfigError.
[[nodiscard]] std::string read_document(const std::filesystem::path& path);
/// Throws ConfigError where the text is no JSON object; duplicate keys are added to `problems`.
[[nodiscard]] Document parse_document(std::string_view text, Problems& problems);
/// A value as JSON, with Infinity and NaN where they are.
[[nodiscard]] std::string shown(const nlohmann::json& value);
/// Whether there is a value: null is the same as none.
[[nodiscard]] bool is_given(const nlohmann::json& root, const nlohmann::json::json_pointer& pointer);
/// Moves members that are called by another name to the name of the schema.
void rename_aliases(Document& document, Problems& problems);
/// Puts the values in place.
void apply_overrides(Document& document, std::span<const ConfigOverride> overrides, Problems& problems);

}  // namespace zeroth::config
