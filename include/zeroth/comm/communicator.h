// Communicator: the typed interface of a backend, with blocking calls and calls that return Work.
#pragma once

#include <zeroth/comm/backend.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

namespace zeroth {

/// Cheap to copy; copies share the group. T is double, float, BFloat16, Float16, std::int64_t, std::int32_t or
/// std::uint8_t. Throws kUsage if sizes of spans and counts do not fit. Blocking calls throw the errors of the Work.
/// The spans of a call that returns Work must live until the Work is done. Dtypes, order of sums and received bytes:
/// Collective and CommBackend::submit().
class Communicator {
 public:
  /// Blocking calls run on `stream`, or on an own inline stream.
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
  /// Sum, minimum or maximum over ranks, in place.
  template <class T>
  void all_reduce(std::span<T> data, ReduceOp op, MessageTag tag = {}) const {
    const Shares shares{.counts = {static_cast<std::int64_t>(data.size())}, .op = op};
    run<T, T>(CollectiveKind::kAllReduce, std::span<const T>(data), data, shares, stream_, tag).wait();
  }
  /// Equal parts: out has size() times the elements of shard.
  template <class T>
  void all_gather(std::span<const T> shard, std::span<T> out, MessageTag tag = {}) const {
    all_gather_async(shard, out, equal_counts(shard.size()), stream_, tag).wait();
  }
  template <class T>
  void all_gather(std::span<const T> shard, std::span<T> out, std::vector<std::int64_t> counts,
                  MessageTag tag = {}) const {
    all_gather_async(shard, out, std::move(counts), stream_, tag).wait();
  }
  template <class T>
  void reduce_scatter(std::span<const T> in, std::span<T> shard, std::vector<std::int64_t> counts, ReduceOp op,
                      MessageTag tag = {}) const {
    run<T, T>(CollectiveKind::kReduceScatter, in, shard, {.counts = std::move(counts), .op = op}, stream_, tag).wait();
  }
  template <class In, class Out>
  void reduce_scatter(std::span<const In> in, std::span<Out> shard, MessageTag tag = {}) const {
    reduce_scatter_async(in, shard, equal_counts(shard.size()), stream_, tag).wait();
  }
  template <class In, class Out>
  void reduce_scatter(std::span<const In> in, std::span<Out> shard, std::vector<std::int64_t> counts,
                      MessageTag tag = {}) const {
    reduce_scatter_async(in, shard, std::move(counts), stream_, tag).wait();
  }
  /// Copies the root's data to all ranks, in place.
  template <class T>
  void broadcast(std::span<T> data, int root, MessageTag tag = {}) const {
    broadcast_async(data, root, stream_, tag).wait();
  }
  /// Gathers equal parts of all ranks at the root: whole has size() times the elements of part there, else none.
  template <class T>
  void gather(std::span<const T> part, std::span<T> whole, int root, MessageTag tag = {}) const {
    gather_async(part, whole, equal_counts(part.size()), root, stream_, tag).wait();
  }
  template <class T>
  void gather(std::span<const T> part, std::span<T> whole, std::vector<std::int64_t> counts, int root,
              MessageTag tag = {}) const {
    gather_async(part, whole, std::move(counts), root, stream_, tag).wait();
  }
  /// Scatters equal parts of the root's data: whole has size() times the elements of part there, else none.
  template <class T>
  void scatter(std::span<const T> whole, std::span<T> part, int root, MessageTag tag = {}) const {
    scatter_async(whole, part, equal_counts(part.size()), root, stream_, tag).wait();
  }
  template <class T>
  void scatter(std::span<const T> whole, std::span<T> part, std::vector<std::int64_t> counts, int root,
               MessageTag tag = {}) const {
    scatter_async(whole, part, std::move(counts), root, stream_, tag).wait();
  }
  /// Part r of `in` goes to rank r, part r of `out` comes from rank r. Both have size() equal parts.
  template <class T>
  void all_to_all(std::span<const T> in, std::span<T> out, MessageTag tag = {}) const {
    std::vector<std::int64_t> counts = equal_counts(in.size() / static_cast<std::size_t>(size()));
    std::vector<std::int64_t> recv_counts = counts;
    run<T, T>(CollectiveKind::kAllToAll, in, out,
              {.counts = std::move(counts), .recv_counts = std::move(recv_counts), .equal_parts = true}, stream_, tag)
        .wait();
  }
  /// counts[r]: elements for rank r; recv_counts[r]: elements from rank r.
  template <class T>
  void all_to_all(std::span<const T> in, std::span<T> out, std::vector<std::int64_t> counts,
                  std::vector<std::int64_t> recv_counts, MessageTag tag = {}) const {
    all_to_all_async(in, out, std::move(counts), std::move(recv_counts), stream_, tag).wait();
  }
  void barrier(MessageTag tag = {}) const { barrier({}, tag); }
  /// A barrier with a name, which ranks compare: barriers with different names throw kMismatch with both names.
  void barrier(std::string_view name, MessageTag tag = {}) const;

