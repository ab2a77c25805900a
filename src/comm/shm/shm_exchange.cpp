#include "comm/shm/shm_exchange.h"

#include "comm/rendezvous/unix_socket.h"
#include "comm/shm/process_liveness.h"

#include <zeroth/base/failpoint.h>

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
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

std::string name_of_rank(const Rendezvous& rendezvous, int rank) {
  return fmt::format("rank {} (pid {})", rank, rendezvous.pids[static_cast<std::size_t>(rank)]);
}

/// Of a message about memory that does not say what it should.
ErrorContext context_of_offer(const RendezvousSpec& spec, const Rendezvous& rendezvous, int from, std::string expected,
                              std::string got) {
  return {.where = "comm.shm",
          .who = fmt::format("rank {}/{}", spec.rank, spec.size),
          .which = fmt::format("job {}, from {}", spec.job, name_of_rank(rendezvous, from)),
          .expected = std::move(expected),
          .got = std::move(got),
          .hint = "all ranks must run the same build of Zeroth"};
}

SharedSpan map_memory_of(const RendezvousSpec& spec, const Rendezvous& rendezvous, int owner, int fd,
                         std::uint64_t bytes) {
  ZR_FAILPOINT("memory.map");
  try {
    ForeignMapping mapping = map_foreign(fd, bytes);
    return {.bytes = mapping.bytes, .keep = std::move(mapping.keep)};
  } catch (const Error& error) {  // it knows the memory, but not whose it is
    ErrorContext context = error.context();
    context.who = fmt::format("rank {}/{}", spec.rank, spec.size);
    context.which = fmt::format("job {}, {} of {}", spec.job, context.which.empty() ? "memory" : context.which,
                                name_of_rank(rendezvous, owner));
    throw Error(error.code(), error.message(), std::move(context));
  }
}

}  // namespace

struct ShmExchange::Offers {
  Sizes sizes;
  std::vector<UniqueFd> descriptors;  ///< by rank; empty for the own rank and for empty arenas
};

Refusal probe_system_calls(SystemCalls& system) {
  const UniqueFd memory(system.memfd_create("zeroth:probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) return {.call = 1, .reason = static_cast<std::int16_t>(errno)};
  const UniqueFd process(system.pidfd_open(::getpid()));
  if (!process) return {.call = 2, .reason = static_cast<std::int16_t>(errno)};
  return {};
}

ShmExchange::ShmExchange(RendezvousSpec spec, CommOptions options, std::shared_ptr<SystemCalls> system,
                         FunctionRef<void()> check)
    : spec_(std::move(spec)),
      options_(std::move(options)),
      system_(std::move(system)),
      rendezvous_(meet(spec_, check)) {}

void ShmExchange::lost(int rank) const {
  throw Error(ErrorCode::kPeerLost, name_of_rank(rendezvous_, rank) + " went away while memory was handed over",
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
      spans.push_back(
          map_memory_of(spec_, rendezvous_, rank, offers.descriptors[index].get(), offers.sizes.bytes[index]));
    }
  }
  return spans;
}

/// Rank 0: takes everybody's offer and gives everybody all of them.
ShmExchange::Offers ShmExchange::collect(const Arena& arena, FunctionRef<void()> check) {
  ZR_FAILPOINT("memory.collect");
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
    ZR_CHECK(message->bytes.size() == sizeof bytes, ErrorCode::kInternal, "a memory offer of the wrong length",
             context_of_offer(spec_, rendezvous_, rank, fmt::format("{} bytes", sizeof bytes),
                              fmt::format("{}", message->bytes.size())));
    std::memcpy(&bytes, message->bytes.data(), sizeof bytes);
    const std::size_t expected_descriptors = bytes > 0 ? 1 : 0;
    ZR_CHECK(message->descriptors.size() == expected_descriptors, ErrorCode::kInternal,
             "a memory offer and its memory do not fit",
             context_of_offer(spec_, rendezvous_, rank,
                              fmt::format("{} descriptors for {} bytes", expected_descriptors, bytes),
                              fmt::format("{}", message->descriptors.size())));
    offers.sizes.bytes[index] = bytes;
    if (bytes > 0) offers.descriptors[index] = std::move(message->descriptors.front());
  }
  ZR_FAILPOINT("memory.spread");
  std::vector<int> descriptors;
  if (arena.capacity() > 0) descriptors.push_back(arena.fd());
  for (const UniqueFd& descriptor : offers.descriptors) {
    if (descriptor) descriptors.push_back(descriptor.get());
  }
  for (int rank = 1; rank < spec_.size; ++rank) {
    if (!send_message(rendezvous_.connections[static_cast<std::size_t>(rank)].get(), bytes_of(offers.sizes),
                      descriptors, check)) {
      check();
      lost(rank);
    }
  }
  return offers;
}

ShmExchange::Offers ShmExchange::offer(const Arena& arena, FunctionRef<void()> check) {
  ZR_FAILPOINT("memory.offer");
  const int broker = rendezvous_.connections.front().get();
  const std::uint64_t bytes = arena.capacity();
  const int fd = arena.fd();
  const bool sent =
      send_message(broker, bytes_of(bytes), bytes > 0 ? std::span<const int>(&fd, 1) : std::span<const int>(), check);
  std::optional<Message> message = sent ? receive_message(broker, sizeof(Sizes), check) : std::nullopt;
  if (!message) {
    check();
    lost(0);
  }
  Offers offers;
  ZR_CHECK(message->bytes.size() == sizeof offers.sizes, ErrorCode::kInternal,
           "a list of memory offers of the wrong length",
           context_of_offer(spec_, rendezvous_, 0, fmt::format("{} bytes", sizeof offers.sizes),
                            fmt::format("{}", message->bytes.size())));
  std::memcpy(&offers.sizes, message->bytes.data(), sizeof offers.sizes);
  offers.descriptors.resize(static_cast<std::size_t>(spec_.size));
  const std::size_t num_ranks = offers.descriptors.size();
  const auto non_empty = static_cast<std::size_t>(
      std::count_if(offers.sizes.bytes.begin(), offers.sizes.bytes.begin() + static_cast<std::ptrdiff_t>(num_ranks),
                    [](std::uint64_t size) { return size > 0; }));
  ZR_CHECK(message->descriptors.size() == non_empty, ErrorCode::kInternal,
           "a list of memory offers and its memory do not fit",
           context_of_offer(spec_, rendezvous_, 0, fmt::format("{} descriptors", non_empty),
                            fmt::format("{}", message->descriptors.size())));
  std::size_t next = 0;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (offers.sizes.bytes[rank] > 0) offers.descriptors[rank] = std::move(message->descriptors[next++]);
  }
  return offers;
}

std::unique_ptr<SegmentExchange> ShmExchange::split(const SubgroupSpec& spec, FunctionRef<void()> check) {
  return std::make_unique<ShmExchange>(RendezvousSpec{.job = spec_.job + "/" + spec.token,
                                                      .rank = spec.rank,
                                                      .size = static_cast<int>(spec.members.size()),
                                                      .timeout = spec_.timeout},
                                       options_, system_, check);
}

std::unique_ptr<Liveness> ShmExchange::watch(const std::vector<JobControl*>& controls) {
  return std::make_unique<ProcessLiveness>(spec_.rank, controls, rendezvous_.pids, options_.frozen_after, *system_);
}

}  // namespace zeroth::detail
