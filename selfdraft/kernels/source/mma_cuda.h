// Tensor cores and asynchronous copies of NVIDIA GPUs from compute capability 8.0 on.
#define DYNAMIC_SHARED(T, name)                                     \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  T* const name = reinterpret_cast<T*>(name##_bytes)
typedef __nv_bfloat16 BF16;
typedef __half FP16;

// c[16 x 8] += a[16 x 16] b[16 x 8]; fragments as in PTX's mma.m16n8k16.
template <class T> FUNCTION void mma(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1);
template <> FUNCTION void mma<BF16>(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <> FUNCTION void mma<FP16>(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c = a b.
template <class T> FUNCTION void mma_new(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1);
template <> FUNCTION void mma_new<BF16>(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
template <> FUNCTION void mma_new<FP16>(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
// (a & mask) | other, in one instruction: left to itself the compiler takes two.
FUNCTION uint masked_or(uint a, uint mask, uint other) {
  uint out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(mask), "r"(other));
  return out;
}
FUNCTION uint low_halves(uint a, uint b) { return __byte_perm(a, b, 0x5410); }
FUNCTION uint high_halves(uint a, uint b) { return __byte_perm(a, b, 0x7632); }

// Copies to shared memory that go on by themselves. `close_copies` makes a batch of those since the last;
// `await_copies<LEFT>` waits, with the simdgroup, until at most LEFT batches are under way.
template <int BYTES> FUNCTION void copy_later(void* to, const void* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(BYTES));
  }
}
FUNCTION void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> FUNCTION void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  __syncwarp();
}
FUNCTION void simd_wait() { __syncwarp(); }
// Waits for TEAMS simdgroups that call with the same number, below 15.
template <int TEAMS> FUNCTION void team_wait(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "n"(32 * TEAMS) : "memory");
}

// 16 bytes of `from`, or zeros: then it is not read, and may lie outside of everything.
FUNCTION void copy_or_zero(void* to, const void* from, bool wanted) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(wanted ? 16 : 0));
}
// 2^x to 22 bits; 0 for what is below the least normal number.
FUNCTION float two_to(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Before a loop that is to stay one.
#define ROLLED _Pragma("unroll 1")
// The same number, of which the compiler does not know: so that it works out anew what hangs on it, and keeps registers free.
FUNCTION uint not_kept(uint x) {
  asm volatile("" : "+r"(x));
  return x;
}
FUNCTION const char* not_kept(const char* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Shared memory as copies take it: counted in bytes.
FUNCTION uint shared_address(const void* p) { return static_cast<uint>(__cvta_generic_to_shared(p)); }
// `copy_later`, or nothing.
template <int BYTES> FUNCTION void copy_if(bool wanted, uint to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to), "l"(from), "r"((int)wanted));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], %3;}" ::"r"(to), "l"(from), "r"((int)wanted), "n"(BYTES));
  }
}
