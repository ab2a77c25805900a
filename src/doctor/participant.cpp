#include "doctor/participant.h"

#include "doctor/facts.h"
#include "doctor/probes.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/comm/factory.h>

#include <nlohmann/json.hpp>

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace zeroth::doctor {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxDiskBytes = std::size_t{1} << 30U;

class Participant {
 public:
  Participant(const Place& place, const RankFacts& facts, const Pretence& pretence)
      : place_(&place), facts_(&facts), pretence_(&pretence) {}

  Json answer(const Json& task) {
    ZR_FAILPOINT("doctor.answer");
    const std::string what = task.at("do").get<std::string>();
    if (what == "facts") return *facts_;
    if (what == "clock") return {{"ns", now_ns()}};
    if (what == "disk") return disk(task);
    if (what == "group") return group(task);
    if (what == "open") return open(task);
    if (what == "serve") return serve(task);
    if (what == "probe") return probe(task);
    if (what == "messages") return messages(task);
    throw Error(ErrorCode::kLaunch, "rank 0 asks for something unknown", {.got = what});
  }

 private:
  /// The wall clock: it is what is compared.
  [[nodiscard]] std::int64_t now_ns() const {
    const auto now =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
            .count();
    const auto pretended = pretence_->clocks_ms.find(place_->rank);
    return now + (pretended == pretence_->clocks_ms.end() ? 0 : static_cast<std::int64_t>(pretended->second * 1e6));
  }

  [[nodiscard]] Json disk(const Json& task) const {
    const auto bytes = std::min(task.at("bytes").get<std::size_t>(), kMaxDiskBytes);
    DiskFacts disk = measure_disk(task.at("folder").get<std::string>(), bytes, kTaskPatience / 4);
    disk.host = place_->host;
    return disk;
  }

  /// A group among the ranks of this host, or of all where the launcher brings a transport between hosts.
  Json group(const Json& task) {
    const std::string name = task.at("group").get<std::string>();
    if (name == "host") {
      CommOptions options;
      options.timeout = kTaskPatience;
      if (place_->world) {
        host_.emplace(place_->world->backend().split(place_->host, place_->rank, "host"));
      } else {
        host_.emplace(make_backend("shm", {.rank = place_->local_rank,
                                           .size = place_->local_size,
                                           .job = place_->job + " doctor",
                                           .options = options}));
      }
    }
    const std::string kind{group_of(name).backend().kind()};
    return {{"kind", kind}};
  }

  Json open(const Json& task) {
    door_.emplace(any_port_like(task.at("like").get<std::string>()), place_->secret);
    return {{"port", door_->port()}};
  }

  Json serve(const Json& task) {
    ZR_CHECK(door_.has_value(), ErrorCode::kLaunch, "nothing is open");
    serve_tcp(*door_, task.at("rank").get<int>(), Deadline(kTaskPatience));
    return Json::object();
  }

  [[nodiscard]] Json probe(const Json& task) const {
    const Endpoint peer{.host = task.at("address").get<std::string>(), .port = task.at("port").get<int>()};
    return figures(measure_tcp({peer}, place_->secret, place_->rank, Deadline(kTaskPatience)));
  }

  [[nodiscard]] Json messages(const Json& task) const {
    const std::string name = task.at("group").get<std::string>();
    const Communicator& group = group_of(name);
    const int peer = task.at("peer").get<int>();
    const double slow = pretence_->slow(place_->rank, task.at("rank").get<int>());
    ZR_CHECK(peer >= 0 && peer < group.size() && peer != group.rank(), ErrorCode::kLaunch, "there is no such peer");
    if (task.at("measure").get<bool>()) return figures(measure_messages(group, peer, slow));
    serve_messages(group, peer, slow);
    return Json::object();
  }

  [[nodiscard]] const Communicator& group_of(const std::string& name) const {
    const std::optional<Communicator>& group = name == "host" ? host_ : place_->world;
    ZR_CHECK(group.has_value(), ErrorCode::kLaunch, "there is no such group", {.got = name});
    return *group;
  }

  static Json figures(const LinkFigures& figures) {
    return {
        {"latency_us", figures.latency_us}, {"there", figures.there_bytes_per_s}, {"back", figures.back_bytes_per_s}};
  }

  const Place* place_;
  const RankFacts* facts_;
  const Pretence* pretence_;
  std::optional<Communicator> host_;
  std::optional<Door> door_;
};

}  // namespace

void take_part(Wire& survey, const Place& place, const RankFacts& facts, const Pretence& pretence,
               Milliseconds patience) {
  Participant participant(place, facts, pretence);
  while (true) {
    Json answer;
    try {
      const Json task = Json::parse(survey.receive(Deadline(patience)));
      if (task.at("do") == "end") return;
      try {
        answer = participant.answer(task);
      } catch (const Json::exception&) {
        throw;
      } catch (const std::exception& error) {
        answer = {{"error", error.what()}};
      }
    } catch (const Json::exception& error) {
      throw Error(ErrorCode::kLaunch, "rank 0 sent no task", {.got = error.what()});
    }
    survey.send(answer.dump(-1, ' ', false, Json::error_handler_t::replace), Deadline(kTaskPatience));
  }
}

}  // namespace zeroth::doctor
