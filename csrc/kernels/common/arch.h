// Facts about compiler and processor for the kernels. The only header of csrc/kernels that may contain #if.
#pragma once

#if !defined(__x86_64__)
#error "the kernels are written for x86-64 hosts (SSE2 is the scalar baseline) and CUDA devices"
#endif

// Marks a function that the CUDA kernels share with the CPU kernels.
#if defined(__CUDACC__)
#define ZR_HOST_DEVICE __host__ __device__
#define ZR_INLINE __forceinline__
#else
#define ZR_HOST_DEVICE
#define ZR_INLINE inline __attribute__((always_inline))
#endif

// [Note: One definition per instruction set]
// A kernel template is compiled several times: with plain x86-64 flags, with -mavx2 -mfma -mf16c and with -mavx512*.
// If such a file emitted an ordinary inline function, the linker would keep one copy of it for the whole program. If it
// kept the AVX-512 copy, a processor without AVX-512 would stop with SIGILL in unrelated code. So everything that those
// files include and use has internal linkage: unnamed namespaces, built-in functions, intrinsics; no inline function of
// the standard library. The test kernels_linkage reads the symbol tables of the objects and checks this.
