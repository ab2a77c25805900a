#include "engine/texts.h"

#include <zeroth/base/error.h>

#include <cstdint>
#include <span>

namespace zeroth {
namespace {

constexpr std::int64_t kLongest = std::int64_t{1} << 31;

}  // namespace

std::vector<std::string> gather_texts(const std::string& own, const Communicator& communicator) {
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> sizes(world);
  const auto own_size = static_cast<std::int64_t>(own.size());
  communicator.all_gather(std::span(&own_size, 1), std::span(sizes));
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) {
    ZR_CHECK(size >= 0 && size <= kLongest, ErrorCode::kMismatch, "a rank's text has an absurd size",
             {.where = "engine.texts",
              .who = "rank " + std::to_string(&size - sizes.data()) + "/" + std::to_string(world),
              .expected = "at most " + std::to_string(kLongest) + " bytes",
              .got = std::to_string(size)});
    total += size;
  }
  std::vector<std::uint8_t> all(static_cast<std::size_t>(total));
  communicator.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(own.data()), own.size()), std::span(all),
                          sizes);
  std::vector<std::string> texts;
  std::size_t offset = 0;
  for (const std::int64_t size : sizes) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + offset, static_cast<std::size_t>(size));
    offset += static_cast<std::size_t>(size);
  }
  return texts;
}

std::string broadcast_text(std::string text, int root, const Communicator& communicator) {
  auto size = static_cast<std::int64_t>(text.size());
  communicator.broadcast(std::span(&size, 1), root);
  ZR_CHECK(size >= 0 && size <= kLongest, ErrorCode::kMismatch, "a rank's text has an absurd size",
           {.where = "engine.texts", .who = "rank " + std::to_string(root), .got = std::to_string(size)});
  text.resize(static_cast<std::size_t>(size));
  if (size > 0) communicator.broadcast(std::span(reinterpret_cast<std::uint8_t*>(text.data()), text.size()), root);
  return text;
}

}  // namespace zeroth
