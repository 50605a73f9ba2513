// Prelude for the host: what tests run kernels with. Threads of a threadgroup are fibers that take turns; they hand over
// where they wait for each other. Threadgroups run one after the other.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::exp;
using std::fma;
using std::log;
typedef unsigned int uint;

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  bfloat16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fc0 : uint16_t((word + 0x7fffu + ((word >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
};
typedef _Float16 float16;

struct uint4 { uint32_t x, y, z, w; };
#define WRITABLE(T, p) const_cast<T*>(p)
inline uint4 load4(const void* p, size_t i) {
  if (uintptr_t(p) % 16) {  // chips fault, or read what stands before
    std::fprintf(stderr, "16 bytes are read from an address that is no multiple of 16\n");
    std::abort();
  }
  uint4 value;
  std::memcpy(&value, static_cast<const char*>(p) + 16 * i, 16);
  return value;
}

namespace host {

struct Index { uint x, y, z; };

// One threadgroup that runs.
struct Threadgroup {
  struct Fiber { ucontext_t context; jmp_buf place; std::vector<char> stack; bool begun = false, done = false; };
  struct Barrier { unsigned arrived = 0, generation = 0; int place = 0; };

  static constexpr size_t kStack = 64 * 1024, kShared = 48 * 1024, kMessage = 64;  // shared: what CUDA lets a text declare
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  std::vector<Barrier> simds;
  Barrier all;
  unsigned running = 0;
  unsigned long moves = 0;  // barriers passed or fibers ended: none in a round means that all wait for ever
  void (*body)(unsigned worker);
  alignas(64) char memory[kShared];
  std::vector<char> dynamic;  // of DYNAMIC_SHARED, and kMessage bytes that stay as they are
  size_t taken = 0;
  std::vector<char> messages;  // a slot for every thread, twice

  void hand_over() {
    if (!_setjmp(fibers[running].place)) _longjmp(scheduler, 1);
  }
  void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
  }

  [[noreturn]] static void stop(const char* format, long one, long other = 0) {
    std::fprintf(stderr, format, one, other);
    std::abort();
  }

  // Chips join only threads that wait at the same place: a line of the text.
  void wait(Barrier& barrier, unsigned members, int place) {
    const unsigned generation = barrier.generation;
    if (barrier.arrived && barrier.place != place) {
      stop("threads wait for each other at different places: lines %ld and %ld of the program\n", barrier.place, place);
    }
    barrier.place = place;
    if (++barrier.arrived == members) {
      barrier.arrived = 0;
      ++barrier.generation;
      ++moves;
      return;
    }
    while (barrier.generation == generation) hand_over();
  }

  // What every lane of the simdgroup gives, in the order of the lanes.
  template <class T>
  void exchange(const T& mine, T* theirs, int place = 0) {
    static_assert(sizeof(T) <= kMessage, "a message is too long");
    const unsigned me = running, first = me / 32 * 32;
    Barrier& barrier = simds[me / 32];
    char* slots = messages.data() + (barrier.generation % 2) * fibers.size() * kMessage;
    std::memcpy(slots + me * kMessage, &mine, sizeof(T));
    wait(barrier, 32, place);
    for (unsigned lane = 0; lane < 32; ++lane) std::memcpy(&theirs[lane], slots + (first + lane) * kMessage, sizeof(T));
  }

  static void enter(unsigned low, unsigned high) {
    auto* self = reinterpret_cast<Threadgroup*>((uintptr_t(high) << 32) | low);
    self->body(self->running);
    self->fibers[self->running].done = true;
    ++self->moves;
    self->hand_over();
  }

  // Runs all fibers to their ends. They take turns from the first to the last, or the other way round.
  void run(unsigned threads, bool backwards) {
    if (fibers.size() != threads) {
      fibers = std::vector<Fiber>(threads);
      for (auto& fiber : fibers) fiber.stack.resize(kStack);
    }
    simds.assign(threads / 32, Barrier());
    messages.resize(2 * threads * kMessage);
    all = Barrier();
    taken = 0;
    std::memset(memory, 0xff, kShared);  // NaN
    dynamic.assign(HOST_DYNAMIC_BYTES + 2 * kMessage, char(0xff));
    for (auto& fiber : fibers) {
      fiber.begun = fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      const auto self = reinterpret_cast<uintptr_t>(this);
      makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 2, unsigned(self), unsigned(self >> 32));
    }
    for (unsigned left = threads; left;) {
      const unsigned long before = moves;
      left = 0;
      for (unsigned turn = 0; turn < threads; ++turn) {
        running = backwards ? threads - 1 - turn : turn;
        if (fibers[running].done) continue;
        resume(fibers[running]);
        left += !fibers[running].done;
      }
      if (left && moves == before) stop("%ld threads wait for others that never come\n", left);
    }
    for (unsigned i = 0; i < kMessage; ++i) {
      if (dynamic_memory()[HOST_DYNAMIC_BYTES + i] != char(0xff)) stop("written behind %ld bytes of dynamic memory\n", HOST_DYNAMIC_BYTES);
    }
  }

  char* dynamic_memory() { return dynamic.data() + (kMessage - uintptr_t(dynamic.data()) % kMessage) % kMessage; }

  // Memory of the threadgroup: every thread asks in the same order, and gets the same.
  void* share(size_t& mine, size_t bytes) {
    const size_t begin = mine;
    mine += (bytes + 63) / 64 * 64;
    if (mine > kShared) stop("%ld bytes of threadgroup memory are too many\n", mine);
    return memory + begin;
  }
};

inline Threadgroup* current;

}  // namespace host

#define SHARED(T, name, n) T* const name = static_cast<T*>(host::current->share(host_shared, sizeof(T) * (n)))
#define BARRIER() host::current->wait(host::current->all, host::current->fibers.size(), __LINE__)
#define UNROLL
#define FUNCTION inline

// __builtin_LINE as a default is the line of the call.
inline float simd_from(float x, uint lane, int place = __builtin_LINE()) {
  if (lane >= 32) host::Threadgroup::stop("there is no lane %ld\n", lane);
  float all[32];
  host::current->exchange(x, all, place);
  return all[lane];
}
template <class F>
float simd_reduced(float x, F join, int place) {  // in the order of CUDA's
  float all[32];
  host::current->exchange(x, all, place);
  for (unsigned step = 16; step; step /= 2) {
    float next[32];
    for (unsigned lane = 0; lane < 32; ++lane) next[lane] = join(all[lane], all[lane ^ step]);
    std::memcpy(all, next, sizeof all);
  }
  return all[host::current->running % 32];
}
inline float simd_total(float x, int place = __builtin_LINE()) {
  return simd_reduced(x, [](float a, float b) { return a + b; }, place);
}
inline float simd_most(float x, int place = __builtin_LINE()) {
  return simd_reduced(x, [](float a, float b) { return std::fmax(a, b); }, place);
}
