#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace zeroth {
namespace {

TEST(Surroundings, TheAddressTowardsAHostIsOneOfAnInterface) {
  const std::vector<Interface> all = interfaces();
  const auto with = [&all](const std::string& address) { return std::ranges::find(all, address, &Interface::address); };
  ASSERT_NE(with("127.0.0.1"), all.end());
  EXPECT_TRUE(with("127.0.0.1")->loopback);
  EXPECT_FALSE(with("127.0.0.1")->name.empty());
  for (const std::string loopback : {"127.0.0.1", "127.0.1.1", "localhost"}) {
    const auto found = with(address_towards(loopback));
    ASSERT_NE(found, all.end()) << loopback;
    EXPECT_TRUE(found->loopback) << loopback;
  }
  for (const Interface& interface : all) {
    if (interface.loopback || interface.address.find('%') != std::string::npos) continue;
    EXPECT_EQ(address_towards(interface.address), interface.address)
        << "a host reaches itself under the address that it asks for";
  }
}

TEST(Surroundings, ANameStandsForItsAddresses) {
  EXPECT_EQ(addresses_of("192.0.2.7"), (std::vector<std::string>{"192.0.2.7"})) << "once, for whichever protocol";
  EXPECT_EQ(addresses_of("2001:db8::7"), (std::vector<std::string>{"2001:db8::7"}));
  const std::vector<std::string> local = addresses_of("localhost");
  EXPECT_NE(std::ranges::find(local, "127.0.0.1"), local.end());
  EXPECT_TRUE(addresses_of("").empty());
  EXPECT_TRUE(addresses_of("no.such.host.invalid").empty());
}

TEST(Surroundings, ThereIsNoWayToAHostThatIsNotThere) {
  EXPECT_EQ(address_towards("no.such.host.invalid"), "");
}

TEST(Surroundings, OpenFilesAreAllowedAsFarAsTheSystemLets) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit tight{.rlim_cur = 100, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  EXPECT_EQ(allow_open_files(50), 100U) << "what is there stays";
  EXPECT_EQ(allow_open_files(120), 120U);
  rlimit now{};
  ::getrlimit(RLIMIT_NOFILE, &now);
  EXPECT_EQ(now.rlim_cur, 120U);
  EXPECT_EQ(now.rlim_max, before.rlim_max) << "the hard limit is not ours";
  if (before.rlim_max != RLIM_INFINITY) {
    EXPECT_EQ(allow_open_files(before.rlim_max + 1), before.rlim_max);
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);

  const std::size_t open = count_open_files();
  const int one_more = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(count_open_files(), open + 1);
  ::close(one_more);
}

}  // namespace
}  // namespace zeroth
