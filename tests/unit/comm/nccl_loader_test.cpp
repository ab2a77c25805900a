// Which NCCL is taken, and what is said of one that will not do. Each case is a process of its own: a library that is
// loaded stays.
#include "comm/nccl/nccl_table.h"
#include "device/cuda/cuda_table.h"
#include "device/shared_library.h"

#include <zeroth/base/error.h>

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

namespace zeroth::detail {
namespace {

/// Runs in a child; what it prints is what the test looks at.
[[noreturn]] void say(const std::function<std::string()>& body) {
  std::string text;
  try {
    text = body();
  } catch (const Error& error) {
    text = error.what();
  }
  std::fprintf(stderr, "%s\n", text.c_str());
  std::_Exit(0);
}

void set_library(const std::string& path) {
  ::setenv("ZEROTH_NCCL_LIBRARY", path.c_str(), 1);
}

#define EXPECT_SAYS(body, regex) EXPECT_EXIT(say(body), ::testing::ExitedWithCode(0), regex)

/// Whether the linker finds it; asked in a child, too.
bool there(const char* name) {
  const pid_t child = ::fork();
  if (child == 0) std::_Exit(::dlopen(name, RTLD_LAZY) == nullptr ? 1 : 0);
  int status = 0;
  return child > 0 && ::waitpid(child, &status, 0) == child && status == 0;
}

TEST(NcclLoader, OneThatIsTooOldIsNamedWithItsVersion) {
  EXPECT_SAYS(
      [] {
        set_library(ZEROTH_NCCL_OLD);
        return load_nccl().library;
      },
      "ENVIRONMENT. this NCCL is too old; where: comm.nccl; which: .*OLD.*; expected: 2.18.0 or later.*; got: 2.13.4; "
      "hint: ");
}

TEST(NcclLoader, AFunctionThatIsMissingIsNamed) {
  EXPECT_SAYS(
      [] {
        set_library(ZEROTH_NCCL_POOR);
        return load_nccl().library;
      },
      "ENVIRONMENT. this NCCL lacks a function; where: comm.nccl; which: .*POOR.*; expected: ncclGetUniqueId");
}

TEST(NcclLoader, WithoutALibraryItSaysWhatWasTried) {
  EXPECT_SAYS(
      [] {
        set_library("/nowhere/libnccl.so.2");
        return load_nccl().library;
      },
      "ENVIRONMENT. NCCL was asked for, and cannot be loaded; where: comm.nccl; expected: /nowhere/libnccl.so.2, as "
      "ZEROTH_NCCL_LIBRARY says; got: "
      "/nowhere/libnccl.so.2: .*; hint: install libnccl2");
}

TEST(NcclLoader, TheOneThatIsLoadedIsTakenFirst) {
  EXPECT_SAYS(
      [] {
        if (::dlopen(ZEROTH_NCCL_OLD, RTLD_NOW | RTLD_LOCAL) == nullptr) return std::string(::dlerror());
        return load_nccl().library;  // and not that of the system
      },
      "this NCCL is too old; .*OLD");
}

TEST(NcclLoader, OneAmongTheGlobalSymbolsIsTakenFirst) {
  EXPECT_SAYS(
      [] {
        if (::dlopen(ZEROTH_NCCL_OLD, RTLD_NOW | RTLD_GLOBAL) == nullptr) return std::string(::dlerror());
        return SharedLibrary::open({.what = "NCCL", .names = {"another-name.so"}, .probe = "ncclGetVersion"}).file();
      },
      "libzeroth_nccl_OLD.so");
}

TEST(NcclLoader, ASecondOneInAProcessIsRefused) {
  EXPECT_SAYS(
      [] {
        if (::dlopen(ZEROTH_NCCL_OLD, RTLD_NOW | RTLD_LOCAL) == nullptr) return std::string(::dlerror());
        set_library(ZEROTH_NCCL_POOR);
        return load_nccl().library;
      },
      "ENVIRONMENT. this process already has another NCCL; where: comm.nccl; expected: .*POOR.*, as "
      "ZEROTH_NCCL_LIBRARY says; got: .*OLD");
}

TEST(NcclLoader, TheVariableMayNameTheOneThatIsLoaded) {
  EXPECT_SAYS(
      [] {
        if (::dlopen(ZEROTH_NCCL_POOR, RTLD_NOW | RTLD_LOCAL) == nullptr) return std::string(::dlerror());
        set_library(ZEROTH_NCCL_POOR);
        return load_nccl().library;
      },
      "this NCCL lacks a function");
}

TEST(NcclLoader, TheRealOneHasEveryFunction) {
  if (!there("libnccl.so.2")) GTEST_SKIP() << "no NCCL: the linker finds no libnccl.so.2";
  EXPECT_SAYS(
      [] {
        const NcclTable& nccl = load_nccl();
        NcclId id;
        const bool made = nccl.unique_id(&id) == NcclStatus::kSuccess;
        const bool registers = nccl.register_buffer != nullptr && nccl.deregister_buffer != nullptr;
        return nccl_version_text(nccl.version) + " of " + nccl.library +
               (registers == (nccl.version >= 21'900) ? ", registers" : ", WRONG") +
               (made ? ", made an id: " : ", made no id: ") + nccl.error_string(NcclStatus::kRemoteError);
      },
      "2[.][0-9]+[.][0-9]+ of .*libnccl.so.*, registers, made an id: .*remote");
}

TEST(CudaLoader, WithoutADeviceItSaysWhatTheDriverSays) {
  if (!there("libcudart.so.13") && !there("libcudart.so.12")) GTEST_SKIP() << "no CUDA device: nor its runtime";
  EXPECT_SAYS(
      [] { return "devices: " + std::to_string(count_cuda_devices(load_cuda(), "test")); },
      "devices: [1-9]|ENVIRONMENT. there is no CUDA device; where: test; .*driver for CUDA [0-9]+, runtime 1[0-9]+");
}

TEST(CudaLoader, WithoutALibraryItSaysWhatWasTried) {
  EXPECT_SAYS(
      [] {
        ::setenv("ZEROTH_CUDA_LIBRARY", "/nowhere/libcudart.so", 1);
        return load_cuda().library;
      },
      "ENVIRONMENT. the CUDA runtime was asked for, and cannot be loaded; where: device.cuda; expected: "
      "/nowhere/libcudart.so, as ZEROTH_CUDA_LIBRARY says");
}

TEST(CudaLoader, TheRealOneHasEveryFunction) {
  if (!there("libcudart.so.13") && !there("libcudart.so.12")) GTEST_SKIP() << "no CUDA device: nor its runtime";
  EXPECT_SAYS(
      [] {
        const CudaTable& cuda = load_cuda();
        return std::to_string(cuda.version) + " of " + cuda.library + ", " + cuda.error_string(kCudaNotReady);
      },
      "1[0-9]+ of .*libcudart.so.*, device not ready");
}

}  // namespace
}  // namespace zeroth::detail
