// CodedGather and CodedReduction: the gather and the reduction of a flat whose numbers travel as codes of a few bits,
// with a scale for each block (WireCodes).
//
//   gather   own part -> codes --all_gather--> codes of all parts -> values, those of this rank's own part too
//   reduce   bucket + errors -> codes of the part of each rank --all_to_all--> the sum of the ranks' values
//
// With nodes a reduction has two hops: among the ranks of a node, each of which then has the node's sum of one part;
// and of that, in codes again, among the ranks of all nodes that have the same part. What crosses between nodes is
// divided by the ranks of a node. Sums are formed in rank order, hop by hop. The bits depend on neither plan nor
// transport, because parts begin at whole blocks. With a degree of gradients runs of ranks sum as without codes, and
// only what runs exchange, once a step, travels in codes.
//
// Ref: Wang et al., "ZeRO++", 2023, sections 3.1 and 3.3; Xie et al., "LoCo", 2024.
#pragma once

#include "zero/sub_group.h"

#include <kernels/quant/quant.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth {

/// The state of errors, see WireCodes::feedback.
inline constexpr std::string_view kReductionError = "reduction_error";

/// Numbers of this flat travel in codes, if the plan has some. The same on all ranks and at all stages.
[[nodiscard]] bool has_codes(const FlatLayout& flat);

/// "int8", "int4", "fp8" or "fp4".
[[nodiscard]] kernels::CodeFormat code_format_named(std::string_view name);

/// A message of elements of one part: its codes, and its scales, each padded to whole multiples of `align` bytes.
struct CodeForm {
  kernels::CodeFormat format = kernels::CodeFormat::kInt8;
  std::int64_t block = 256;
  std::int64_t align = sizeof(float);
  [[nodiscard]] std::int64_t scales_at(std::int64_t elements) const;
  /// Of codes and scales.
  [[nodiscard]] std::int64_t bytes(std::int64_t elements) const;
};
[[nodiscard]] CodeForm form_of_parameters(const WireCodes& codes);
[[nodiscard]] CodeForm form_of_gradients(const WireCodes& codes);

/// From which degree to which, one hop after the other: sums of a part at `to` become sums of parts at `from`.
struct CodeHop {
  int from = 1;
  int to = 1;
};
[[nodiscard]] std::vector<CodeHop> hops_of_gradients(const Degrees& degrees);
/// Of the gather that has codes.
[[nodiscard]] CodeHop hop_of_parameters(const Degrees& degrees);
/// A rank keeps its part of each flat at the degree of a node, for further gathers of the same parameters.
[[nodiscard]] bool keeps_node_parts(const ShardingPlan& plan, const Degrees& degrees);

/// Bytes of memory of a rank, by plan: messages, and sums of a part.
struct CodeMemory {
  std::size_t gather = 0;      ///< messages of one flat
  std::size_t reduction = 0;   ///< messages and sums of one flat
  std::size_t node_parts = 0;  ///< of all flats
  [[nodiscard]] std::size_t messages() const { return gather + reduction; }
};
[[nodiscard]] CodeMemory code_memory(const ModelLayout& model, const ShardingPlan& plan, int rank);

/// Makes codes of, or values from, parts in memory of `kernels`.
class Coder {
 public:
  Coder(CodeForm form, Kernels& kernels, Stream stream) : form_(form), kernels_(kernels), stream_(std::move(stream)) {}
  [[nodiscard]] const CodeForm& form() const { return form_; }
  /// In a task of the stream, as value(). `n`: elements; `error` or null.
  void code(std::byte* message, const std::byte* values, DType dtype, float* error, std::int64_t n) const;
  /// The sum of the messages' values, times `factor`.
  void value(std::byte* values, DType dtype, const std::vector<const std::byte*>& messages, std::int64_t n,
             float factor = 1.0F) const;

 private:
  CodeForm form_;
  Kernels& kernels_;
  Stream stream_;
};

class CodedGather {
 public:
  /// `calls`: from the degree of parameters at rest, see hop_of_parameters(). Borrows all. Not collective.
  CodedGather(const ModelLayout& model, const ShardingPlan& plan, SubGroupCalls& calls, int rank, Kernels& kernels,
              Stream stream, MemoryLedger& ledger);
  /// Like SubGroupCalls::gather(); what comes are values of codes, on every rank. Enqueued on the stream.
  void gather(CallPurpose purpose, const FlatLayout& flat, const std::byte* part, std::byte* whole);

 private:
  SubGroupCalls& calls_;
  int rank_;
  Coder coder_;
  Stream stream_;
  Arena messages_;
  MemoryHold hold_;
};

class CodedReduction {
 public:
  /// Collective over `world`, blocks: makes the groups of the hops. Borrows all.
  CodedReduction(const ModelLayout& model, const ShardingPlan& plan, CommBackend& world, Kernels& kernels,
                 Stream stream, MemoryLedger& ledger);
  /// The sum over all ranks of `bucket`, in `dtype`, as float32: of this rank's piece. `bucket` has the whole flat, or
  /// with a degree of gradients this rank's part at it. Where there are errors ([length] float32, of the whole flat),
  /// they go into the messages and are replaced. Enqueued on the stream; the result is there until what the next call
  /// enqueues.
  const std::byte* reduce(const FlatLayout& flat, const std::byte* bucket, DType dtype, float* error);
  [[nodiscard]] std::size_t transport_bytes() const;

 private:
  /// One hop. `values`: this rank's part at hop.to(), whose sum over the ranks, of their parts at hop.from(), goes to
  /// `sum`.
  void hop(SubGroupCalls& calls, const FlatLayout& flat, const std::byte* values, DType dtype, float* error,
           std::byte* sum);

  int rank_;
  Coder coder_;
  Stream stream_;
  std::vector<std::unique_ptr<SubGroupCalls>> hops_;
  Arena memory_;
  MemoryHold hold_;
  std::byte* sent_ = nullptr;
  std::byte* received_ = nullptr;
  std::vector<std::byte*> sums_;  ///< one a hop
};

}  // namespace zeroth
