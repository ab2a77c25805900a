// Digests against the published vectors.
#include "base/hmac.h"

#include "support/error_of.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <string>

namespace zeroth {
namespace {

std::string hex(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

TEST(Sha256, AgreesWithTheStandard) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PadsEveryLength) {
  // Around the ends of blocks, where the length finds no room: a digest of the digests of 0 to 130 letters, by another
  // implementation.
  std::string digests;
  for (std::size_t length = 0; length <= 130; ++length) digests += hex(sha256(std::string(length, 'a')));
  EXPECT_EQ(hex(sha256(digests)), "5eee4c50e1b5ec4f1a47f34c25ca988850b49da7904f5ab1b3abc5cc0ae66ef9");
}

TEST(HmacSha256, AgreesWithRfc4231) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  std::string counted;
  for (char byte = 1; byte <= 25; ++byte) counted += byte;
  EXPECT_EQ(hex(hmac_sha256(counted, std::string(50, '\xcd'))),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "This is a test using a larger than block-size key and a larger than block-size data. The "
                            "key needs to be hashed before being used by the HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(HmacSha256, TakesAnEmptyKeyAndNoBytes) {
  // By Python's hmac.
  EXPECT_EQ(hex(hmac_sha256({}, {})), "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(HmacSha256, SaysThatLibcryptoHasNoDigest) {
  ASSERT_EQ(::EVP_set_default_properties(nullptr, "provider=nobody"), 1);
  const std::string without = test::error_of(ErrorCode::kEnvironment, [] { (void)sha256("abc"); });
  const std::string without_key = test::error_of(ErrorCode::kEnvironment, [] { (void)hmac_sha256("key", "abc"); });
  ASSERT_EQ(::EVP_set_default_properties(nullptr, ""), 1);
  EXPECT_NE(without.find("libcrypto does not compute SHA-256"), std::string::npos) << without;
  EXPECT_NE(without_key.find("OPENSSL_CONF"), std::string::npos) << without_key;
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

}  // namespace
}  // namespace zeroth
