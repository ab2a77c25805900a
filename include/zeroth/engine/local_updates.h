// LocalUpdates: groups of ranks ("sites") that train apart, and exchange weights once in many steps. Each site has an
// engine of its own, at any ZeRO stage, over its own ranks. It sums no gradient with other sites and votes with none.
//
//   x     outer parameters: what all sites had after their last exchange       lr, mu    of the outer update
//   y_i   parameters of site i at the exchange                                 S         sites
//
//   mean     y = (y_0 + y_1 + ...) / S; with a payload of codes  y = x - (q_0 + q_1 + ...) / S, q_i ~ x - y_i
//   outer    d = x - y;  m = mu m + d;  x = x - lr (d + mu m)       Nesterov; else x = x - lr m
//            formed as  y + (1 - lr) d - lr mu m': with lr 1 and mu 0 it is y to the bit
//   taken    `delay` steps after the exchange began: y_i = keep_local y_i + (1 - keep_local) x
//
//   local SGD            lr 1, mu 0: plain averaging
//   DiLoCo               mu > 0, Nesterov                       Douillard et al., arXiv 2311.08105
//   Streaming DiLoCo     several fragments, delay, keep_local, payload        Douillard et al., arXiv 2501.18512
//   CO2                  LocalMethod::kCo2, one window late     Sun et al., ICLR 2024, arXiv 2401.16265
//   branches             LocalMethod::kNone; `zeroth ckpt average` merges     Li et al., arXiv 2208.03306
//
// CO2: while window t + 1 runs, from x1, the sum of window t travels, which began at x0 and ended at y. At the end of
// window t + 1:  d = x0 - y;  m = clip(mu m + d);  x2 = x1 - lr m / gap, and window t + 2 begins at x2 on all sites.
// gap = 1 + |x1 - x0| / gap_scale, element by element.
//
// Fragments are units, strided: unit u belongs to fragment u mod F. After s steps since the beginning, fragment f is
// exchanged where (s - floor(f H / F)) mod H = 0, s > 0. A rank sends its 1/N of a fragment to the ranks of the same
// number of the other sites, N ranks in a site; inside of the site its ranks bring it to those that update it.
//
// Sites that are jobs of their own, connected by a hub, may be lost: with LostSites::kLeave the mean is then that of
// the sites whose messages have all come, the same set on all ranks, and a site that comes back begins with the outer
// states of another one. docs/decisions/0063-a-site-that-is-lost.md.
//
// Outer states lie where the optimizer's do ("outer_param", "outer_momentum", "outer_previous"), and are in
// checkpoints. The bits do not depend on the ZeRO stage, and sites may have different ones.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/site_line.h>
#include <zeroth/engine/step_follower.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

class Coder;

enum class LocalMethod : std::uint8_t { kAverage, kCo2, kNone };

/// What sites send of an element.
enum class LocalPayload : std::uint8_t {
  kFull,  ///< the master itself: float32, or float64
  kInt8,  ///< x - y as codes of kernels/quant, with a scale for each block
  kInt4,
  kFp4,  ///< E3M0: what Streaming DiLoCo sends
};

/// What an exchange without all sites is.
enum class LostSites : std::uint8_t {
  kEnd,    ///< kPeerLost in all sites
  kLeave,  ///< the mean of those that are there
};

struct LocalSettings {
  LocalMethod method = LocalMethod::kAverage;
  int steps = 1;  ///< H: between two exchanges of a fragment
  double outer_lr = 1.0;
  double outer_momentum = 0.0;
  bool nesterov = true;
  int fragments = 1;        ///< F
  int delay = 0;            ///< tau
  double keep_local = 0.0;  ///< alpha
  LocalPayload payload = LocalPayload::kFull;
  int block = 256;         ///< elements with one scale: a multiple of 16 that divides 1,024
  double gap_scale = 0.0;  ///< of CO2; 0: no penalty
  double clip = 0.0;       ///< of CO2: largest magnitude of an element of the momentum; 0: none
  LostSites lost_sites = LostSites::kEnd;
  bool operator==(const LocalSettings&) const = default;
};

[[nodiscard]] std::string_view name_of(LocalMethod method) noexcept;
[[nodiscard]] std::string_view name_of(LocalPayload payload) noexcept;
[[nodiscard]] std::string_view name_of(LostSites lost) noexcept;
/// Throw kConfig for other names, with the names that there are.
[[nodiscard]] LocalMethod local_method_of(std::string_view name);
[[nodiscard]] LocalPayload local_payload_of(std::string_view name);
[[nodiscard]] LostSites lost_sites_of(std::string_view name);

