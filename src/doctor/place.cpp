#include "doctor/place.h"

#include "doctor/facts.h"
#include "hosts/secret.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/world.h>

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <memory>
#include <span>
#include <sstream>
#include <utility>

namespace zeroth::doctor {
namespace {

constexpr const char* kJob = "ZEROTH_JOB_ID";

int number_of(const char* name, int low, int high) {
  const std::string text = variable_or_empty(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  ZR_CHECK(error == std::errc{} && end == text.data() + text.size() && value >= low && value <= high,
           ErrorCode::kEnvironment, "a variable of the launcher makes no sense",
           {.where = "zeroth doctor",
            .which = name,
            .expected = fmt::format("{} to {}", low, high),
            .got = "\"" + text + "\"",
            .hint = "start it with zeroth-run, or without RANK and WORLD_SIZE"});
  return value;
}

Place place_of_zeroth_run(std::optional<Door>& door) {
  constexpr int kMost = 4096;
  Place place;
  place.size = number_of("WORLD_SIZE", 1, kMost);
  place.rank = number_of("RANK", 0, place.size - 1);
  place.local_size = number_of("LOCAL_WORLD_SIZE", 1, place.size);
  place.local_rank = number_of("LOCAL_RANK", 0, place.local_size - 1);
  place.num_hosts = number_of("GROUP_WORLD_SIZE", 1, place.size);
  place.host = number_of("GROUP_RANK", 0, place.num_hosts - 1);
  place.job = variable_or_empty(kJob);
  place.secret = place.job;
  ZR_CHECK(place.secret.size() >= 16, ErrorCode::kEnvironment, "the job has no name that others cannot guess",
           {.where = "zeroth doctor", .which = kJob, .expected = "16 characters or more, as zeroth-run sets it"});
  const int port = number_of("MASTER_PORT", 1, 65535);
  place.hub = {{.host = variable_or_empty("MASTER_ADDR"), .port = port}};
  if (place.rank == 0) {
    // With several hosts at all addresses: where the own name leads to loopback, that is a finding and not the end.
    Endpoint own = place.num_hosts > 1 ? any_port_like(place.hub.front().host) : place.hub.front();
    own.port = port;
    door.emplace(own, place.secret);
  }
  return place;
}

/// Numeric addresses of the interfaces that are up; loopback only if there is nothing else to tell, on one host.
std::vector<std::string> own_addresses(bool loopback) {
  std::vector<std::string> addresses;
  for (const Interface& one : interfaces()) {
    // The door listens with IPv4 or both, never with IPv6 alone on the hosts that MPI connects.
    if (one.loopback == loopback && one.address.find(':') == std::string::npos) addresses.push_back(one.address);
  }
  return addresses;
}

/// Every rank's `number`, in rank order.
std::vector<std::int64_t> gather(const Communicator& world, std::int64_t number) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(world.size()));
  world.all_gather(std::span<const std::int64_t>(&number, 1), std::span(all));
  return all;
}

std::string identity_of_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return host_name() + " " + boot;
}

/// "secret port address address ..." from rank 0 to all.
std::string hand_out(const Communicator& world, const std::string& text) {
  std::int64_t size = static_cast<std::int64_t>(text.size());
  world.broadcast(std::span(&size, 1), 0);
  ZR_CHECK(size >= 0 && size <= 65536, ErrorCode::kMismatch, "rank 0 says something else than a place to meet",
           {.where = "zeroth doctor"});
  std::vector<std::uint8_t> bytes(text.begin(), text.end());
  bytes.resize(static_cast<std::size_t>(size));
  world.broadcast(std::span(bytes), 0);
  return {bytes.begin(), bytes.end()};
}

std::string hexadecimal(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}

Place place_of_world(std::optional<Door>& door, Milliseconds timeout) {
  const World own = World::from_environment();
  CommOptions options;
  options.timeout = timeout;
  Place place{.rank = own.rank(), .size = own.size(), .job = own.job()};
  place.world.emplace(own.connect(options, std::make_shared<TrafficTable>()));
  const std::vector<std::int64_t> identities =
      gather(*place.world, static_cast<std::int64_t>(digest64(identity_of_host()) >> 1U));
  std::vector<std::int64_t> hosts;
  std::vector<int> count;
  for (int rank = 0; rank < place.size; ++rank) {
    const auto found = std::ranges::find(hosts, identities[static_cast<std::size_t>(rank)]);
    const auto host = static_cast<std::size_t>(found - hosts.begin());
    if (found == hosts.end()) {
      hosts.push_back(identities[static_cast<std::size_t>(rank)]);
      count.push_back(0);
    }
    if (rank == place.rank) {
      place.host = static_cast<int>(host);
      place.local_rank = count[host];
    }
    ++count[host];
  }
  place.num_hosts = static_cast<int>(hosts.size());
  place.local_size = count[static_cast<std::size_t>(place.host)];
  std::string offer;
  if (place.rank == 0) {
    offer = hexadecimal(random_nonce() + random_nonce());
    door.emplace(Endpoint{}, offer);
    offer += fmt::format(" {}", door->port());
    for (const std::string& address : own_addresses(place.num_hosts == 1)) offer += " " + address;
  }
  std::istringstream words(hand_out(*place.world, offer));
  int port = 0;
  words >> place.secret >> port;
  for (std::string address; words >> address;) place.hub.push_back({.host = address, .port = port});
  return place;
}

}  // namespace

bool started_as_rank() {
  for (const char* name : {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"}) {
    if (!variable_or_empty(name).empty()) return true;
  }
  return false;
}

Place find_place(std::optional<Door>& door, Milliseconds timeout) {
  const bool ours = !variable_or_empty(kJob).empty() && !variable_or_empty("RANK").empty();
  return ours ? place_of_zeroth_run(door) : place_of_world(door, timeout);
}

}  // namespace zeroth::doctor
