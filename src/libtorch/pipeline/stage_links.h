// StageLinks: values and gradients between the ranks of a pipeline.
//
// A message is a head of fixed size, the form of the values where it is another than last time on this link, and one
// message a tensor. Sends are started and go on while the rank computes; the links keep what is sent until it is. A
// receive takes what comes next from that rank and keeps it until somebody asks for it: so the order in which values
// are wanted need not be the one in which they were sent.
//
// Where several ranks of a stage have the same values (tensor parallelism), each may send its slice of a tensor to its
// counterpart, and the ranks there gather the slices: between nodes every element goes once.
// Ref: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 4.1.
#pragma once

#include "libtorch/pipeline/stage_values.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/program/action.h>

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth::libtorch {

/// What is sent of one micro-batch: values of a chunk's input or gradients of its output; or what a V_ action tells.
struct Parcel {
  bool is_gradient = false;
  int chunk = 0;  ///< the chunk that takes it; -1: what `told_by` tells
  int micro_batch = 0;
  ActionKind told_by = ActionKind::kForward;  ///< kVocabInput, kVocabSum or kVocabInputGradient
  auto operator<=>(const Parcel&) const = default;
};

class StageLinks {
 public:
  /// What runs, for messages.
  struct Run {
    bool trains = true;
    int micro_batches = 0;
  };
  /// `copies`: the ranks that have the same values as this one and send slices of them; none: all is sent whole. Names
  /// the calls of `stages` for errors of waits: by what is awaited from which stage. `device`: where this stage
  /// computes; tensors of a device travel through memory of the host.
  StageLinks(Communicator stages, std::optional<Communicator> copies, c10::Device device);
  StageLinks(const StageLinks&) = delete;
  StageLinks& operator=(const StageLinks&) = delete;
  ~StageLinks();

  /// From now on parcels are those of this step, and of the program with this digest: others are kMismatch.
  void begin_step(std::uint64_t step, std::uint64_t digest, Run run);
  /// Returns at once. Shares the tensors, which must not be written to any more.
  void send(int to, const Parcel& parcel, SentValues values);
  /// Blocks until it is there. Throws kMismatch, with ranks and parcels, if the other rank runs another program.
  [[nodiscard]] SentValues receive(int from, const Parcel& parcel);
  /// Blocks until all that was sent has been taken, or is on its way without this rank's memory.
  void settle();
  /// After a failure: forgets everything.
  void abandon() noexcept;

  [[nodiscard]] std::uint64_t sent_bytes() const { return sent_bytes_; }
  [[nodiscard]] std::uint64_t received_bytes() const { return received_bytes_; }
  [[nodiscard]] std::uint64_t descriptions() const { return descriptions_; }
  void reset_counters() { sent_bytes_ = received_bytes_ = descriptions_ = 0; }

 private:
  struct Head;
  struct Sending;
  /// Form of the last values of a kind: of a chunk's inputs or gradients, from or to one rank.
  using Link = std::tuple<int, bool, int, ActionKind>;

  void forget_sent();
  /// Says why the message that came in the place of `wanted` is not one of this step.
  [[noreturn]] void refuse(const Head& head, int from, const Parcel& wanted) const;
  [[nodiscard]] std::pair<Parcel, SentValues> take_next(int from, const Parcel& wanted);
  [[nodiscard]] std::string name_of_stage(int stage) const;

  /// Bytes of a tensor that go between two ranks: all, or this rank's slice.
  [[nodiscard]] std::span<std::byte> slice_of(const at::Tensor& tensor, bool in_slices) const;
  [[nodiscard]] bool can_slice(const at::Tensor& tensor) const;

  Communicator stages_;
  std::optional<Communicator> copies_;
  c10::Device device_;
  std::shared_ptr<std::atomic<ActionWord>> awaited_;  ///< the message that a wait is for, as its action; 0: unknown
  std::uint64_t digest_ = 0;
  std::uint64_t step_ = 0;
  Run run_{};
  std::map<Link, std::string> sent_forms_;
  std::map<Link, std::string> received_forms_;
  std::deque<std::unique_ptr<Sending>> sending_;
  std::map<std::pair<int, Parcel>, SentValues> arrived_;
  std::uint64_t sent_bytes_ = 0;
  std::uint64_t received_bytes_ = 0;
  std::uint64_t descriptions_ = 0;
};

}  // namespace zeroth::libtorch
