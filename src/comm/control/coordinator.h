// Coordinator: what rank 0 makes of what all ranks say about themselves. No sockets, no clocks of its own: times come
// in, actions go out.
//
// - A rank waits for one that is gone or silent: verdict PEER_LOST, how it ended and what the others do meanwhile.
// - All other ranks are gone or silent, and not one of them waits: verdict PEER_LOST, rank 0 is cut off.
// - Ranks wait for each other in a circle: verdict MISMATCH, calls that only some of them make.
// - A wait has lasted 10 s, or a quarter of its deadline: a line, who is missing, where that rank is, who waits.
// - A wait has reached its deadline: verdict TIMEOUT, with the same line.
#pragma once

#include "comm/control/control_message.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/rank_activity.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace zeroth::detail {

/// Ask all ranks.
struct AskAction {
  AskMessage ask{};
};
/// A line for the log of rank 0.
struct NoteAction {
  std::string text{};
};
/// The job ends: to all ranks.
struct VerdictAction {
  Error error;
};
using CoordinatorAction = std::variant<AskAction, NoteAction, VerdictAction>;

struct CoordinatorOptions {
  Milliseconds silent_after{10'000};  ///< without a sign of life for so long a rank is lost
  Milliseconds ask_every{250};
  Milliseconds suspicious_after{1'000};  ///< a wait of this length is worth a question
  Milliseconds note_after{10'000};       ///< and this length a line; or a quarter of the wait's deadline
  Milliseconds answer_within{1'000};     ///< who has not answered by then is described without its place
  Milliseconds gather{150};              ///< causes that ranks tell within this time are compared
  Milliseconds grace{1'000};  ///< what the data plane finds out by itself within this time is told better there
  Milliseconds unwind{300};   ///< who has given its group up may still be about to say why
};

class Coordinator {
 public:
  using TimePoint = SteadyClock::time_point;
  Coordinator(int size, CoordinatorOptions options);

  void joined(int rank, std::string host, int pid, TimePoint now);
  /// Anything at all has come from the rank.
  void heard(int rank, TimePoint now);
  /// "action 1B3 of step 4 (stage 1 of 2: ...)": what it did when it said so; "" for no action.
  void seen_in(int rank, std::string action, TimePoint now);
  void answered(int rank, const StatusMessage& message, TimePoint now);
  /// Its connection has ended, after this goodbye or without one. `trouble`: what the system says of it, or "".
  void left(int rank, std::optional<RankStatus> goodbye, TimePoint now, std::string trouble = "");
  /// How its process has ended, where the system tells: "was killed by SIGKILL (signal 9)".
  void ended(int rank, std::string how) { at(rank).end = std::move(how); }
  /// A rank ends with this error. Where it is only what that rank saw of another one, the other's own word may be on
  /// its way: so the cause is the first error of the best class (a rank's own; a mismatch; a loss; a deadline) within a
  /// moment.
  /// `of_job`: an ErrorOfJob. Its verdict says of each rank in it where that is in its program, and calls each call as
  /// the rank does that makes it.
  void told(Error error, TimePoint now, bool of_job = false);
  /// What has been told so far, for a rank 0 that ends itself and can wait for nothing better.
  [[nodiscard]] const std::optional<Error>& last_word() const { return told_; }

  /// To be called at least every ask_every while a rank waits. After a verdict nothing comes any more.
  [[nodiscard]] std::vector<CoordinatorAction> tick(TimePoint now);
  /// Whether some rank has said that it waits, or how it ends.
  [[nodiscard]] bool busy() const;

 private:
  /// A status of the same wait as the one before.
  struct Sample {
    TimePoint when{};
    std::uint64_t looks = 0;
  };
  struct Rank {
    bool joined = false;
    bool gone = false;
    std::optional<RankStatus> goodbye{};
    std::string trouble{};
    std::string end{};
    std::string host{};
    int pid = 0;
    TimePoint heard{};
    TimePoint gone_at{};
    std::string action{};  ///< seen_in()
    TimePoint action_at{};
    std::optional<RankStatus> status{};
    std::string place{};           ///< in its last answer to a question with a number
    std::uint32_t answered = 0;    ///< the last question it has answered
    std::deque<Sample> samples{};  ///< of its wait, unchanged since
    std::uint64_t noted_wait = 0;  ///< the last one that a line was written about
  };
  enum class Purpose : std::uint8_t { kNote, kTimeout, kCircle, kLeft, kTold };
  /// Where is everybody? For a line or a verdict.
  struct Inquiry {
    Purpose purpose;
    int about;  ///< the rank that waits
    std::vector<int> circle{};
    std::uint32_t question = 0;
    TimePoint since{};
  };

  [[nodiscard]] Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] bool waits(int rank) const;
  [[nodiscard]] const WaitReport& wait_of(int rank) const { return at(rank).status->wait.report; }
  [[nodiscard]] std::string name_of(int rank) const;
  /// Of a rank that is gone without a goodbye, or silent.
  [[nodiscard]] std::string loss_text(int rank, TimePoint now) const;
  /// A rank that is lost to one that waits for it; none where it is there.
  [[nodiscard]] std::optional<Error> loss_of(int rank, int waiting, TimePoint now) const;
  [[nodiscard]] std::optional<Error> find_loss(TimePoint now) const;
  /// Nobody is left who could say what has become of the job, and not all have left in order.
  [[nodiscard]] std::optional<Error> find_isolation(TimePoint now) const;
  /// `last`: what it has said at its end, or where it is, without its group.
  [[nodiscard]] Error left_error(int rank, const RankStatus& last, int waiting) const;
  [[nodiscard]] Error loss_error(int rank, const std::string& what, int waiting, std::string hint) const;
  /// A rank that waits in vain for one that has given its group up and lives, -1: none.
  [[nodiscard]] int find_left() const;
  /// Whether the rank cannot go on before `other` makes another call. Not so for what `other` has begun: it may be on
  /// its way.
  [[nodiscard]] bool needs(int rank, int other) const;
  /// Ranks that wait for each other and have looked in vain since all of them did.
  [[nodiscard]] std::vector<int> find_circle() const;
  [[nodiscard]] bool blocked_since(int rank, TimePoint since) const;
  void begin(Purpose purpose, int about, std::vector<int> circle, TimePoint now,
             std::vector<CoordinatorAction>& actions);
  [[nodiscard]] bool complete(const Inquiry& inquiry, TimePoint now) const;
  [[nodiscard]] std::vector<CoordinatorAction> conclude(const Inquiry& inquiry, TimePoint now);
  /// Ranks that the others wait for while they themselves do not wait.
  [[nodiscard]] std::vector<int> missing_for(int rank) const;
  [[nodiscard]] std::string explain(int about, TimePoint now) const;
  [[nodiscard]] std::string who_waits() const;
  [[nodiscard]] std::map<std::string, std::vector<int>> waiting_by_call() const;
  /// As many of them as one can read, and how many there are more.
  [[nodiscard]] static std::string first_of(std::vector<std::string> texts);
  /// "ranks 0, 1 wait for barrier#5 at train.py:33".
  [[nodiscard]] std::string crowd_text(const std::string& call, const std::vector<int>& ranks) const;
  /// An ErrorOfJob with the lines of its ranks, as far as they have answered that question.
  [[nodiscard]] Error with_places(const Error& error, std::uint32_t question) const;
  [[nodiscard]] Error circle_error(const std::vector<int>& circle) const;

  int size_;
  CoordinatorOptions options_;
  std::vector<Rank> ranks_;
  std::optional<Inquiry> inquiry_{};
  std::optional<Error> told_{};
  bool told_of_job_ = false;
  TimePoint told_at_{};  ///< the first time
  std::uint32_t questions_ = 0;
  TimePoint asked_{};
  bool judged_ = false;
};

/// Whether the wait cannot end without this rank of the job.
[[nodiscard]] bool awaits(const WaitStatus& wait, int rank);
/// "rank 0 (pid 4711 on h1)".
[[nodiscard]] std::string rank_text(int rank, int pid, const std::string& host);
/// The hint where nothing better is known.
inline constexpr const char* kLookThere = "look at the output of that rank and its host";
/// What is said of a rank whose connection has ended without a goodbye: how its process has ended, where that is known,
/// or what the system says of the connection; and of one that is silent.
[[nodiscard]] std::string end_text(const std::string& how, const std::string& trouble);
[[nodiscard]] std::string silence_text(Milliseconds silent);
/// ", last seen in action 1B3 of step 4 (...) 0.4 s before"; "" without an action.
[[nodiscard]] std::string last_action_text(const std::string& action, Milliseconds before);

}  // namespace zeroth::detail
