#include "zero/call_tags.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace zeroth {
namespace {

constexpr std::uint32_t kOperations = 0x100;  // labels from here on

bool is_unit(const ModelLayout& model, const MessageTag& tag) {
  return tag.unit >= 0 && static_cast<std::size_t>(tag.unit) < model.units.size();
}

bool is(CallPurpose purpose, const MessageTag& tag) {
  return tag.label == static_cast<std::uint32_t>(purpose);
}

bool gathers(const MessageTag& tag) {
  return is(CallPurpose::kGatherParameters, tag);
}

bool sums(const MessageTag& tag) {
  return is(CallPurpose::kReduceGradients, tag) || is(CallPurpose::kShareGradients, tag) ||
         is(CallPurpose::kCombineGradients, tag);
}

}  // namespace

MessageTag tag_of(OperationId what) {
  return {.unit = -1, .label = kOperations + static_cast<std::uint32_t>(what)};
}

TagNames tag_names(const ModelLayout& model, bool gathers_any, OperationNames operations) {
  TagNames names;
  names.name = [&model, operations = std::move(operations)](const MessageTag& tag) -> std::string {
    if (tag.label >= kOperations)
      return operations ? operations(static_cast<OperationId>(std::min(tag.label - kOperations, 0xffU))) : "";
    static constexpr const char* kPurposes[] = {"",
                                                "the parameters of ",
                                                "the updated parameters of ",
                                                "the parameters of ",
                                                "the gradients of ",
                                                "the summed gradients of ",
                                                "the groups' gradients of "};
    if (!is_unit(model, tag) || tag.label >= std::size(kPurposes)) return "";
    return kPurposes[tag.label] + ("unit " + model.units[static_cast<std::size_t>(tag.unit)].name);
  };
  names.hint = [&model, gathers_any](const MessageTag& own, const MessageTag& theirs) -> std::string {
    const bool alike = (gathers(own) && gathers(theirs)) || (sums(own) && sums(theirs));
    if (!alike || own.unit == theirs.unit || !is_unit(model, own) || !is_unit(model, theirs)) return "";
    const auto name = [&](const MessageTag& tag) { return model.units[static_cast<std::size_t>(tag.unit)].name; };
    // Lower number first: the same words on all ranks.
    const auto& [first, second] =
        std::minmax(own, theirs, [](const MessageTag& a, const MessageTag& b) { return a.unit < b.unit; });
    return "ranks run different modules, or the same ones in another order: run units " + name(first) + " and " +
           name(second) + " on every rank (with zeros where there is nothing to do), or " +
           (gathers_any ? ""
                        : "name no units (Engine(units=[]) in Python): then all gradients are summed at the end of "
                          "backward; or ") +
           "train over shm, or shm+mpi between hosts, where the ranks of a host may take different paths";
  };
  return names;
}

}  // namespace zeroth
