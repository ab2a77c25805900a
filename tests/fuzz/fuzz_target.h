// What every fuzz target of Zeroth is made of: one function that is given bytes, and says aloud what it finds wrong.
//
// With clang's libFuzzer (make fuzz) the function is called with bytes that it makes up; in every other build
// corpus_main.cpp calls it with the files of tests/fuzz/corpus, so that what was once found stays found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace zeroth::fuzz {

/// Ends the process, which is how a finding is told.
inline void expect(bool holds, const char* what, std::string_view got = "") {
  if (holds) return;
  std::fprintf(stderr, "\nFINDING: %s\n%.*s\n", what, static_cast<int>(got.size()), got.data());
  std::abort();
}

[[nodiscard]] inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return size == 0 ? std::string_view() : std::string_view(reinterpret_cast<const char*>(data), size);
}

[[nodiscard]] inline std::span<const std::byte> bytes_of(const std::uint8_t* data, std::size_t size) {
  return std::as_bytes(std::span(data, size));
}

/// Whether a line of an error may be printed on a terminal: no control characters.
[[nodiscard]] inline bool is_printable(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) return false;
  }
  return true;
}

}  // namespace zeroth::fuzz
