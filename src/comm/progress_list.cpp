#include "comm/progress_list.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace zeroth::detail {

void ProgressList::add(std::weak_ptr<Progress> progress) {
  const auto is_same = [&](const std::weak_ptr<Progress>& known) {
    return !known.owner_before(progress) && !progress.owner_before(known);
  };
  std::erase_if(entries_, [](const auto& entry) { return entry.expired(); });  // which come and go where nobody waits
  if (std::ranges::none_of(entries_, is_same)) entries_.push_back(std::move(progress));
}

bool ProgressList::advance() {
  bool busy = false;
  bool gone = false;
  // By index: what runs may wait itself, and come here again.
  for (std::size_t index = 0; index < entries_.size(); ++index) {
    if (const std::shared_ptr<Progress> progress = entries_[index].lock()) {
      busy = progress->advance() || busy;
    } else {
      gone = true;
    }
  }
  if (gone) std::erase_if(entries_, [](const auto& entry) { return entry.expired(); });
  return busy;
}

void ProgressList::set_awaited(int rank) {
  for (std::size_t index = 0; index < entries_.size(); ++index) {
    if (const std::shared_ptr<Progress> progress = entries_[index].lock()) progress->set_awaited(rank);
  }
}

void ProgressList::clear_awaited() noexcept {
  for (const std::weak_ptr<Progress>& entry : entries_) {
    if (const std::shared_ptr<Progress> progress = entry.lock()) progress->clear_awaited();
  }
}

}  // namespace zeroth::detail
