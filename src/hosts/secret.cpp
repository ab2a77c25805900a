#include "hosts/secret.h"

#include "base/hmac.h"
#include "base/unique_fd.h"

#include <zeroth/base/error.h>
#include <zeroth/base/secret.h>
#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <span>

namespace zeroth {
namespace {

constexpr std::size_t kMinSecret = 16;
constexpr std::size_t kMaxSecret = 4096;

}  // namespace

std::string proof_of(ProofSide side, std::string_view secret, std::string_view head_nonce,
                     std::string_view node_nonce) {
  std::string text = side == ProofSide::kHead ? "zeroth-run head" : "zeroth-run node";
  text.append(head_nonce).append(node_nonce);
  return std::string(as_text(hmac_sha256(secret, text)));
}

bool same_proof(std::string_view a, std::string_view b) {
  return same_secret(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

std::string random_nonce() {
  std::string bytes(kNonceBytes, '\0');
  fill_random(std::as_writable_bytes(std::span(bytes)), "the rendezvous");
  return bytes;
}

std::string read_secret(const std::string& file) {
  std::string secret = variable_or_empty("ZEROTH_RDZV_SECRET");
  const std::string where = file.empty() ? "ZEROTH_RDZV_SECRET" : file;
  if (!file.empty()) {
    const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    struct stat info{};
    secret.assign(kMaxSecret + 2, '\0');
    const bool regular = fd.valid() && ::fstat(fd.get(), &info) == 0 && S_ISREG(info.st_mode);
    const ssize_t bytes = regular ? ::read(fd.get(), secret.data(), secret.size()) : -1;
    if (bytes < 0) {
      throw Error(
          ErrorCode::kIo,
          "cannot read the secret: " + (fd.valid() && !regular ? std::string("not a regular file") : errno_text(errno)),
          {.where = "--rdzv-secret-file", .which = file, .hint = "give the path of a file that this user may read"});
    }
    secret.resize(static_cast<std::size_t>(bytes));
    if (secret.ends_with('\n')) secret.pop_back();
  }
  if (secret.size() < kMinSecret || secret.size() > kMaxSecret) {
    throw Error(ErrorCode::kUsage,
                secret.empty() && file.empty() ? "nodes need a secret that they share" : "the secret is not usable",
                {.which = where,
                 .expected = fmt::format("{} to {} bytes", kMinSecret, kMaxSecret),
                 .got = fmt::format("{} bytes", secret.size()),
                 .hint = "the same on every node: --rdzv-secret-file FILE, or ZEROTH_RDZV_SECRET; for "
                         "example from openssl rand -hex 32"});
  }
  return secret;
}

std::string warning_of_secret(const std::string& file) {
  struct stat info{};
  if (file.empty() || ::stat(file.c_str(), &info) != 0) return "";
  const unsigned mode = info.st_mode & 07777U;
  if ((mode & (S_IRGRP | S_IWGRP | S_IROTH | S_IWOTH)) == 0) return "";
  return fmt::format(
      "warning: other users may read or change the secret: {} has mode {:o}; hint: chmod 600 {}, or mount it with "
      "defaultMode 0400",
      file, mode, file);
}

}  // namespace zeroth
