// SiteHub: the process between sites that are jobs of their own. It listens, tells ranks from strangers, passes
// messages on, and decides the rounds (site_rounds.h). One thread; no call blocks.
#pragma once

#include "base/unique_fd.h"
#include "hosts/option_values.h"
#include "hosts/site_rounds.h"

#include <zeroth/base/deadline.h>

#include <poll.h>

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

class SiteHub {
 public:
  /// Listens; port 0: a free one. Throws Error(kLaunch).
  SiteHub(int num_sites, const Endpoint& at, std::string secret);
  SiteHub(const SiteHub&) = delete;
  SiteHub& operator=(const SiteHub&) = delete;
  ~SiteHub();

  [[nodiscard]] int port() const { return port_; }
  void add_polled(std::vector<pollfd>& polled) const;
  /// Does what can be done and is due: after a poll of those, and at least every kTurnEvery while ranks are here.
  void turn();
  static constexpr Milliseconds kTurnEvery{250};
  /// The site has ended, and will not be started again.
  void gone(int site);
  /// Connections that did not know the secret.
  [[nodiscard]] int strangers() const { return strangers_; }
  /// A line about sites that have not come, every few seconds while others wait for them; "" if there is nothing to
  /// say.
  [[nodiscard]] std::string take_notice();

  /// A rank says something every second.
  static constexpr Milliseconds kSilent{15'000};

 private:
  struct Link;
  using TimePoint = SteadyClock::time_point;
  void accept_all();
  /// Of a session; they are made when somebody comes.
  [[nodiscard]] SiteRounds& rounds_of(std::uint64_t session);
  void take(Link& link, const SiteHead& head, std::string payload);
  void admit(Link& link, const SiteHead& head, const std::string& payload);
  void refuse(Link& link, const std::string& why);
  void act();
  void lose(Link& link, const std::string& why);

  int num_sites_;
  std::string secret_;
  UniqueFd listening_;
  int port_ = 0;
  std::map<std::uint64_t, SiteRounds> sessions_;
  std::map<std::pair<std::uint64_t, SiteMember>, Link*> members_;
  std::list<std::unique_ptr<Link>> links_;
  std::vector<int> gone_;
  TimePoint turned_ = SteadyClock::now();
  TimePoint noticed_ = SteadyClock::now();
  int strangers_ = 0;
};

}  // namespace zeroth
