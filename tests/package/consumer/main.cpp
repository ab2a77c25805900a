// Uses the installed headers and libraries; every outside library that they need must come through find_package(Zeroth).
#include <zeroth/base/error.h>
#include <zeroth/base/log.h>
#include <zeroth/base/text.h>

#include <cstdio>
#include <string>

int main() {
  const zeroth::Logger log(0, 1, zeroth::LogLevel::kInfo);
  log.progress("a program outside the tree");
  try {
    throw zeroth::Error(zeroth::ErrorCode::kUsage, "on purpose");
  } catch (const zeroth::Error& error) {
    if (std::string(error.what()).find("on purpose") == std::string::npos) return 1;
  }
  if (zeroth::format_bytes(512) != "512 B") return 1;
  std::puts("consumer works");
  return 0;
}
