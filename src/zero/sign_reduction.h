// SignReduction: the mean over ranks of a flat's messages, with one bit an element on the wire, and error feedback.
//
//   c = worker error + momentum_factor * momentum + grad_factor * gradient [+ sum_factor * sum] on every rank
//   c -> signs and a scale a parameter --all_to_all--> mean of all ranks + server error        on the owner of a piece
//     -> signs and a scale a parameter --all_gather--> result                                  on every rank
//
// What signs and scales miss stays in the two errors and goes into the next call. Sums are formed in rank order, scales
// of exact sums of squares: the bits depend on neither plan, transport nor the split of the flat into calls of kernels.
// A rank alone has nothing to send: its result is c itself, and errors are zero.
//
// Ref: Tang et al., "1-bit Adam", ICML 2021, arXiv 2102.02888, algorithm 1. There a vector has one scale; here a
// parameter has one, so that small parameters beside large ones are not drowned.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/shard/flat_layout.h>
#include <zeroth/zero/message_reduction.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace zeroth {

class SignReduction final : public MessageReduction {
 public:
  /// `rank`: of the communicator, whose ranks have the pieces of the flat. Borrows `kernels`. Not collective.
  SignReduction(const FlatLayout& flat, Communicator communicator, Kernels& kernels, Stream stream);

  void reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
              std::byte* worker_error, std::byte* server_error, std::byte* result) override;
  [[nodiscard]] MessageWire wire() const override;

 private:
  /// Elements of one parameter in the piece of one rank: they have one scale on the way back.
  struct Part {
    int segment = 0;
    Range range{};             ///< of the flat
    std::int64_t bits_at = 0;  ///< byte of its first sign, among those of all ranks in their order
    int number = 0;            ///< among the parts of its rank
  };
  /// Bytes of the signs of all pieces.
  [[nodiscard]] std::int64_t all_bits() const;
  /// Of all ranks.
  [[nodiscard]] std::int64_t all_parts() const;
  [[nodiscard]] std::byte* at(std::byte* array, std::int64_t element) const {
    return array + array_bytes(element, dtype_);
  }
  /// Roots of the means of squares, of ranges of an array that begins at element `first` of the flat.
  [[nodiscard]] std::vector<double> scales_of(const std::vector<Range>& ranges, std::byte* array, std::int64_t first);
  void pack(const Range& range, std::byte* array, std::int64_t first, std::uint8_t* bits, double scale);
  void sum(const Range& range, const std::vector<kernels::SignSource>& sources, std::byte* target, std::int64_t first,
           const std::byte* error, double factor);

  std::vector<Segment> segments_;
  DType dtype_;
  Communicator communicator_;  ///< of scales, which are the host's
  Communicator messages_;      ///< of signs, where the kernels write them
  Kernels& kernels_;
  Stream stream_;
  std::vector<Range> pieces_;              ///< one a rank
  std::vector<std::int64_t> piece_bytes_;  ///< of their signs
  std::vector<std::int64_t> bits_at_;      ///< where those of each rank begin
  std::vector<std::vector<Part>> parts_;   ///< one list a rank
  std::vector<std::int64_t> part_counts_;  ///< their sizes
};

}  // namespace zeroth
