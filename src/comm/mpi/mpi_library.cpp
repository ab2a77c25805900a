// libzeroth_mpi.so: the functions of mpi_table.h over the MPI that this file is compiled with.
#include "comm/mpi/mpi_table.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::detail {
namespace {

struct MpiCommunicator {
  MPI_Comm comm = MPI_COMM_NULL;
};

/// A message or a call of a group on its way, and what MPI reads of it until it is done.
struct MpiRequest {
  MPI_Request handle = MPI_REQUEST_NULL;
  std::vector<int> numbers{};
};

std::atomic<bool> leaves_unfinished{false};
pid_t initialised_by = 0;
bool alone = false;  // in MPI's world

/// MPI_Finalize() waits for the ranks that still run, so it is for those that have ended well: who fails must not wait.
/// mpirun sees a process that has ended without it as failed, and ends the others.
void finish(int status, void* /*unused*/) {
  if (::getpid() != initialised_by || (!alone && (status != 0 || leaves_unfinished.load()))) return;
  int done = 0;
  if (MPI_Finalized(&done) == MPI_SUCCESS && done == 0) MPI_Finalize();
}

int open_world(MpiWorldFacts* facts, void** out) {
  int initialised = 0;
  int level = MPI_THREAD_SINGLE;
  if (const int code = MPI_Initialized(&initialised); code != MPI_SUCCESS) return code;
  if (initialised == 0) {
    if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level); code != MPI_SUCCESS)
      return code;
    initialised_by = ::getpid();
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    alone = size == 1;
    ::on_exit(finish, nullptr);
  } else if (const int code = MPI_Query_thread(&level); code != MPI_SUCCESS) {
    return code;
  }
  facts->started_here = initialised_by == ::getpid() ? 1 : 0;
  facts->threads = level == MPI_THREAD_MULTIPLE     ? MpiThreads::kMultiple
                   : level == MPI_THREAD_SERIALIZED ? MpiThreads::kSerialized
                   : level == MPI_THREAD_FUNNELED   ? MpiThreads::kFunneled
                                                    : MpiThreads::kSingle;
  auto world = std::make_unique<MpiCommunicator>();
  if (const int code = MPI_Comm_dup(MPI_COMM_WORLD, &world->comm); code != MPI_SUCCESS) return code;
  if (const int code = MPI_Comm_set_errhandler(world->comm, MPI_ERRORS_RETURN); code != MPI_SUCCESS) return code;
  MPI_Comm_rank(world->comm, &facts->rank);
  MPI_Comm_size(world->comm, &facts->size);
  MPI_Comm here = MPI_COMM_NULL;
  if (const int code = MPI_Comm_split_type(world->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
      code != MPI_SUCCESS)
    return code;
  MPI_Comm_size(here, &facts->size_here);
  MPI_Comm_free(&here);
  int found = 0;
  int* largest = nullptr;
  MPI_Comm_get_attr(world->comm, MPI_TAG_UB, static_cast<void*>(&largest), &found);
  facts->largest_tag = found != 0 && largest != nullptr ? *largest : 32'767;  // what MPI promises at least
  leaves_unfinished.store(false);                                             // all ranks have come together again
  *out = world.release();
  return MPI_SUCCESS;
}

/// call(comm, request) starts something in the group.
template <class Call>
int start(void* group, void** out, const Call& call) {
  auto request = std::make_unique<MpiRequest>();
  const int code = call(static_cast<MpiCommunicator*>(group)->comm, *request);
  if (code == MPI_SUCCESS) *out = request.release();
  return code;
}

int send_message(void* world, const void* data, int bytes, int to, int tag, void** out) {
  return start(world, out, [&](MPI_Comm comm, MpiRequest& request) {
    return MPI_Isend(data, bytes, MPI_BYTE, to, tag, comm, &request.handle);
  });
}

int receive_message(void* world, void* data, int bytes, int from, int tag, void** out) {
  return start(world, out, [&](MPI_Comm comm, MpiRequest& request) {
    return MPI_Irecv(data, bytes, MPI_BYTE, from, tag, comm, &request.handle);
  });
}

