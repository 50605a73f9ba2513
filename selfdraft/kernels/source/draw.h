// A token from each law: the id of the largest z + noise, the lowest of equal ones. The text runs twice: for slices of
// the vocabulary (JOIN 0), and for what they found (JOIN 1).
//
//   z [B, P, V], keys [B or more, P or more, 2], noisy [B or more] -> out [B, P, slices, 2]: the best, its id     JOIN 0
//   z: that, keys, noisy                                           -> out [B, P]                                  JOIN 1
//
// Threadgroups: (slices, P, B) of THREADS threads, or (1, P, B) of 32. A thread has PER pairs of ids i and i + apart, which
// share a hash. Needs the parts `threefry` and `best`.
// Template: JOIN; THREADS; PER.
constexpr int SIMDGROUPS = THREADS / 32;
SHARED(float, values, SIMDGROUPS);
SHARED(float, ids, SIMDGROUPS);

const int size = z_shape[2];
const size_t position = size_t(group.z) * z_shape[1] + group.y;
Best best = {lowest(), 0.0f};

if (JOIN) {
  const auto found = z + position * size * 2;
  for (int slice = lane; slice < size; slice += 32) best = better(best, found[2 * slice], int(found[2 * slice + 1]));
  best = best_of_simd(best);
  if (lane == 0) out[position] = uint(best.id);
  return;
}

const auto logits = z + position * size;
const int apart = (size + 1) / 2, begin = int(group.x) * THREADS * PER + int(worker);
float first[PER], second[PER];
UNROLL for (int i = 0; i < PER; ++i) {
  const int at = begin + i * THREADS;
  first[i] = at < apart ? logits[at] : lowest();
  second[i] = at + apart < size ? logits[at + apart] : lowest();
}
const size_t key = (size_t(group.z) * keys_shape[1] + group.y) * 2;
const uint key_x = keys[key], key_y = keys[key + 1];
const bool drawn = noisy[group.z] != 0;

UNROLL for (int i = 0; i < PER; ++i) {
  const int at = begin + i * THREADS;
  const bool one = first[i] > lowest(), other = second[i] > lowest();
  if (one || other) {
    Words words = {0, 0};
    if (drawn) words = threefry(key_x, key_y, at, at + apart < size ? at + apart : 0);
    if (one) best = better(best, drawn ? first[i] + gumbel(words.x) : first[i], at);
    if (other) best = better(best, drawn ? second[i] + gumbel(words.y) : second[i], at + apart);
  }
}

best = best_of_simd(best);
if (lane == 0) values[simdgroup] = best.value, ids[simdgroup] = best.id;
BARRIER();
if (simdgroup != 0) return;
best = {lane < SIMDGROUPS ? values[lane] : lowest(), lane < SIMDGROUPS ? ids[lane] : 0.0f};
best = best_of_simd(best);
if (lane == 0) {
  const size_t slices = (apart + THREADS * PER - 1) / (THREADS * PER), own = (position * slices + group.x) * 2;
  out[own] = best.value, out[own + 1] = best.id;
}
