// What attention takes from a fused projection: a simdgroup normalises and rotates one head of one token, and writes it
// to where attention reads it. A head's arithmetic hangs on nothing but its own numbers and its position.
//
//   projected [rows, tokens, N]: query and gate of every head side by side, keys of all kv heads, their values;
//   q_norm, k_norm [SIZE], inverse_frequencies [HALF], starts, rope_deltas [rows], eps [1]
//   -> keys, values [1, KV_HEADS, capacity, SIZE] of each row at starts[row] + token, in place, rotated by rope_deltas[row]
//      positions more;
//      q [rows, HEADS, tokens, SIZE]
//
// Threadgroups: (HEADS + 2 KV_HEADS, tokens, rows) of 32 threads.
// Numbers of heads are read from shapes, as is HALF of the rotated dimensions, at most SIZE / 2.
// Template: T; SIZE, a multiple of 32.
#ifdef __METAL_VERSION__
#define COSINE(x) metal::precise::cos(x)
#define SINE(x) metal::precise::sin(x)
#define ROOT(x) metal::precise::sqrt(x)
#else
#define COSINE(x) cosf(x)
#define SINE(x) sinf(x)
#define ROOT(x) sqrtf(x)
#endif
constexpr int EACH = SIZE / 32;
SHARED(float, row, SIZE);

const int HALF = inverse_frequencies_shape[0], KV_HEADS = keys_shape[1], HEADS = projected_shape[2] / (2 * SIZE) - KV_HEADS;
const int head = group.x, token = group.y, tokens = projected_shape[1], capacity = keys_shape[2];
const bool asks = head < HEADS, stores_value = head >= HEADS + KV_HEADS;
const int position = starts[group.z] + token, kv_head = head - HEADS - (stores_value ? KV_HEADS : 0);
const bool has_place = position >= 0 && position < capacity;
const size_t from = (size_t(group.z) * tokens + token) * projected_shape[2] + (asks ? 2 * head : HEADS + head) * SIZE;
const size_t to = (size_t(asks ? 0 : kv_head) * capacity + (has_place ? position : 0)) * SIZE;

float x[EACH], total = 0;
UNROLL for (int i = 0; i < EACH; ++i) {
  x[i] = float(projected[from + 32 * i + lane]);
  total = fma(x[i], x[i], total);
}
if (stores_value) {
  if (has_place) UNROLL for (int i = 0; i < EACH; ++i) WRITABLE(T, values)[to + 32 * i + lane] = T(x[i]);
  return;
}

const float by = 1.0f / ROOT(simd_total(total) / SIZE + eps[0]);
UNROLL for (int i = 0; i < EACH; ++i) {
  const int at = 32 * i + lane;
  const float weight = asks ? float(q_norm[at]) : float(k_norm[at]);
  row[at] = float(T(weight * float(T(x[i] * by))));  // rounded twice, as MLX's own norm does
}
BARRIER();

UNROLL for (int i = 0; i < EACH; ++i) {
  const int at = 32 * i + lane;
  float value = row[at];
  if (at < 2 * HALF) {
    const bool second = at >= HALF;
    const float angle = float(position + rope_deltas[group.z]) * inverse_frequencies[second ? at - HALF : at];
    const float other = row[second ? at - HALF : at + HALF] * SINE(angle);
    value = fma(value, COSINE(angle), second ? other : -other);
  }
  if (asks) {
    q[((size_t(group.z) * HEADS + head) * tokens + token) * SIZE + at] = T(value);
  } else if (has_place) {
    WRITABLE(T, keys)[to + at] = T(value);
  }
}
#undef COSINE
#undef SINE
#undef ROOT