int test_request(void* handle, int* done) {
  auto* request = static_cast<MpiRequest*>(handle);
  const int code = MPI_Test(&request->handle, done, MPI_STATUS_IGNORE);
  if (code != MPI_SUCCESS) *done = 1;  // an error ends the request
  if (*done != 0) delete request;
  return code;
}

int cancel_request(void* handle) {
  return MPI_Cancel(&static_cast<MpiRequest*>(handle)->handle);
}

int probe_message(void* world, int* tag, int* from, int* bytes) {
  int found = 0;
  MPI_Status status;
  *from = -1;
  const int code = MPI_Iprobe(MPI_ANY_SOURCE, *tag < 0 ? MPI_ANY_TAG : *tag, static_cast<MpiCommunicator*>(world)->comm,
                              &found, &status);
  if (code != MPI_SUCCESS || found == 0) return code;
  *from = status.MPI_SOURCE;
  *tag = status.MPI_TAG;
  return MPI_Get_count(&status, MPI_BYTE, bytes);
}

void leave_unfinished() {
  leaves_unfinished.store(true);
}

std::atomic<bool> has_left_memory{false};
void leave_memory() {
  has_left_memory.store(true);
}
int memory_is_left() {
  return has_left_memory.load() ? 1 : 0;
}

void error_text(int code, char* to, int size) {
  char whole[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, whole, &length) != MPI_SUCCESS) length = 0;
  const auto room = static_cast<std::size_t>(size - 1);
  std::strncpy(to, whole, room);
  to[room] = '\0';
}

int size_of_group(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size;
}

int split_group(void* group, int color, int key, void** out) {
  auto part = std::make_unique<MpiCommunicator>();
  *out = nullptr;
  const int code =
      MPI_Comm_split(static_cast<MpiCommunicator*>(group)->comm, color < 0 ? MPI_UNDEFINED : color, key, &part->comm);
  if (code != MPI_SUCCESS || part->comm == MPI_COMM_NULL) return code;
  if (const int set = MPI_Comm_set_errhandler(part->comm, MPI_ERRORS_RETURN); set != MPI_SUCCESS) return set;
  *out = part.release();
  return MPI_SUCCESS;
}

int start_barrier(void* group, void** out) {
  return start(group, out, [](MPI_Comm comm, MpiRequest& request) { return MPI_Ibarrier(comm, &request.handle); });
}

int start_broadcast(void* group, void* data, int bytes, int root, void** out) {
  return start(group, out, [&](MPI_Comm comm, MpiRequest& request) {
    return MPI_Ibcast(data, bytes, MPI_BYTE, root, comm, &request.handle);
  });
}

/// Lengths and offsets of the parts, kept with the request: MPI reads them while it is under way.
struct KeptParts {
  const int* bytes;
  const int* offsets;
};

KeptParts keep(MpiRequest& request, const MpiParts& parts, int size) {
  request.numbers.assign(parts.bytes, parts.bytes + size);
  request.numbers.insert(request.numbers.end(), parts.offsets, parts.offsets + size);
  return {request.numbers.data(), request.numbers.data() + size};
}

/// One after the other, all of one length: the same on every rank, who all see the same parts.
bool even(const MpiParts& parts, int size) {
  for (int rank = 0; rank < size; ++rank) {
    if (parts.bytes[rank] != parts.bytes[0] || parts.offsets[rank] != rank * parts.bytes[0]) return false;
  }
  return true;
}

int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int start_all_gather(void* group, const void* own, void* whole, MpiParts parts, void** out) {
  return start(group, out, [&](MPI_Comm comm, MpiRequest& request) {
    const int size = size_of_group(comm);
    const int own_bytes = parts.bytes[rank_in(comm)];
    const void* const from = own == nullptr ? MPI_IN_PLACE : own;
    if (even(parts, size))
      return MPI_Iallgather(from, own_bytes, MPI_BYTE, whole, own_bytes, MPI_BYTE, comm, &request.handle);
    const KeptParts kept = keep(request, parts, size);
    return MPI_Iallgatherv(from, own_bytes, MPI_BYTE, whole, kept.bytes, kept.offsets, MPI_BYTE, comm, &request.handle);
  });
}

