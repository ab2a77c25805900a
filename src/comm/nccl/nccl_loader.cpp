#include "comm/nccl/nccl_table.h"
#include "device/shared_library.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

namespace zeroth::detail {
namespace {

NcclTable make_table() {
  const SharedLibrary library =
      SharedLibrary::open({.where = "comm.nccl",
                           .what = "NCCL",
                           .names = {"libnccl.so.2"},
                           .variable = "ZEROTH_NCCL_LIBRARY",
                           .probe = "ncclGetVersion",
                           .hint = "install libnccl2, or set ZEROTH_NCCL_LIBRARY to its file; inside Python import "
                                   "torch first, whose NCCL is then used"});
  NcclTable table;
  table.library = library.file();
  NcclStatus (*version)(int*) = nullptr;
  library.find(version, "ncclGetVersion");
  ZR_CHECK(version(&table.version) == NcclStatus::kSuccess, ErrorCode::kEnvironment, "NCCL does not say its version",
           {.where = "comm.nccl", .which = table.library});
  // Before the functions: an old one lacks some, and its age is what is to be said.
  ZR_CHECK(
      table.version >= kNcclLeastVersion, ErrorCode::kEnvironment, "this NCCL is too old",
      {.where = "comm.nccl",
       .which = table.library,
       .expected = nccl_version_text(kNcclLeastVersion) + " or later: calls that do not block, and groups of groups",
       .got = nccl_version_text(table.version),
       .hint = "install a newer libnccl2; inside Python, a newer torch brings one"});
  library.find(table.unique_id, "ncclGetUniqueId");
  library.find(table.init, "ncclCommInitRankConfig");
  library.find(table.split, "ncclCommSplit");
  library.find(table.finalize, "ncclCommFinalize");
  library.find(table.destroy, "ncclCommDestroy");
  library.find(table.abort, "ncclCommAbort");
  library.find(table.async_error, "ncclCommGetAsyncError");
  library.find(table.error_string, "ncclGetErrorString");
  library.find(table.last_error, "ncclGetLastError");
  library.find(table.group_start, "ncclGroupStart");
  library.find(table.group_end, "ncclGroupEnd");
  library.find(table.all_gather, "ncclAllGather");
  library.find(table.reduce_scatter, "ncclReduceScatter");
  library.find(table.all_reduce, "ncclAllReduce");
  library.find(table.reduce, "ncclReduce");
  library.find(table.broadcast, "ncclBroadcast");
  library.find(table.send, "ncclSend");
  library.find(table.recv, "ncclRecv");
  library.find(table.register_buffer, "ncclCommRegister", /*optional=*/true);
  library.find(table.deregister_buffer, "ncclCommDeregister", /*optional=*/true);
  return table;
}

}  // namespace

std::string nccl_version_text(int version) {
  if (version < 10'000)
    return fmt::format("{}.{}.{}", version / 1'000, version / 100 % 10, version % 100);  // up to 2.8
  return fmt::format("{}.{}.{}", version / 10'000, version / 100 % 100, version % 100);
}

const NcclTable& load_nccl() {
  static const NcclTable table = make_table();  // a library is one for the process; a failure is tried again
  return table;
}

}  // namespace zeroth::detail
