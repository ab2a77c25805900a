// What a proof depends on.
#include "hosts/secret.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace zeroth::launcher {
namespace {

TEST(Proof, DependsOnSideSecretAndBothNonces) {
  const std::set<std::string> proofs{
      proof_of(ProofSide::kHead, "s", "a", "b"), proof_of(ProofSide::kNode, "s", "a", "b"),
      proof_of(ProofSide::kHead, "t", "a", "b"), proof_of(ProofSide::kHead, "s", "c", "b"),
      proof_of(ProofSide::kHead, "s", "a", "c")};
  EXPECT_EQ(proofs.size(), 5U);
}

TEST(Proof, IsTheSameOnlyIfEveryByteIs) {
  const std::string proof = proof_of(ProofSide::kHead, "s", "a", "b");
  EXPECT_TRUE(same_proof(proof, proof));
  EXPECT_FALSE(same_proof(proof, proof.substr(1)));
  EXPECT_FALSE(same_proof(proof, ""));
  for (std::size_t i = 0; i < proof.size(); ++i) {
    std::string other = proof;
    other[i] = static_cast<char>(other[i] ^ 1);
    EXPECT_FALSE(same_proof(proof, other));
  }
}

TEST(Nonce, IsNewEveryTime) {
  EXPECT_EQ(random_nonce().size(), kNonceBytes);
  EXPECT_NE(random_nonce(), random_nonce());
}

}  // namespace
}  // namespace zeroth::launcher
