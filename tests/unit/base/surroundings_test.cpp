#include <zeroth/base/surroundings.h>

#include <gtest/gtest.h>

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
    EXPECT_EQ(address_towards(interface.address), interface.address) << "a host reaches itself under the address that it asks for";
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

}  // namespace
}  // namespace zeroth
