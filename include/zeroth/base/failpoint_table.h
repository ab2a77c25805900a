// All failpoints of Zeroth. A site in the code names its row; an unknown name, or the row of another file, does not
// compile. docs/decisions/0017-failpoints.md explains why the table is here and not beside the sites.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace zeroth {

/// Possible effects of a site, besides the end, a halt or a sleep of the process.
enum class FailpointKind {
  kThrowing,    ///< an exception may leave the site
  kNoThrow,     ///< no exception may leave it: it lies in a noexcept function
  kSystemCall,  ///< an exception may leave it, and the system call at the site can fail with an errno
};

/// One row: one site, or several sites of one kind; then each of `members` replaces the star in the name.
struct FailpointRow {
  std::string_view name{};
  std::string_view file{};
  std::string_view what{};  ///< the moment, as readable text
  FailpointKind kind = FailpointKind::kThrowing;
  std::span<const std::string_view> members{};

  [[nodiscard]] constexpr std::size_t size() const { return members.empty() ? 1 : members.size(); }
};

namespace detail {

inline constexpr auto kPostedCalls =
    std::to_array<std::string_view>({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "gather", "scatter",
                                     "all_to_all", "barrier", "attach", "split"});
inline constexpr auto kMessageCalls = std::to_array<std::string_view>(
    {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "gather", "scatter", "all_to_all", "barrier", "split"});
inline constexpr auto kDirections = std::to_array<std::string_view>({"send", "recv"});

inline constexpr auto kFailpoints = std::to_array<FailpointRow>({
    // Rendezvous.
    {"rendezvous.listen", "src/comm/rendezvous/rendezvous.cpp", "rank 0, before it takes the name of the job"},
    {"rendezvous.admit", "src/comm/rendezvous/rendezvous.cpp", "rank 0, with a hello that it has read and not judged"},
    {"rendezvous.answer", "src/comm/rendezvous/rendezvous.cpp", "rank 0, when all have come and nobody has been told"},
    {"rendezvous.connect", "src/comm/rendezvous/rendezvous.cpp", "other ranks, before they look for rank 0"},
    {"rendezvous.hello", "src/comm/rendezvous/rendezvous.cpp", "other ranks, connected and silent"},
    {"rendezvous.welcome", "src/comm/rendezvous/rendezvous.cpp",
     "other ranks, after their hello and before the answer"},
    {"memory.collect", "src/comm/shm/shm_exchange.cpp", "rank 0, before it takes the memory of the others"},
    {"memory.spread", "src/comm/shm/shm_exchange.cpp", "rank 0, with everybody's memory, of which nobody else has any"},
    {"memory.offer", "src/comm/shm/shm_exchange.cpp", "other ranks, before they give their memory"},
    {"memory.map", "src/comm/shm/shm_exchange.cpp", "before the memory of one peer is mapped"},
    {"system.memfd_create", "src/comm/system_calls.cpp", "memfd_create", FailpointKind::kSystemCall},
    {"system.pidfd_open", "src/comm/system_calls.cpp", "pidfd_open", FailpointKind::kSystemCall},
    {"system.process_vm_readv", "src/comm/system_calls.cpp", "process_vm_readv", FailpointKind::kSystemCall},
    {"unix_socket.connect", "src/comm/rendezvous/unix_socket.cpp", "connect to an abstract socket",
     FailpointKind::kSystemCall},
    {"unix_socket.send", "src/comm/rendezvous/unix_socket.cpp", "sendmsg", FailpointKind::kSystemCall},
    {"unix_socket.receive", "src/comm/rendezvous/unix_socket.cpp", "recvmsg", FailpointKind::kSystemCall},
    // Matched calls over shared memory.
    {"shm.*.post", "src/comm/shm/shared_memory_engine.cpp", "before the call is posted", FailpointKind::kThrowing,
     kPostedCalls},
    {"shm.*.mid", "src/comm/shm/shared_memory_engine.cpp", "all have posted the same call; no data has moved",
     FailpointKind::kThrowing, kPostedCalls},
    {"shm.*.end", "src/comm/shm/shared_memory_engine.cpp", "the call is done on this rank", FailpointKind::kThrowing,
     kPostedCalls},
    {"shm.staged.round", "src/comm/shm/staged_transfer.cpp", "a round lies in the staging area and is not taken"},
    {"shm.direct.read", "src/comm/shm/direct_transfer.cpp", "before peers' memory is read where it lies"},
    {"shm.*.start", "src/comm/shm/point_transfer.cpp", "before the first byte of a message", FailpointKind::kThrowing,
     kDirections},
    {"shm.*.data", "src/comm/shm/point_transfer.cpp", "the header has gone or come, data has not",
     FailpointKind::kThrowing, kDirections},
    {"shm.look", "src/comm/shm/point_transfer.cpp", "a started message is not done, and its peer may leave now"},
    {"shm.wait_until", "src/comm/shm/shared_memory_engine.cpp", "before a one-sided wait"},
    {"shm.depart", "src/comm/shm/shared_memory_engine.cpp", "before peers are told that this rank leaves",
     FailpointKind::kNoThrow},
    // Matched calls over messages.
    {"messages.*.post", "src/comm/messages/message_backend.cpp", "before the call is described to the others",
     FailpointKind::kThrowing, kMessageCalls},
    {"messages.*.mid", "src/comm/messages/message_backend.cpp", "all have described the same call; no data has moved",
     FailpointKind::kThrowing, kMessageCalls},
    {"messages.*.end", "src/comm/messages/message_backend.cpp", "the call is done on this rank",
     FailpointKind::kThrowing, kMessageCalls},
    {"messages.send", "src/comm/messages/message_links.cpp", "before one message is given to the transport"},
    {"messages.receive", "src/comm/messages/message_links.cpp", "before one message is asked of the transport"},
    {"messages.headers", "src/comm/messages/message_points.cpp",
     "sends and receives between two ranks: headers posted, none has come"},
    {"mpi.open", "src/comm/mpi/mpi_world.cpp", "before MPI's world is opened"},
    {"mpi.start", "src/comm/mpi/mpi_world.cpp", "before MPI is given a message, or asked for one"},
    {"mpi.wait", "src/comm/mpi/mpi_world.cpp", "before MPI is asked whether a message is done"},
    {"nccl.open", "src/comm/nccl/nccl_group.cpp",
     "before NCCL is asked to connect the ranks of the world, or of a part of it"},
    {"nccl.give", "src/comm/nccl/nccl_group.cpp",
     "the others can see which call this rank has come to, and NCCL has not been given it"},
    {"nccl.wait", "src/comm/nccl/nccl_group.cpp", "before the host waits for what NCCL does on the device"},
    {"abort.nccl", "src/comm/nccl/nccl_group.cpp", "before NCCL's calls of this rank are made to end",
     FailpointKind::kNoThrow},
    {"c10d.*", "src/libtorch/c10d.cpp", "before torch's group is given a message, or asked for one",
     FailpointKind::kThrowing, kDirections},
    {"levels.step", "src/comm/levels/two_level_backend.cpp", "before one step of a call over two levels"},
    {"mixed.choose", "src/comm/mixed/mixed_backend.cpp", "the backend of a call is chosen, and has not been given it"},
    // The control plane. No exception may leave its own threads, nor the functions that tell it about an error.
    {"control.connect", "src/comm/control/introduction.cpp",
     "other ranks, before they look for rank 0 beside the data"},
    {"control.hello", "src/comm/control/introduction.cpp",
     "other ranks, challenged, before they show that they know the secret"},
    {"control.welcome", "src/comm/control/introduction.cpp", "rank 0, with a good proof, before it shows its own",
     FailpointKind::kNoThrow},
    {"control.beat", "src/comm/control/control_plane.cpp", "before a sign of life", FailpointKind::kNoThrow},
    {"control.tell", "src/comm/control/control_plane.cpp", "before an error of this rank is on its way to rank 0",
     FailpointKind::kNoThrow},
    {"control.verdict", "src/comm/control/control_plane.cpp", "rank 0 has judged the job, and nobody has been told",
     FailpointKind::kNoThrow},
    {"control.judged", "src/comm/control/control_plane.cpp",
     "a verdict has come, and no wait of this rank can throw it yet", FailpointKind::kNoThrow},
    // The store.
    {"store.ask", "src/comm/store/store_socket.cpp", "a client, before its request"},
    {"store.answer", "src/comm/store/store_socket.cpp", "the server, with a request that it has read"},
    // Between sites that are jobs of their own.
    {"sites.put", "src/comm/sites/site_client.cpp", "before this rank's message of an exchange is given to the hub"},
    {"sites.take", "src/comm/sites/site_client.cpp",
     "the hub has been given this rank's message, and its decision has not been read"},
    {"sites.give_state", "src/comm/sites/site_client.cpp", "before a site that comes back is given this rank's state"},
    // One rank tells the others about its failure, or gets theirs: failures during a failure.
    {"abort.tell", "src/comm/shm/peers.cpp", "before the others can see that this rank stops the job",
     FailpointKind::kNoThrow},
    {"abort.wake", "src/comm/shm/peers.cpp", "the others can see it, and still sleep", FailpointKind::kNoThrow},
    {"abort.hear", "src/comm/shm/peers.cpp", "a failure of a peer has been found and not been thrown"},
    {"abort.messages", "src/comm/messages/message_backend.cpp", "before the transport tells the others",
     FailpointKind::kNoThrow},
    {"abort.mpi", "src/comm/mpi/mpi_world.cpp", "before MPI carries the word to the others", FailpointKind::kNoThrow},
    // Gradients.
    {"one_sided.announce", "src/zero/one_sided_exchange.cpp", "before peers can see a word of this rank"},
    {"one_sided.reduce", "src/zero/one_sided_exchange.cpp", "before a range is summed from the buckets of all ranks"},
    {"one_sided.combine", "src/zero/one_sided_exchange.cpp",
     "the group's sums are complete, the other groups have not been told"},
    {"matched.reduce", "src/zero/matched_exchange.cpp", "before a bucket is reduced by a collective"},
    {"matched.combine", "src/zero/matched_sums.cpp", "before the sums of groups are added up"},
    // Messages in the place of gradients.
    {"signs.send", "src/zero/sign_reduction.cpp", "messages of a flat are formed, and none has gone"},
    {"signs.sum", "src/zero/sign_reduction.cpp",
     "an owner has all messages for its piece, and has not sent the result"},
    // A step.
    {"engine.vote", "src/engine/engine.cpp", "the gradients are complete, the ranks have not voted on them"},
    {"engine.update", "src/engine/engine.cpp", "voted for, no parameter has changed"},
    {"engine.messages", "src/engine/message_round.cpp", "voted for, no message has gone"},
    {"engine.publish", "src/engine/engine.cpp", "the own shard is updated, nobody has been told"},
    {"engine.committed", "src/engine/engine.cpp", "the step is done on this rank"},
    // The launcher, whose rank is the number of its node.
    {"launcher.join", "src/launcher/rendezvous.cpp", "other nodes, before they look for node 0"},
    {"launcher.admit", "src/launcher/rendezvous.cpp", "node 0, with the hello of a node that it has not judged"},
    {"launcher.hello", "src/launcher/agent.cpp", "other nodes, believed, before their hello"},
    {"launcher.order", "src/launcher/remote_group.cpp", "node 0, before another node is given its task"},
    {"launcher.task", "src/launcher/agent.cpp", "other nodes, with their task, before a rank is started"},
    {"launcher.spawn", "src/launcher/spawn.cpp", "before a process is started"},
    {"launcher.output", "src/launcher/local_group.cpp", "output of a rank has been read and not passed on"},
    // The doctor.
    {"doctor.ask", "src/doctor/survey.cpp", "rank 0, before the ranks are told what to measure"},
    {"doctor.answer", "src/doctor/participant.cpp", "a rank, told what to measure"},
    // Files.
    {"checkpoint.mkdir", "src/checkpoint/folder.cpp", "mkdir of the temporary folder", FailpointKind::kSystemCall},
    {"checkpoint.rename", "src/checkpoint/folder.cpp", "rename of the whole folder to its final name",
     FailpointKind::kSystemCall},
    {"checkpoint.open", "src/checkpoint/files.cpp", "open of a new file", FailpointKind::kSystemCall},
    {"checkpoint.reserve", "src/checkpoint/files.cpp", "fallocate", FailpointKind::kSystemCall},
    {"checkpoint.write", "src/checkpoint/files.cpp", "write", FailpointKind::kSystemCall},
    {"checkpoint.sync", "src/checkpoint/files.cpp", "fsync of a file", FailpointKind::kSystemCall},
    {"checkpoint.close", "src/checkpoint/files.cpp", "close", FailpointKind::kSystemCall},
    {"checkpoint.folder", "src/checkpoint/files.cpp", "fsync of a folder", FailpointKind::kSystemCall},
    {"checkpoint.reopen", "src/checkpoint/files.cpp", "open for reading", FailpointKind::kSystemCall},
    {"checkpoint.read", "src/checkpoint/files.cpp", "pread", FailpointKind::kSystemCall},
    {"io.tmpfile", "src/io/scratch_file.cpp", "open of a scratch file without a name", FailpointKind::kSystemCall},
    {"io.reserve", "src/io/scratch_file.cpp", "fallocate of a scratch file", FailpointKind::kSystemCall},
    {"io.direct", "src/io/scratch_file.cpp", "a scratch file is made direct", FailpointKind::kSystemCall},
    {"io.io_uring.setup", "src/io/io_uring_engine.cpp", "io_uring_setup", FailpointKind::kSystemCall},
    {"io.io_uring.submit", "src/io/io_uring_engine.cpp", "io_uring_enter with new transfers",
     FailpointKind::kSystemCall},
    {"io.aio.setup", "src/io/aio_engine.cpp", "io_setup", FailpointKind::kSystemCall},
    {"io.aio.submit", "src/io/aio_engine.cpp", "io_submit", FailpointKind::kSystemCall},
    {"io.aio.events", "src/io/aio_engine.cpp", "io_getevents", FailpointKind::kSystemCall},
    {"io.threads.transfer", "src/io/thread_engine.cpp", "pread or pwrite", FailpointKind::kSystemCall},
    {"export.open", "src/engine/safetensors.cpp", "open of the temporary file", FailpointKind::kSystemCall},
    {"export.write", "src/engine/safetensors.cpp", "write", FailpointKind::kSystemCall},
    {"export.flush", "src/engine/safetensors.cpp", "fdatasync on the way", FailpointKind::kSystemCall},
    {"export.sync", "src/engine/safetensors.cpp", "fsync of the whole file", FailpointKind::kSystemCall},
    {"export.close", "src/engine/safetensors.cpp", "close", FailpointKind::kSystemCall},
    {"export.rename", "src/engine/safetensors.cpp", "rename to the final name", FailpointKind::kSystemCall},
    {"export.folder", "src/engine/safetensors.cpp", "fsync of the folder", FailpointKind::kSystemCall},
});

}  // namespace detail
}  // namespace zeroth
