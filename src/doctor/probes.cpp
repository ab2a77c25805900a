#include "doctor/probes.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

namespace zeroth::doctor {
namespace {

using Microseconds = std::chrono::duration<double, std::micro>;
using Seconds = std::chrono::duration<double>;

constexpr int kMostTrips = 200;
constexpr Milliseconds kTrips{100};  ///< so long trips are made, one at least
constexpr Milliseconds kWarmUp{50};  ///< a stream's start does not count
constexpr Milliseconds kWindow{200};
constexpr std::size_t kBlock = std::size_t{256} << 10U;

constexpr std::int64_t kFirstMessage = std::int64_t{64} << 10U;
constexpr std::int64_t kLargestMessage = std::int64_t{32} << 20U;
constexpr Milliseconds kLongMessage{10};
constexpr int kRepeats = 3;

/// Calls `trip` for a while; the shortest.
template <typename Trip>
double shortest_trip_us(const Trip& trip) {
  double best = std::numeric_limits<double>::infinity();
  const Deadline end(kTrips);
  for (int i = 0; i < kMostTrips && (i == 0 || !end.passed()); ++i) {
    const auto begin = SteadyClock::now();
    trip();
    best = std::min(best, Microseconds(SteadyClock::now() - begin).count());
  }
  return best;
}

/// Reads for a while, and then no more: the sender sees the connection close. Bytes a second.
double drain(Wire& wire, const Deadline& deadline) {
  std::vector<std::byte> block(kBlock);
  std::size_t got = wire.read_some(block, deadline);
  const Deadline warm_up(kWarmUp);
  while (got > 0 && !warm_up.passed()) got = wire.read_some(block, deadline);
  ZR_CHECK(got > 0, ErrorCode::kPeerLost, "a stream ended before its time");
  const auto begin = SteadyClock::now();
  std::size_t bytes = 0;
  Seconds lasted{0};
  // What a slow link brings comes in lumps: more time for more of them.
  for (int lumps = 0; lasted < kWindow || lumps < 4 || (lumps < 32 && lasted < 5 * kWindow); ++lumps) {
    got = wire.read_some(block, deadline);
    ZR_CHECK(got > 0, ErrorCode::kPeerLost, "a stream ended before its time");
    bytes += got;
    lasted = SteadyClock::now() - begin;
  }
  wire.close();
  return static_cast<double>(bytes) / lasted.count();
}

/// Writes until the receiver has had enough.
void pour(Wire& wire, const Deadline& deadline) {
  const std::vector<std::byte> block(kBlock);
  try {
    while (true) wire.write_all(block, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kPeerLost) throw;
  }
}

double rate_of(const std::string& text) {
  double rate = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rate);
  ZR_CHECK(error == std::errc{} && end == text.data() + text.size() && rate > 0, ErrorCode::kLaunch,
           "a peer measured nonsense");
  return rate;
}

Wire admit_rank(Door& door, int rank, const Deadline& deadline) {
  while (true) {
    int who = -1;
    Wire wire = door.admit(deadline, who);
    ZR_CHECK(who >= 0, ErrorCode::kTimeout, fmt::format("rank {} did not come", rank));
    if (who == rank) return wire;
  }
}

template <typename T>
void give(const Communicator& group, int peer, std::span<const T> data) {
  group.send(data, peer);
}

template <typename T>
void take(const Communicator& group, int peer, std::span<T> data, double slow_bytes_per_s) {
  group.recv(data, peer);
  if (slow_bytes_per_s > 0)
    std::this_thread::sleep_for(Seconds(static_cast<double>(data.size_bytes()) / slow_bytes_per_s));
}

/// Sends messages of growing size, each confirmed by one byte; ends with the size 0. Returns the best rate.
double send_growing(const Communicator& group, int peer, double latency_us, double slow_bytes_per_s) {
  std::vector<std::uint8_t> data(static_cast<std::size_t>(kLargestMessage), 1);
  std::array<std::uint8_t, 1> done{};
  double best = 0;
  int repeats = 0;
  std::int64_t size = kFirstMessage;
  while (repeats < kRepeats) {
    give<std::int64_t>(group, peer, std::span(&size, 1));
    take<std::uint8_t>(group, peer, done, slow_bytes_per_s);
    const auto begin = SteadyClock::now();
    give<std::uint8_t>(group, peer, std::span(data).first(static_cast<std::size_t>(size)));
    take<std::uint8_t>(group, peer, done, 0);
    const Seconds lasted = SteadyClock::now() - begin;
    best = std::max(best, static_cast<double>(size) / std::max(lasted.count() - latency_us * 1e-6, lasted.count() / 2));
    if (lasted >= kLongMessage || size == kLargestMessage) {
      // One that took very long shows enough.
      repeats += lasted >= 20 * kLongMessage ? kRepeats : 1;
    } else {
      size *= 2;
    }
  }
  size = 0;
  give<std::int64_t>(group, peer, std::span(&size, 1));
  return best;
}

void receive_growing(const Communicator& group, int peer, double slow_bytes_per_s) {
  std::vector<std::uint8_t> data(static_cast<std::size_t>(kLargestMessage));
  const std::array<std::uint8_t, 1> done{1};
  while (true) {
    std::int64_t size = 0;
    group.recv(std::span(&size, 1), peer);
    if (size == 0) return;
    ZR_CHECK(size > 0 && size <= kLargestMessage, ErrorCode::kLaunch, "a peer announces a message of an absurd size");
    give<std::uint8_t>(group, peer, done);
    take<std::uint8_t>(group, peer, std::span(data).first(static_cast<std::size_t>(size)), slow_bytes_per_s);
    give<std::uint8_t>(group, peer, done);
  }
}

}  // namespace