  /// Sends to, or receives from, one other rank; see Collective.
  template <class T>
  void send(std::span<const T> data, int to, MessageTag tag = {}) const {
    const Collective call = send_call(data, to, tag);
    batch({&call, 1});
  }
  template <class T>
  void recv(std::span<T> data, int from, MessageTag tag = {}) const {
    const Collective call = recv_call(data, from, tag);
    batch({&call, 1});
  }
  template <class T>
  [[nodiscard]] static Collective send_call(std::span<const T> data, int to, MessageTag tag = {}) {
    return {.kind = CollectiveKind::kSend,
            .in_dtype = DTypeOf<T>::value,
            .out_dtype = DTypeOf<T>::value,
            .send = reinterpret_cast<const std::byte*>(data.data()),
            .counts = {static_cast<std::int64_t>(data.size())},
            .root = to,
            .tag = tag};
  }
  template <class T>
  [[nodiscard]] static Collective recv_call(std::span<T> data, int from, MessageTag tag = {}) {
    return {.kind = CollectiveKind::kRecv,
            .in_dtype = DTypeOf<T>::value,
            .out_dtype = DTypeOf<T>::value,
            .recv = reinterpret_cast<std::byte*>(data.data()),
            .counts = {static_cast<std::int64_t>(data.size())},
            .root = from,
            .tag = tag};
  }
  /// Submits calls as values; consecutive sends and receives run side by side.
  void batch(std::span<const Collective> calls) const { batch_async(calls, stream_).wait(); }
  Work batch_async(std::span<const Collective> calls, const Stream& stream) const {
    return backend_->submit(calls, stream);
  }

  /// Starts sends and receives as values; see CommBackend::start().
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points) const {
    return backend_->start(points, stream_);
  }
  /// Starts one; the spans must live until it is done.
  template <class T>
  [[nodiscard]] std::unique_ptr<PendingPoints> start_send(std::span<const T> data, int to, MessageTag tag = {}) const {
    const Collective call = send_call(data, to, tag);
    return start({&call, 1});
  }
  template <class T>
  [[nodiscard]] std::unique_ptr<PendingPoints> start_recv(std::span<T> data, int from, MessageTag tag = {}) const {
    const Collective call = recv_call(data, from, tag);
    return start({&call, 1});
  }

  template <class In, class Out>
  Work all_reduce_async(std::span<const In> in, std::span<Out> out, const Stream& stream, MessageTag tag = {}) const {
    return run<In, Out>(CollectiveKind::kAllReduce, in, out, {.counts = {static_cast<std::int64_t>(in.size())}}, stream,
                        tag);
  }
  template <class T>
  Work all_gather_async(std::span<const T> shard, std::span<T> out, std::vector<std::int64_t> counts,
                        const Stream& stream, MessageTag tag = {}) const {
    return run<T, T>(CollectiveKind::kAllGather, shard, out, {.counts = std::move(counts)}, stream, tag);
  }
  template <class In, class Out>
  Work reduce_scatter_async(std::span<const In> in, std::span<Out> shard, std::vector<std::int64_t> counts,
                            const Stream& stream, MessageTag tag = {}) const {
    return run<In, Out>(CollectiveKind::kReduceScatter, in, shard, {.counts = std::move(counts)}, stream, tag);
  }
  template <class T>
  Work broadcast_async(std::span<T> data, int root, const Stream& stream, MessageTag tag = {}) const {
    const std::span<const T> in = rank() == root ? std::span<const T>(data) : std::span<const T>();
    return run<T, T>(CollectiveKind::kBroadcast, in, data,
                     {.counts = {static_cast<std::int64_t>(data.size())}, .root = root}, stream, tag);
  }
  template <class T>
  Work gather_async(std::span<const T> part, std::span<T> whole, std::vector<std::int64_t> counts, int root,
                    const Stream& stream, MessageTag tag = {}) const {
    return run<T, T>(CollectiveKind::kGather, part, whole, {.counts = std::move(counts), .root = root}, stream, tag);
  }
  template <class T>
  Work scatter_async(std::span<const T> whole, std::span<T> part, std::vector<std::int64_t> counts, int root,
                     const Stream& stream, MessageTag tag = {}) const {
    return run<T, T>(CollectiveKind::kScatter, whole, part, {.counts = std::move(counts), .root = root}, stream, tag);
  }
  template <class T>
  Work all_to_all_async(std::span<const T> in, std::span<T> out, std::vector<std::int64_t> counts,
                        std::vector<std::int64_t> recv_counts, const Stream& stream, MessageTag tag = {}) const {
    return run<T, T>(CollectiveKind::kAllToAll, in, out,
                     {.counts = std::move(counts), .recv_counts = std::move(recv_counts)}, stream, tag);
  }

 private:
  struct Call {
    Collective collective{};
    std::int64_t send_elements = 0;
    std::int64_t recv_elements = 0;
  };
  /// Counts, operation and root of a call.
  struct Shares {
    std::vector<std::int64_t> counts{};
    std::vector<std::int64_t> recv_counts{};
    bool equal_parts = false;
    ReduceOp op = ReduceOp::kSum;
    int root = 0;
  };
  template <class In, class Out>
  Work run(CollectiveKind kind, std::span<const In> in, std::span<Out> out, Shares shares, const Stream& stream,
           MessageTag tag) const {
    return submit({.collective = {.kind = kind,
                                  .in_dtype = DTypeOf<In>::value,
                                  .out_dtype = DTypeOf<Out>::value,
                                  .send = reinterpret_cast<const std::byte*>(in.data()),
                                  .recv = reinterpret_cast<std::byte*>(out.data()),
                                  .counts = std::move(shares.counts),
                                  .recv_counts = std::move(shares.recv_counts),
                                  .equal_parts = shares.equal_parts,
                                  .op = shares.op,
                                  .root = shares.root,
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
