// SiteRounds: what the hub between sites decides. No sockets and no clock: words and times come in, actions go out.
//
// A round is one exchange of all ranks of all sites that are present; a rank exchanges with the ranks of its number.
// Rounds are decided in their order, each once, when all ranks of all sites that are present have put their messages:
// the sites of which all messages are there are in it. See docs/decisions/0063-a-site-that-is-lost.md.
#pragma once

#include "hosts/site_messages.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace zeroth {

/// A rank of a site, in the site's `start`-th start.
struct SiteMember {
  int site = 0;
  int rank = 0;
  std::uint64_t start = 0;

  auto operator<=>(const SiteMember&) const = default;
};

/// A frame for a rank. After kDismissed nothing follows.
struct SiteAction {
  SiteMember to{};
  SiteHead head{};
  SiteBytes payload{};
};

class SiteRounds {
 public:
  using TimePoint = SteadyClock::time_point;
  explicit SiteRounds(int num_sites);

  struct Hello {
    int site = 0;
    int rank = 0;
    int num_ranks = 0;
    Milliseconds timeout{};  ///< a site may put so much later than another one
    std::string job{};       ///< of the site; another one is another start
    std::string name{};      ///< "pid 4711"
  };
  struct Arrival {
    std::uint64_t start = 0;  ///< of the site
    std::string refusal{};
  };
  [[nodiscard]] Arrival come(const Hello& hello, TimePoint now);
  void put(const SiteMember& from, std::uint64_t round, std::uint64_t about, SiteBytes message, TimePoint now);
  void state_for(const SiteMember& from, int site, std::uint64_t start, std::uint64_t round, const SiteBytes& state,
                 TimePoint now);
  void bye(const SiteMember& from, TimePoint now);
  /// The connection has ended. `why`: "has closed its connection".
  void closed(const SiteMember& from, const std::string& why, TimePoint now);
  /// The site has ended, and will not be started again.
  void gone(int site, TimePoint now);

  /// Does what is due.
  void tick(TimePoint now);
  [[nodiscard]] std::optional<TimePoint> due() const;
  [[nodiscard]] std::vector<SiteAction> take_actions();
  [[nodiscard]] SiteSet present() const { return present_; }
  /// Whose start the others wait for.
  [[nodiscard]] SiteSet missing() const;

 private:
  enum class State { kAway, kComing, kReady, kPresent, kLeft };
  struct Site {
    bool expected = true;
    State state = State::kAway;
    std::uint64_t start = 0;
    std::string job{};
    std::vector<std::string> names{};  ///< of ranks that are here, by rank; "": not yet
    std::uint64_t from = 0;            ///< the first round of which it is a part
    bool welcomed = false;
    int giver = -1;  ///< who was asked for its state
    std::vector<SiteBytes> states{};
  };
  struct Round {
    std::uint64_t about = 0;
    std::vector<std::vector<SiteBytes>> messages{};  ///< by site and rank
    SiteSet complete = 0;
    TimePoint since{};  ///< of the first complete site
  };

  [[nodiscard]] Site& at(int site) { return sites_[static_cast<std::size_t>(site)]; }
  [[nodiscard]] const Site& at(int site) const { return sites_[static_cast<std::size_t>(site)]; }
  [[nodiscard]] bool is_current(const SiteMember& member) const;
  [[nodiscard]] SiteSet required(std::uint64_t round) const;
  [[nodiscard]] std::string name_of(const SiteMember& member) const;
  void say(int site, int rank, SiteHead head, SiteBytes payload = nullptr);
  void say_all(int site, const SiteHead& head, const SiteBytes& payload = nullptr);
  void dismiss(int site, ErrorCode code, const std::string& text);
  void lose(int site, const std::string& why, ErrorCode code, const std::string& to_itself);
  void leave_present(int site);
  void settle();
  void begin();
  void welcome(int site, bool joins);
  void decide();
  void ask_for_states(int giver, std::uint64_t round);
  void fail_all(ErrorCode code, const std::string& text);

  std::vector<Site> sites_;
  int num_ranks_ = 0;
  Milliseconds timeout_{};
  SiteSet present_ = 0;
  std::uint64_t next_ = 0;  ///< round to decide
  std::map<std::uint64_t, Round> rounds_;
  std::string news_;
  bool ended_ = false;  ///< the last site that was present has said goodbye
  std::vector<SiteAction> actions_;
};

}  // namespace zeroth
