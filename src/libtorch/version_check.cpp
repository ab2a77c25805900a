#include "libtorch/version_check.h"

#include <zeroth/base/error.h>

#include <ATen/Context.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>

#include <filesystem>
#include <fstream>

namespace zeroth::libtorch {

std::string installed_torch_version(const std::string& folder) {
  const auto without_local = [](const std::string& version) { return version.substr(0, version.find('+')); };
  std::string line;
  std::ifstream python(std::filesystem::path(folder) / "version.py");
  while (std::getline(python, line)) {
    if (!line.starts_with("__version__ =")) continue;
    const std::size_t begin = line.find_first_of("'\"");
    const std::size_t end = line.find_last_of("'\"");
    if (begin != std::string::npos && end > begin) return without_local(line.substr(begin + 1, end - begin - 1));
  }
  std::ifstream archive(std::filesystem::path(folder) / "build-version");
  return std::getline(archive, line) ? without_local(line) : std::string();
}

void compare_torch_versions(const std::string& built, const std::string& loaded, const std::string& folder) {
  ZR_CHECK(loaded.empty() || loaded == built, ErrorCode::kEnvironment,
           "another torch is loaded than the one that Zeroth was built against",
           {.where = "libtorch",
            .which = folder,
            .expected = "torch " + built,
            .got = "torch " + loaded,
            .hint = "rebuild Zeroth against this torch, or run it with the one of the build (LD_LIBRARY_PATH)"});
}

std::string torch_version_text() {
  return std::string("torch ") + TORCH_VERSION;
}

void require_same_torch() {
  Dl_info info{};
  // Any symbol of libtorch_cpu will do: it tells which file was loaded.
  if (::dladdr(reinterpret_cast<const void*>(&at::globalContext), &info) == 0 || info.dli_fname == nullptr) return;
  const std::filesystem::path folder = std::filesystem::path(info.dli_fname).parent_path().parent_path();
  compare_torch_versions(TORCH_VERSION, installed_torch_version(folder.string()), folder.string());
}

}  // namespace zeroth::libtorch
