#include "engine/config/document.h"

#include "engine/config/schema.h"

#include <zeroth/base/text.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

namespace zeroth::config {
namespace {

/// Counts the lines that the parser has read: its events carry no position, but a key ends where the parser
/// stands.
class LineCountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  LineCountingIterator(const char* at, std::size_t* line) : at_(at), line_(line) {}
  reference operator*() const { return *at_; }
  LineCountingIterator& operator++() {
    if (*at_++ == '\n') ++*line_;
    return *this;
  }
  LineCountingIterator operator++(int) {
    LineCountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const LineCountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const LineCountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  std::size_t* line_;
};

constexpr std::string_view kBlank = " \t\r\n";

/// Infinity, -Infinity and NaN, which JSON has not and Python's json module writes: accelerate's documents hold one.
struct NonFinite {
  std::string text{};                       ///< the document, with 0 in their place
  std::map<std::size_t, double> numbers{};  ///< each by its index among all numbers of the document
};

NonFinite take_non_finite(std::string_view text) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr std::array<std::pair<std::string_view, double>, 3> kWords{
      {{"Infinity", kInfinity}, {"-Infinity", -kInfinity}, {"NaN", std::numeric_limits<double>::quiet_NaN()}}};
  NonFinite out{.text = std::string(text), .numbers = {}};
  const auto is_one_of = [text](std::size_t at, std::string_view chars) {
    return at >= text.size() || chars.find(text[at]) != std::string_view::npos;
  };
  const auto word_at = [&](std::size_t at) -> const std::pair<std::string_view, double>* {
    if (at > 0 && !is_one_of(at - 1, " \t\r\n[,:")) return nullptr;
    for (const auto& word : kWords) {
      if (text.substr(at).starts_with(word.first) && is_one_of(at + word.first.size(), " \t\r\n,]}")) return &word;
    }
    return nullptr;
  };
  std::size_t index = 0;
  bool in_string = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (in_string) {
      if (c == '\\') ++at;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (const auto* word = word_at(at); word != nullptr) {
      out.text.replace(at, word->first.size(), "0" + std::string(word->first.size() - 1, ' '));
      out.numbers.emplace(index++, word->second);
      at += word->first.size() - 1;
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      ++index;
      while (at + 1 < text.size() && is_one_of(at + 1, "0123456789+-.eE")) ++at;
    }
  }
  return out;
}

/// Builds the tree. Objects and arrays that are open lie on a stack, so the depth of a document costs no call
/// stack.
class TreeBuilder {
 public:
  TreeBuilder(Document& document, Problems& problems, const std::size_t& line,
              const std::map<std::size_t, double>& non_finite)
      : document_(document), problems_(problems), line_(line), non_finite_(non_finite) {}

  bool null() { return leaf(nullptr); }
  bool boolean(bool value) { return leaf(value); }
  bool number_integer(Json::number_integer_t value) { return number(value); }
  bool number_unsigned(Json::number_unsigned_t value) { return number(value); }
  bool number_float(Json::number_float_t value, const std::string& /*text*/) { return number(value); }
  bool string(std::string& value) { return leaf(std::move(value)); }
  bool binary(Json::binary_t& /*value*/) { return false; }

  bool key(std::string& name) {
    Open& top = open_.back();
    top.member = name;
    const std::string pointer = child_pointer(top.pointer, name);
    std::string origin = problems_.origin() + ":" + std::to_string(line_);
    const auto [at, added] = document_.origins.emplace(pointer, origin);
    if (!added) {
      problems_.add({.pointer = printable(pointer),
                     .origin = std::move(origin),
                     .what = "the key is there twice",
                     .hint = "the first one is at " + at->second + "; leave one of them"});
    }
    return true;
  }
  bool start_object(std::size_t /*count*/) { return start(Json::object()); }
  bool start_array(std::size_t /*count*/) { return start(Json::array()); }
  bool end_object() { return end(); }
  bool end_array() { return end(); }

  bool parse_error(std::size_t /*position*/, const std::string& /*token*/, const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: <reason>"
    std::string reason = error.what();
    const std::size_t at = reason.find("] ");
    if (at != std::string::npos) reason.erase(0, at + 2);
    constexpr int kNumberOverflow = 406;
    fail(error.id == kNumberOverflow ? "a number is too large" : "this is not JSON", printable(reason, 240));
    return false;
  }

 private:
  struct Open {
    Json* node = nullptr;
    std::string pointer{};
    std::string member{};
  };

