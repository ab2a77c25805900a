#include "comm/sites/site_client.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/engine/site_line.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <string_view>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kLineWhere = "engine.local_updates";
constexpr const char* kSitesGroup = "sites";

/// In a group of one job, where nobody can be lost.
class GroupExchange final : public SiteExchange {
 public:
  GroupExchange(std::unique_ptr<PendingPoints> points, int sites) : points_(std::move(points)), sites_(sites) {}

  SiteOutcome wait() override {
    if (points_) points_->wait();
    SiteOutcome outcome;
    for (int site = 0; site < sites_; ++site) outcome.present.push_back(site);
    outcome.staying = outcome.present;
    return outcome;
  }

 private:
  std::unique_ptr<PendingPoints> points_;
  int sites_;
};

class GroupLine final : public SiteLine {
 public:
  explicit GroupLine(std::shared_ptr<CommBackend> across) : across_(std::move(across)) {
    across_.backend().set_tag_names({.name = [](const MessageTag& tag) -> std::string {
      if (tag.unit < 0) return "";
      return "fragment " + std::to_string(tag.unit) + " of local updates at their step " + std::to_string(tag.label);
    }});
  }

  int sites() const override { return across_.size(); }
  int site() const override { return across_.rank(); }
  bool survives() const override { return false; }
  std::vector<std::optional<std::string>> texts(const std::string& own) override {
    std::vector<std::string> all = gather_texts(own, across_);
    return {std::make_move_iterator(all.begin()), std::make_move_iterator(all.end())};
  }
  void take_first(std::span<std::uint8_t> bytes) override {
    if (across_.size() > 1 && !bytes.empty()) across_.broadcast(bytes, 0);
  }
  std::unique_ptr<SiteExchange> start(const MessageTag& tag, std::span<std::byte> all, std::size_t bytes) override {
    std::vector<Collective> points;
    const std::span messages(reinterpret_cast<std::uint8_t*>(all.data()), all.size());
    const auto of = [&](int site) { return messages.subspan(bytes * static_cast<std::size_t>(site), bytes); };
    for (int site = 0; bytes > 0 && site < across_.size(); ++site) {
      if (site == across_.rank()) continue;
      points.push_back(Communicator::send_call(std::span<const std::uint8_t>(of(across_.rank())), site, tag));
      points.push_back(Communicator::recv_call(of(site), site, tag));
    }
    return std::make_unique<GroupExchange>(points.empty() ? nullptr : across_.start(points), across_.size());
  }

 private:
  Communicator across_;
};

class HubLine final : public SiteLine {
 public:
  HubLine(const SitePlace& place, const HubLineOptions& options)
      : place_(place),
        options_(options),
        client_(place, {.rank = options.rank,
                        .ranks = options.ranks,
                        .session = options.session,
                        .job = options.job,
                        .timeout = options.timeout,
                        .activity = options.activity}) {}

  int sites() const override { return place_.sites; }
  int site() const override { return place_.site; }
  bool survives() const override { return true; }
  bool joins() const override { return client_.joins(); }
  void leave() noexcept override {
    if (options_.failed && options_.failed->load()) return;
    try {
      if (options_.activity) options_.activity->check();
      client_.leave();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the job has failed, and says no goodbye
    }
  }

  std::vector<std::optional<std::string>> texts(const std::string& own) override {
    detail::DecidedRound round = taken(client_.put(own, kTexts));
    std::vector<std::optional<std::string>> all(static_cast<std::size_t>(place_.sites));
    for (auto& [site, text] : round.messages) all[static_cast<std::size_t>(site)] = std::move(text);
    all[static_cast<std::size_t>(place_.site)] = own;
    return all;
  }

