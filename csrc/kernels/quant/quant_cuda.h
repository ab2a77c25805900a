// quant.h on a CUDA device: the arithmetic of lane.h, so it has the bits of the CPU variants.
#pragma once

#include <kernels/quant/quant.h>

// Each enqueues the call of quant.h of its name on `stream` (a cudaStream_t). All arrays are memory of the device, with
// the alignment of their types; the list of sources is memory of the host, which is read before the return. Each
// returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for null and for arguments that the host's call
// refuses; or the error of the launch. None blocks.
extern "C" int zeroth_cuda_quantize(const zeroth::kernels::QuantizeArgs* args, void* stream);
/// Also refuses more than 128 sources into a dst of 16 bits.
extern "C" int zeroth_cuda_dequantize(const zeroth::kernels::DequantizeArgs* args, void* stream);
