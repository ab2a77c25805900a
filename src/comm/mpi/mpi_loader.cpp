#include "comm/mpi/mpi_transport.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

namespace zeroth::detail {
namespace {

constexpr const char* kLibrary = "libzeroth_mpi.so";
constexpr const char* kVariable = "ZEROTH_MPI_LIBRARY";

/// The file that holds this function: a program, or the Python module.
std::string own_file() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&load_mpi), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code ignored;
  const std::string path = std::filesystem::canonical(info.dli_fname, ignored);
  // A program found on PATH has no folder in its name.
  return path.empty() ? std::string(std::filesystem::canonical("/proc/self/exe", ignored)) : path;
}

std::string last_error() {
  const char* const text = ::dlerror();
  return text == nullptr ? "no reason given" : text;
}

}  // namespace

std::vector<std::string> mpi_library_places(const std::string& own, const std::optional<std::string>& variable) {
  if (variable) return {*variable};
  std::vector<std::string> places;
  if (const auto folder = std::filesystem::path(own).parent_path(); !folder.empty()) {
    places.push_back(folder / kLibrary);
    places.push_back((folder / ".." / "lib" / kLibrary).lexically_normal());
  }
  places.emplace_back(kLibrary);
  return places;
}

const MpiTable& load_mpi() {
  const char* const set = std::getenv(kVariable);
  std::vector<std::string> refusals;
  for (const std::string& place :
       mpi_library_places(own_file(), set ? std::optional<std::string>(set) : std::nullopt)) {
    // MPI loads parts of its own that look for its symbols among those of all libraries: hence RTLD_GLOBAL, also inside
    // Python.
    void* const handle = ::dlopen(place.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) {
      refusals.push_back(last_error());
      continue;
    }
    const auto function = reinterpret_cast<MpiTableFunction>(::dlsym(handle, kMpiTableSymbol));
    if (function == nullptr) {
      refusals.push_back(last_error());
      continue;
    }
    const MpiTable& table = *function();
    ZR_CHECK(table.version == kMpiTableVersion, ErrorCode::kEnvironment,
             "libzeroth_mpi.so is of another version of Zeroth",
             {.where = "comm.mpi",
              .which = place,
              .expected = "table " + std::to_string(kMpiTableVersion),
              .got = "table " + std::to_string(table.version),
              .hint = "build and install both together"});
    return table;
  }
  throw Error(ErrorCode::kEnvironment, "MPI was asked for, and libzeroth_mpi.so cannot be loaded",
              {.where = "comm.mpi",
               .expected = std::string(kLibrary) + ", which is built where CMake finds MPI",
               .got = join(refusals, "; "),
               .hint = std::string("on Debian: apt-get install libopenmpi-dev openmpi-bin, then build again; or set ") +
                       kVariable});
}

}  // namespace zeroth::detail
