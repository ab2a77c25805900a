// Kernels: the arithmetic of an engine, on the memory of its device.
//
// Everything an engine computes or copies in its states goes through this interface. Two machines implement it, with
// the same bits: the host (threads and vector instructions) and a CUDA device (the module zeroth_cuda).
//
// A call names a stream and is made inside a task of it, or where its tasks run at once. On the host the work is done
// when the call returns. On a device it is on the stream, after what the stream holds.
#pragma once

#include <kernels/adamw/adamw.h>
#include <kernels/bucket/bucket_variants.h>
#include <kernels/common/dispatch.h>
#include <kernels/lamb/lamb.h>
#include <kernels/lion/lion.h>
#include <kernels/lowrank/lowrank.h>
#include <kernels/norm/norm.h>
#include <kernels/quant/quant.h>
#include <kernels/reduce/reduce.h>
#include <kernels/sgd/sgd.h>
#include <kernels/signs/signs.h>
#include <kernels/topk/topk.h>
#include <zeroth/base/dtype.h>
#include <zeroth/device/device.h>
#include <zeroth/device/thread_pool.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace zeroth {

/// Memory of one of the machines. Owns it.
struct Scratch {
  std::shared_ptr<void> keep{};
  std::span<std::byte> bytes{};
};

class Kernels;

/// The norm of a range that kernels have formed. Its value is there when their stream has come to them.
class PendingNorm {
 public:
  /// Of a range that is formed anew, on the host: nothing yet. For Kernels.
  kernels::NormAccumulator& begin() {
    is_pending_ = false;
    return norm_ = {};
  }
  /// The same on a device: memory for the sums of its blocks. For Kernels.
  [[nodiscard]] std::span<double> begin_blocks(std::int64_t blocks, Kernels& kernels);
  /// Sum of squares. The kernels' stream must have been synchronised.
  [[nodiscard]] const kernels::NormAccumulator& value() const;

 private:
  mutable kernels::NormAccumulator norm_{};
  Scratch words_{};
  mutable bool is_pending_ = false;
};

/// One engine's. Used by one thread at a time.
class Kernels {
 public:
  Kernels() = default;
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;
  virtual ~Kernels() = default;

  /// ArenaKind::kDevice, or kPrivate for memory of the host.
  [[nodiscard]] virtual ArenaKind memory() const = 0;
  [[nodiscard]] bool on_host() const { return memory() != ArenaKind::kDevice; }
  /// For loops of a caller's own. Throws kUsage, naming `what`, on a device.
  [[nodiscard]] virtual kernels::Isa host(std::string_view what) const = 0;

  /// Zeroed memory for states. Blocks.
  [[nodiscard]] virtual Arena make_arena(std::size_t bytes, std::string_view name) = 0;
  /// Memory for a while, not zeroed.
  [[nodiscard]] virtual Scratch make_scratch(std::size_t bytes) = 0;
  /// Zeroed memory that kernels write and the host reads, once their stream has been synchronised.
  [[nodiscard]] virtual Scratch make_words(std::size_t bytes) = 0;

  /// Calls body(begin, end) for ranges that make up [0, elements): on the host for pieces of at least 16 Ki elements on
  /// the engine's threads, on a device for all of it. Blocks until the bodies have returned.
  virtual void for_ranges(std::int64_t elements, const std::function<void(std::int64_t, std::int64_t)>& body) = 0;

