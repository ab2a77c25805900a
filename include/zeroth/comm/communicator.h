// Communicator: the pleasant face of a backend. Typed spans, blocking calls and calls that return Work.
#pragma once

#include <zeroth/comm/backend.h>

#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

namespace zeroth {

/// Cheap to copy; copies speak for the same seat. T is double, float, BFloat16, std::int64_t, std::int32_t or
/// std::uint8_t. Sizes are checked: kUsage when spans and counts do not fit. Blocking calls throw what the
/// Work would throw.
class Communicator {
 public:
  /// Blocking calls run on an inline stream of its own, or on `stream`.
  explicit Communicator(std::shared_ptr<CommBackend> backend);
  Communicator(std::shared_ptr<CommBackend> backend, Stream stream);

  [[nodiscard]] int rank() const { return backend_->rank(); }
  [[nodiscard]] int size() const { return backend_->size(); }
  [[nodiscard]] CommBackend& backend() const { return *backend_; }
  [[nodiscard]] const std::shared_ptr<CommBackend>& shared_backend() const { return backend_; }
  [[nodiscard]] const Stream& stream() const { return stream_; }

  /// Sum over ranks, in place.
  template <class T>
  void all_reduce(std::span<T> data, MessageTag tag = {}) const {
    all_reduce_async(std::span<const T>(data), data, stream_, tag).wait();
  }
  template <class In, class Out>
  void all_reduce(std::span<const In> in, std::span<Out> out, MessageTag tag = {}) const {
    all_reduce_async(in, out, stream_, tag).wait();
  }
  /// Equal parts: out is size() times shard.
  template <class T>
  void all_gather(std::span<const T> shard, std::span<T> out, MessageTag tag = {}) const {
    all_gather_async(shard, out, equal_counts(shard.size()), stream_, tag).wait();
  }
  template <class T>
  void all_gather(std::span<const T> shard,
                  std::span<T> out,
                  std::vector<std::int64_t> counts,
                  MessageTag tag = {}) const {
    all_gather_async(shard, out, std::move(counts), stream_, tag).wait();
  }
  template <class In, class Out>
  void reduce_scatter(std::span<const In> in, std::span<Out> shard, MessageTag tag = {}) const {
    reduce_scatter_async(in, shard, equal_counts(shard.size()), stream_, tag).wait();
  }
  template <class In, class Out>
  void reduce_scatter(std::span<const In> in,
                      std::span<Out> shard,
                      std::vector<std::int64_t> counts,
                      MessageTag tag = {}) const {
    reduce_scatter_async(in, shard, std::move(counts), stream_, tag).wait();
  }
  /// The root's data to everybody, in place.
  template <class T>
  void broadcast(std::span<T> data, int root, MessageTag tag = {}) const {
    broadcast_async(data, root, stream_, tag).wait();
  }
  void barrier(MessageTag tag = {}) const;

  template <class In, class Out>
  Work all_reduce_async(std::span<const In> in,
                        std::span<Out> out,
                        const Stream& stream,
                        MessageTag tag = {}) const {
    return run<In, Out>(
        CollectiveKind::kAllReduce, in, out, {static_cast<std::int64_t>(in.size())}, 0, stream, tag);
  }
  template <class T>
  Work all_gather_async(std::span<const T> shard,
                        std::span<T> out,
                        std::vector<std::int64_t> counts,
                        const Stream& stream,
                        MessageTag tag = {}) const {
    return run<T, T>(CollectiveKind::kAllGather, shard, out, std::move(counts), 0, stream, tag);
  }
  template <class In, class Out>
  Work reduce_scatter_async(std::span<const In> in,
                            std::span<Out> shard,
                            std::vector<std::int64_t> counts,
                            const Stream& stream,
                            MessageTag tag = {}) const {
    return run<In, Out>(CollectiveKind::kReduceScatter, in, shard, std::move(counts), 0, stream, tag);
  }
  template <class T>
  Work broadcast_async(std::span<T> data, int root, const Stream& stream, MessageTag tag = {}) const {
    return run<T, T>(CollectiveKind::kBroadcast,
                     std::span<const T>(data),
                     data,
                     {static_cast<std::int64_t>(data.size())},
                     root,
                     stream,
                     tag);
  }

 private:
  struct Call {
    Collective collective{};
    std::int64_t send_elements = 0;
    std::int64_t recv_elements = 0;
  };
  template <class In, class Out>
  Work run(CollectiveKind kind,
           std::span<const In> in,
           std::span<Out> out,
           std::vector<std::int64_t> counts,
           int root,
           const Stream& stream,
           MessageTag tag) const {
    return submit({.collective = {.kind = kind,
                                  .in_dtype = DTypeOf<In>::value,
                                  .out_dtype = DTypeOf<Out>::value,
                                  .send = reinterpret_cast<const std::byte*>(in.data()),
                                  .recv = reinterpret_cast<std::byte*>(out.data()),
                                  .counts = std::move(counts),
                                  .root = root,
                                  .tag = tag},
                   .send_elements = static_cast<std::int64_t>(in.size()),
                   .recv_elements = static_cast<std::int64_t>(out.size())},
                  stream);
  }
  [[nodiscard]] std::vector<std::int64_t> equal_counts(std::size_t shard) const {
    return std::vector<std::int64_t>(static_cast<std::size_t>(size()), static_cast<std::int64_t>(shard));
  }
  Work submit(const Call& call, const Stream& stream) const;

  std::shared_ptr<CommBackend> backend_;
  Stream stream_;
};

}  // namespace zeroth
