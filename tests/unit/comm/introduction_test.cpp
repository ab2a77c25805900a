// How ranks and the hub come to believe each other: proofs, and what happens to those who have none.
#include "comm/control/introduction.h"

#include "support/error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Milliseconds kLong{20'000};
const std::string kHere = "127.0.0.1";

HelloMessage hello_of(std::uint32_t rank, std::uint32_t size = 3) {
  return {.rank = rank, .size = size, .pid = 4711, .host = "h1"};
}

/// One that runs in a thread until the end of the test.
class Background {
 public:
  explicit Background(std::function<void()> turn)
      : thread_([this, turn = std::move(turn)] {
          while (!done_.load()) turn();
        }) {}
  ~Background() {
    done_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

/// The other end of a connection, whose messages a test makes up.
class Talker {
 public:
  explicit Talker(ForkClosedFd socket) : link_(std::move(socket)) {}
  static Talker to(const TcpAddress& address) {
    std::string why;
    return Talker(connect_tcp(address, Deadline(kLong), why));
  }

  void send(const ControlMessage& message) { link_.send(message); }
  /// None: it has been closed.
  std::optional<ControlMessage> next() {
    std::optional<ControlMessage> first;
    const Deadline deadline(kLong);
    bool open = true;
    while (open && !first && !deadline.passed()) {
      pollfd watched{.fd = link_.fd(), .events = POLLIN, .revents = 0};
      (void)::poll(&watched, 1, 100);
      open = link_.receive([&](ControlMessage message) {
        if (!first) first = std::move(message);
      });
    }
    return first;
  }
  ChallengeMessage challenge() {
    const std::optional<ControlMessage> first = next();
    return first && std::holds_alternative<ChallengeMessage>(*first) ? std::get<ChallengeMessage>(*first)
                                                                     : ChallengeMessage{};
  }

 private:
  ControlLink link_;
};

/// A hub of three ranks that looks until the end of the test.
class ReceptionTest : public ::testing::Test {
 protected:
  ~ReceptionTest() override { looking_.reset(); }

  const TcpAddress& address() const { return reception_.addresses().front(); }
  /// A connection that says what `answer` makes of the challenge: was it welcomed?
  bool is_welcome(const std::function<HelloMessage(const ChallengeMessage&)>& answer) {
    Talker talker = Talker::to(address());
    talker.send(answer(talker.challenge()));
    const std::optional<ControlMessage> word = talker.next();
    return word && std::holds_alternative<WelcomeMessage>(*word);
  }
  [[nodiscard]] IntroductionSpec spec_of(std::vector<TcpAddress> hub, std::uint32_t rank, Milliseconds timeout = kLong,
                                         Milliseconds patience = kLong) const {
    return {.hub = std::move(hub),
            .secret = reception_.secret(),
            .hello = hello_of(rank),
            .timeout = timeout,
            .patience = patience,
            .who = "a rank",
            .check = [] {}};
  }
  HelloMessage proven(HelloMessage hello, const ChallengeMessage& challenge) const {
    hello.proof = proof_of_rank(reception_.secret(), address(), challenge, hello);
    return hello;
  }
  /// Whom the hub has refused, and why, so far; all of them, once there are `count`.
  std::string refused(std::uint64_t count) {
    const Deadline deadline(kLong);
    while (reception_.strangers() < count && !deadline.passed()) std::this_thread::sleep_for(Milliseconds{2});
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(reception_.strangers(), count);
    return refused_;
  }

  Reception reception_{{kHere}, 3};
  std::vector<Reception::Member> members_;
  std::mutex mutex_;
  std::string refused_;
  std::optional<Background> looking_{[this] {
    std::vector<pollfd> polled;
    reception_.add_polled(polled);
    (void)::poll(polled.data(), polled.size(), 5);
    const std::lock_guard lock(mutex_);
    for (Reception::Member& member : reception_.look(
             [this](const TcpAddress& peer, const std::string& why) { refused_ += to_text(peer) + ": " + why + "\n"; }))
      members_.push_back(std::move(member));
  }};
};

TEST(Proof, DependsOnAllThatHasBeenSaid) {
  const JobSecret secret{1};
  const TcpAddress hub{"10.0.0.1", 4000};
  const ChallengeMessage challenge{{2}};
  const HelloMessage hello = hello_of(1);
  std::set<Digest> proofs{proof_of_rank(secret, hub, challenge, hello),
                          proof_of_hub(secret, hub, challenge, hello),
                          proof_of_rank({2}, hub, challenge, hello),
                          proof_of_rank(secret, {"10.0.0.2", 4000}, challenge, hello),
                          proof_of_rank(secret, {"10.0.0.1", 4001}, challenge, hello),
                          proof_of_rank(secret, hub, {{3}}, hello),
                          proof_of_rank(secret, hub, challenge, hello_of(2)),
                          proof_of_rank(secret, hub, challenge, hello_of(1, 4))};
  HelloMessage other = hello;
  other.nonce[0] = 1;
  proofs.insert(proof_of_rank(secret, hub, challenge, other));
  other = hello;
  other.host = "h2";
  proofs.insert(proof_of_rank(secret, hub, challenge, other));
  EXPECT_EQ(proofs.size(), 10U);
}

TEST_F(ReceptionTest, RanksAreWelcomedOnce) {
  for (const std::uint32_t rank : {2U, 1U}) {
    const Introduction done = introduce(spec_of({address()}, rank));
    EXPECT_FALSE(done.verdict.has_value());
  }
  const std::lock_guard lock(mutex_);
  ASSERT_EQ(members_.size(), 2U);
  EXPECT_EQ(members_[0].hello.rank, 2U);
  EXPECT_EQ(members_[1].hello.host, "h1");
  EXPECT_EQ(reception_.strangers(), 0U);
}

TEST_F(ReceptionTest, TheSecretIsNeverSaid) {
  Talker talker = Talker::to(address());
  const HelloMessage hello = proven(hello_of(1), talker.challenge());
  talker.send(hello);
  const std::optional<ControlMessage> welcome = talker.next();
  ASSERT_TRUE(welcome.has_value());
  std::vector<std::byte> said = encode(hello);
  for (const std::byte byte : encode(*welcome)) said.push_back(byte);
  const auto secret = std::as_bytes(std::span(reception_.secret()));
  for (std::size_t at = 0; at + 8 <= secret.size(); ++at) {
    const auto piece = secret.subspan(at, 8);
    EXPECT_TRUE(std::ranges::search(said, piece).empty());
  }
}

TEST_F(ReceptionTest, AWrongSecretIsRefusedAndNamedWithItsAddress) {
  EXPECT_FALSE(is_welcome([&](const ChallengeMessage& challenge) {
    HelloMessage hello = hello_of(1);
    hello.proof = proof_of_rank({}, address(), challenge, hello);
    return hello;
  }));
  EXPECT_THAT(refused(1), AllOf(HasSubstr("127.0.0.1:"), HasSubstr(": it does not know the job's secret")));
}

TEST_F(ReceptionTest, ARecordedHelloIsOfNoUse) {
  HelloMessage recorded;
  EXPECT_TRUE(is_welcome([&](const ChallengeMessage& challenge) { return recorded = proven(hello_of(1), challenge); }));
  EXPECT_FALSE(is_welcome([&](const ChallengeMessage&) { return recorded; }));
  EXPECT_THAT(refused(1), HasSubstr("it does not know the job's secret"));
}

TEST_F(ReceptionTest, AProofIsForOneRankOnly) {
  EXPECT_FALSE(is_welcome([&](const ChallengeMessage& challenge) {
    HelloMessage hello = proven(hello_of(1), challenge);
    hello.rank = 2;
    return hello;
  }));
  EXPECT_THAT(refused(1), HasSubstr("it does not know the job's secret"));
}

TEST_F(ReceptionTest, WhatTheHubShowsIsNoProofOfARank) {
  // Two connections: what the hub says on one is said back to it on the other.
  const HelloMessage plain = hello_of(1);
  EXPECT_FALSE(is_welcome([&](const ChallengeMessage& challenge) {
    HelloMessage hello = plain;
    hello.proof = proof_of_hub(reception_.secret(), address(), challenge, plain);
    return hello;
  }));
  EXPECT_THAT(refused(1), HasSubstr("it does not know the job's secret"));
}

TEST_F(ReceptionTest, WhoKnowsTheSecretAndIsNoRankThatCouldComeIsRefused) {
  const auto comes = [&](HelloMessage hello) {
    return is_welcome([&, hello](const ChallengeMessage& challenge) { return proven(hello, challenge); });
  };
  EXPECT_TRUE(comes(hello_of(1)));
  EXPECT_FALSE(comes(hello_of(1)));
  EXPECT_FALSE(comes(hello_of(0)));
  EXPECT_FALSE(comes(hello_of(3)));
  EXPECT_FALSE(comes(hello_of(2, 4)));
  EXPECT_THAT(refused(4),
              AllOf(HasSubstr("rank 1, which has come already"), HasSubstr("rank 0, which has come already"),
                    HasSubstr("rank 3 of 3, in a job of 3"), HasSubstr("rank 2 of 4, in a job of 3")));
}

TEST_F(ReceptionTest, WhoSpeaksBeforeItsTurnOrTooMuchIsRefused) {
  Talker hasty = Talker::to(address());
  hasty.send(VerdictMessage{.message = "the job ends"});
  hasty.challenge();
  EXPECT_FALSE(hasty.next().has_value());
  EXPECT_THAT(refused(1), HasSubstr("it speaks before it has shown that it knows the job's secret"));
  Talker chatty = Talker::to(address());
  chatty.send(VerdictMessage{.message = std::string(600, 'x')});
  chatty.challenge();
  EXPECT_FALSE(chatty.next().has_value());
  EXPECT_THAT(refused(2), HasSubstr("too long"));
}

TEST_F(ReceptionTest, ManySilentOnesDoNotKeepARankOut) {
  std::vector<Talker> silent;
  for (int count = 0; count < 100; ++count) silent.push_back(Talker::to(address()));
  const Introduction done = introduce(spec_of({address()}, 1, Milliseconds{0}));
  const std::lock_guard lock(mutex_);
  EXPECT_EQ(members_.size(), 1U);
  EXPECT_GE(reception_.strangers(), 30U);
}

TEST_F(ReceptionTest, WhatIsSaidRightBehindTheWelcomeIsHeard) {
  // Over the size that a stranger may say.
  const Background verdict([this] {
    const std::lock_guard lock(mutex_);
    for (Reception::Member& member : members_)
      member.link.send(VerdictMessage{.code = ErrorCode::kIo, .message = std::string(3'000, 'x')});
    members_.clear();
    std::this_thread::sleep_for(Milliseconds{1});
  });
  Introduction done = introduce(spec_of({address()}, 1));
  const Deadline deadline(kLong);
  while (!done.verdict && !deadline.passed()) {
    pollfd watched{.fd = done.link.fd(), .events = POLLIN, .revents = 0};
    (void)::poll(&watched, 1, 100);
    ASSERT_TRUE(done.link.receive([&](const ControlMessage& message) {
      done.verdict = std::get<VerdictMessage>(message);
    })) << done.link.trouble();
  }
  EXPECT_EQ(done.verdict->message.size(), 3'000U);
}

/// Somebody else who listens, and does with each who comes what the test wants.
class Impostor {
 public:
  explicit Impostor(std::function<void(Talker&)> act)
      : listener_(listen_tcp(kHere, address_)), serving_([this, act = std::move(act)] {
          pollfd watched{.fd = listener_.get(), .events = POLLIN, .revents = 0};
          if (::poll(&watched, 1, 10) != 1) return;
          TcpAddress peer;
          talkers_.emplace_back(accept_tcp(listener_, peer));
          act(talkers_.back());
        }) {}
  const TcpAddress& address() const { return address_; }

 private:
  TcpAddress address_;
  ForkClosedFd listener_;
  std::vector<Talker> talkers_;
  Background serving_;
};

TEST_F(ReceptionTest, ARankGoesOnToTheFirstAddressWhereTheSecretIsKnown) {
  const Impostor silent([](Talker&) {});
  const Impostor guessing([](Talker& talker) {
    talker.send(ChallengeMessage{{7}});
    (void)talker.next();
    talker.send(WelcomeMessage{});
    talker.send(VerdictMessage{.message = "the job ends"});  // which nobody may believe
  });
  const Impostor bold([](Talker& talker) { talker.send(VerdictMessage{.message = "the job ends"}); });
  const Introduction done = introduce(
      spec_of({silent.address(), guessing.address(), bold.address(), address()}, 1, kLong, Milliseconds{300}));
  EXPECT_FALSE(done.verdict.has_value());
  const std::lock_guard lock(mutex_);
  EXPECT_EQ(members_.size(), 1U);
}

TEST(Introduction, SaysWhatItHasFoundAtEachAddress) {
  const Impostor guessing([](Talker& talker) {
    talker.send(ChallengeMessage{{7}});
    (void)talker.next();
    talker.send(WelcomeMessage{{9}});
  });
  // The rank's own proof, said back to it.
  const Impostor mirror([](Talker& talker) {
    talker.send(ChallengeMessage{{7}});
    const std::optional<ControlMessage> hello = talker.next();
    if (hello) talker.send(WelcomeMessage{std::get<HelloMessage>(*hello).proof});
  });
  const Impostor silent([](Talker&) {});
  TcpAddress nobody;
  listen_tcp(kHere, nobody).reset();
  const auto begin = SteadyClock::now();
  const std::string error = test::error_of(ErrorCode::kResource, [&] {
    (void)introduce({.hub = {guessing.address(), mirror.address(), silent.address(), nobody},
                     .secret = {5},
                     .hello = hello_of(1),
                     .timeout = Milliseconds{500},
                     .patience = Milliseconds{300},
                     .who = "rank 1/3",
                     .check = [] {}});
  });
  EXPECT_LT(SteadyClock::now() - begin, kLong);
  const std::string no_secret = ": who listens there does not know the job's secret";
  EXPECT_THAT(
      error, AllOf(HasSubstr("rank 0 cannot be reached beside the data"), HasSubstr("who: rank 1/3"),
                   HasSubstr(to_text(guessing.address()) + no_secret), HasSubstr(to_text(mirror.address()) + no_secret),
                   HasSubstr(to_text(silent.address()) + ": who listens there says nothing"),
                   HasSubstr(to_text(nobody) + ": Connection refused")));
}

TEST(Introduction, EndsWithWhatIsKnownOfRank0) {
  const Impostor silent([](Talker&) {});
  int looks = 0;
  const auto check = [&] {
    if (++looks == 2) throw Error(ErrorCode::kPeerLost, "rank 0 was killed");
  };
  const std::string error = test::error_of(ErrorCode::kPeerLost, [&] {
    (void)introduce({.hub = {silent.address()},
                     .hello = hello_of(1),
                     .timeout = kLong,
                     .patience = kLong,
                     .who = "rank 1/3",
                     .check = check});
  });
  EXPECT_THAT(error, HasSubstr("rank 0 was killed"));
}

/// Between a rank and the hub, at another address: it passes on every word.
TEST_F(ReceptionTest, AProofThatWasMadeForAnotherAddressIsNotPassedOn) {
  std::atomic<int> passed{0};
  const Impostor relay([&](Talker& to_rank) {
    Talker to_hub = Talker::to(address());
    to_rank.send(to_hub.challenge());
    const std::optional<ControlMessage> hello = to_rank.next();
    if (!hello) return;
    to_hub.send(*hello);
    const std::optional<ControlMessage> welcome = to_hub.next();
    if (welcome) to_rank.send(*welcome);
    ++passed;
  });
  const std::string error = test::error_of(ErrorCode::kResource, [&] {
    (void)introduce(spec_of({relay.address()}, 1, Milliseconds{100}, Milliseconds{1'000}));
  });
  EXPECT_THAT(error, HasSubstr(to_text(relay.address())));
  EXPECT_GT(passed.load(), 0);
  const std::lock_guard lock(mutex_);
  EXPECT_TRUE(members_.empty());
}

TEST_F(ReceptionTest, AnOlderRankIsToldApart) {
  std::vector<std::byte> hello = encode(hello_of(1));
  hello[0] = std::byte{1};
  std::string why;
  const ForkClosedFd socket = connect_tcp(address(), Deadline(kLong), why);
  ASSERT_EQ(::send(socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL), static_cast<ssize_t>(hello.size()));
  EXPECT_THAT(refused(1), HasSubstr("it speaks version 1 of the control plane, this process version 4: all ranks must "
                                    "run the same build of Zeroth"));
}

}  // namespace
}  // namespace zeroth::detail
