#include <zeroth/zero/call_tags.h>

#include <iterator>

namespace zeroth {
namespace {

constexpr std::uint32_t kMeetings = 0x100;  // labels from here on

}  // namespace

MessageTag tag_of(Meeting what) { return {.unit = -1, .label = kMeetings + static_cast<std::uint32_t>(what)}; }

TagNames tag_names(const ModelLayout& model) {
  return [&model](const MessageTag& tag) -> std::string {
    if (tag.label >= kMeetings) return name_of(static_cast<Meeting>(tag.label - kMeetings));
    static constexpr const char* kPurposes[] = {
        "", "the parameters of ", "the updated parameters of ", "the parameters of ", "the gradients of ", "the summed gradients of ",
        "the groups' gradients of "};
    if (tag.unit < 0 || static_cast<std::size_t>(tag.unit) >= model.units.size() || tag.label >= std::size(kPurposes)) return "";
    return kPurposes[tag.label] + ("unit " + model.units[static_cast<std::size_t>(tag.unit)].name);
  };
}

const char* name_of(Meeting what) noexcept {
  static constexpr const char* kNames[] = {"step()", "average()", "barrier()", "a forward that shares buffers", "an export", "close()", "the next batch"};
  const auto index = static_cast<std::size_t>(what);
  return index < std::size(kNames) ? kNames[index] : "an unknown call";
}

}  // namespace zeroth
