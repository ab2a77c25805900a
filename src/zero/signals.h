// The words in shared memory by which ranks tell each other how far they are. One block a rank, written by that rank
// only.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/base/platform.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace zeroth {

using SignalWord = std::atomic<std::uint64_t>;
static_assert(SignalWord::is_always_lock_free && sizeof(SignalWord) == 8, "signals are shared between processes");

/// Code of the `event`-th reduction of a flat in the `backward`-th backward (both from 0): larger is later, 0 is "none
/// yet".
[[nodiscard]] constexpr std::uint64_t reduction_code(std::uint64_t backward, std::uint64_t event) {
  return (backward << 16U) | (event + 1);
}

[[nodiscard]] constexpr std::uint64_t backward_of(std::uint64_t code) {
  return code >> 16U;
}

/// Backwards have numbers through all steps: step << 20 | backward within the step.
inline constexpr std::uint64_t kBackwardsPerStep = std::uint64_t{1} << 20U;

/// Number of the first backward of the step after the one of `backward`: by it ranks name a step that is complete.
[[nodiscard]] constexpr std::uint64_t step_after(std::uint64_t backward) {
  return (backward / kBackwardsPerStep + 1) * kBackwardsPerStep;
}

/// The bucket that a rank has published last.
struct Publication {
  std::uint64_t code = 0;  ///< reduction_code()
  bool wide = false;       ///< its gradients are wider than planned, and lie beyond the plan
  bool last = false;       ///< the rank publishes the flat no more in this step
};

/// As a word: orders like the codes.
[[nodiscard]] constexpr std::uint64_t word_of(const Publication& publication) {
  return publication.code << 2U | (publication.last ? 2U : 0U) | (publication.wide ? 1U : 0U);
}

/// What a rank sleeps for in a call of another group.
struct Awaited {
  static constexpr std::uint64_t kAny = 0xffff;  ///< it does not know for whom
  static constexpr std::uint64_t kNewsMask = ~std::uint64_t{0} >> 16U;

  std::uint64_t number = 0;  ///< of a rank in the job, plus 1; 0: it does not sleep
  std::uint64_t news = 0;    ///< sum of all ranks', as it was before it last looked in vain, of 48 bits
};

[[nodiscard]] constexpr std::uint64_t word_of(const Awaited& awaited) {
  return awaited.news << 16U | awaited.number;
}
[[nodiscard]] constexpr Awaited awaited_of(std::uint64_t word) {
  return {.number = word & 0xffffU, .news = word >> 16U};
}

/// Where the words lie inside a rank's block.
class SignalLayout {
 public:
  SignalLayout(int flats, int world)
      : flats_(static_cast<std::size_t>(flats)), world_(static_cast<std::size_t>(world)) {}

  [[nodiscard]] std::size_t bytes() const {
    const std::size_t words = kHeaderWords + flats_ * (kWordsPerFlat + world_);
    return (words * sizeof(SignalWord) + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  [[nodiscard]] std::size_t flats() const { return flats_; }
  [[nodiscard]] std::size_t world() const { return world_; }

  static constexpr std::size_t kHeaderWords = 2 * kCacheLineBytes / sizeof(SignalWord);
  static constexpr std::size_t kWordsPerFlat = 4;  ///< and one for each rank

 private:
  std::size_t flats_;
  std::size_t world_;
};

/// One rank's block, as seen by anyone.
class Signals {
 public:
  Signals(std::span<std::byte> block, SignalLayout layout)
      : words_(reinterpret_cast<SignalWord*>(block.data())), layout_(layout) {
    ZR_ASSERT(block.size() >= layout.bytes(), "signal block too small");
  }

  /// Backwards that this rank has closed.
  [[nodiscard]] SignalWord& closed() const { return words_[0]; }
  /// 1 + unit whose bucket slot this rank waits for, 0 if none: owners then copy its gradients aside.
  [[nodiscard]] SignalWord& pressure() const { return words_[1]; }
  /// Number of collectives of the engine that this rank has come to, times 256, plus the kind of the last one.
  [[nodiscard]] SignalWord& sync_point() const { return words_[2]; }
  /// Steps whose sums this rank has done with: from then on the others may write where it read theirs.
  [[nodiscard]] SignalWord& taken() const { return words_[3]; }
  /// Version of what this rank updates of its parameters; `epoch` follows when it has the others' updates as well.
  [[nodiscard]] SignalWord& updated() const { return words_[4]; }
  /// The step, as the number of its first backward's successor, of which summed() is complete.
  [[nodiscard]] SignalWord& summed_all() const { return words_[5]; }
  /// word_of() what this rank sleeps for outside of the exchange of gradients; 0 if it does not.
  [[nodiscard]] SignalWord& awaited() const { return words_[6]; }
  /// This rank's number in the job, plus 1. Constant as `tag`.
  [[nodiscard]] SignalWord& number() const { return words_[7]; }
  /// Counts this rank's news: grows after every change of a word above or below but `updated`, `awaited`, `epoch` and
  /// constants, so that who waits for any of them polls one word a rank. A cache line of its own.
  [[nodiscard]] SignalWord& news() const { return words_[kCacheLineBytes / sizeof(SignalWord)]; }
  /// Version of what this rank has at rest of `flat`: updates done, plus one.
  [[nodiscard]] SignalWord& epoch(int flat) const { return word(0, flat); }
  /// word_of() the bucket that this rank has published last; see publication().
  [[nodiscard]] SignalWord& published(int flat) const { return word(1, flat); }
  [[nodiscard]] Publication publication(int flat) const {
    const std::uint64_t word = published(flat).load();
    return {.code = word >> 2U, .wide = (word & 1U) != 0, .last = (word & 2U) != 0};
  }
  /// Digest of the flat's layout, constant from the construction of the stores on and never 0 then: compared before a
  /// rank reads another rank's shard or bucket of the flat.
  [[nodiscard]] SignalWord& tag(int flat) const { return word(2, flat); }
  /// Twice the number of the step (as in summed_all()), plus one if this rank's sub-group has sums of the flat. Without
  /// sub-groups: as soon as these sums are final, which may be inside of backward.
  [[nodiscard]] SignalWord& summed(int flat) const { return word(3, flat); }
  /// reduction_code() up to which this rank, an owner, has taken the gradients of rank `source`.
  [[nodiscard]] SignalWord& consumed(int flat, int source) const {
    return words_[SignalLayout::kHeaderWords + SignalLayout::kWordsPerFlat * layout_.flats() +
                  static_cast<std::size_t>(flat) * layout_.world() + static_cast<std::size_t>(source)];
  }

 private:
  [[nodiscard]] SignalWord& word(std::size_t kind, int flat) const {
    return words_[SignalLayout::kHeaderWords + kind * layout_.flats() + static_cast<std::size_t>(flat)];
  }
  SignalWord* words_;
  SignalLayout layout_;
};

}  // namespace zeroth
