#include "doctor/survey.h"

#include "doctor/facts.h"
#include "doctor/participant.h"
#include "hosts/sockets.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace zeroth::doctor {
namespace {

using Json = nlohmann::json;

constexpr Milliseconds kAnswer = kTaskPatience + kTaskPatience / 2;
/// What the page cache has taken at once a slow disk writes for long.
constexpr Milliseconds kDisk{60'000};
constexpr int kClockTrips = 8;
/// A link that looks slow is measured so often again; the best counts.
constexpr int kSecondLooks = 2;

/// What is said at once, by whom.
using Tasks = std::map<int, Json>;

class Survey {
 public:
  Survey(const Place& place, Door& door, Wire own, const SurveyOptions& options)
      : place_(&place), door_(&door), options_(&options) {
    wires_.emplace(0, std::move(own));
    report_.num_ranks = place.size;
  }

  Report run() {
    meet();
    gather_facts();
    gather_disks();
    gather_clocks();
    near_links();
    far_links();
    look_again();
    for (auto& [rank, wire] : wires_) {
      try {
        wire.send(Json{{"do", "end"}}.dump(), Deadline(kTaskPatience));
      } catch (const Error&) {
        continue;  // it has gone by itself
      }
    }
    return std::move(report_);
  }

 private:
  struct Measurement {
    Link link;
    std::string group;  ///< "host", "world"; "" for TCP
  };

  void meet() {
    const Deadline deadline(options_->meeting);
    while (static_cast<int>(wires_.size()) < place_->size && !deadline.passed()) {
      int rank = -1;
      Wire wire = door_->admit(deadline, rank);
      if (rank > 0 && rank < place_->size) wires_.try_emplace(rank, std::move(wire));
    }
    std::vector<int> missing;
    for (int rank = 0; rank < place_->size; ++rank) {
      if (!wires_.contains(rank)) missing.push_back(rank);
    }
    const std::string where = place_->hub.empty() ? "rank 0" : "rank 0, " + text_of(place_->hub.front());
    for (const int rank : missing) {
      report_.lost.push_back(
          {.rank = rank,
           .expected = "to come to " + where,
           .got = fmt::format("nothing for {:.0f} s", static_cast<double>(options_->meeting.count()) / 1000)});
    }
    if (place_->num_hosts > 1 && !place_->hub.empty()) {
      const std::string& master = place_->hub.front().host;
      if (const std::string loopback = loopback_of(master); !loopback.empty()) {
        report_.findings.push_back(
            {.code = ErrorCode::kLaunch,
             .message = "rank 0's host advertises loopback",
             .context = {.who = "rank 0",
                         .which = "MASTER_ADDR",
                         .expected = "an address that the other hosts reach",
                         .got = master == loopback ? loopback : master + ", there " + loopback,
                         .hint = "correct /etc/hosts on rank 0's host, or name the hosts by their addresses"}});
      }
    }
    if (door_->strangers() > 0) {
      report_.findings.push_back(
          {.note = true,
           .code = ErrorCode::kLaunch,
           .message = fmt::format("{} connections came that do not belong to this job", door_->strangers()),
           .context = {.who = "rank 0", .hint = "a port scanner, or another job with the same port"}});
    }
  }

  void lost(int rank, const std::string& got) {
    report_.lost.push_back({.rank = rank, .host = report_.host_of(rank), .expected = "answers", .got = got});
  }

  /// Says every task at once and waits for the answers; who gives none in time is lost. An answer may be {"error":
  /// text}.
  Tasks ask(const Tasks& tasks, Milliseconds patience = kAnswer) {
    ZR_FAILPOINT("doctor.ask");
    Tasks answers;
    std::set<int> gone;
    const auto talk = [&](int rank, const auto& say) {
      const auto wire = wires_.find(rank);
      if (wire == wires_.end() || gone.contains(rank)) return;
      try {
        say(wire->second);
      } catch (const Error& error) {
        gone.insert(rank);
        lost(rank, error.message());
      } catch (const Json::exception& error) {
        gone.insert(rank);
        lost(rank, error.what());
      }
    };
    for (const auto& [rank, task] : tasks)
      talk(rank, [&task = task](Wire& wire) { wire.send(task.dump(), Deadline(kAnswer)); });
    const Deadline deadline(patience);
    for (const auto& [rank, task] : tasks)
      talk(rank, [&, rank = rank](Wire& wire) { answers[rank] = Json::parse(wire.receive(deadline)); });
    for (const int rank : gone) wires_.erase(rank);
    return answers;
  }

  [[nodiscard]] static std::string error_of(const Json& answer) {
    return answer.is_object() ? answer.value("error", "") : "no answer";
  }

  /// Ranks that are here, by host, in order.
  [[nodiscard]] std::map<int, std::vector<int>> ranks_of_hosts() const {
    std::map<int, std::vector<int>> hosts;
    for (const RankFacts& facts : report_.ranks) {
      if (wires_.contains(facts.rank)) hosts[facts.host].push_back(facts.rank);
    }
    return hosts;
  }

  /// The same task for the first rank of each host.
  Tasks ask_hosts(const Json& task, Milliseconds patience = kAnswer) {
    Tasks tasks;
    for (const auto& [host, ranks] : ranks_of_hosts()) tasks[ranks.front()] = task;
    return ask(tasks, patience);
  }

  void gather_facts() {
    Tasks tasks;
    for (const auto& [rank, wire] : wires_) tasks[rank] = {{"do", "facts"}};
    for (const auto& [rank, answer] : ask(tasks)) {
      try {
        RankFacts facts = answer.get<RankFacts>();
        ZR_CHECK(facts.rank == rank && facts.host >= 0 && facts.host < place_->num_hosts, ErrorCode::kLaunch,
                 "a rank says that it is another one");
        if (std::ranges::find(report_.hosts, facts.host, &HostEntry::host) == report_.hosts.end()) {
          report_.hosts.push_back({.host = facts.host, .name = facts.host_name});
        }
        report_.ranks.push_back(std::move(facts));
      } catch (const std::exception& error) {
        lost(rank, error.what());
        wires_.erase(rank);
      }
    }
    std::ranges::sort(report_.hosts, {}, &HostEntry::host);
    for (HostEntry& host : report_.hosts) host.address = address_of_host(host.host);
    // Hosts of the same name cannot be told apart by it.
    std::map<std::string, int> names;
    for (const HostEntry& host : report_.hosts) ++names[host.name];
    for (HostEntry& host : report_.hosts) {
      if (names[host.name] > 1)
        host.name = host.address.empty() ? fmt::format("{}#{}", host.name, host.host) : host.address;
    }
  }

  /// As the others reach it: what its connection to us shows, and of our own host what another's does.
  [[nodiscard]] std::string address_of_host(int host) const {
    if (place_->num_hosts < 2) return "";
    for (const RankFacts& facts : report_.ranks) {
      const auto wire = wires_.find(facts.rank);
      if (wire == wires_.end() || facts.rank == 0) continue;
      if (host == place_->host && facts.host != host) return own_address(wire->second);
      if (host != place_->host && facts.host == host) return peer_address(wire->second);
    }
    return "";
  }

  void gather_disks() {
    if (options_->folder.empty()) return;
    for (const auto& [rank, answer] :
         ask_hosts({{"do", "disk"}, {"folder", options_->folder}, {"bytes", options_->disk_bytes}}, kDisk)) {
      try {
        report_.disks.push_back(answer.get<DiskFacts>());
        report_.disks.back().host = report_.host_of(rank);
      } catch (const Json::exception&) {
        report_.disks.push_back({.host = report_.host_of(rank), .folder = options_->folder, .error = error_of(answer)});
      }
    }
  }

  void gather_clocks() {
    if (place_->num_hosts < 2) return;
    for (const auto& [host, ranks] : ranks_of_hosts()) compare_clock(host, ranks.front());
  }

  void compare_clock(int host, int rank) {
    const auto now = [] {
      return std::chrono::duration<double, std::milli>(std::chrono::system_clock::now().time_since_epoch()).count();
    };
    ClockFacts best{.host = host, .uncertainty_ms = std::numeric_limits<double>::infinity()};
    for (int trip = 0; trip < kClockTrips; ++trip) {
      const double before = now();
      const Tasks answers = ask({{rank, {{"do", "clock"}}}});
      const double after = now();
      if (answers.empty() || !answers.begin()->second.value("error", "").empty()) return;
      const auto there = static_cast<double>(answers.begin()->second.value("ns", std::int64_t{0})) * 1e-6;
      if ((after - before) / 2 >= best.uncertainty_ms) continue;
      best.uncertainty_ms = (after - before) / 2;
      best.ahead_ms = there - (before + after) / 2;
    }
    report_.clocks.push_back(best);
  }

  /// Measures at once what has no end in common, and notes figures or errors.
  void measure(std::vector<Measurement>& round) {
    Tasks tasks;
    std::map<int, int> places;  // of each rank in the group of its host
    for (const auto& [host, ranks] : ranks_of_hosts()) {
      for (std::size_t i = 0; i < ranks.size(); ++i) places[ranks[i]] = static_cast<int>(i);
    }
    for (const Measurement& one : round) {
      const auto& [a, b] = std::pair(one.link.a, one.link.b);
      if (one.group.empty()) {
        const int host = report_.host_of(b);
        tasks[b] = {{"do", "serve"}, {"rank", a}};
        tasks[a] = {{"do", "probe"}, {"address", address_of_host(host)}, {"port", ports_[b]}};
      } else {
        const bool near = one.group == "host";
        tasks[b] = {
            {"do", "messages"}, {"group", one.group}, {"peer", near ? places[a] : a}, {"rank", a}, {"measure", false}};
        tasks[a] = {
            {"do", "messages"}, {"group", one.group}, {"peer", near ? places[b] : b}, {"rank", b}, {"measure", true}};
      }
    }
    const Tasks answers = ask(tasks);
    for (Measurement& one : round) take(one.link, answers);
  }

  static void take(Link& link, const Tasks& answers) {
    const auto of = [&](int rank) {
      const auto found = answers.find(rank);
      return found == answers.end() ? Json(nullptr) : found->second;
    };
    const Json measured = of(link.a);
    link.error = error_of(measured);
    if (link.error.empty()) link.error = error_of(of(link.b));
    if (!link.error.empty()) return;
    link.latency_us = measured.value("latency_us", 0.0);
    link.there_bytes_per_s = measured.value("there", 0.0);
    link.back_bytes_per_s = measured.value("back", 0.0);
  }

  void near_links() {
    std::map<int, std::vector<int>> hosts;
    Tasks groups;
    for (const auto& [host, ranks] : ranks_of_hosts()) {
      const auto first = std::ranges::find(report_.ranks, ranks.front(), &RankFacts::rank);
      // Where one does not answer, the others would wait for it.
      if (ranks.size() < 2 || first->ranks_on_host != static_cast<int>(ranks.size())) continue;
      hosts[host] = ranks;
    }
    if (place_->world ? static_cast<int>(wires_.size()) < place_->size : hosts.empty()) return;
    for (const auto& [rank, wire] : wires_) {
      if (place_->world || hosts.contains(report_.host_of(rank))) groups[rank] = {{"do", "group"}, {"group", "host"}};
    }
    std::map<int, std::string> kinds;
    for (const auto& [rank, answer] : ask(groups)) {
      const std::string error = error_of(answer);
      const int host = report_.host_of(rank);
      if (error.empty()) {
        kinds[host] = answer.value("kind", "shm");
        continue;
      }
      if (hosts.erase(host) == 0) continue;
      report_.findings.push_back(
          {.code = ErrorCode::kResource,
           .message = "the ranks of a host cannot share memory",
           .context = {.where = report_.name_of_host(host), .who = fmt::format("rank {}", rank), .got = error}});
    }
    std::map<std::size_t, std::vector<Measurement>> rounds;
    for (const auto& [host, ranks] : hosts) {
      const auto of_host = rounds_of(static_cast<int>(ranks.size()));
      for (std::size_t i = 0; i < of_host.size(); ++i) {
        for (const auto& [a, b] : of_host[i]) {
          rounds[i].push_back({.link = {.a = ranks[static_cast<std::size_t>(a)],
                                        .b = ranks[static_cast<std::size_t>(b)],
                                        .transport = kinds[host]},
                               .group = "host"});
        }
      }
    }
    run(rounds);
  }

  void far_links() {
    std::vector<int> firsts;
    for (const auto& [host, ranks] : ranks_of_hosts()) firsts.push_back(ranks.front());
    if (firsts.size() < 2) return;
    for (const auto& [rank, answer] : ask_hosts({{"do", "open"}, {"like", address_of_host(place_->host)}}))
      ports_[rank] = answer.value("port", 0);
    const auto over = [&](const std::string& transport, const std::string& group) {
      std::map<std::size_t, std::vector<Measurement>> rounds;
      const auto pairs = rounds_of(static_cast<int>(firsts.size()));
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        for (const auto& [a, b] : pairs[i]) {
          rounds[i].push_back({.link = {.a = firsts[static_cast<std::size_t>(a)],
                                        .b = firsts[static_cast<std::size_t>(b)],
                                        .transport = transport,
                                        .far = true},
                               .group = group});
        }
      }
      run(rounds);
    };
    over("tcp", "");
    if (place_->world && static_cast<int>(wires_.size()) == place_->size) over("mpi", "world");
  }

  void run(std::map<std::size_t, std::vector<Measurement>>& rounds) {
    std::set<int> broken;  // hosts whose group has failed: every later call fails with it
    bool world_broken = false;
    for (auto& [index, round] : rounds) {
      std::erase_if(round, [&](const Measurement& one) {
        const bool dead =
            one.group == "host" ? broken.contains(report_.host_of(one.link.a)) : one.group == "world" && world_broken;
        return dead || !wires_.contains(one.link.a) || !wires_.contains(one.link.b);
      });
      measure(round);
      for (const Measurement& one : round) {
        report_.links.push_back(one.link);
        groups_.push_back(one.group);
        if (one.link.error.empty()) continue;
        if (one.group == "host") broken.insert(report_.host_of(one.link.a));
        world_broken = world_broken || one.group == "world";
      }
    }
  }

  /// A busy moment is no bad link.
  void look_again() {
    for (int look = 0; look < kSecondLooks; ++look) {
      for (const std::size_t index : odd_links(report_, options_->thresholds)) {
        Link& link = report_.links[index];
        if (!wires_.contains(link.a) || !wires_.contains(link.b)) continue;
        std::vector<Measurement> again{{.link = link, .group = groups_[index]}};
        measure(again);
        const Link& now = again.front().link;
        if (!now.error.empty()) {
          link.error = now.error;
          return;
        }
        link.latency_us = std::min(link.latency_us, now.latency_us);
        link.there_bytes_per_s = std::max(link.there_bytes_per_s, now.there_bytes_per_s);
        link.back_bytes_per_s = std::max(link.back_bytes_per_s, now.back_bytes_per_s);
      }
    }
  }

  const Place* place_;
  Door* door_;
  const SurveyOptions* options_;
  std::map<int, Wire> wires_;  // by rank
  std::map<int, int> ports_;
  std::vector<std::string> groups_;  // one a link of the report
  Report report_;
};

}  // namespace

std::vector<std::vector<Pair>> rounds_of(int count) {
  constexpr int kOneByOne = 8;
  std::vector<std::vector<Pair>> rounds;
  if (count <= kOneByOne) {
    for (int a = 0; a < count; ++a) {
      for (int b = a + 1; b < count; ++b) rounds.push_back({{a, b}});
    }
    return rounds;
  }
  // The circle method: one stays, the others move on by one place; with an odd number a place is empty.
  const int places = count + count % 2;
  for (int round = 0; round < places - 1; ++round) {
    std::vector<Pair> pairs;
    for (int i = 0; i < places / 2; ++i) {
      const int a = i == 0 ? places - 1 : (round + i) % (places - 1);
      const int b = (round + places - 1 - i) % (places - 1);
      if (a < count && b < count) pairs.emplace_back(std::minmax(a, b));
    }
    rounds.push_back(std::move(pairs));
  }
  return rounds;
}

Report survey(const Place& place, Door& door, Wire own, const SurveyOptions& options) {
  return Survey(place, door, std::move(own), options).run();
}

}  // namespace zeroth::doctor
