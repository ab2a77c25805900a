#include "doctor/report.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace zeroth::doctor {

using Json = nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ClockFacts, host, ahead_ms, uncertainty_ms)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Link, a, b, transport, far, latency_us, there_bytes_per_s, back_bytes_per_s, error)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostEntry, host, name, address)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LostRank, rank, host, expected, got)

}  // namespace zeroth::doctor

namespace zeroth {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ErrorContext, where, who, which, expected, got, hint)
}

namespace zeroth::doctor {
namespace {

/// Texts come from other hosts: one line each, and valid UTF-8 for those who read the JSON.
std::string dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

void to_json(Json& json, const Finding& finding) {
  json = Json{{"note", finding.note},
              {"code", std::string(slug(finding.code))},
              {"message", finding.message},
              {"context", finding.context},
              {"text", finding.line()}};
}

void from_json(const Json& json, Finding& finding) {
  finding.note = json.at("note").get<bool>();
  finding.code = code_of_slug(json.at("code").get<std::string>()).value_or(ErrorCode::kInternal);
  finding.message = json.at("message").get<std::string>();
  finding.context = json.at("context").get<ErrorContext>();
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Report, num_ranks, hosts, ranks, lost, disks, clocks, links, findings, advice)

std::string Finding::line() const {
  return Error(code, message, context).what();
}

std::string Report::name_of_host(int host) const {
  const auto found = std::ranges::find(hosts, host, &HostEntry::host);
  return found == hosts.end() || found->name.empty() ? fmt::format("host {}", host) : found->name;
}

int Report::host_of(int rank) const {
  const auto found = std::ranges::find(ranks, rank, &RankFacts::rank);
  return found == ranks.end() ? -1 : found->host;
}

bool Report::well() const {
  return std::ranges::all_of(findings, &Finding::note);
}

std::string to_text(const Report& report) {
  Json json = report;
  json["well"] = report.well();
  return dump(json, 2);
}

Report report_from(std::string_view text) {
  ZR_CHECK(text.size() <= kMaxReportBytes, ErrorCode::kLaunch, "the report of the ranks is too large",
           {.where = "zeroth doctor", .got = fmt::format("{} bytes", text.size())});
  try {
    return Json::parse(text).get<Report>();
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::kLaunch, "what the ranks printed is no report",
                {.where = "zeroth doctor", .got = error.what()});
  }
}

}  // namespace zeroth::doctor
