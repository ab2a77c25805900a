#include "compute/cuda_kernels.h"

#include "compute/host_arithmetic.h"
#include "device/shared_library.h"

#include <zeroth/base/error.h>
#include <zeroth/compute/device_rows.h>

#include <string>
#include <vector>

namespace zeroth {
namespace detail {
namespace {

class CudaKernels final : public Kernels {
 public:
  CudaKernels(const CudaTable& cuda, const CudaKernelTable& table, Device& device)
      : cuda_(cuda), table_(table), device_(device), stream_(device.make_stream("memory")) {}

  ArenaKind memory() const override { return ArenaKind::kDevice; }
  kernels::Isa host(std::string_view what) const override {
    throw Error(ErrorCode::kUsage, "a computation that the device has no kernel for",
                {.where = "compute.cuda",
                 .which = std::string(what),
                 .expected = "states in memory of the host",
                 .hint = "AdamW, Adam, SGD, Lion and LAMB have kernels; train this one on the CPU"});
  }

  Arena make_arena(std::size_t bytes, std::string_view name) override {
    Arena arena = device_.make_arena(ArenaKind::kDevice, bytes, name);
    zero(arena.data(), bytes, stream_);
    stream_.synchronize();
    return arena;
  }
  Scratch make_scratch(std::size_t bytes) override {
    const Arena arena = device_.make_arena(ArenaKind::kDevice, bytes, "scratch");
    return {arena.keep_alive(), {arena.data(), bytes}};
  }
  Scratch make_words(std::size_t bytes) override {
    if (bytes == 0) return {};
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    PinResult pinned = pin_memory(cuda_, bytes);
    check(pinned.status, "to pin memory");
    std::byte* const memory = pinned.memory.get();
    fill_entries(memory, static_cast<std::int64_t>(bytes), DType::kUInt8, 0.0);
    return {std::shared_ptr<std::byte>(std::move(pinned.memory)), {memory, bytes}};
  }

  void for_ranges(std::int64_t elements, const std::function<void(std::int64_t, std::int64_t)>& body) override {
    if (elements > 0) body(0, elements);
  }

