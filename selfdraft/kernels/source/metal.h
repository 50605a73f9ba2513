// Prelude for Metal.
#include <metal_stdlib>
#include <metal_simdgroup>
#define SHARED(T, name, n) threadgroup T name[n]
#define BARRIER() threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define FUNCTION inline
#define UNROLL _Pragma("clang loop unroll(full)")
#define load4(p, i) (((const device uint4*)(p))[i])
#define WRITABLE(T, p) ((device T*)(p))
inline float simd_total(float x) { return metal::simd_sum(x); }
inline float simd_most(float x) { return metal::simd_max(x); }
inline float simd_from(float x, uint lane) { return metal::simd_shuffle(x, ushort(lane)); }
using metal::exp;
using metal::fma;
using metal::log;