LinkFigures measure_tcp(const std::vector<Endpoint>& peer, const std::string& secret, int own_rank,
                        const Deadline& deadline) {
  Wire talk = knock(peer, secret, own_rank, deadline);
  LinkFigures figures;
  figures.latency_us = shortest_trip_us([&] {
                         std::array<std::byte, 1> byte{};
                         talk.write_all(byte, deadline);
                         talk.read_all(byte, deadline);
                       }) /
                       2;
  const std::array<std::byte, 1> end{std::byte{1}};
  talk.write_all(end, deadline);
  Wire there = knock(peer, secret, own_rank, deadline);
  pour(there, deadline);
  figures.there_bytes_per_s = rate_of(talk.receive(deadline));
  Wire back = knock(peer, secret, own_rank, deadline);
  figures.back_bytes_per_s = drain(back, deadline);
  return figures;
}

void serve_tcp(Door& door, int rank, const Deadline& deadline) {
  Wire talk = admit_rank(door, rank, deadline);
  for (std::array<std::byte, 1> byte{}; byte[0] == std::byte{0};) {
    talk.read_all(byte, deadline);
    if (byte[0] == std::byte{0}) talk.write_all(byte, deadline);
  }
  Wire there = admit_rank(door, rank, deadline);
  talk.send(fmt::format("{:.3f}", drain(there, deadline)), deadline);
  Wire back = admit_rank(door, rank, deadline);
  pour(back, deadline);
}

LinkFigures measure_messages(const Communicator& group, int peer, double slow_bytes_per_s) {
  LinkFigures figures;
  std::int64_t more = 1;
  const auto trip = [&] {
    give<std::int64_t>(group, peer, std::span(&more, 1));
    std::int64_t answer = 0;
    take<std::int64_t>(group, peer, std::span(&answer, 1), slow_bytes_per_s);
  };
  figures.latency_us = shortest_trip_us(trip) / 2;
  more = 0;
  trip();
  figures.there_bytes_per_s = send_growing(group, peer, figures.latency_us, slow_bytes_per_s);
  // The other way round: the sender measures.
  receive_growing(group, peer, slow_bytes_per_s);
  group.recv(std::span(&figures.back_bytes_per_s, 1), peer);
  ZR_CHECK(figures.back_bytes_per_s > 0, ErrorCode::kLaunch, "a peer measured nonsense");
  return figures;
}

void serve_messages(const Communicator& group, int peer, double slow_bytes_per_s) {
  for (std::int64_t more = 1; more != 0;) {
    take<std::int64_t>(group, peer, std::span(&more, 1), slow_bytes_per_s);
    give<std::int64_t>(group, peer, std::span(&more, 1));
  }
  receive_growing(group, peer, slow_bytes_per_s);
  const double rate = send_growing(group, peer, 0, slow_bytes_per_s);
  give<double>(group, peer, std::span(&rate, 1));
}

}  // namespace zeroth::doctor
