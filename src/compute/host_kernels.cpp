#include "compute/host_arithmetic.h"

#include <kernels/copy/copy.h>
#include <zeroth/compute/kernels.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace zeroth {
namespace {

constexpr std::size_t kGrain = std::size_t{16} << 10U;
/// Elements that are summed and then measured at a time: they stay in the cache.
constexpr std::int64_t kPiece = 16 * kernels::kNormBlock;

class HostKernels final : public Kernels {
 public:
  HostKernels(Device& device, ThreadPool& pool, kernels::Isa isa) : device_(device), pool_(pool), isa_(isa) {}

  ArenaKind memory() const override { return ArenaKind::kPrivate; }
  kernels::Isa host(std::string_view /*what*/) const override { return isa_; }

  Arena make_arena(std::size_t bytes, std::string_view name) override {
    return device_.make_arena(ArenaKind::kPrivate, bytes, name);
  }
  Scratch make_scratch(std::size_t bytes) override {
    const std::shared_ptr<std::byte[]> memory = std::make_shared_for_overwrite<std::byte[]>(bytes);
    return {memory, {memory.get(), bytes}};
  }
  Scratch make_words(std::size_t bytes) override {
    const std::shared_ptr<std::byte[]> memory = std::make_shared<std::byte[]>(bytes);
    return {memory, {memory.get(), bytes}};
  }

  void for_ranges(std::int64_t elements, const std::function<void(std::int64_t, std::int64_t)>& body) override {
    pool_.parallel_for(static_cast<std::size_t>(elements), kGrain, [&body](std::size_t begin, std::size_t end) {
      body(static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end));
    });
  }

  void copy(void* to, const void* from, std::size_t bytes, const Stream& /*stream*/) override {
    if (to == from) return;
    for_ranges(static_cast<std::int64_t>(bytes), [&](std::int64_t begin, std::int64_t end) {
      kernels::copy_stream(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                           end - begin, isa_);
    });
  }
  void copy_over_bus(void* to, const void* from, std::size_t bytes, const Stream& stream) override {
    copy(to, from, bytes, stream);
  }
  void convert(void* to, DType to_dtype, const void* from, DType from_dtype, std::int64_t n,
               const Stream& /*stream*/) override {
    kernels::sum_sources({.dst = to,
                          .dst_dtype = to_dtype,
                          .sources = &from,
                          .num_sources = 1,
                          .src_dtype = from_dtype,
                          .read_soon = true,
                          .n = n},
                         isa_);
  }
  void zero(void* to, std::size_t bytes, const Stream& /*stream*/) override {
    kernels::fill_zero(to, static_cast<std::int64_t>(bytes), isa_);
  }
  void fill(void* to, std::int64_t n, DType dtype, double value) override { detail::fill_entries(to, n, dtype, value); }
  void settle(const Stream& /*stream*/) override {}
  void store(const kernels::detail::BucketArgs& args, std::int64_t* nonfinite, const Stream& /*stream*/) override {
    std::atomic<std::int64_t> found{0};
    for_ranges(args.n, [&](std::int64_t begin, std::int64_t end) {
      std::byte* dst = static_cast<std::byte*>(args.dst) + array_bytes(begin, args.dst_dtype);
      const std::byte* src = static_cast<const std::byte*>(args.src) + array_bytes(begin, args.src_dtype);
      found += args.add ? kernels::bucket_add(dst, src, args.src_dtype, end - begin, isa_)
                        : kernels::bucket_store(dst, args.dst_dtype, src, args.src_dtype, end - begin, isa_);
    });
    *nonfinite += found.load();
  }
  void sum(const kernels::SumSourcesArgs& args, double factor, PendingNorm& norm, const Stream& /*stream*/) override {
    form(args.dst, args.dst_dtype, args.n, factor, norm, [&](std::byte* sum, std::int64_t at, std::int64_t n) {
      std::vector<const void*> parts;
      for (int source = 0; source < args.num_sources; ++source) {
        const DType dtype = args.src_dtypes != nullptr ? args.src_dtypes[source] : args.src_dtype;
        parts.push_back(static_cast<const std::byte*>(args.sources[source]) + array_bytes(at, dtype));
      }
      kernels::SumSourcesArgs piece = args;
      piece.dst = sum;
      piece.sources = parts.data();
      piece.n = n;
      kernels::sum_sources(piece, isa_);
    });
  }
  void measure(const void* data, DType dtype, std::int64_t n, double factor, PendingNorm& norm,
               const Stream& /*stream*/) override {
    form(const_cast<void*>(data), dtype, n, factor, norm, [](std::byte*, std::int64_t, std::int64_t) {});
  }
  void adamw(const kernels::AdamWArgs& args, const Stream& /*stream*/) override { kernels::adamw_step(args, isa_); }
  void sgd(const kernels::SgdArgs& args, const Stream& /*stream*/) override { kernels::sgd_step(args, isa_); }
  void lion(const kernels::LionArgs& args, const Stream& /*stream*/) override { kernels::lion_step(args, isa_); }
  void lamb_measure(const kernels::LambArgs& args, const Stream& /*stream*/) override {
    kernels::lamb_measure(args, isa_);
  }
  void lamb_apply(const kernels::LambArgs& args, const Stream& /*stream*/) override { kernels::lamb_apply(args, isa_); }
  void sign_message(const kernels::SignMessageArgs& args, const Stream& /*stream*/) override {
    kernels::sign_message(args, isa_);
  }
  void sign_pack(const kernels::SignPackArgs& args, const Stream& /*stream*/) override {
    kernels::sign_pack(args, isa_);
  }
  void sign_sum(const kernels::SignSumArgs& args, const Stream& /*stream*/) override { kernels::sign_sum(args, isa_); }
  void quantize(const kernels::QuantizeArgs& args, const Stream& /*stream*/) override { kernels::quantize(args, isa_); }
  void dequantize(const kernels::DequantizeArgs& args, const Stream& /*stream*/) override {
    kernels::dequantize(args, isa_);
  }
  void topk(const kernels::TopkArgs& args, const Stream& /*stream*/) override { kernels::topk(args, isa_); }
  void topk_add(const kernels::TopkAddArgs& args, const Stream& /*stream*/) override { kernels::topk_add(args); }
  void lowrank_product(const kernels::LowRankProductArgs& args, const Stream& /*stream*/) override {
    kernels::lowrank_product(args, isa_);
  }
  void lowrank_transposed_product(const kernels::LowRankProductArgs& args, const Stream& /*stream*/) override {
    kernels::lowrank_transposed_product(args, isa_);
  }
  void lowrank_restore(const kernels::LowRankRestoreArgs& args, const Stream& /*stream*/) override {
    kernels::lowrank_restore(args, isa_);
  }
  void lowrank_orthonormalize(const kernels::OrthonormalizeArgs& args, const Stream& /*stream*/) override {
    kernels::lowrank_orthonormalize(args, isa_);
  }
  void lowrank_draw_missing(const kernels::LowRankDrawArgs& args, const Stream& /*stream*/) override {
    kernels::lowrank_draw_missing(args);
  }