  void copy(void* to, const void* from, std::size_t bytes, const Stream& stream) override {
    if (to == from || bytes == 0) return;
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(cuda_.copy(to, from, bytes, kCudaCopyAnyWay, stream.native()), "to copy");
    if (is_of_host(to) || is_of_host(from)) stream.synchronize();
  }
  void copy_over_bus(void* to, const void* from, std::size_t bytes, const Stream& stream) override {
    if (bytes == 0) return;
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(cuda_.copy(to, from, bytes, kCudaCopyAnyWay, stream.native()), "to copy over the bus");
  }
  void convert(void* to, DType to_dtype, const void* from, DType from_dtype, std::int64_t n,
               const Stream& stream) override {
    if (n > 0)
      add_up({.dst = to, .dst_dtype = to_dtype, .sources = &from, .num_sources = 1, .src_dtype = from_dtype, .n = n},
             stream);
  }
  void zero(void* to, std::size_t bytes, const Stream& stream) override {
    if (bytes == 0) return;
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.fill_zero(to, static_cast<std::int64_t>(bytes), stream.native()), "to set memory to zero");
  }
  void fill(void* to, std::int64_t n, DType dtype, double value) override {
    std::vector<std::byte> entries(array_bytes(n, dtype));
    fill_entries(entries.data(), n, dtype, value);
    copy(to, entries.data(), entries.size(), stream_);
  }
  void settle(const Stream& stream) override { stream.synchronize(); }
  void store(const kernels::detail::BucketArgs& args, std::int64_t* nonfinite, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.bucket(&args, nonfinite, stream.native()), "to store a gradient");
  }
  void sum(const kernels::SumSourcesArgs& args, double factor, PendingNorm& norm, const Stream& stream) override {
    add_up(args, stream);
    measure(args.dst, args.dst_dtype, args.n, factor, norm, stream);
  }
  void measure(const void* data, DType dtype, std::int64_t n, double factor, PendingNorm& norm,
               const Stream& stream) override {
    if (factor != 1.0) {  // rare, and there is no kernel that scales first
      std::vector<std::byte> values(array_bytes(n, dtype));
      copy(values.data(), data, values.size(), stream);
      return add_to_norm(norm.begin(), values.data(), dtype, n, factor, kernels::best_isa());
    }
    const std::span<double> blocks = norm.begin_blocks((n + kernels::kNormBlock - 1) / kernels::kNormBlock, *this);
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.norm_blocks(data, dtype, n, blocks.data(), stream.native()), "to measure gradients");
  }
  void adamw(const kernels::AdamWArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.adamw(&args, stream.native()), "to update parameters");
  }
  void sgd(const kernels::SgdArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.sgd(&args, stream.native()), "to update parameters");
  }
  void lion(const kernels::LionArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lion(&args, stream.native()), "to update parameters");
  }
  void lamb_measure(const kernels::LambArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lamb_measure(&args, stream.native()), "to measure parameters");
  }
  void lamb_apply(const kernels::LambArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lamb_apply(&args, stream.native()), "to update parameters");
  }
  void sign_message(const kernels::SignMessageArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.sign_message(&args, stream.native()), "to form a message");
  }
  void sign_pack(const kernels::SignPackArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.sign_pack(&args, stream.native()), "to pack signs");
  }
  void sign_sum(const kernels::SignSumArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.sign_sum(&args, stream.native()), "to sum signs");
  }
  void quantize(const kernels::QuantizeArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.quantize(&args, stream.native()), "to make codes");
  }
  void dequantize(const kernels::DequantizeArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.dequantize(&args, stream.native()), "to sum codes");
  }
  void topk(const kernels::TopkArgs& args, const Stream& stream) override {
    if (args.n == 0) return;
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    const Scratch workspace = make_scratch(static_cast<std::size_t>(table_.topk_workspace(args.n)));
    check(table_.topk(&args, workspace.bytes.data(), stream.native()), "to find the greatest elements");
    stream.synchronize();  // the workspace goes
  }
  void topk_add(const kernels::TopkAddArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    if (count_.bytes.empty()) count_ = make_words(sizeof(std::int64_t));
    auto* const outside = reinterpret_cast<std::int64_t*>(count_.bytes.data());
    *outside = 0;  // nothing writes it: each call has waited for its kernels
    check(table_.topk_outside(&args, outside, stream.native()), "to look at places");
    settle(stream);
    ZR_CHECK(*outside == 0, ErrorCode::kUsage, "a sum has no such place",
             {.where = "kernels.topk_add",
              .expected = "0 to " + std::to_string(args.n - 1),
              .got = std::to_string(*outside) + " others"});
    check(table_.topk_add(&args, stream.native()), "to add the greatest elements");
  }
  void lowrank_product(const kernels::LowRankProductArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lowrank_product(&args, stream.native()), "to multiply a matrix");
  }
  void lowrank_transposed_product(const kernels::LowRankProductArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lowrank_transposed_product(&args, stream.native()), "to multiply a matrix");
  }
  void lowrank_restore(const kernels::LowRankRestoreArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lowrank_restore(&args, stream.native()), "to multiply factors");
  }
  void lowrank_orthonormalize(const kernels::OrthonormalizeArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lowrank_orthonormalize(&args, stream.native()), "to make columns orthonormal");
  }
  void lowrank_draw_missing(const kernels::LowRankDrawArgs& args, const Stream& stream) override {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    check(table_.lowrank_draw_missing(&args, stream.native()), "to draw columns");
  }

 private:
  static constexpr std::string_view kWhere = "compute.cuda";

  void add_up(const kernels::SumSourcesArgs& args, const Stream& stream) {
    const CudaDeviceScope scope(cuda_, device_.ordinal(), kWhere);
    const std::int64_t bytes = table_.sum_sources_workspace(&args);
    const Scratch workspace = make_scratch(static_cast<std::size_t>(bytes));
    check(table_.sum_sources(&args, bytes > 0 ? workspace.bytes.data() : nullptr, stream.native()), "to sum gradients");
    if (bytes > 0) stream.synchronize();  // the workspace goes
  }
  void check(CudaStatus status, std::string_view call) const { check_cuda(cuda_, status, call, kWhere); }
  [[nodiscard]] bool is_of_host(const void* address) const {
    CudaPointer about;
    check(cuda_.pointer(&about, address), "to look at an address");
    return about.type == kCudaMemoryUnknown || about.type == kCudaMemoryHost;
  }

  const CudaTable& cuda_;
  const CudaKernelTable& table_;
  Device& device_;
  Stream stream_;
  Scratch count_{};  ///< that kernels write and the host reads
};

}  // namespace

