// Matrix units behind one set of names: `mma` is in mma_cuda.h or mma_host.h, as are BF16 and FP16.

// A pair of ones.
template <class T> struct Pairs;
template <> struct Pairs<BF16> { static constexpr uint kOnes = 0x3F803F80u, kMask = 0x00780078u, kSixteen = 0x41804180u; static constexpr int kShift = 3; };
template <> struct Pairs<FP16> { static constexpr uint kOnes = 0x3C003C00u, kMask = 0x03C003C0u, kSixteen = 0x4C004C00u; static constexpr int kShift = 6; };

// The nibbles at PLACE and PLACE + 4 of a word, as a pair of numbers 16 + nibble: they fill the upper bits of the mantissa.
template <class T, int PLACE> FUNCTION uint nibbles(uint word) {
  constexpr int shift = Pairs<T>::kShift - 4 * PLACE;
  const uint shifted = shift >= 0 ? word << (shift & 31) : word >> (-shift & 31);
  return masked_or(shifted, Pairs<T>::kMask, Pairs<T>::kSixteen);
}

// Orders pairs of neighbours as `nibbles` orders weights: of 4 bits (k, k + 4), of 8 bits (k, k + 2).
template <int PAIRS, int BITS> FUNCTION void pair_up(uint* b) {
  constexpr int step = BITS == 4 ? 2 : 1;
  UNROLL for (int first = 0; first < PAIRS; first += 2 * step) {
    uint pairs[2 * step];
    UNROLL for (int j = 0; j < step; ++j) {
      pairs[2 * j] = low_halves(b[first + j], b[first + j + step]);
      pairs[2 * j + 1] = high_halves(b[first + j], b[first + j + step]);
    }
    UNROLL for (int j = 0; j < 2 * step; ++j) b[first + j] = pairs[j];
  }
}

// One half of a pair.
template <class T> FUNCTION float half_float(uint pair, int half);
template <> FUNCTION float half_float<BF16>(uint pair, int half) {
  union { uint bits; float value; } it;
  it.bits = half ? pair & 0xFFFF0000u : pair << 16;
  return it.value;
}
template <> FUNCTION float half_float<FP16>(uint pair, int half) {
  union { uint bits; FP16 values[2]; } it;
  it.bits = pair;
  return float(it.values[half]);
}

// c = a b, or that added to c.
template <class T> FUNCTION void mma_next(bool added, float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  if (added) mma<T>(c, a0, a1, a2, a3, b0, b1);
  else mma_new<T>(c, a0, a1, a2, a3, b0, b1);
}

// COUNT elements that lie on a border of their own size, up to 16 bytes.
template <int COUNT, class T> FUNCTION void load_shared(const T* from, T* to) {
  constexpr int bytes = COUNT * sizeof(T);
  if constexpr (bytes % 16 == 0) {
    UNROLL for (int i = 0; i < bytes / 16; ++i) ((uint4*)to)[i] = ((const uint4*)from)[i];
  } else if constexpr (bytes % 8 == 0) {
    UNROLL for (int i = 0; i < bytes / 8; ++i) ((uint2*)to)[i] = ((const uint2*)from)[i];
  } else {
    UNROLL for (int i = 0; i < bytes / 4; ++i) ((uint*)to)[i] = ((const uint*)from)[i];
  }
}
