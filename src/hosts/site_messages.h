// What ranks of sites that are jobs of their own say to the hub between them, and the hub to them: frames over TCP.
// docs/decisions/0063-a-site-that-is-lost.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace zeroth {

inline constexpr int kMostSites = 64;

// What zeroth-run tells the ranks of a site.
inline constexpr const char* kSiteVariable = "ZEROTH_SITE";                 ///< "1/3": number, and how many
inline constexpr const char* kSitesAtVariable = "ZEROTH_SITES_AT";          ///< "127.0.0.1:40123": the hub
inline constexpr const char* kSitesSecretVariable = "ZEROTH_SITES_SECRET";  ///< that both sides prove

/// Sites as bits.
using SiteSet = std::uint64_t;
[[nodiscard]] constexpr SiteSet site_bit(int site) {
  return SiteSet{1} << static_cast<unsigned>(site);
}
[[nodiscard]] constexpr bool has_site(SiteSet sites, int site) {
  return (sites & site_bit(site)) != 0;
}
/// "site 1", "sites 0, 2", "no site".
[[nodiscard]] std::string text_of_sites(SiteSet sites);

enum class SiteWord : std::uint16_t {
  // The hub says:
  kChallenge = 1,  ///< its nonce
  kWelcome,        ///< its proof; `round`: the first, `value`: 1 if a training runs, which the rank's site joins
  kMessage,        ///< of the rank of this number in `site`, for `round`
  kRound,          ///< `round` is decided: `sites` are in it, the sites in `value` go on; the text: who went and came
  kJoiner,         ///< before the kRound of `round`: `site`, in its `value`-th start, waits for a state
  kState,          ///< of a rank of this number; the first round is `round`
  kDismissed,      ///< the end: the text says why, `value` is an ErrorCode
  // A rank says:
  kHello,     ///< nonce, proof, job; `round`: session, `sites`: ranks of its site, `value`: timeout in ms
  kPut,       ///< its message for `round`; `value`: what it is of
  kStateFor,  ///< for the rank of this number in `site`, in its `value`-th start; `round`: of its next message
  kPing,
  kBye,
};

struct SiteHead {
  std::uint32_t magic = kMagic;
  SiteWord word = SiteWord::kPing;
  std::uint16_t unused = 0;
  std::int32_t site = 0;
  std::int32_t rank = 0;
  std::uint64_t round = 0;
  SiteSet sites = 0;
  std::uint64_t value = 0;
  std::uint64_t bytes = 0;  ///< that follow

  static constexpr std::uint32_t kMagic = 0x3153525AU;  // "ZRS1", on all hosts that there are
};
static_assert(sizeof(SiteHead) == 48);

using SiteBytes = std::shared_ptr<const std::string>;

/// Frames in and out of a socket that does not block, which it borrows.
class SiteStream {
 public:
  explicit SiteStream(int socket);

  /// Queues it, and sends what goes.
  void send(SiteHead head, SiteBytes payload = nullptr);
  void send_text(SiteHead head, std::string text) { send(head, std::make_shared<const std::string>(std::move(text))); }
  void flush();
  [[nodiscard]] bool wants_to_write() const { return !out_.empty() && !broken_; }
  /// Reads what is there, within reason. False once the other side has closed, or has said what is no frame.
  using Take = std::function<void(const SiteHead& head, std::string payload)>;
  [[nodiscard]] bool receive(const Take& take);
  /// Until then frames have to be small.
  void trust() { largest_ = UINT64_MAX; }

  static constexpr std::uint64_t kLargestOfStrangers = 1024;

 private:
  struct Part {
    SiteBytes bytes;
    std::size_t sent = 0;
  };
  int socket_;
  std::deque<Part> out_;
  SiteHead head_{};
  std::size_t head_has_ = 0;
  std::string payload_;
  std::size_t payload_has_ = 0;
  std::uint64_t largest_ = kLargestOfStrangers;
  bool broken_ = false;
};

}  // namespace zeroth
