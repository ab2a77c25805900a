// The secret of a job, and how two processes show each other that they have it without saying it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace zeroth {

inline constexpr std::size_t kNonceBytes = 16;

enum class ProofSide { kHead, kNode };
/// What a side shows: a function of the secret and of both sides' nonces, so that a recorded one is of no use
/// later, nor the other side's own. The bytes of a Digest.
[[nodiscard]] std::string proof_of(ProofSide side, std::string_view secret, std::string_view head_nonce,
                                   std::string_view node_nonce);
/// Takes the same time wherever they differ.
[[nodiscard]] bool same_proof(std::string_view a, std::string_view b);
/// Random bytes. Throws Error(kResource).
[[nodiscard]] std::string random_nonce();

/// From a file (its last line end does not count), or from ZEROTH_RDZV_SECRET if `file` is "". Throws Error:
/// kIo, kUsage (none, or not of 16 to 4096 bytes).
[[nodiscard]] std::string read_secret(const std::string& file);
/// A warning if other users of this host may read or change the file, for a user; "" if not, and for "".
[[nodiscard]] std::string warning_of_secret(const std::string& file);

}  // namespace zeroth
