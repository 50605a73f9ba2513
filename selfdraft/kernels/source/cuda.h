// Prelude for CUDA.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define SHARED(T, name, n) __shared__ T name[n]
#define BARRIER() __syncthreads()
#define FUNCTION __device__ inline
#define UNROLL _Pragma("unroll")
typedef unsigned int uint;
__device__ inline uint4 load_sixteen_bytes(const void* p, size_t i) { return __ldg((const uint4*)p + i); }
#define load4(p, i) load_sixteen_bytes(p, i)
#define WRITABLE(T, p) const_cast<T*>(p)
__device__ inline float simd_total(float x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ inline float simd_most(float x) {
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ inline float simd_from(float x, uint lane) { return __shfl_sync(0xffffffffu, x, lane); }