  // All send: nobody knows yet which site is the first that is there.
  void take_first(std::span<std::uint8_t> bytes) override {
    const std::string own(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const detail::DecidedRound round = taken(client_.put(own, kFirst));
    if (round.messages.empty() || round.messages.begin()->first > place_.site) return;
    const auto& [site, first] = *round.messages.begin();
    require_size(site, first, bytes.size());
    if (!first.empty()) std::memcpy(bytes.data(), first.data(), first.size());
  }

  std::unique_ptr<SiteExchange> start(const MessageTag& tag, std::span<std::byte> all, std::size_t bytes) override;

  std::string take_state() override { return client_.take_state(); }
  void give_state(std::uint64_t joiner, std::string state) override {
    client_.give_state({.site = static_cast<int>(joiner % kMostSites), .start = joiner / kMostSites}, std::move(state));
  }

  /// Of an exchange.
  SiteOutcome outcome_of(std::uint64_t number, std::span<std::byte> all, std::size_t bytes) {
    const detail::DecidedRound round = taken(number);
    SiteOutcome outcome{.news = std::exchange(news_, {}), .joiners = std::exchange(joiners_, {})};
    for (int site = 0; site < place_.sites; ++site) {
      if (has_site(round.staying, site)) outcome.staying.push_back(site);
      if (!has_site(round.sites, site)) continue;
      outcome.present.push_back(site);
      if (site == place_.site) continue;
      const auto found = round.messages.find(site);
      require_size(site, found == round.messages.end() ? std::string() : found->second, bytes);
      if (bytes > 0) std::memcpy(all.data() + bytes * static_cast<std::size_t>(site), found->second.data(), bytes);
    }
    return outcome;
  }

 private:
  static constexpr std::uint64_t kTexts = ~std::uint64_t{0};
  static constexpr std::uint64_t kFirst = kTexts - 1;

  /// What is said beside an exchange is for the next one.
  detail::DecidedRound taken(std::uint64_t number) {
    detail::DecidedRound round = client_.take(number);
    for (std::size_t begin = 0; begin < round.news.size();) {
      const std::size_t end = round.news.find('\n', begin);
      news_.push_back(round.news.substr(begin, end - begin));
      begin = end == std::string::npos ? round.news.size() : end + 1;
    }
    for (const detail::SiteJoiner& joiner : round.joiners)
      joiners_.push_back(joiner.start * kMostSites + static_cast<std::uint64_t>(joiner.site));
    if (options_.table) {
      std::uint64_t bytes = 0;
      for (const auto& [site, message] : round.messages) bytes += message.size();
      options_.table->observe({.group = kSitesGroup, .kind = CollectiveKind::kRecv, .calls = 1, .bytes = bytes});
    }
    return round;
  }

  static void require_size(int site, const std::string& message, std::size_t bytes) {
    ZR_CHECK(message.size() == bytes, ErrorCode::kMismatch, "a site has sent a message of another size",
             {.where = kLineWhere,
              .who = "site " + std::to_string(site),
              .expected = std::to_string(bytes) + " bytes",
              .got = std::to_string(message.size()),
              .hint = "all sites build the same model, with the same units and degrees of sharding"});
  }

  SitePlace place_;
  HubLineOptions options_;
  std::vector<std::string> news_;
  std::vector<std::uint64_t> joiners_;
  detail::SiteClient client_;
};

class HubExchange final : public SiteExchange {
 public:
  HubExchange(HubLine& line, std::uint64_t number, std::span<std::byte> all, std::size_t bytes)
      : line_(line), number_(number), all_(all), bytes_(bytes) {}
  SiteOutcome wait() override { return line_.outcome_of(number_, all_, bytes_); }

 private:
  HubLine& line_;
  std::uint64_t number_;
  std::span<std::byte> all_;
  std::size_t bytes_;
};

std::unique_ptr<SiteExchange> HubLine::start(const MessageTag& tag, std::span<std::byte> all, std::size_t bytes) {
  const std::span<const std::byte> own = all.subspan(bytes * static_cast<std::size_t>(place_.site), bytes);
  const std::uint64_t about = std::uint64_t{static_cast<std::uint32_t>(tag.unit)} << 32U | tag.label;
  const std::uint64_t number = client_.put(std::string(reinterpret_cast<const char*>(own.data()), own.size()), about);
  return std::make_unique<HubExchange>(*this, number, all, bytes);
}

}  // namespace

std::unique_ptr<SiteLine> make_group_line(std::shared_ptr<CommBackend> across) {
  return std::make_unique<GroupLine>(std::move(across));
}

std::unique_ptr<SiteLine> make_hub_line(const SitePlace& place, const HubLineOptions& options) {
  return std::make_unique<HubLine>(place, options);
}

}  // namespace zeroth
