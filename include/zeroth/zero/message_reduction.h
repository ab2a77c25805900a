// MessageReduction: how the messages of all ranks become one result. It is the lossy part of an optimizer whose ranks
// exchange messages in the place of gradients (SignMessages).
//
//   c        worker error + momentum_factor * momentum + grad_factor * gradient [+ sum_factor * sum]    on every rank
//   result   about the mean of c over the ranks: the same bits on every rank
//
// What a rank's contribution misses stays in its worker error and goes into its next message; what sums miss may stay
// in the server error of the owner of a piece. A component: one file in src/zero/reductions/, and its line in
// src/zero/reductions/table.h (docs/how-to-add-a-reduction.md).
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/zero/model_layout.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Bytes that one call brings to a rank from others.
struct MessageWire {
  std::int64_t all_to_all = 0;  ///< and sums: on the way to the owners of pieces
  std::int64_t all_gather = 0;  ///< of results and of what all ranks send to all
  MessageWire& operator+=(const MessageWire& other) {
    all_to_all += other.all_to_all;
    all_gather += other.all_gather;
    return *this;
  }
};

/// Where a reduction works: on one flat. All outlives it.
struct ReductionContext {
  const ModelLayout& model;
  int flat = 0;
  Communicator communicator;  ///< whose ranks have the pieces of the flat
  Kernels& kernels;
  Stream stream;
  CompressionOptions options{};
  [[nodiscard]] const FlatLayout& layout() const { return model.flat(flat); }
};

class MessageReduction {
 public:
  MessageReduction() = default;
  MessageReduction(const MessageReduction&) = delete;
  MessageReduction& operator=(const MessageReduction&) = delete;
  virtual ~MessageReduction() = default;

  struct Message {
    const std::byte* momentum = nullptr;  ///< [length] of the accumulation dtype, the same on all ranks; or null
    const std::byte* sum = nullptr;       ///< the same, of this rank; or null
    const std::byte* grad = nullptr;      ///< [length] of grad_dtype, of this rank
    DType grad_dtype = DType::kFloat32;   ///< the accumulation dtype, or the flat's
  };
  /// Collective, blocks. `factors`: one a segment of the flat, the same on all ranks; parameters without keep their
  /// errors and their elements of `result`; so does padding. `worker_error`, `result`: [length] of the accumulation
  /// dtype; `result` may be `momentum`. `server_error`: [this rank's piece].
  virtual void reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
                      std::byte* worker_error, std::byte* server_error, std::byte* result) = 0;
  /// Of a call in which every parameter has factors, of this rank.
  [[nodiscard]] virtual MessageWire wire() const = 0;

 protected:
  /// Adds the message of elements `range` of the flat, without the error, to `worker_error`, which has the whole flat.
  static void form(const Message& message, const MessageFactors& factors, const Range& range, std::byte* worker_error,
                   DType dtype, Kernels& kernels, const Stream& stream);
  /// to = to + factor * from, each operation rounded once.
  static void add(float* to, float factor, const float* from, std::int64_t n, Kernels& kernels, const Stream& stream);
};

/// A reduction that goes parameter by parameter. Flats of float64, of which there is no lossy form here, and a rank
/// alone have the exact mean.
class SegmentReduction : public MessageReduction {
 public:
  enum class Runs : std::uint8_t {
    kOnHost,      ///< reduce_part() has loops of its own, for memory of the host
    kOnAnyDevice  ///< it does everything by calls of the kernels
  };
  /// Throws kUsage, naming the compression, for kOnHost where states lie on a device.
  explicit SegmentReduction(ReductionContext context, Runs runs = Runs::kOnHost);
  void reduce(const Message& message, const std::vector<std::optional<MessageFactors>>& factors,
              std::byte* worker_error, std::byte* server_error, std::byte* result) final;
  [[nodiscard]] MessageWire wire() const final;

 protected:
  /// One parameter, as float32. All arrays have its elements, where the kernels' memory is.
  struct Part {
    const Segment& segment;
    float* message = nullptr;         ///< c; may be changed
    float* error = nullptr;           ///< zeros; set it to what this rank's contribution misses
    float* server_error = nullptr;    ///< of the elements of this rank's piece, at `owned.begin`; or null
    Range owned{};                    ///< of the parameter, from 0: what lies in this rank's piece
    const float* momentum = nullptr;  ///< of before, the same on all ranks; or null
    float* result = nullptr;          ///< may be `momentum`
  };
  /// Collective, blocks.
  virtual void reduce_part(const Part& part) = 0;
  [[nodiscard]] virtual MessageWire wire_of(const Segment& segment) const = 0;
  /// What lies in the piece of each rank of a parameter, from 0.
  [[nodiscard]] std::vector<Range> pieces_of(const Segment& segment) const;

  [[nodiscard]] const ReductionContext& context() const { return context_; }
  [[nodiscard]] Kernels& kernels() const { return context_.kernels; }
  [[nodiscard]] const Stream& stream() const { return context_.stream; }
  /// Of messages where the kernels write them.
  [[nodiscard]] const Communicator& ranks() const { return ranks_; }
  /// Memory of the kernels, not zeroed, until reduce_part() has returned and its kernels are done.
  template <class T>
  [[nodiscard]] std::span<T> memory(std::int64_t elements) {
    const auto count = static_cast<std::size_t>(elements);
    return {reinterpret_cast<T*>(next_memory(count * sizeof(T))), count};
  }

 private:
  [[nodiscard]] std::byte* next_memory(std::size_t bytes);

  ReductionContext context_;
  Communicator ranks_;
  std::vector<Scratch> memory_;              ///< while a call lasts: parts take the same, one after the other
  std::size_t taken_ = 0;                    ///< of these, by this part
  std::unique_ptr<MessageReduction> exact_;  ///< in its place; null: it has a form
};

/// A factory: EngineSettings::own_reduction, and a line of the table.
using MakeReduction = std::function<std::unique_ptr<MessageReduction>(const ReductionContext& context)>;

/// That of context.options.compression. Throws kConfig for a name that is not built, with all names.
[[nodiscard]] std::unique_ptr<MessageReduction> make_reduction(const ReductionContext& context);
[[nodiscard]] std::vector<std::string> reduction_names();

}  // namespace zeroth
