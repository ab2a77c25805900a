#include "support/fork_ranks.h"

#include <zeroth/base/error.h>
#include <zeroth/base/platform.h>
#include <zeroth/comm/store.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
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
  [[nodiscard]] std::shared_ptr<Store> handle() const {
    return name.empty() ? server : connect_store(name, kLong);
  }
};

class StoreTest : public ::testing::TestWithParam<std::string> {
 protected:
  static Stores make() {
    if (GetParam() == "inproc") return {.server = make_inproc_store(), .name = {}};
    const std::string name = test::unique_job();
    return {.server = serve_store(name), .name = name};
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, ::testing::Values("inproc", "socket"), [](const auto& item) {
  return item.param;
});

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
