// libzeroth_mpi.so: the functions of mpi_table.h over the MPI that this file is compiled with.
#include "comm/mpi/mpi_table.h"

#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace zeroth::detail {
namespace {

struct MpiWorld {
  MPI_Comm comm = MPI_COMM_NULL;
};

std::atomic<bool> leaves_unfinished{false};
pid_t initialised_by = 0;
bool alone = false;  // in MPI's world

/// MPI_Finalize() waits for the ranks that still run, so it is for those that have ended well: who fails must not wait. mpirun sees a process that
/// has ended without it as failed, and ends the others.
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
    if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level); code != MPI_SUCCESS) return code;
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
  auto world = std::make_unique<MpiWorld>();
  if (const int code = MPI_Comm_dup(MPI_COMM_WORLD, &world->comm); code != MPI_SUCCESS) return code;
  if (const int code = MPI_Comm_set_errhandler(world->comm, MPI_ERRORS_RETURN); code != MPI_SUCCESS) return code;
  MPI_Comm_rank(world->comm, &facts->rank);
  MPI_Comm_size(world->comm, &facts->size);
  int found = 0;
  int* largest = nullptr;
  MPI_Comm_get_attr(world->comm, MPI_TAG_UB, static_cast<void*>(&largest), &found);
  facts->largest_tag = found != 0 && largest != nullptr ? *largest : 32'767;  // what MPI promises at least
  leaves_unfinished.store(false);  // all ranks have come together again
  *out = world.release();
  return MPI_SUCCESS;
}

int send_message(void* world, const void* data, int bytes, int to, int tag, void** out) {
  auto request = std::make_unique<MPI_Request>(MPI_REQUEST_NULL);
  const int code = MPI_Isend(data, bytes, MPI_BYTE, to, tag, static_cast<MpiWorld*>(world)->comm, request.get());
  if (code == MPI_SUCCESS) *out = request.release();
  return code;
}

int receive_message(void* world, void* data, int bytes, int from, int tag, void** out) {
  auto request = std::make_unique<MPI_Request>(MPI_REQUEST_NULL);
  const int code = MPI_Irecv(data, bytes, MPI_BYTE, from, tag, static_cast<MpiWorld*>(world)->comm, request.get());
  if (code == MPI_SUCCESS) *out = request.release();
  return code;
}

int test_request(void* handle, int* done) {
  auto* request = static_cast<MPI_Request*>(handle);
  const int code = MPI_Test(request, done, MPI_STATUS_IGNORE);
  if (code != MPI_SUCCESS) *done = 1;  // an error ends the request
  if (*done != 0) delete request;
  return code;
}

int cancel_request(void* handle) { return MPI_Cancel(static_cast<MPI_Request*>(handle)); }

int probe_message(void* world, int tag, int* from, int* bytes) {
  int found = 0;
  MPI_Status status;
  *from = -1;
  const int code = MPI_Iprobe(MPI_ANY_SOURCE, tag, static_cast<MpiWorld*>(world)->comm, &found, &status);
  if (code != MPI_SUCCESS || found == 0) return code;
  *from = status.MPI_SOURCE;
  return MPI_Get_count(&status, MPI_BYTE, bytes);
}

void leave_unfinished() { leaves_unfinished.store(true); }

void error_text(int code, char* to, int size) {
  char whole[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, whole, &length) != MPI_SUCCESS) length = 0;
  const auto room = static_cast<std::size_t>(size - 1);
  std::strncpy(to, whole, room);
  to[room] = '\0';
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
                              .text = error_text};
  return &table;
}
