// zeroth-config-reference            prints docs/configuration.md
// zeroth-config-reference --check F  exits with 1 and the first different line if F is not what it would
// print
#include "engine/config/reference.h"

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>

namespace {

int check(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::cerr << path << ": cannot be opened\n";
    return 1;
  }
  const std::string found{std::istreambuf_iterator<char>(file), {}};
  const std::string expected = zeroth::config::reference_markdown();
  if (found == expected) return 0;
  std::istringstream found_lines(found);
  std::istringstream expected_lines(expected);
  for (int number = 1;; ++number) {
    std::string ours;
    std::string theirs;
    const bool more_ours = static_cast<bool>(std::getline(expected_lines, ours));
    const bool more_theirs = static_cast<bool>(std::getline(found_lines, theirs));
    if (more_ours && more_theirs && ours == theirs) continue;
    std::cerr << path << ":" << number << ": is not what the schema says\n  expected: " << ours
              << "\n  got:      " << theirs << "\n  hint: zeroth-config-reference > docs/configuration.md\n";
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 1) {
      std::cout << zeroth::config::reference_markdown() << std::flush;
      return std::cout.good() ? 0 : 1;
    }
    if (argc == 3 && std::string_view(argv[1]) == "--check") return check(argv[2]);
    std::cerr << "usage: zeroth-config-reference [--check FILE]\n";
    return 64;
  } catch (const std::exception& error) {
    std::cerr << "zeroth-config-reference: " << error.what() << "\n";
    return 70;
  }
}
