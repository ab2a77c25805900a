// Every ErrorCode, with what must never change about it: other programs read slugs and exit codes.
#pragma once

#include <zeroth/base/error.h>

#include <array>
#include <string_view>

namespace zeroth::test {

struct CodeFacts {
  ErrorCode code;
  std::string_view slug;
  int exit_code;
};

inline constexpr std::array<CodeFacts, 16> kCodes{{
    {ErrorCode::kUsage, "USAGE", 64},
    {ErrorCode::kConfig, "CONFIG", 78},
    {ErrorCode::kModel, "MODEL", 65},
    {ErrorCode::kMismatch, "MISMATCH", 76},
    {ErrorCode::kPeerLost, "PEER_LOST", 76},
    {ErrorCode::kTimeout, "TIMEOUT", 76},
    {ErrorCode::kNonFinite, "NONFINITE", 65},
    {ErrorCode::kOutOfMemory, "OUT_OF_MEMORY", 71},
    {ErrorCode::kCheckpoint, "CHECKPOINT", 65},
    {ErrorCode::kResource, "RESOURCE", 71},
    {ErrorCode::kIo, "IO", 74},
    {ErrorCode::kLaunch, "LAUNCH", 69},
    {ErrorCode::kEnvironment, "ENVIRONMENT", 77},
    {ErrorCode::kAborted, "ABORTED", 76},
    {ErrorCode::kUser, "USER", 1},
    {ErrorCode::kInternal, "INTERNAL", 70},
}};

}  // namespace zeroth::test
