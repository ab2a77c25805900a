#include "safetensors_file.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace gpt {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::ErrorContext;
using Names = std::vector<std::string>;

constexpr std::size_t kLengthBytes = 8;
// Names in a message; the rest is counted.
constexpr std::size_t kShown = 5;

[[noreturn]] void io_error(const fs::path& path, const std::string& reason) {
  throw Error(ErrorCode::kIo, "the initial weights cannot be read",
              ErrorContext{.where = "zeroth-gpt --init", .which = path.string(), .got = reason});
}

// A rule of the format is broken; becomes an error with the file's name.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& otherwise) {
  if (!holds) {
    throw Malformed(otherwise);
  }
}

std::vector<std::byte> read_file(const fs::path& path) {
  std::error_code ec;
  const std::uintmax_t size = fs::file_size(path, ec);
  if (ec) {
    io_error(path, zeroth::errno_text(ec.value()));
  }
  errno = 0;
  std::vector<std::byte> bytes(size);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (!file) {
    io_error(path, zeroth::errno_text(errno));
  }
  return bytes;
}

std::uint64_t element_bytes(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t, std::less<>> kBytes{{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2},
                                                                        {"I64", 8}, {"I32", 4}, {"I16", 2}, {"I8", 1},
                                                                        {"U8", 1},  {"BOOL", 1}};
  const auto found = kBytes.find(dtype);
  require(found != kBytes.end(), "the dtype " + dtype);
  return found->second;
}

// Elements of `list`, all of them integers from 0 to 2^63 - 1.
std::vector<std::int64_t> integers(const json& list, const std::string& what) {
  require(list.is_array(), "a " + what + " that is no list");
  std::vector<std::int64_t> values;
  for (const json& item : list) {
    require(item.is_number_unsigned() &&
                item.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int64_t>::max()},
            "a " + what + " of something else than sizes");
    values.push_back(item.get<std::int64_t>());
  }
  return values;
}

StoredTensor read_entry(const json& entry, std::span<const std::byte> data) {
  require(entry.is_object() && entry.contains("dtype") && entry.contains("shape") && entry.contains("data_offsets"),
          "an entry without dtype, shape or data_offsets");
  require(entry["dtype"].is_string(), "a dtype that is no text");
  StoredTensor tensor{.dtype = entry["dtype"].get<std::string>(), .shape = integers(entry["shape"], "shape")};
  std::uint64_t bytes = element_bytes(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    require(!__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes),
            "a shape of more than 2^64 bytes");
  }
  const std::vector<std::int64_t> offsets = integers(entry["data_offsets"], "data_offsets");
  require(offsets.size() == 2 && offsets[0] <= offsets[1] && static_cast<std::uint64_t>(offsets[1]) <= data.size(),
          "data_offsets that do not lie in the file");
  const auto begin = static_cast<std::size_t>(offsets[0]);
  const auto end = static_cast<std::size_t>(offsets[1]);
  require(end - begin == bytes, "data_offsets that do not fit dtype and shape");
  tensor.data = data.subspan(begin, bytes);
  return tensor;
}

// Each byte of data is of one tensor: two names for one place, or bytes of none, are how a file hides something.
void require_filled(const std::map<std::string, StoredTensor>& tensors, std::span<const std::byte> data) {
  std::vector<std::span<const std::byte>> ranges;
  for (const auto& [name, tensor] : tensors) {
    ranges.push_back(tensor.data);
  }
  std::ranges::sort(ranges,
                    [](auto a, auto b) { return std::pair(a.data(), a.size()) < std::pair(b.data(), b.size()); });
  const std::byte* end = data.data();
  for (const auto& range : ranges) {
    require(range.data() == end, "tensors that overlap, or leave bytes between them");
    end += range.size();
  }
  require(end == data.data() + data.size(), "bytes after the last tensor");
}

std::map<std::string, StoredTensor> parse(std::span<const std::byte> file) {
  require(file.size() >= kLengthBytes, "a file of fewer than 8 bytes");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  require(length <= file.size() - kLengthBytes, "a header that is longer than the file");
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  const json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  require(header.is_object(), "a header that is no JSON object");
  const std::span<const std::byte> data = file.subspan(kLengthBytes + length);
  std::map<std::string, StoredTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      continue;
    }
    try {
      tensors.emplace(name, read_entry(entry, data));
    } catch (const Malformed& reason) {
      throw Malformed(name + ": " + reason.what());
    }
  }
  require_filled(tensors, data);
  return tensors;
}

void add(Names& problems, const std::string& what, Names items) {
  if (items.empty()) {
    return;
  }
  const std::size_t more = items.size() > kShown ? items.size() - kShown : 0;
  items.resize(items.size() - more);
  problems.push_back(what + ": " + zeroth::join(items, ", ") + (more > 0 ? fmt::format(" and {} more", more) : ""));
}

Names problems_of(const std::map<std::string, StoredTensor>& tensors, const std::map<std::string, Shape>& shapes) {
  Names missing;
  Names reshaped;
  for (const auto& [name, shape] : shapes) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      missing.push_back(name);
    } else if (found->second.shape != shape) {
      reshaped.push_back(fmt::format("{} {} instead of {}", name, found->second.shape, shape));
    }
  }
  Names extra;
  Names no_floats;
  for (const auto& [name, tensor] : tensors) {
    if (!shapes.contains(name)) {
      extra.push_back(name);
    } else if (!tensor.dtype.starts_with('F') && tensor.dtype != "BF16") {
      no_floats.push_back(name + " (" + tensor.dtype + ")");
    }
  }
  Names problems;
  add(problems, "missing", missing);
  add(problems, "not in the model", extra);
  add(problems, "of another shape", reshaped);
  add(problems, "no floating-point numbers", no_floats);
  return problems;
}

}  // namespace

std::map<std::string, StoredTensor> parse_safetensors(std::span<const std::byte> file, const fs::path& path) {
  try {
    return parse(file);
  } catch (const Malformed& reason) {
    io_error(path, reason.what());
  }
}

SafetensorsFile::SafetensorsFile(const fs::path& path)
    : path_(path), bytes_(read_file(path)), tensors_(parse_safetensors(bytes_, path)) {}

void SafetensorsFile::require_weights(const std::map<std::string, Shape>& shapes) const {
  const Names problems = problems_of(tensors_, shapes);
  ZR_CHECK(problems.empty(), ErrorCode::kUsage, "the initial weights are not those of this model",
           ErrorContext{.where = "zeroth-gpt --init",
                        .which = path_.string(),
                        .expected = fmt::format("its {} parameters", shapes.size()),
                        .got = zeroth::join(problems, "; "),
                        .hint = "give the --layers and --d-model that they were made with"});
}

}  // namespace gpt
