#include "comm/shm_exchange.h"

#include "comm/process_monitor.h"
#include "comm/unix_socket.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

namespace zeroth::detail {
namespace {

/// Sizes of everybody's arena; a descriptor travels with each that is not empty.
struct Sizes {
  std::array<std::uint64_t, kMaxShmRanks> bytes{};
};

}  // namespace

struct ShmExchange::Offers {
  Sizes sizes;
  std::vector<UniqueFd> descriptors;  ///< by rank; empty for the own rank and for empty arenas
};

void require_system_calls(SystemCalls& system, int rank, int size) {
  const auto require = [&](int fd, std::string_view call) {
    const int refused = errno;
    const UniqueFd owner(fd);
    ZR_CHECK(owner,
             ErrorCode::kResource,
             fmt::format("{} failed: {}", call, errno_text(refused)),
             {.where = "comm.shm",
              .who = fmt::format("rank {}/{}", rank, size),
              .hint = fmt::format(
                  "the kernel or container refuses this system call: allow {} in its seccomp profile "
                  "(Linux 5.3 or newer)",
                  call)});
  };
  require(system.memfd_create("zeroth:probe", MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create");
  require(system.pidfd_open(::getpid()), "pidfd_open");
}

ShmExchange::ShmExchange(RendezvousSpec spec,
                         CommOptions options,
                         std::shared_ptr<SystemCalls> system,
                         FunctionRef<void()> check)
    : spec_(std::move(spec)),
      options_(std::move(options)),
      system_(std::move(system)),
      rendezvous_(meet(spec_, check)) {}

void ShmExchange::lost(int rank) const {
  throw Error(ErrorCode::kPeerLost,
              fmt::format("rank {} (pid {}) went away while memory was handed over",
                          rank,
                          rendezvous_.pids[static_cast<std::size_t>(rank)]),
              {.where = "comm.shm", .who = fmt::format("rank {}/{}", spec_.rank, spec_.size)});
}

std::vector<SharedSpan> ShmExchange::exchange(const Arena& arena, FunctionRef<void()> check) {
  Offers offers = spec_.rank == 0 ? collect(arena, check) : offer(arena, check);
  std::vector<SharedSpan> spans;
  for (int rank = 0; rank < spec_.size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (rank == spec_.rank) {
      spans.push_back({.bytes = {arena.data(), arena.capacity()}, .keep = arena.keep_alive()});
    } else if (offers.sizes.bytes[index] == 0) {
      spans.emplace_back();
    } else {
      ForeignMapping mapping = map_foreign(offers.descriptors[index].get(), offers.sizes.bytes[index]);
      spans.push_back({.bytes = mapping.bytes, .keep = std::move(mapping.keep)});
    }
  }
  return spans;
}

/// Rank 0: takes everybody's offer and gives everybody all of them.
ShmExchange::Offers ShmExchange::collect(const Arena& arena, FunctionRef<void()> check) {
  Offers offers;
  offers.descriptors.resize(static_cast<std::size_t>(spec_.size));
  offers.sizes.bytes[0] = arena.capacity();
  for (int rank = 1; rank < spec_.size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    std::optional<Message> message =
        receive_message(rendezvous_.connections[index].get(), sizeof(std::uint64_t), check);
    if (!message) {
      check();
      lost(rank);
    }
    std::uint64_t bytes = 0;
    ZR_CHECK(
        message->bytes.size() == sizeof bytes, ErrorCode::kInternal, "a memory offer of the wrong length");
    std::memcpy(&bytes, message->bytes.data(), sizeof bytes);
    ZR_CHECK(message->descriptors.size() == (bytes > 0 ? 1U : 0U),
             ErrorCode::kInternal,
             "a memory offer without memory");
    offers.sizes.bytes[index] = bytes;
    if (bytes > 0) offers.descriptors[index] = std::move(message->descriptors.front());
  }
  std::vector<int> descriptors;
  if (arena.capacity() > 0) descriptors.push_back(arena.fd());
  for (const UniqueFd& descriptor : offers.descriptors) {
    if (descriptor) descriptors.push_back(descriptor.get());
  }
  for (int rank = 1; rank < spec_.size; ++rank) {
    if (!send_message(rendezvous_.connections[static_cast<std::size_t>(rank)].get(),
                      bytes_of(offers.sizes),
                      descriptors)) {
      check();
      lost(rank);
    }
  }
  return offers;
}

ShmExchange::Offers ShmExchange::offer(const Arena& arena, FunctionRef<void()> check) {
  const int broker = rendezvous_.connections.front().get();
  const std::uint64_t bytes = arena.capacity();
  const int fd = arena.fd();
  const bool sent = send_message(
      broker, bytes_of(bytes), bytes > 0 ? std::span<const int>(&fd, 1) : std::span<const int>());
  std::optional<Message> message = sent ? receive_message(broker, sizeof(Sizes), check) : std::nullopt;
  if (!message) {
    check();
    lost(0);
  }
  Offers offers;
  ZR_CHECK(message->bytes.size() == sizeof offers.sizes,
           ErrorCode::kInternal,
           "a list of memory offers of the wrong length");
  std::memcpy(&offers.sizes, message->bytes.data(), sizeof offers.sizes);
  offers.descriptors.resize(static_cast<std::size_t>(spec_.size));
  std::size_t next = 0;
  for (std::size_t rank = 0; rank < offers.descriptors.size(); ++rank) {
    if (offers.sizes.bytes[rank] == 0) continue;
    ZR_CHECK(
        next < message->descriptors.size(), ErrorCode::kInternal, "fewer descriptors than memory offers");
    offers.descriptors[rank] = std::move(message->descriptors[next++]);
  }
  return offers;
}

std::unique_ptr<SegmentExchange> ShmExchange::split(const SubgroupSpec& spec, FunctionRef<void()> check) {
  return std::make_unique<ShmExchange>(RendezvousSpec{.job = spec_.job + "/" + spec.token,
                                                      .rank = spec.rank,
                                                      .size = static_cast<int>(spec.members.size()),
                                                      .timeout = spec_.timeout},
                                       options_,
                                       system_,
                                       check);
}

std::unique_ptr<Liveness> ShmExchange::watch(const std::vector<JobControl*>& controls) {
  return std::make_unique<ProcessMonitor>(
      spec_.rank, controls, rendezvous_.pids, options_.frozen_after, *system_);
}

}  // namespace zeroth::detail
