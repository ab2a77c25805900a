#include "comm/rendezvous/unix_socket.h"
#include "support/fork_ranks.h"

#include <zeroth/base/error.h>
#include <zeroth/base/platform.h>
#include <zeroth/comm/store.h>

#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

constexpr Milliseconds kLong{20'000};
constexpr Milliseconds kShort{50};

/// Several handles of one store, one for each of the test's threads.
struct Stores {
  std::shared_ptr<Store> server{};
  std::string name{};
  [[nodiscard]] std::shared_ptr<Store> handle() const { return name.empty() ? server : connect_store(name, kLong); }
};

class StoreTest : public ::testing::TestWithParam<std::string> {
 protected:
  static Stores make() {
    if (GetParam() == "inproc") return {.server = make_inproc_store(), .name = {}};
    const std::string name = test::unique_job();
    return {.server = serve_store(name), .name = name};
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, ::testing::Values("inproc", "socket"),
                         [](const auto& item) { return item.param; });

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::kInternal;
}

TEST_P(StoreTest, ValuesAreAnyBytes) {
  const Stores stores = make();
  const auto store = stores.handle();
  const std::string binary("a\0b\xff", 4);
  store->set("key", binary);
  store->set("", "empty key");
  store->set("empty", "");
  EXPECT_EQ(stores.server->get("key", kShort), binary);
  EXPECT_EQ(store->get("", kShort), "empty key");
  EXPECT_EQ(store->get("empty", kShort), "");
  store->set("key", "new");
  EXPECT_EQ(store->get("key", kShort), "new");
  const std::string long_value(60'000, 'x');
  store->set("long", long_value);
  EXPECT_EQ(store->get("long", kShort), long_value);
  EXPECT_EQ(code_of([&] { store->set("long", std::string(70'000, 'x')); }), ErrorCode::kUsage);
}

TEST_P(StoreTest, AMissingKeyIsATimeoutThatNamesIt) {
  const Stores stores = make();
  const auto store = stores.handle();
  try {
    (void)store->get("nobody sets this", kShort);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_NE(std::string(error.what()).find("nobody sets this"), std::string::npos) << error.what();
  }
  store->set("one", "1");
  const std::vector<std::string> keys{"one", "two"};
  EXPECT_EQ(code_of([&] { store->wait(keys, kShort); }), ErrorCode::kTimeout);
}

TEST_P(StoreTest, GetWaitsForALateSet) {
  const Stores stores = make();
  std::thread setter([handle = stores.handle()] {
    std::this_thread::sleep_for(Milliseconds{60});
    handle->set("late", "value");
  });
  EXPECT_EQ(stores.handle()->get("late", kLong), "value");
  const std::vector<std::string> keys{"late"};
  stores.handle()->wait(keys, kLong);
  setter.join();
}

TEST_P(StoreTest, AddIsAtomic) {
  const Stores stores = make();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([handle = stores.handle()] {
      for (int count = 0; count < 100; ++count) handle->add("counter", 3);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(stores.handle()->add("counter", -1), 1199);
  EXPECT_EQ(stores.handle()->get("counter", kShort), "1199");
  stores.server->set("text", "12x");
  EXPECT_EQ(code_of([&] { stores.handle()->add("text", 1); }), ErrorCode::kUsage);
  stores.server->set("most", "9223372036854775807");
  EXPECT_EQ(code_of([&] { stores.handle()->add("most", 1); }), ErrorCode::kUsage);
}

TEST(SocketStore, AServerThatGoesIsAnError) {
  const std::string name = test::unique_job();
  auto server = serve_store(name);
  const auto client = connect_store(name, kLong);
  client->set("a", "b");
  EXPECT_EQ(code_of([&] { (void)serve_store(name); }), ErrorCode::kResource);
  server.reset();
  EXPECT_EQ(code_of([&] { client->set("a", "c"); }), ErrorCode::kPeerLost);
  EXPECT_EQ(code_of([&] { (void)connect_store(name, kShort); }), ErrorCode::kTimeout);
}

/// Stands between a client and the store `name`: holds the first answer back for `delay`, passes all else on.
class LateStore {
 public:
  LateStore(const std::string& name, Milliseconds delay)
      : listener_(*detail::listen_at(detail::socket_name("store", outer_))), relay_([this, name, delay] {
          pollfd watched{.fd = listener_.get(), .events = POLLIN, .revents = 0};
          if (::poll(&watched, 1, 20'000) <= 0) return;
          const UniqueFd client = detail::accept_from(listener_.get());
          const UniqueFd store = detail::connect_to(detail::socket_name("store", name), give_up_later());
          for (bool first = true;; first = false) {
            const auto request = detail::receive_message(client.get(), 70'000, give_up_later());
            if (!request || !detail::send_message(store.get(), request->bytes)) return;
            const auto answer = detail::receive_message(store.get(), 70'000, give_up_later());
            if (first) std::this_thread::sleep_for(delay);
            if (!answer || !detail::send_message(client.get(), answer->bytes)) return;
          }
        }) {}
  ~LateStore() { relay_.join(); }  // it ends when the client has closed
  LateStore(const LateStore&) = delete;
  LateStore& operator=(const LateStore&) = delete;

  [[nodiscard]] const std::string& name() const { return outer_; }

 private:
  struct GiveUp {
    Deadline deadline{kLong};
    void operator()() const { ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "nobody talks to the relay"); }
  };
  static GiveUp give_up_later() { return {}; }

  std::string outer_ = test::unique_job();
  UniqueFd listener_;
  std::thread relay_;
};

TEST(SocketStore, ALateAnswerIsNotTakenForTheAnswerToTheNextQuestion) {
  const std::string name = test::unique_job();
  const auto server = serve_store(name);
  server->set("first", "1");
  server->set("second", "2");
  const LateStore late(name, Milliseconds{1'600});  // longer than the patience of its client
  const auto client = connect_store(late.name(), kShort);
  try {
    (void)client->get("first", kShort);
    FAIL() << "the answer was not late";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    for (const char* part : {"does not answer", "\"first\"", "not known"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  EXPECT_EQ(client->get("second", kLong), "2");
  EXPECT_EQ(client->add("count", 5), 5);
  EXPECT_EQ(client->get("first", kLong), "1");
}

/// What a client of the store `name` sends to ask for `key`.
std::vector<std::byte> recorded_request(const std::string& key) {
  const std::string name = test::unique_job();
  const UniqueFd listener = *detail::listen_at(detail::socket_name("store", name));
  std::thread asking(
      [&] { EXPECT_EQ(code_of([&] { (void)connect_store(name, kLong)->get(key, kLong); }), ErrorCode::kPeerLost); });
  pollfd watched{.fd = listener.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&watched, 1, 20'000), 1);
  std::vector<std::byte> request;
  {
    const UniqueFd client = detail::accept_from(listener.get());
    const Deadline deadline(kLong);
    const auto message = detail::receive_message(
        client.get(), 70'000, [&] { ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "no request"); });
    if (message) request = message->bytes;
  }
  asking.join();
  return request;
}

TEST(SocketStore, AClientThatDoesNotReadHoldsNobodyUp) {
  const std::vector<std::byte> request = recorded_request("long");
  const std::string name = test::unique_job();
  const auto server = serve_store(name);
  server->set("long", std::string(60'000, 'x'));
  const UniqueFd rude = detail::connect_to(detail::socket_name("store", name), [] {});
  constexpr int kQuestions = 20;  // their answers are more than a socket holds
  for (int question = 0; question < kQuestions; ++question) {
    if (!detail::send_message(rude.get(), request)) break;
  }
  std::this_thread::sleep_for(Milliseconds{50});  // by now the store cannot send the next one
  const auto polite = connect_store(name, Milliseconds{5'000});
  polite->set("key", "value");
  EXPECT_EQ(polite->get("key", kLong), "value");
  int answers = 0;
  while (detail::receive_message(rude.get(), 70'000, [] { FAIL() << "the store has not turned it away"; })) ++answers;
  EXPECT_LT(answers, kQuestions);
}

TEST(SocketStore, ServesOtherProcesses) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  const int descriptors = test::open_descriptors();
  const std::string name = test::unique_job();
  const test::ForkReport report = test::fork_ranks(3, [&](int rank) {
    const auto store = rank == 0 ? serve_store(name) : connect_store(name, kLong);
    store->set("rank" + std::to_string(rank), std::to_string(rank * 10));
    const std::vector<std::string> keys{"rank0", "rank1", "rank2"};
    store->wait(keys, kLong);
    test::require(store->get("rank2", kLong) == "20", "value");
    store->add("done", 1);
    while (rank == 0 && store->get("done", kLong) != "3") std::this_thread::sleep_for(Milliseconds{2});
  });
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_EQ(test::open_descriptors(), descriptors);
}

}  // namespace
}  // namespace zeroth
