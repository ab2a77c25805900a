// Messages as codes of 8 or 4 bits with a scale for each block of 256 elements: to the owners of pieces and, of the
// mean, back. Errors are fed back on both ways.
#include "zero/coded_calls.h"
#include "zero/reductions/table.h"

#include <numeric>
#include <span>
#include <vector>

namespace zeroth {
namespace {

class CodedMessages final : public SegmentReduction {
 public:
  explicit CodedMessages(const ReductionContext& context)
      : SegmentReduction(context, Runs::kOnAnyDevice),
        coder_({.format = code_format_named(context.options.compression)}, context.kernels, context.stream) {}

 private:
  void reduce_part(const Part& part) override {
    const std::vector<Range> pieces = pieces_of(part.segment);
    const std::int64_t own = part.owned.size();
    const auto world = pieces.size();
    std::vector<std::int64_t> bytes;
    for (const Range& piece : pieces) bytes.push_back(coder_.form().bytes(piece.size()));
    const std::span<std::byte> sent = memory<std::byte>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}));
    kernels().zero(sent.data(), sent.size(), stream());  // what is between codes and scales
    std::byte* at = sent.data();
    for (std::size_t rank = 0; rank < world; at += bytes[rank++]) {
      if (pieces[rank].size() == 0) continue;
      coder_.code(at, reinterpret_cast<const std::byte*>(part.message + pieces[rank].begin), DType::kFloat32,
                  part.error + pieces[rank].begin, pieces[rank].size());
    }
    const auto own_bytes = coder_.form().bytes(own);
    const std::span<std::byte> received = memory<std::byte>(static_cast<std::int64_t>(world) * own_bytes);
    ranks().all_to_all(read(sent), written(received), bytes, std::vector<std::int64_t>(world, own_bytes));
    const std::span<float> mean = memory<float>(own);
    const std::span<std::byte> packed = memory<std::byte>(own_bytes);
    kernels().zero(packed.data(), packed.size(), stream());
    if (own > 0) {
      std::vector<const std::byte*> messages;
      for (std::size_t rank = 0; rank < world; ++rank)
        messages.push_back(received.data() + rank * static_cast<std::size_t>(own_bytes));
      coder_.value(reinterpret_cast<std::byte*>(mean.data()), DType::kFloat32, messages, own,
                   1.0F / static_cast<float>(world));
      coder_.code(packed.data(), reinterpret_cast<const std::byte*>(mean.data()), DType::kFloat32, part.server_error,
                  own);
    }
    const std::span<std::byte> all = memory<std::byte>(static_cast<std::int64_t>(sent.size()));
    ranks().all_gather(read(packed), written(all), bytes);
    const std::byte* message = all.data();
    for (std::size_t rank = 0; rank < world; message += bytes[rank++]) {
      if (pieces[rank].size() > 0)
        coder_.value(reinterpret_cast<std::byte*>(part.result + pieces[rank].begin), DType::kFloat32, {message},
                     pieces[rank].size());
    }
  }

  MessageWire wire_of(const Segment& segment) const override {
    const std::vector<Range> pieces = pieces_of(segment);
    MessageWire wire;
    for (std::size_t rank = 0; rank < pieces.size(); ++rank) {
      const std::int64_t bytes = coder_.form().bytes(pieces[rank].size());
      if (static_cast<int>(rank) == ranks().rank()) {
        wire.all_to_all += bytes * (ranks().size() - 1);
      } else {
        wire.all_gather += bytes;
      }
    }
    return wire;
  }

  static std::span<const std::uint8_t> read(std::span<const std::byte> data) {
    return {reinterpret_cast<const std::uint8_t*>(data.data()), data.size()};
  }
  static std::span<std::uint8_t> written(std::span<std::byte> data) {
    return {reinterpret_cast<std::uint8_t*>(data.data()), data.size()};
  }
  Coder coder_;
};

}  // namespace

std::unique_ptr<MessageReduction> make_coded(const ReductionContext& context) {
  return std::make_unique<CodedMessages>(context);
}

}  // namespace zeroth
