#include "device/shared_library.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>

#include <dlfcn.h>

#include <filesystem>

namespace zeroth::detail {
namespace {

std::string last_error() {
  const char* const text = ::dlerror();
  return text == nullptr ? "no reason given" : text;
}

/// The file that holds a function, "" where the linker does not say.
std::string file_of(const void* function) {
  Dl_info info{};
  if (function == nullptr || ::dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code ignored;
  const std::string path = std::filesystem::canonical(info.dli_fname, ignored);
  return path.empty() ? std::string(info.dli_fname) : path;
}

/// RTLD_DEFAULT is a null handle, which is as good as any other.
struct Found {
  void* handle = nullptr;
  const void* probe = nullptr;
};

Found find_loaded(const LibraryQuery& query) {
  if (const void* const probe = ::dlsym(RTLD_DEFAULT, query.probe.c_str())) return {RTLD_DEFAULT, probe};
  for (const std::string& name : query.names) {
    void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    if (const void* const probe = ::dlsym(handle, query.probe.c_str())) return {handle, probe};
  }
  return {};
}

}  // namespace

SharedLibrary SharedLibrary::open(const LibraryQuery& query) {
  SharedLibrary library;
  library.where_ = query.where;
  library.what_ = query.what;
  const std::string wanted = variable_or_empty(query.variable.c_str());
  if (const Found found = find_loaded(query); found.probe != nullptr) {
    library.handle_ = found.handle;
    library.file_ = file_of(found.probe);
    std::error_code ignored;
    const bool same = wanted.empty() || std::filesystem::equivalent(wanted, library.file_, ignored);
    ZR_CHECK(
        same, ErrorCode::kEnvironment, "this process already has another " + query.what,
        {.where = query.where,
         .expected = wanted + ", as " + query.variable + " says",
         .got = library.file_,
         .hint = "one process can use one only: unset the variable, or have it name the library that is loaded first"});
    return library;
  }
  std::vector<std::string> refusals;
  for (const std::string& place : wanted.empty() ? query.names : std::vector<std::string>{wanted}) {
    void* const handle = ::dlopen(place.c_str(), RTLD_NOW);
    if (handle == nullptr) {
      refusals.push_back(last_error());
      continue;
    }
    const void* const probe = ::dlsym(handle, query.probe.c_str());
    if (probe == nullptr) {
      refusals.push_back(last_error());
      continue;
    }
    library.handle_ = handle;
    library.file_ = file_of(probe);
    return library;
  }
  throw Error(
      ErrorCode::kEnvironment, query.what + " was asked for, and cannot be loaded",
      {.where = query.where,
       .expected = wanted.empty() ? "one of " + join(query.names, ", ") : wanted + ", as " + query.variable + " says",
       .got = join(refusals, "; "),
       .hint = query.hint});
}

void* SharedLibrary::address(const char* name, bool optional) const {
  void* const found = ::dlsym(handle_, name);
  ZR_CHECK(found != nullptr || optional, ErrorCode::kEnvironment, "this " + what_ + " lacks a function",
           {.where = where_, .which = file_, .expected = name, .got = last_error(), .hint = "install a newer version"});
  return found;
}

}  // namespace zeroth::detail
