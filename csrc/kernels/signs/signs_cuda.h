// signs.h on a CUDA device: the arithmetic of lane.h, so it has the bits of the CPU variants.
#pragma once

#include <kernels/signs/signs.h>

// Each enqueues the call of signs.h of its name on `stream` (a cudaStream_t). All arrays are memory of the device, with
// the alignment of their types; the list of sources is memory of the host, which is read before the return. Each
// returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for null and for arguments that the host's call
// refuses; or the error of the launch. None blocks.
extern "C" int zeroth_cuda_sign_message(const zeroth::kernels::SignMessageArgs* args, void* stream);
extern "C" int zeroth_cuda_sign_pack(const zeroth::kernels::SignPackArgs* args, void* stream);
/// Also refuses more than 128 sources into a dst that is the error.
extern "C" int zeroth_cuda_sign_sum(const zeroth::kernels::SignSumArgs* args, void* stream);
