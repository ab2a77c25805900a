// The kernels of a mixture of experts on a CUDA device: the arithmetic and orders of gate.h, dispatch.h and permute.h,
// so they have the bits of the CPU variants.
#pragma once

#include <kernels/moe/dispatch.h>
#include <kernels/moe/gate.h>
#include <kernels/moe/permute.h>

#include <cstddef>

// Each enqueues the call of its name on `stream` (a cudaStream_t). All arrays are memory of the device, with the
// alignment of their types. What the host's call reads in arrays is not checked: places of rows, chosen experts and the
// bias have to be right. Each returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for null and for
// counts and dtypes that the host's call refuses; or the error of the launch. None blocks.
extern "C" int zeroth_cuda_moe_permute(const zeroth::kernels::PermuteArgs* args, void* stream);
extern "C" int zeroth_cuda_moe_unpermute(const zeroth::kernels::UnpermuteArgs* args, void* stream);
extern "C" int zeroth_cuda_moe_unpermute_weights(const zeroth::kernels::UnpermuteArgs* args, void* stream);
extern "C" int zeroth_cuda_moe_jitter(const zeroth::kernels::JitterArgs* args, void* stream);

/// Bytes of the workspace of zeroth_cuda_moe_gate() and zeroth_cuda_moe_gate_backward(): memory of the device, of
/// 8-byte alignment. 0 for what those refuse.
extern "C" std::size_t zeroth_cuda_moe_gate_workspace(const zeroth::kernels::GateRule* rule, zeroth::DType dtype,
                                                      std::int64_t tokens);
/// Also refuses score_sums without scores.
extern "C" int zeroth_cuda_moe_gate(const zeroth::kernels::GateArgs* args, void* workspace, void* stream);
extern "C" int zeroth_cuda_moe_gate_backward(const zeroth::kernels::GateBackwardArgs* args, void* workspace,
                                             void* stream);