const CudaKernelTable& load_cuda_kernels() {
  static const CudaKernelTable loaded = [] {
    const SharedLibrary library = SharedLibrary::open(
        {.where = "compute.cuda",
         .what = "Zeroth's CUDA kernels",
         .names = {"libzeroth_cuda.so"},
         .variable = "ZEROTH_CUDA_MODULE",
         .probe = "zeroth_cuda_adamw",
         .hint = "build Zeroth where nvcc is found (ZEROTH_CUDA=ON), or name the file in ZEROTH_CUDA_MODULE"});
    CudaKernelTable table;
    library.find(table.adamw, "zeroth_cuda_adamw");
    library.find(table.sgd, "zeroth_cuda_sgd");
    library.find(table.lion, "zeroth_cuda_lion");
    library.find(table.lamb_measure, "zeroth_cuda_lamb_measure");
    library.find(table.lamb_apply, "zeroth_cuda_lamb_apply");
    library.find(table.sign_message, "zeroth_cuda_sign_message");
    library.find(table.sign_pack, "zeroth_cuda_sign_pack");
    library.find(table.sign_sum, "zeroth_cuda_sign_sum");
    library.find(table.quantize, "zeroth_cuda_quantize");
    library.find(table.dequantize, "zeroth_cuda_dequantize");
    library.find(table.topk_workspace, "zeroth_cuda_topk_workspace");
    library.find(table.topk, "zeroth_cuda_topk");
    library.find(table.topk_outside, "zeroth_cuda_topk_outside");
    library.find(table.topk_add, "zeroth_cuda_topk_add");
    library.find(table.lowrank_product, "zeroth_cuda_lowrank_product");
    library.find(table.lowrank_transposed_product, "zeroth_cuda_lowrank_transposed_product");
    library.find(table.lowrank_restore, "zeroth_cuda_lowrank_restore");
    library.find(table.lowrank_orthonormalize, "zeroth_cuda_lowrank_orthonormalize");
    library.find(table.lowrank_draw_missing, "zeroth_cuda_lowrank_draw_missing");
    library.find(table.bucket, "zeroth_cuda_bucket");
    library.find(table.fill_zero, "zeroth_cuda_fill_zero");
    library.find(table.norm_blocks, "zeroth_cuda_norm_blocks");
    library.find(table.sum_sources, "zeroth_cuda_sum_sources");
    library.find(table.gather_rows, "zeroth_cuda_gather_rows");
    library.find(table.sum_sources_workspace, "zeroth_cuda_sum_sources_workspace");
    return table;
  }();
  return loaded;
}

std::unique_ptr<Kernels> make_cuda_kernels(const CudaTable& cuda, const CudaKernelTable& table, Device& device) {
  return std::make_unique<CudaKernels>(cuda, table, device);
}

void gather_rows_on_device(const CudaTable& cuda, const CudaKernelTable& table, const kernels::GatherRowsArgs& args,
                           void* stream) {
  constexpr std::string_view kRows = "host_table";
  ZR_CHECK(args.n >= 0 && args.rows >= 0 && args.dim >= 1, ErrorCode::kUsage, "a table has rows without values",
           {.where = std::string(kRows), .expected = "1 or more", .got = std::to_string(args.dim)});
  check_cuda(cuda, table.gather_rows(&args, stream), "to gather rows of a table", kRows);
}

}  // namespace detail

void gather_rows_on_device(const kernels::GatherRowsArgs& args, void* stream) {
  detail::gather_rows_on_device(detail::load_cuda(), detail::load_cuda_kernels(), args, stream);
}

std::unique_ptr<Kernels> make_kernels(Device& device, ThreadPool& pool) {
  if (device.execution_mode() != ExecutionMode::kDevice) return make_host_kernels(device, pool, kernels::best_isa());
  return detail::make_cuda_kernels(detail::load_cuda(), detail::load_cuda_kernels(), device);
}

}  // namespace zeroth
