#include "engine/load_hypers.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>

namespace zeroth {
namespace {

using PairsJson = nlohmann::json;

struct NamedValue {
  const char* name;
  std::string value;
};

std::vector<NamedValue> values_of(const GroupHyper& hyper) {
  return {{"lr", shortest_text(hyper.lr)},
          {"beta1", shortest_text(hyper.beta1)},
          {"beta2", shortest_text(hyper.beta2)},
          {"eps", shortest_text(hyper.eps)},
          {"weight_decay", shortest_text(hyper.weight_decay)},
          {"momentum", shortest_text(hyper.momentum)},
          {"dampening", shortest_text(hyper.dampening)},
          {"nesterov", hyper.nesterov ? "true" : "false"}};
}

/// "lr 0.001, weight_decay 0.1": of `one`, what `other` has otherwise.
std::string different_values(const GroupHyper& one, const GroupHyper& other) {
  const std::vector<NamedValue> values = values_of(one);
  const std::vector<NamedValue> others = values_of(other);
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < values.size(); ++at) {
    if (values[at].value != others[at].value) parts.push_back(values[at].name + (" " + values[at].value));
  }
  return join(parts, ", ");
}

}  // namespace

std::string text_of(const std::vector<GroupPair>& pairs) {
  PairsJson json = PairsJson::array();
  for (const GroupPair& pair : pairs) json.push_back({pair.here, pair.there, pair.param});
  return json.dump(-1, ' ', false, PairsJson::error_handler_t::replace);
}

std::vector<GroupPair> pairs_in(const std::vector<std::string>& texts) {
  std::vector<GroupPair> pairs;
  for (const std::string& text : texts) {
    for (const PairsJson& said : PairsJson::parse(text)) {
      GroupPair pair{.here = said.at(0).get<int>(), .there = said.at(1).get<int>(), .param = said.at(2)};
      const bool known = std::ranges::any_of(
          pairs, [&pair](const GroupPair& one) { return one.here == pair.here && one.there == pair.there; });
      if (!known) pairs.push_back(std::move(pair));
    }
  }
  return pairs;
}

std::vector<int> groups_there(const std::vector<GroupPair>& pairs, std::span<const GroupHyper> here,
                              std::span<const GroupHyper> there, bool strict, const std::string& path) {
  constexpr const char* kHint =
      "build the engine with the same parameter groups; hypers = false keeps the hyper-parameters of this engine; "
      "strict = false takes those of the first parameter of a group";
  std::vector<const GroupPair*> first(here.size());
  std::map<int, const GroupPair*> first_there;
  for (const GroupPair& pair : pairs) {
    const GroupHyper& its = there[static_cast<std::size_t>(pair.there)];
    const GroupPair*& known = first[static_cast<std::size_t>(pair.here)];
    if (known == nullptr) known = &pair;
    const GroupHyper& firsts = there[static_cast<std::size_t>(known->there)];
    ZR_CHECK(!strict || its == firsts, ErrorCode::kCheckpoint, "parameters of one group had different hyper-parameters",
             {.where = "engine.load",
              .which = path + ", group " + std::to_string(pair.here),
              .expected = different_values(firsts, its) + " (" + known->param + ")",
              .got = different_values(its, firsts) + " (" + pair.param + ")",
              .hint = kHint});
    const GroupPair* const other = first_there.try_emplace(pair.there, &pair).first->second;
    const GroupHyper& own = here[static_cast<std::size_t>(pair.here)];
    const GroupHyper& others = here[static_cast<std::size_t>(other->here)];
    ZR_CHECK(!strict || own == others, ErrorCode::kCheckpoint,
             "groups with different hyper-parameters were one group in a checkpoint",
             {.where = "engine.load",
              .which = path + ", groups " + std::to_string(other->here) + " and " + std::to_string(pair.here),
              .expected = different_values(others, own) + " (" + other->param + "), " + different_values(own, others) +
                          " (" + pair.param + ")",
              .got = "both in group " + std::to_string(pair.there),
              .hint = kHint});
  }
  std::vector<int> chosen;
  for (const GroupPair* pair : first) chosen.push_back(pair == nullptr ? -1 : pair->there);
  return chosen;
}

std::vector<GroupHyper> chosen_hypers(std::span<const GroupHyper> here, std::span<const GroupHyper> there,
                                      const std::vector<int>& chosen) {
  std::vector<GroupHyper> hypers(here.begin(), here.end());
  for (std::size_t group = 0; group < hypers.size(); ++group) {
    if (chosen[group] >= 0) hypers[group] = there[static_cast<std::size_t>(chosen[group])];
  }
  return hypers;
}

std::string changes_of(std::span<const GroupHyper> before, std::span<const GroupHyper> after) {
  std::vector<std::string> groups;
  for (std::size_t group = 0; group < before.size(); ++group) {
    const std::vector<NamedValue> olds = values_of(before[group]);
    const std::vector<NamedValue> news = values_of(after[group]);
    std::vector<std::string> parts;
    for (std::size_t at = 0; at < olds.size(); ++at) {
      if (olds[at].value != news[at].value)
        parts.push_back(olds[at].name + (" " + olds[at].value) + " -> " + news[at].value);
    }
    if (!parts.empty()) groups.push_back("group " + std::to_string(group) + ": " + join(parts, ", "));
  }
  constexpr std::size_t kMost = 10;
  const std::size_t more = groups.size() > kMost ? groups.size() - kMost : 0;
  groups.resize(groups.size() - more);
  return join(groups, "; ") + (more > 0 ? "; and " + std::to_string(more) + " more groups" : "");
}

}  // namespace zeroth