int start_all_to_all(void* group, const void* from, void* to, int bytes, void** out) {
  return start(group, out, [&](MPI_Comm comm, MpiRequest& request) {
    return MPI_Ialltoall(from, bytes, MPI_BYTE, to, bytes, MPI_BYTE, comm, &request.handle);
  });
}

int start_gather(void* group, const void* own, void* whole, MpiParts parts, int root, void** out) {
  return start(group, out, [&](MPI_Comm comm, MpiRequest& request) {
    const KeptParts kept = keep(request, parts, size_of_group(comm));
    const void* const from = own == nullptr ? MPI_IN_PLACE : own;
    return MPI_Igatherv(from, parts.bytes[rank_in(comm)], MPI_BYTE, whole, kept.bytes, kept.offsets, MPI_BYTE, root,
                        comm, &request.handle);
  });
}

int start_scatter(void* group, const void* whole, void* own, MpiParts parts, int root, void** out) {
  return start(group, out, [&](MPI_Comm comm, MpiRequest& request) {
    const KeptParts kept = keep(request, parts, size_of_group(comm));
    void* const to = own == nullptr ? MPI_IN_PLACE : own;
    return MPI_Iscatterv(whole, kept.bytes, kept.offsets, MPI_BYTE, to, parts.bytes[rank_in(comm)], MPI_BYTE, root,
                         comm, &request.handle);
  });
}

MPI_Datatype type_of(MpiNumber number) {
  switch (number) {
    case MpiNumber::kUInt32:
      return MPI_UINT32_T;
    case MpiNumber::kUInt64:
      return MPI_UINT64_T;
    case MpiNumber::kFloat:
      return MPI_FLOAT;
    case MpiNumber::kDouble:
      return MPI_DOUBLE;
  }
  return MPI_DATATYPE_NULL;
}

int start_all_reduce(void* group, const void* from, void* to, int count, MpiNumber number, void** out) {
  return start(group, out, [&](MPI_Comm comm, MpiRequest& request) {
    return MPI_Iallreduce(from == nullptr ? MPI_IN_PLACE : from, to, count, type_of(number), MPI_SUM, comm,
                          &request.handle);
  });
}

int start_reduce_scatter(void* group, const void* from, void* to, const int* counts, MpiNumber number, void** out) {
  return start(group, out, [&](MPI_Comm comm, MpiRequest& request) {
    const int size = size_of_group(comm);
    const bool equal = std::all_of(counts, counts + size, [&](int count) { return count == counts[0]; });
    if (equal) return MPI_Ireduce_scatter_block(from, to, counts[0], type_of(number), MPI_SUM, comm, &request.handle);
    request.numbers.assign(counts, counts + size);
    return MPI_Ireduce_scatter(from, to, request.numbers.data(), type_of(number), MPI_SUM, comm, &request.handle);
  });
}

const char* library_name() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "an MPI";
  text[std::strcspn(text, ",\n")] = '\0';
  return text;
}

}  // namespace
}  // namespace zeroth::detail

extern "C" __attribute__((visibility("default"))) const zeroth::detail::MpiTable* zeroth_mpi_table() {
  using namespace zeroth::detail;
  static const MpiTable table{.version = kMpiTableVersion,
                              .library = library_name(),
                              .open = open_world,
                              .send = send_message,
                              .receive = receive_message,
                              .test = test_request,
                              .cancel = cancel_request,
                              .probe = probe_message,
                              .leave_unfinished = leave_unfinished,
                              .leave_memory = leave_memory,
                              .memory_is_left = memory_is_left,
                              .text = error_text,
                              .split = split_group,
                              .barrier = start_barrier,
                              .broadcast = start_broadcast,
                              .all_gather = start_all_gather,
                              .all_to_all = start_all_to_all,
                              .gather = start_gather,
                              .scatter = start_scatter,
                              .all_reduce = start_all_reduce,
                              .reduce_scatter = start_reduce_scatter};
  return &table;
}
