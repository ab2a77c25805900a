#include "launcher/error_line.h"

#include <zeroth/base/error.h>

namespace zeroth::launcher {
namespace {

constexpr std::string_view kNativeMark = "ZEROTH ERROR [";
constexpr std::string_view kPythonMark = "Error: [";
constexpr std::string_view kNameCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.";

/// "PEER_LOST" of "PEER_LOST] ...".
std::string_view code_at(std::string_view rest) {
  const std::size_t end = rest.find(']');
  return end == std::string_view::npos ? std::string_view{} : rest.substr(0, end);
}

}  // namespace

std::optional<ErrorMark> find_error_mark(std::string_view line) noexcept {
  if (const std::size_t mark = line.find(kNativeMark); mark != std::string_view::npos) {
    return ErrorMark{mark, code_at(line.substr(mark + kNativeMark.size()))};
  }
  const std::size_t mark = line.find(kPythonMark);
  if (mark == std::string_view::npos) {
    return std::nullopt;
  }
  const std::string_view code = code_at(line.substr(mark + kPythonMark.size()));
  if (!code_of_slug(code)) {
    return std::nullopt;
  }
  const std::size_t before = line.substr(0, mark).find_last_not_of(kNameCharacters);
  return ErrorMark{before == std::string_view::npos ? 0 : before + 1, code};
}

}  // namespace zeroth::launcher
