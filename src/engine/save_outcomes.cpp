#include "engine/save_outcomes.h"

#include "engine/odd_rank.h"
#include "engine/texts.h"

#include <zeroth/base/text.h>

#include <nlohmann/json.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <new>
#include <random>
#include <system_error>

namespace zeroth {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

std::string outcome_text(const Error* error, const Files& files) {
  Json json = Json::object();
  if (error != nullptr) {
    json = {{"code", slug(error->code())}, {"text", error->what()}};
  } else {
    Json list = Json::array();
    for (const CheckpointFile& file : files)
      list.push_back({{"name", file.name}, {"bytes", file.bytes}, {"chunks", file.chunks}});
    json["files"] = std::move(list);
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string outcome_of_call(const std::function<Files()>& work) {
  try {
    return outcome_text(nullptr, work());
  } catch (const Error& error) {
    return outcome_text(&error, {});
  } catch (const std::bad_alloc& error) {
    const Error own = error_of(error);
    return outcome_text(&own, {});
  }
}

Files files_of(const std::string& outcome) {
  const Json json = Json::parse(outcome);
  Files files;
  for (const Json& file : json.at("files")) {
    files.push_back({.name = file.at("name"),
                     .bytes = file.at("bytes"),
                     .chunks = file.at("chunks").get<std::vector<std::uint64_t>>()});
  }
  return files;
}

void throw_if_any_failed(const std::vector<std::string>& outcomes, const char* what, int first_rank, int world) {
  std::vector<int> failed;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (Json::parse(outcomes[rank]).contains("code")) failed.push_back(first_rank + static_cast<int>(rank));
  }
  if (failed.empty()) return;
  const Json first = Json::parse(outcomes[static_cast<std::size_t>(failed.front() - first_rank)]);
  throw Error(code_of_slug(first.at("code").get<std::string>()).value_or(ErrorCode::kIo), what,
              {.where = "engine.checkpoint",
               .who = ranks_text(failed) + " of " + std::to_string(world),
               .got = first.at("text").get<std::string>()});
}

std::vector<Files> on_all_ranks(const Communicator& communicator, const char* what,
                                const std::function<Files()>& work) {
  const std::vector<std::string> outcomes = gather_texts(outcome_of_call(work), communicator);
  throw_if_any_failed(outcomes, what, 0, communicator.size());
  std::vector<Files> files;
  for (const std::string& outcome : outcomes) files.push_back(files_of(outcome));
  return files;
}

std::string on_first_rank(const Communicator& communicator, const char* what,
                          const std::function<std::string()>& work) {
  std::string said;
  if (communicator.rank() == 0) said = outcome_of_call([&] { return Files{{.name = work()}}; });
  said = broadcast_text(std::move(said), 0, communicator);
  throw_if_any_failed({said}, what, 0, communicator.size());
  return files_of(said).at(0).name;
}

void require_same_folder(const std::string& folder, const Communicator& communicator, const char* where) {
  std::error_code error;
  std::string own = std::filesystem::absolute(folder, error).lexically_normal().string();
  if (own.size() > 1 && own.ends_with('/')) own.pop_back();
  const std::vector<std::string> folders = gather_texts(own, communicator);
  std::vector<std::int64_t> digests;
  for (const std::string& one : folders) digests.push_back(static_cast<std::int64_t>(digest64(one) >> 1U));
  const OddRank found = find_odd_rank(digests);
  if (found.odd < 0) return;
  const auto rank_text = [&](int rank) {
    return "rank " + std::to_string(rank) + " of " + std::to_string(communicator.size());
  };
  throw Error(ErrorCode::kMismatch, "ranks name other folders of checkpoints",
              {.where = where,
               .who = rank_text(found.odd),
               .expected = folders[static_cast<std::size_t>(found.usual)] + " (" + rank_text(found.usual) + ")",
               .got = folders[static_cast<std::size_t>(found.odd)],
               .hint = "give every rank the same folder: a name with a time or a random number is rank 0's to choose"});
}

std::string random_run_name() {
  std::random_device random;
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "%08x%08x", random(), random());
  return text.data();
}

}  // namespace zeroth
