// Kernels of a CUDA device over tables of C functions.
#pragma once

#include "device/cuda/cuda_table.h"

#include <kernels/rows/rows.h>
#include <zeroth/compute/kernels.h>

#include <memory>

namespace zeroth::detail {

/// The functions of the module zeroth_cuda (csrc/kernels/*/*_cuda.h), which return a cudaError_t.
struct CudaKernelTable {
  CudaStatus (*adamw)(const kernels::AdamWArgs* args, void* stream) = nullptr;
  CudaStatus (*sgd)(const kernels::SgdArgs* args, void* stream) = nullptr;
  CudaStatus (*lion)(const kernels::LionArgs* args, void* stream) = nullptr;
  CudaStatus (*lamb_measure)(const kernels::LambArgs* args, void* stream) = nullptr;
  CudaStatus (*lamb_apply)(const kernels::LambArgs* args, void* stream) = nullptr;
  CudaStatus (*sign_message)(const kernels::SignMessageArgs* args, void* stream) = nullptr;
  CudaStatus (*sign_pack)(const kernels::SignPackArgs* args, void* stream) = nullptr;
  CudaStatus (*sign_sum)(const kernels::SignSumArgs* args, void* stream) = nullptr;
  CudaStatus (*quantize)(const kernels::QuantizeArgs* args, void* stream) = nullptr;
  CudaStatus (*dequantize)(const kernels::DequantizeArgs* args, void* stream) = nullptr;
  std::int64_t (*topk_workspace)(std::int64_t n) = nullptr;
  CudaStatus (*topk)(const kernels::TopkArgs* args, void* workspace, void* stream) = nullptr;
  CudaStatus (*topk_outside)(const kernels::TopkAddArgs* args, std::int64_t* outside, void* stream) = nullptr;
  CudaStatus (*topk_add)(const kernels::TopkAddArgs* args, void* stream) = nullptr;
  CudaStatus (*lowrank_product)(const kernels::LowRankProductArgs* args, void* stream) = nullptr;
  CudaStatus (*lowrank_transposed_product)(const kernels::LowRankProductArgs* args, void* stream) = nullptr;
  CudaStatus (*lowrank_restore)(const kernels::LowRankRestoreArgs* args, void* stream) = nullptr;
  CudaStatus (*lowrank_orthonormalize)(const kernels::OrthonormalizeArgs* args, void* stream) = nullptr;
  CudaStatus (*lowrank_draw_missing)(const kernels::LowRankDrawArgs* args, void* stream) = nullptr;
  CudaStatus (*bucket)(const kernels::detail::BucketArgs* args, std::int64_t* nonfinite, void* stream) = nullptr;
  CudaStatus (*fill_zero)(void* dst, std::int64_t bytes, void* stream) = nullptr;
  CudaStatus (*norm_blocks)(const void* src, DType dtype, std::int64_t n, double* sums, void* stream) = nullptr;
  CudaStatus (*sum_sources)(const kernels::SumSourcesArgs* args, void* workspace, void* stream) = nullptr;
  CudaStatus (*gather_rows)(const kernels::GatherRowsArgs* args, void* stream) = nullptr;
  std::int64_t (*sum_sources_workspace)(const kernels::SumSourcesArgs* args) = nullptr;
};

/// Looked for once; see make_kernels(). Throws kEnvironment.
[[nodiscard]] const CudaKernelTable& load_cuda_kernels();

/// On `device`, a CUDA device. Borrows everything.
[[nodiscard]] std::unique_ptr<Kernels> make_cuda_kernels(const CudaTable& cuda, const CudaKernelTable& table,
                                                         Device& device);

/// See zeroth::gather_rows_on_device().
void gather_rows_on_device(const CudaTable& cuda, const CudaKernelTable& table, const kernels::GatherRowsArgs& args,
                           void* stream);

}  // namespace zeroth::detail