struct LocalReport {
  int sites = 1;
  int site = 0;
  std::vector<int> present{};  ///< sites in the mean of the last exchange that has ended; at first those that began
  bool joined = false;         ///< this site has come to a training that others had begun
  std::int64_t step = 0;       ///< since the beginning of the windows
  std::int64_t exchanges = 0;  ///< of fragments, ended or under way
  std::uint64_t received_bytes = 0;  ///< from other sites by formula, so far
  /// Of one exchange of each fragment, from other sites to this rank.
  std::vector<std::uint64_t> bytes_per_exchange{};
  std::vector<int> offsets{};  ///< floor(f H / F)
};

class LocalUpdates final : public StepFollower {
 public:
  /// Collective over the engine's ranks and over `across`, blocks. `across`: the ranks that have this rank's number in
  /// their site, one a site, in the order of the sites; it is used on the thread of the engine. All sites take site 0's
  /// weights. From now on Engine::step() makes the exchanges, and the engine owns the result. The states of an exchange
  /// that is under way travel while the rank computes, as far as the transport does that by itself
  /// (CommBackend::start). Throws kUsage for an engine that has local updates, kConfig for settings that cannot be, and
  /// kMismatch, with the names, where ranks have different ones, or sites other models or numbers of ranks.
  static LocalUpdates& attach(Engine& engine, std::shared_ptr<CommBackend> across, const LocalSettings& settings);
  /// The same over any line. Over a hub whose other sites train already it blocks until their next exchange has ended;
  /// this site then has their step, frozen parameters and outer states, and begins where their window began.
  static LocalUpdates& attach(Engine& engine, std::unique_ptr<SiteLine> line, const LocalSettings& settings);
  /// Blocks for an exchange that is under way, unless an exception unwinds: other sites wait for its messages.
  ~LocalUpdates() override;

  [[nodiscard]] const LocalSettings& settings() const { return settings_; }
  [[nodiscard]] LocalReport report() const;

  void after_step(StepResult& result) override;
  void settle() override;
  [[nodiscard]] std::string saved() const override;
  void require_usable(const std::string& saved, bool strict, const std::string& where) const override;
  void restore(const std::string& saved) override;
  [[nodiscard]] std::uint64_t held_bytes() const override;

 private:
  struct Part;
  struct Fragment;
  LocalUpdates(Engine& engine, std::unique_ptr<SiteLine> line, const LocalSettings& settings);
  void require_possible() const;
  void require_free_names() const;
  void require_same();
  void find_parts();
  void add_states();
  void begin();
  void take_first_weights();
  void join_running();
  void take_joined();
  void give_states();
  void hear(const SiteOutcome& outcome);
  void require_allowed(const std::vector<int>& present, const std::vector<std::string>& news);
  [[nodiscard]] std::string own_description() const;
  [[nodiscard]] std::string state_to_give();
  /// Calls body(part) for all flats, frozen ones too.
  template <class Body>
  void each_part(const Body& body) const;
  /// Of a flat, what a site is given that comes back.
  [[nodiscard]] std::vector<std::string> given_states(const Part& part) const;
  void find_due();
  [[nodiscard]] bool has_outer() const;
  [[nodiscard]] std::int64_t now() const;
  void send(Fragment& fragment);
  void arrive(Fragment& fragment);
  void take(Fragment& fragment);
  template <class T>
  void pack(const Part& part, std::byte* message);
  template <class T>
  void update(const Part& part, const Fragment& fragment);
  template <class T>
  void take_part(const Part& part);
  [[nodiscard]] std::size_t message_bytes(const Part& part) const;
  /// Where those of the slot of an exchange begin: of all sites, in their order.
  [[nodiscard]] std::byte* messages_of(const Fragment& fragment);
  /// Of a payload of codes.
  [[nodiscard]] Coder coder() const;

  Engine& engine_;
  std::unique_ptr<SiteLine> line_;
  LocalSettings settings_;
  std::vector<int> present_;
  std::vector<std::uint64_t> joiners_;  ///< that wait for this site's state
  std::string joined_;                  ///< what this site was given, until its first step
  bool has_joined_ = false;
  bool failed_ = false;  ///< an exchange has
  std::vector<Fragment> fragments_;
  std::int64_t anchor_ = 0;  ///< committed steps of the engine at the beginning
  std::int64_t exchanges_ = 0;
  std::uint64_t received_ = 0;
  std::vector<std::byte> messages_;  ///< of all fragments: this rank's, then those of all sites
  MemoryHold hold_;
};

}  // namespace zeroth
