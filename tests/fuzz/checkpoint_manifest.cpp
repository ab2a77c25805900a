// The manifest of a checkpoint: what is accepted reads back as itself; what is refused says which file and why. The
// bytes are taken as they are, and as a text whose digest is right, or nothing behind the digest would be reached.
#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/checkpoint/manifest.h>

#include <cstdio>
#include <exception>
#include <set>
#include <string>

using zeroth::Manifest;
using zeroth::fuzz::expect;

namespace {

void check_accepted(const Manifest& manifest) {
  const std::string text = to_text(manifest);
  expect(zeroth::manifest_of(text, "again") == manifest, "a manifest does not read back as itself", text);
  expect(manifest.files.size() == static_cast<std::size_t>(manifest.world), "not one file a rank", text);
  std::set<std::string> names;
  for (const zeroth::CheckpointFile& file : manifest.files) {
    expect(file.name.find('/') == std::string::npos && file.name != "..", "a file elsewhere", file.name);
    expect(names.insert(file.name).second, "a file twice", file.name);
    expect(file.chunks.size() == (file.bytes + (1U << 20U) - 1) >> 20U, "not one digest a chunk", text);
  }
}

void check(const std::string& text) {
  try {
    check_accepted(zeroth::manifest_of(text, "fuzz"));
  } catch (const zeroth::Error& error) {
    expect(error.code() == zeroth::ErrorCode::kCheckpoint, "refused with another code", error.what());
    expect(error.context().which == "fuzz" && !error.context().got.empty(), "refused without file and reason",
           error.what());
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error", error.what());
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(zeroth::fuzz::text_of(data, size));
  check(text);
  char digest[64];
  std::snprintf(digest, sizeof digest, ",\n\"digest\": \"%016llx\"}\n",
                static_cast<unsigned long long>(zeroth::digest64(text)));
  check(text + digest);
  return 0;
}
