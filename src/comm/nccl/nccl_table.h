// NCCL behind a table of its C functions. The library is looked for when an NCCL world is asked for: nothing here is
// compiled or linked against it, and a test's table stands in for it. Types and numbers are those of its public ABI,
// which tests/cuda compares with nccl.h where there is one.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

namespace zeroth::detail {

enum class NcclStatus : int {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

/// NCCL has done it, or goes on by itself.
[[nodiscard]] constexpr bool is_accepted(NcclStatus status) {
  return status == NcclStatus::kSuccess || status == NcclStatus::kInProgress;
}

enum class NcclOp : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3 };

enum class NcclType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9
};

/// ncclUniqueId: goes by value.
struct NcclId {
  char bytes[128] = {};
};

inline constexpr int kNcclUnset = INT_MIN;
inline constexpr int kNcclNoColor = -1;
inline constexpr int kNcclLeastVersion = 21'800;  ///< 2.18: split, and calls that do not block

/// ncclConfig_t as it was in 2.18. Later versions read as many bytes as `size` says, and of what `version` had.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kNcclLeastVersion;
  int blocking = kNcclUnset;
  int cga_cluster_size = kNcclUnset;
  int least_ctas = kNcclUnset;
  int most_ctas = kNcclUnset;
  const char* net_name = nullptr;
  int split_share = kNcclUnset;
  int later = kNcclUnset;  ///< padding then, another number since
};

using NcclComm = void*;

struct NcclTable {
  std::string library{};  ///< its file
  int version = 0;        ///< 22809 for 2.28.9

  NcclStatus (*unique_id)(NcclId* id) = nullptr;
  NcclStatus (*init)(NcclComm* comm, int size, NcclId id, int rank, NcclConfig* config) = nullptr;
  NcclStatus (*split)(NcclComm comm, int color, int key, NcclComm* part, NcclConfig* config) = nullptr;
  NcclStatus (*finalize)(NcclComm comm) = nullptr;
  NcclStatus (*destroy)(NcclComm comm) = nullptr;
  NcclStatus (*abort)(NcclComm comm) = nullptr;
  NcclStatus (*async_error)(NcclComm comm, NcclStatus* status) = nullptr;
  const char* (*error_string)(NcclStatus status) = nullptr;
  const char* (*last_error)(NcclComm comm) = nullptr;
  NcclStatus (*group_start)() = nullptr;
  NcclStatus (*group_end)() = nullptr;
  NcclStatus (*all_gather)(const void* send, void* recv, std::size_t count, NcclType type, NcclComm comm,
                           void* stream) = nullptr;
  NcclStatus (*reduce_scatter)(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, NcclComm comm,
                               void* stream) = nullptr;
  NcclStatus (*all_reduce)(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, NcclComm comm,
                           void* stream) = nullptr;
  NcclStatus (*reduce)(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, int root,
                       NcclComm comm, void* stream) = nullptr;
  NcclStatus (*broadcast)(const void* send, void* recv, std::size_t count, NcclType type, int root, NcclComm comm,
                          void* stream) = nullptr;
  NcclStatus (*send)(const void* data, std::size_t count, NcclType type, int peer, NcclComm comm,
                     void* stream) = nullptr;
  NcclStatus (*recv)(void* data, std::size_t count, NcclType type, int peer, NcclComm comm, void* stream) = nullptr;
  /// Null before 2.19.
  NcclStatus (*register_buffer)(NcclComm comm, void* buffer, std::size_t bytes, void** handle) = nullptr;
  NcclStatus (*deregister_buffer)(NcclComm comm, void* handle) = nullptr;
};

/// "2.28.9".
[[nodiscard]] std::string nccl_version_text(int version);

/// The NCCL of this process (torch's, if torch is loaded), else that of the system or of ZEROTH_NCCL_LIBRARY; looked
/// for once. Throws kEnvironment with what each place said, or with the function or version that is missing. Needs no
/// GPU.
[[nodiscard]] const NcclTable& load_nccl();

}  // namespace zeroth::detail