  // References into objects stay valid while members are added; an array only grows while none of its
  // elements is open.
  Json* place(Json value) {
    if (open_.empty()) {
      document_.root = std::move(value);
      return &document_.root;
    }
    Json& parent = *open_.back().node;
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    Json& slot = parent[open_.back().member];
    slot = std::move(value);
    return &slot;
  }
  bool number(Json value) {
    const auto at = non_finite_.find(numbers_++);
    return leaf(at == non_finite_.end() ? std::move(value) : Json(at->second));
  }
  bool leaf(Json value) {
    place(std::move(value));
    return true;
  }
  bool start(Json value) {
    if (open_.size() == kMaxDepth) {
      fail("brackets are nested too deep", {}, "at most " + std::to_string(kMaxDepth) + " levels");
      return false;
    }
    std::string pointer;
    if (!open_.empty()) {
      const Open& top = open_.back();
      pointer = top.node->is_array() ? child_pointer(top.pointer, std::to_string(top.node->size()))
                                     : child_pointer(top.pointer, top.member);
    }
    Json* node = place(std::move(value));
    open_.push_back({.node = node, .pointer = std::move(pointer), .member = {}});
    return true;
  }
  bool end() {
    open_.pop_back();
    return true;
  }
  void fail(std::string what, std::string got, std::string expected = {}) {
    problems_.add({.pointer = {},
                   .origin = problems_.origin() + ":" + std::to_string(line_),
                   .what = std::move(what),
                   .expected = std::move(expected),
                   .got = std::move(got),
                   .hint = {}});
  }

  Document& document_;
  Problems& problems_;
  const std::size_t& line_;
  const std::map<std::size_t, double>& non_finite_;
  std::size_t numbers_ = 0;
  std::vector<Open> open_{};
};

/// Whether the text was read to its end; `document` has what was read.
bool read_json(std::string_view text, Document& document, Problems& problems) {
  const NonFinite plain = take_non_finite(text);
  const std::string_view json = plain.numbers.empty() ? text : std::string_view(plain.text);
  std::size_t line = 1;
  TreeBuilder builder(document, problems, line, plain.numbers);
  return Json::sax_parse(LineCountingIterator(json.data(), &line),
                         LineCountingIterator(json.data() + json.size(), &line), &builder);
}

[[noreturn]] void refuse_file(const std::filesystem::path& path, std::string what, std::string hint = {}) {
  const std::string origin = path.string();
  Problems problems(origin);
  problems.add({.pointer = {},
                .origin = origin,
                .what = std::move(what),
                .expected = "a file with one JSON object, at most 16 MiB",
                .got = {},
                .hint = std::move(hint)});
  problems.raise();
  throw Error(ErrorCode::kInternal, "a listed problem was not raised");
}

std::vector<std::string> pointer_names(std::string_view pointer) {
  std::vector<std::string> names;
  for (std::size_t at = 0; at < pointer.size();) {
    std::size_t end = pointer.find('/', at + 1);
    if (end == std::string_view::npos) end = pointer.size();
    std::string name;
    for (std::size_t i = at + 1; i < end; ++i) {
      if (pointer[i] == '~' && i + 1 < end) {
        name += pointer[++i] == '1' ? '/' : '~';
      } else {
        name += pointer[i];
      }
    }
    names.push_back(std::move(name));
    at = end;
  }
  return names;
}

}  // namespace

std::string printable(std::string_view text, std::size_t max_chars) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    if (out.size() >= max_chars) return out + "...";
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4U], kHex[byte & 15U]};
    }
  }
  return out;
}

std::string Document::origin_of(std::string_view pointer, std::string_view otherwise) const {
  while (!pointer.empty()) {
    if (const auto at = origins.find(pointer); at != origins.end()) return at->second;
    pointer = pointer.substr(0, pointer.rfind('/'));
  }
  return std::string(otherwise);
}

std::string child_pointer(std::string_view pointer, std::string_view name) {
  std::string child(pointer);
  child += '/';
  for (const char c : name) {
    if (c == '~') {
      child += "~0";
    } else if (c == '/') {
      child += "~1";
    } else {
      child += c;
    }
  }
  return child;
}

std::string read_document(const std::filesystem::path& path) {
  // Opening a pipe could wait for ever, so the kind is looked at first.
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) refuse_file(path, "the file is not there");
  if (error) refuse_file(path, "the file cannot be looked at: " + error.message());
  if (status.type() == std::filesystem::file_type::directory) refuse_file(path, "this is a directory");
  if (status.type() != std::filesystem::file_type::regular) refuse_file(path, "this is not a regular file");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse_file(path, "the file cannot be opened: " + errno_text(errno));
  std::string text(kMaxDocumentBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) refuse_file(path, "the file cannot be read: " + errno_text(errno));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