  /// Either side may be memory of the host; copies to and from it block until they are done.
  virtual void copy(void* to, const void* from, std::size_t bytes, const Stream& stream) = 0;
  /// Between memory of the device and Device::make_copy_memory(): done when `stream` has come to it. The host does not
  /// wait.
  virtual void copy_over_bus(void* to, const void* from, std::size_t bytes, const Stream& stream) = 0;
  /// n elements in another dtype: from fp32 to 16 bits, rounded to nearest even, and back. On the calling thread: for
  /// for_ranges().
  virtual void convert(void* to, DType to_dtype, const void* from, DType from_dtype, std::int64_t n,
                       const Stream& stream) = 0;
  virtual void zero(void* to, std::size_t bytes, const Stream& stream) = 0;
  /// Sets n entries to `value`, rounded to `dtype`. Blocks.
  virtual void fill(void* to, std::int64_t n, DType dtype, double value) = 0;
  /// Blocks until what `stream` was given is done: the host may use its results, and memory of its arguments again.
  virtual void settle(const Stream& stream) = 0;
  /// bucket_store() or bucket_add(): adds the number of infinite and NaN elements to *nonfinite (make_words()).
  virtual void store(const kernels::detail::BucketArgs& args, std::int64_t* nonfinite, const Stream& stream) = 0;
  /// sum_sources(), and the norm of the sums, each times `factor`.
  virtual void sum(const kernels::SumSourcesArgs& args, double factor, PendingNorm& norm, const Stream& stream) = 0;
  /// The norm of n elements of an accumulation dtype, each times `factor`.
  virtual void measure(const void* data, DType dtype, std::int64_t n, double factor, PendingNorm& norm,
                       const Stream& stream) = 0;
  /// On the calling thread: for for_ranges().
  virtual void adamw(const kernels::AdamWArgs& args, const Stream& stream) = 0;
  virtual void sgd(const kernels::SgdArgs& args, const Stream& stream) = 0;
  virtual void lion(const kernels::LionArgs& args, const Stream& stream) = 0;
  /// The measures are memory of make_words(), or on the host any.
  virtual void lamb_measure(const kernels::LambArgs& args, const Stream& stream) = 0;
  virtual void lamb_apply(const kernels::LambArgs& args, const Stream& stream) = 0;
  /// Those of kernels/signs/signs.h, on the calling thread: for for_ranges(), at multiples of 8 elements.
  virtual void sign_message(const kernels::SignMessageArgs& args, const Stream& stream) = 0;
  virtual void sign_pack(const kernels::SignPackArgs& args, const Stream& stream) = 0;
  virtual void sign_sum(const kernels::SignSumArgs& args, const Stream& stream) = 0;
  /// Those of kernels/quant/quant.h, on the calling thread: for for_ranges(), at whole blocks.
  virtual void quantize(const kernels::QuantizeArgs& args, const Stream& stream) = 0;
  virtual void dequantize(const kernels::DequantizeArgs& args, const Stream& stream) = 0;
  /// Those of kernels/topk/topk.h. Both block: on a device memory of the call goes after it, and the host looks at
  /// whether places fit. There the places of one source are distinct, and `room` is not used.
  virtual void topk(const kernels::TopkArgs& args, const Stream& stream) = 0;
  virtual void topk_add(const kernels::TopkAddArgs& args, const Stream& stream) = 0;
  /// Those of kernels/lowrank/lowrank.h, on the calling thread.
  virtual void lowrank_product(const kernels::LowRankProductArgs& args, const Stream& stream) = 0;
  virtual void lowrank_transposed_product(const kernels::LowRankProductArgs& args, const Stream& stream) = 0;
  virtual void lowrank_restore(const kernels::LowRankRestoreArgs& args, const Stream& stream) = 0;
  virtual void lowrank_orthonormalize(const kernels::OrthonormalizeArgs& args, const Stream& stream) = 0;
  virtual void lowrank_draw_missing(const kernels::LowRankDrawArgs& args, const Stream& stream) = 0;
};

/// Those of the host. Borrows `device` and `pool`.
[[nodiscard]] std::unique_ptr<Kernels> make_host_kernels(Device& device, ThreadPool& pool, kernels::Isa isa);

/// Those of the device's machine. For a CUDA device the module zeroth_cuda is loaded: the file that ZEROTH_CUDA_MODULE
/// names, else libzeroth_cuda.so as the dynamic linker finds it. Throws kEnvironment without it. Borrows both.
[[nodiscard]] std::unique_ptr<Kernels> make_kernels(Device& device, ThreadPool& pool);

}  // namespace zeroth
