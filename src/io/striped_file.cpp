#include <zeroth/base/error.h>
#include <zeroth/io/striped_file.h>

#include <fmt/format.h>

#include <algorithm>

namespace zeroth {

StripedFile StripedFile::create(std::span<const std::string> folders, std::uint64_t bytes,
                                const StripeOptions& options) {
  const auto check = [&](bool good, const char* message, const std::string& expected, const std::string& got) {
    ZR_CHECK(good, ErrorCode::kUsage, message, {.where = "io.striped_file", .expected = expected, .got = got});
  };
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 62U;
  check(!folders.empty(), "a striped file without a folder", "at least one folder", "none");
  check(options.stripe_bytes > 0 && options.stripe_bytes <= (std::size_t{1} << 40U), "a stripe of no possible size",
        "1 to 2^40 bytes", std::to_string(options.stripe_bytes));
  check(bytes > 0 && bytes <= kLargest - options.stripe_bytes, "a striped file of no possible size", "1 to 2^62 bytes",
        std::to_string(bytes));
  StripedFile striped;
  striped.stripe_bytes_ = options.stripe_bytes;
  striped.first_folder_ = options.first_folder % folders.size();
  const std::uint64_t stripes = (bytes + options.stripe_bytes - 1) / options.stripe_bytes;
  striped.bytes_ = stripes * options.stripe_bytes;
  const std::uint64_t stripes_per_file = (stripes + folders.size() - 1) / folders.size();
  for (const std::string& folder : folders) {
    striped.files_.push_back(ScratchFile::create(folder, stripes_per_file * options.stripe_bytes, options.file));
    const std::size_t alignment = striped.files_.back()->alignment();
    check(options.stripe_bytes % alignment == 0, "a stripe is not aligned",
          fmt::format("a multiple of {} bytes, for {}", alignment, folder), std::to_string(options.stripe_bytes));
    striped.alignment_ = std::max(striped.alignment_, alignment);
  }
  return striped;
}

std::vector<IoRequest> StripedFile::requests(IoOp op, std::uint64_t offset, std::span<std::byte> memory,
                                             std::string_view name) const {
  const bool aligned = offset % alignment_ == 0 && memory.size() % alignment_ == 0;
  ZR_CHECK(aligned && offset <= bytes_ && memory.size() <= bytes_ - offset, ErrorCode::kUsage,
           "a range is not one of its striped file",
           {.where = "io.striped_file",
            .which = std::string(name),
            .expected = fmt::format("multiples of {} bytes within {}", alignment_, bytes_),
            .got = fmt::format("{} bytes at offset {}", memory.size(), offset)});
  std::vector<IoRequest> requests;
  requests.reserve(memory.size() / stripe_bytes_ + 2);
  while (!memory.empty()) {
    const std::uint64_t stripe = offset / stripe_bytes_;
    const std::size_t begin = static_cast<std::size_t>(offset % stripe_bytes_);
    const std::size_t length = std::min(memory.size(), stripe_bytes_ - begin);
    requests.push_back({.op = op,
                        .file = files_[(first_folder_ + stripe) % files_.size()],
                        .offset = stripe / files_.size() * stripe_bytes_ + begin,
                        .memory = memory.first(length),
                        .name = std::string(name)});
    memory = memory.subspan(length);
    offset += length;
  }
  return requests;
}

}  // namespace zeroth
