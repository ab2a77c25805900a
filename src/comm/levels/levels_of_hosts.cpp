#include "comm/levels/levels_of_hosts.h"

#include "comm/rank_facts.h"

#include <zeroth/base/secret.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/two_level.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <span>
#include <utility>

namespace zeroth::detail {
namespace {

/// What a rank says of itself before there are nodes.
struct RankFacts {
  std::array<char, 160> host{};
  std::uint64_t wanted_nodes = 0;  ///< digest
  std::uint64_t mark = 0;          ///< random: rank 0's makes a name that no other group has
};

std::uint64_t digest_of(const std::vector<int>& nodes) {
  return digest64({reinterpret_cast<const char*>(nodes.data()), nodes.size() * sizeof(int)});
}

/// What all ranks say before there are nodes. Collective.
struct Introduced {
  std::vector<std::string> hosts{};
  std::string name{};  ///< that no other group has
};

Introduced introduce(const std::shared_ptr<MessageTransport>& transport, const CommOptions& options,
                     const std::string& host) {
  RankFacts own;
  std::memcpy(own.host.data(), host.data(), std::min(host.size(), own.host.size() - 1));
  own.wanted_nodes = digest_of(options.nodes);
  fill_random(std::as_writable_bytes(std::span(&own.mark, 1)), "the name of a group",
              {.where = "comm." + std::string(transport->kind())});
  std::vector<RankFacts> all = facts_of_ranks(transport, options, own);
  Introduced introduced{.name = fmt::format("hosts-{:016x}", all.front().mark)};
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    ZR_CHECK(
        all[rank].wanted_nodes == own.wanted_nodes, ErrorCode::kMismatch, "ranks put ranks on different nodes",
        {.where = "comm." + std::string(transport->kind()),
         .who = fmt::format("rank {}/{}", transport->rank(), transport->size()),
         .which = "zeroth.ranks_per_node",
         .expected = options.nodes.empty() ? "none wanted here" : fmt::format("nodes {} of the ranks", options.nodes),
         .got = fmt::format("another value on rank {}", rank)});
    all[rank].host.back() = '\0';
    introduced.hosts.emplace_back(all[rank].host.data());
  }
  return introduced;
}

/// `spec.options.nodes` are the nodes, `spec.job` names the group.
std::unique_ptr<CommBackend> make_levels(const std::shared_ptr<MessageTransport>& transport, const WorldSpec& spec) {
  const CommOptions& options = spec.options;
  const int node = options.nodes[static_cast<std::size_t>(spec.rank)];
  const auto before = options.nodes.begin() + spec.rank;
  WorldSpec inside = spec;
  inside.rank = static_cast<int>(std::count(options.nodes.begin(), before, node));
  inside.size = static_cast<int>(std::count(options.nodes.begin(), options.nodes.end(), node));
  inside.job = fmt::format("{}/node {}", spec.job, node);
  inside.options.nodes.clear();
  for (std::size_t rank = 0; rank < options.nodes.size(); ++rank) {
    if (options.nodes[rank] == node) inside.options.watched_ranks.push_back(static_cast<int>(rank));
  }
  try {
    std::unique_ptr<CommBackend> base = make_message_backend(transport, options);
    return make_two_level_backend(std::move(base), make_backend(inside.size > 1 ? "shm" : "self", inside), options);
  } catch (const Error& error) {
    transport->abort(error.what());
    throw;
  }
}

}  // namespace

std::string host_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  for (const char* name : {"net", "pid"}) {
    std::error_code unreadable;
    text += " " + std::filesystem::read_symlink(std::string("/proc/self/ns/") + name, unreadable).string();
  }
  return text;
}

std::vector<int> nodes_of_hosts(const std::vector<std::string>& hosts, const std::vector<int>& wanted) {
  std::vector<int> nodes;
  std::map<std::string, int> number_of_host;
  std::map<int, std::size_t> first_of_node;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto host = number_of_host.emplace(hosts[rank], static_cast<int>(number_of_host.size())).first;
    if (wanted.empty()) {
      nodes.push_back(host->second);
      continue;
    }
    const std::size_t first = first_of_node.emplace(wanted[rank], rank).first->second;
    ZR_CHECK(hosts[first] == hosts[rank], ErrorCode::kConfig, "a node would have ranks on two hosts",
             {.where = "comm",
              .which = "zeroth.ranks_per_node",
              .expected = "a number that divides the ranks of each host",
              .got = fmt::format("ranks {} and {} on node {}", first, rank, wanted[rank]),
              .hint = "leave the key out: each host is a node"});
    nodes.push_back(wanted[rank]);
  }
  return nodes;
}

std::vector<int> nodes_of_ranks(const std::shared_ptr<MessageTransport>& transport, const CommOptions& options,
                                const std::string& host) {
  const Introduced introduced = introduce(transport, options, host);
  return options.nodes.empty() ? nodes_of_hosts(introduced.hosts, {}) : options.nodes;
}

std::unique_ptr<CommBackend> make_levels_of_hosts(const std::shared_ptr<MessageTransport>& transport,
                                                  const WorldSpec& spec) {
  WorldSpec whole = spec;
  whole.options.nodes = nodes_of_hosts(introduce(transport, spec.options, host_identity()).hosts, spec.options.nodes);
  if (whole.job.empty()) whole.job = job_from_environment();
  return make_levels(transport, whole);
}

}  // namespace zeroth::detail

namespace zeroth {

std::unique_ptr<CommBackend> make_backend_over_hosts(const std::shared_ptr<MessageTransport>& transport,
                                                     const CommOptions& options) {
  const detail::Introduced introduced = detail::introduce(transport, options, detail::host_identity());
  WorldSpec spec{.rank = transport->rank(), .size = transport->size(), .job = introduced.name, .options = options};
  spec.options.nodes = detail::nodes_of_hosts(introduced.hosts, options.nodes);
  const std::set<int> different(spec.options.nodes.begin(), spec.options.nodes.end());
  if (different.size() == 1) return make_message_backend(transport, options);
  return detail::make_levels(transport, spec);
}

}  // namespace zeroth
