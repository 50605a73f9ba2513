// What mma_cuda.h does, emulated. Copies happen as late as they may: who forgets to wait reads what was there before.
#define DYNAMIC_SHARED(T, name) T* const name = reinterpret_cast<T*>(host::current->dynamic_memory())
typedef bfloat16 BF16;
typedef float16 FP16;
struct uint2 { uint32_t x, y; };

template <class T> float half_of(uint word, int index) {
  const uint16_t bits = word >> (16 * index);
  T value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}

// Sums in fp64, rounded once.
template <class T>
void mma(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, int place = __builtin_LINE()) {
  struct Fragment { uint a[4], b[2]; };
  Fragment all[32];
  host::current->exchange(Fragment{{a0, a1, a2, a3}, {b0, b1}}, all, place);
  const int lane = host::current->running % 32;
  for (int j = 0; j < 4; ++j) {
    const int row = lane / 4 + 8 * (j / 2), column = 2 * (lane % 4) + j % 2;
    double sum = c[j];
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2;
      const float a = half_of<T>(all[row % 8 * 4 + holder].a[row / 8 + 2 * (k / 8)], k % 2);
      const float b = half_of<T>(all[column * 4 + holder].b[k / 8], k % 2);
      sum += double(a) * double(b);
    }
    c[j] = float(sum);
  }
}
template <class T>
void mma_new(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, int place = __builtin_LINE()) {
  for (int j = 0; j < 4; ++j) c[j] = 0;
  mma<T>(c, a0, a1, a2, a3, b0, b1, place);
}
inline uint masked_or(uint a, uint mask, uint other) { return (a & mask) | other; }
inline uint low_halves(uint a, uint b) { return (a & 0xffffu) | (b << 16); }
inline uint high_halves(uint a, uint b) { return (a >> 16) | (b & 0xffff0000u); }

struct Copies {
  struct Copy { char* to; const char* from; int bytes; };
  std::vector<std::vector<Copy>> batches{1};  // the last is open
};
inline std::vector<Copies> host_copies;  // of every thread
inline Copies& own_copies() {
  if (host::current->fibers.size() != host_copies.size()) host_copies = std::vector<Copies>(host::current->fibers.size());
  return host_copies[host::current->running];
}
template <int BYTES> void copy_later(void* to, const void* from) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "no such copy");
  if (uintptr_t(to) % BYTES || uintptr_t(from) % BYTES) {
    std::fprintf(stderr, "a copy of %d bytes is not on such a border\n", BYTES);
    std::abort();
  }
  own_copies().batches.back().push_back({static_cast<char*>(to), static_cast<const char*>(from), BYTES});
}
inline void close_copies() { own_copies().batches.emplace_back(); }
inline void simd_wait(int place = __builtin_LINE()) {
  host::current->wait(host::current->simds[host::current->running / 32], 32, place);
}
template <int LEFT> void await_copies(int place = __builtin_LINE()) {
  auto& batches = own_copies().batches;
  while (batches.size() > LEFT + 1) {
    for (auto& copy : batches.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    batches.erase(batches.begin());
  }
  simd_wait(place);
}

inline char* shared_address(void* p) { return static_cast<char*>(p); }
template <int BYTES> void copy_if(bool wanted, void* to, const void* from) {
  if (wanted) copy_later<BYTES>(to, from);
}
template <class X> X not_kept(X x) { return x; }
#define ROLLED

// Of every number; the first simdgroup of a threadgroup that starts finds them idle, as the last one left them.
inline host::Threadgroup::Barrier host_teams[15];
template <int TEAMS> void team_wait(int number, int place = __builtin_LINE()) {
  if (number < 0 || number >= 15) host::Threadgroup::stop("there is no barrier for a team %ld\n", number);
  host::current->wait(host_teams[number], 32 * TEAMS, place);
}

inline void copy_or_zero(void* to, const void* from, bool wanted) {
  alignas(16) static const char zeros[16] = {};
  copy_later<16>(to, wanted ? from : zeros);
}
inline float two_to(float x) { return std::exp2(x); }