 private:
  /// Forms elements at `target` piece by piece (place, first element, elements), with their norm.
  void form(void* target, DType dtype, std::int64_t elements, double factor, PendingNorm& result,
            const std::function<void(std::byte*, std::int64_t, std::int64_t)>& piece) {
    // [Note: Norm at the sum] Squares are added while a piece of the sum is still in the cache, so that the step phase
    // need not read it once more. A later event changes the sum: it begins anew. Pieces may be added in any order: the
    // norm is exact.
    kernels::NormAccumulator& norm = result.begin();
    std::mutex merging;
    for_ranges(elements, [&](std::int64_t begin, std::int64_t end) {
      kernels::NormAccumulator part_norm;
      for (std::int64_t at = begin; at < end; at += kPiece) {
        const std::int64_t n = std::min(kPiece, end - at);
        std::byte* const sum = static_cast<std::byte*>(target) + array_bytes(at, dtype);
        piece(sum, at, n);
        detail::add_to_norm(part_norm, sum, dtype, n, factor, isa_);
      }
      const std::lock_guard lock(merging);
      norm.merge(part_norm);
    });
  }

  Device& device_;
  ThreadPool& pool_;
  kernels::Isa isa_;
};

}  // namespace

std::span<double> PendingNorm::begin_blocks(std::int64_t blocks, Kernels& kernels) {
  const std::size_t bytes = static_cast<std::size_t>(blocks) * sizeof(double);
  if (words_.bytes.size() != bytes) words_ = kernels.make_words(bytes);
  is_pending_ = true;
  return {reinterpret_cast<double*>(words_.bytes.data()), static_cast<std::size_t>(blocks)};
}

const kernels::NormAccumulator& PendingNorm::value() const {
  if (is_pending_) {
    norm_ = {};
    norm_.add_blocks({reinterpret_cast<const double*>(words_.bytes.data()), words_.bytes.size() / sizeof(double)});
    is_pending_ = false;
  }
  return norm_;
}

std::unique_ptr<Kernels> make_host_kernels(Device& device, ThreadPool& pool, kernels::Isa isa) {
  return std::make_unique<HostKernels>(device, pool, isa);
}

}  // namespace zeroth
