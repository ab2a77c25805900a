// LocalSettings, as values: what cannot be, where ranks differ, and what a checkpoint keeps.
#pragma once

#include <zeroth/engine/local_updates.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// Throws kConfig. `num_units`: with a trainable parameter.
void validate(const LocalSettings& settings, int num_units);
/// JSON, doubles as hexadecimal text.
[[nodiscard]] std::string text_of(const LocalSettings& settings);
/// "steps 4 (8 on rank 1)" of two such texts, each key that differs.
[[nodiscard]] std::vector<std::string> differences(std::string_view usual, std::string_view other);
/// Of these, what a window that goes on must have alike.
[[nodiscard]] std::vector<std::string> window_differences(std::string_view usual, std::string_view other);
/// A sum travels while the next window runs, or is taken later than it is sent.
[[nodiscard]] inline bool is_late(const LocalSettings& settings) {
  return settings.delay > 0 || settings.method == LocalMethod::kCo2;
}
/// Steps after the beginning of a window in which each fragment is exchanged.
[[nodiscard]] std::vector<int> offsets_of(const LocalSettings& settings);
/// The latest exchange of a fragment until step `now`, -1 if there was none. Steps count from the beginning.
[[nodiscard]] std::int64_t last_exchange(const LocalSettings& settings, int offset, std::int64_t now);
/// Most fragments that are under way at once.
[[nodiscard]] int most_under_way(const LocalSettings& settings);

/// What a checkpoint has beside the states.
struct SavedLocal {
  std::string settings{};
  std::int64_t begun = 0;  ///< committed steps at the beginning
};
[[nodiscard]] std::string text_of(const SavedLocal& saved);
/// `where`: the checkpoint. Throws kCheckpoint.
[[nodiscard]] SavedLocal saved_local_of(const std::string& text, const std::string& where);

}  // namespace zeroth
