// y[m, n] = sum over k of x[m, k] (scales[n, k / GROUP] q[n, k] + biases[n, k / GROUP]), without matrix units.
//
// T: of x, scales, biases, residual and y. FORM: what is made of the product, see verify_qmv_end.h; where it is gated, a
// simdgroup has R / 2 rows of the first half and theirs of the second. BITS, GROUP: of the quantisation. TILE: rows m of a threadgroup.
// R: rows n of the weights to a simdgroup. SIMDS: simdgroups of a threadgroup.
//
// A lane takes every 32nd piece of 16 bytes of its R rows of weights, makes eight weights at a time and uses them for all
// rows of the tile. An output is one chain of fma to a lane, k rising, then simd_total: the same for every M, TILE and R.

constexpr uint PIECE = 128 / BITS;  // weights in 16 bytes; they lie in one group
constexpr uint PART = 16 / BITS;  // weights in half a word
constexpr uint LOADS = 8 * sizeof(T) / 16;  // 16 bytes each, for eight of x

const uint M = x_shape[0] * x_shape[1], N = weight_shape[0], K = x_shape[2];
const uint TILES = (M + TILE - 1) / TILE, PIECES = K / PIECE;  // of x; of a row

// Tiles of the same weights are neighbours: the second finds them in a cache.
const uint top = group.x % TILES * TILE;
constexpr uint OWN = FORM == GATED ? R / 2 : R;  // outputs of a simdgroup
const uint ENDS = FORM == GATED ? N / 2 : N, left = (group.x / TILES * SIMDS + simdgroup) * OWN;

float sums[TILE][R];
UNROLL for (uint m = 0; m < TILE; ++m) {
  UNROLL for (uint r = 0; r < R; ++r) sums[m][r] = 0;
}

for (uint piece = lane; piece < PIECES; piece += 32) {
  union { uint4 all; uint words[4]; } packed[R];
  float scale[R], bias[R];
  UNROLL for (uint r = 0; r < R; ++r) {
    // Behind the end: read again, and not written.
    const uint n = (left + r % OWN < ENDS ? left + r % OWN : ENDS - 1) + (r < OWN ? 0 : ENDS);
    packed[r].all = load4(weight, n * PIECES + piece);
    const uint at = n * (K / GROUP) + piece * PIECE / GROUP;
    scale[r] = float(scales[at]);
    bias[r] = float(biases[at]);
  }
  UNROLL for (uint eight = 0; eight < PIECE / 8; ++eight) {
    float weights[R][8];
    UNROLL for (uint r = 0; r < R; ++r) {
      UNROLL for (uint part = 0; part < 8 / PART; ++part) {
        const uint bits = packed[r].words[(8 * eight + PART * part) * BITS / 32] >> part % 2 * 16;
        UNROLL for (uint i = 0; i < PART; ++i) {
          // Left where it stands, q is in the mantissa of 2^(23 - place) the integer part: no conversion, hardly a shift.
          const uint place = BITS * i;
          union { uint bits; float value; } q;
          q.bits = (bits & (((1u << BITS) - 1) << place)) | ((150u - place) << 23);
          weights[r][PART * part + i] = fma(q.value - float(1u << (23 - place)), scale[r], bias[r]);
        }
      }
    }
    UNROLL for (uint m = 0; m < TILE; ++m) {
      const uint row = top + m < M ? top + m : M - 1;
      union { uint4 all[LOADS]; T values[8]; } given;
      UNROLL for (uint j = 0; j < LOADS; ++j) {
        given.all[j] = load4(x, (row * (K / 8) + piece * (PIECE / 8) + eight) * LOADS + j);
      }
      UNROLL for (uint i = 0; i < 8; ++i) {
        const float value = float(given.values[i]);
        UNROLL for (uint r = 0; r < R; ++r) sums[m][r] = fma(weights[r][i], value, sums[m][r]);
      }
    }
  }
}

// Lane m OWN + r keeps an output: TILE R is at most 32.
float mine = 0, other = 0;
UNROLL for (uint m = 0; m < TILE; ++m) {
  UNROLL for (uint r = 0; r < R; ++r) {
    const float total = simd_total(sums[m][r]);
    if (lane == m * OWN + r % OWN) (r < OWN ? mine : other) = total;
  }
}
const uint row = top + lane / OWN, n = left + lane % OWN;
if (lane < TILE * OWN && row < M && n < ENDS) {
  const uint at = row * ENDS + n;
  y[at] = FORM == GATED ? gated<T>(mine, other) : FORM == ADDED ? T(float(T(mine)) + float(residual[at])) : T(mine);
}
