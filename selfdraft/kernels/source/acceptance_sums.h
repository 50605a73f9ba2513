// Softmax of every law of a cycle, slice by slice: the largest logit and the sum of exp(z - largest).
//
//   z_p [B, K+1, V], z_q [B, K, V], depths [B or more] -> sums [B, K+1 + K, 2, slices]; of what lies behind a row's depth
//   nothing is written
//
// Threadgroups: (slices, K+1 + K, B) of THREADS threads, which have 2 PER numbers each. Needs the part `best`.
// Template: THREADS; PER.
constexpr int SIMDGROUPS = THREADS / 32, OWN = 2 * PER;
SHARED(float, tops, SIMDGROUPS);
SHARED(float, totals, SIMDGROUPS);

const int most = z_q_shape[1], size = z_p_shape[2], depth = depths[group.z], law = group.y;
const bool of_q = law > most;
const int position = of_q ? law - most - 1 : law;
if (position > depth || (of_q && position == depth)) return;

const auto logits = of_q ? z_q + (size_t(group.z) * most + position) * size
                         : z_p + (size_t(group.z) * (most + 1) + position) * size;
const int begin = int(group.x) * THREADS * OWN + int(worker);
float numbers[OWN], top = lowest();
UNROLL for (int i = 0; i < OWN; ++i) {
  const int at = begin + i * THREADS;
  numbers[i] = at < size ? logits[at] : lowest();
}
UNROLL for (int i = 0; i < OWN; ++i) top = numbers[i] > top ? numbers[i] : top;
top = simd_most(top);
if (lane == 0) tops[simdgroup] = top;
BARRIER();
UNROLL for (int i = 0; i < SIMDGROUPS; ++i) top = tops[i] > top ? tops[i] : top;

float total = 0;
UNROLL for (int i = 0; i < OWN; ++i) {
  if (!(numbers[i] <= lowest())) total += exp(numbers[i] - top);  // NaN is summed
}
total = simd_total(total);
if (lane == 0) totals[simdgroup] = total;
BARRIER();
if (simdgroup != 0) return;
total = simd_total(lane < SIMDGROUPS ? totals[lane] : 0.0f);
if (lane == 0) {
  const int slices = (size + THREADS * OWN - 1) / (THREADS * OWN);
  const size_t own = (size_t(group.z) * (2 * most + 1) + law) * 2 * slices + group.x;
  sums[own] = top, sums[own + slices] = total;
}