Document parse_document(std::string_view text, Problems& problems) {
  Document document;
  const auto refuse = [&problems](std::string what, std::string got) {
    problems.add({.pointer = {},
                  .origin = problems.origin(),
                  .what = std::move(what),
                  .expected = "one JSON object, at most 16 MiB",
                  .got = std::move(got),
                  .hint = {}});
    problems.raise();
  };
  if (text.size() > kMaxDocumentBytes) refuse("the document is too large", "more than 16 MiB");
  if (text.find_first_not_of(kBlank) == std::string_view::npos) refuse("the document is empty", {});

  if (!read_json(text, document, problems)) problems.raise();
  if (!document.root.is_object()) {
    refuse("the document is no object", printable(std::string(document.root.type_name())));
  }
  return document;
}

std::string shown(const Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double number = value.get<double>();
    return std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity";
  }
  if (!value.is_structured()) return value.dump();
  std::string text;
  for (const auto& item : value.items()) {
    if (!text.empty()) text += ',';
    if (value.is_object()) text += Json(item.key()).dump() + ':';
    text += shown(item.value());
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

bool is_given(const Json& root, const Json::json_pointer& pointer) {
  return root.contains(pointer) && !root.at(pointer).is_null();
}

namespace {

/// Where a value goes. A section that is left open gives way; nullptr where one is of a wrong type, which is the
/// schema's to say.
Json* place_of(const std::string& pointer, Json& root) {
  Json* node = &root;
  for (const std::string& name : pointer_names(pointer)) {
    if (node->is_null() || *node == "auto") *node = Json::object();
    if (!node->is_object()) return nullptr;
    node = &(*node)[name];
  }
  return node;
}

}  // namespace

void rename_aliases(Document& document, Problems& problems) {
  for (const KeyAlias& alias : key_aliases()) {
    const Json::json_pointer from{std::string(alias.alias)};
    const Json::json_pointer to{std::string(alias.pointer)};
    if (!document.root.contains(from)) continue;  // follows objects only as far as they are objects
    if (document.root.at(from).is_null()) {
      document.root.at(from.parent_pointer()).erase(from.back());
      continue;
    }
    const std::string origin = document.origin_of(alias.alias, problems.origin());
    if (is_given(document.root, to)) {
      problems.add({.pointer = std::string(alias.alias),
                    .origin = origin,
                    .what = "the same thing is given under two names",
                    .hint = "it is also at " + document.origin_of(alias.pointer, problems.origin()) + " as " +
                            std::string(alias.pointer) + "; leave one of them"});
      document.root.at(from.parent_pointer()).erase(from.back());
      continue;
    }
    Json value = document.root.at(from);
    document.root.at(from.parent_pointer()).erase(from.back());
    Json* const place = place_of(std::string(alias.pointer), document.root);
    if (place == nullptr) continue;
    *place = std::move(value);
    // Every pointer at or below the alias moves with it.
    std::map<std::string, std::string, std::less<>> moved;
    for (auto at = document.origins.lower_bound(alias.alias); at != document.origins.end();) {
      if (!at->first.starts_with(alias.alias)) break;
      const std::string rest = at->first.substr(alias.alias.size());
      if (rest.empty() || rest.front() == '/') {
        moved.emplace(std::string(alias.pointer) + rest, at->second);
        at = document.origins.erase(at);
      } else {
        ++at;
      }
    }
    document.origins.merge(moved);
  }
}

namespace {

/// The pointer with the key's own name where it has another one that is accepted, too.
std::string without_alias(const std::string& pointer) {
  for (const KeyAlias& alias : key_aliases()) {
    if (!pointer.starts_with(alias.alias)) continue;
    const std::string rest = pointer.substr(alias.alias.size());
    if (rest.empty() || rest.front() == '/') return std::string(alias.pointer) + rest;
  }
  return pointer;
}

}  // namespace

void apply_overrides(Document& document, std::span<const ConfigOverride> overrides, Problems& problems) {
  for (const ConfigOverride& override_value : overrides) {
    Document document_of_value;
    Problems ignored(override_value.origin);
    const bool good = read_json(override_value.json, document_of_value, ignored);
    const Json& value = document_of_value.root;
    if (!good || !override_value.pointer.starts_with('/')) {
      problems.add({.pointer = override_value.pointer,
                    .origin = override_value.origin,
                    .what = "the override cannot be used",
                    .expected = "a JSON pointer such as /zero_optimization/stage and a JSON value",
                    .got = printable(override_value.json),
                    .hint = {}});
      continue;
    }
    const std::string pointer = without_alias(override_value.pointer);
    Json* const place = place_of(pointer, document.root);
    if (place == nullptr) continue;
    *place = value;
    document.origins[pointer] = override_value.origin;
  }
}

}  // namespace zeroth::config
