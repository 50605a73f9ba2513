// e_i = sum (c_i p_{i+1} - q_{i+1})+ of the block rule, slice by slice, for i = 1 .. K-1.
//
//   z_p [B, K+1, V], z_q [B, K, V], drafts [B or more, K or more], depths [B or more], sums [B, K+1 + K, 2, slices]
//   -> excess [B, K-1, slices]; nothing is written of a row whose depth is i or less
//
// Threadgroups: (slices, K-1, B) of THREADS threads, which have 2 PER numbers each. Needs the parts `best`, `acceptance`.
// Template: THREADS; PER; MOST, which K does not exceed.
constexpr int SIMDGROUPS = THREADS / 32, OWN = 2 * PER;
SHARED(float, tops, 2 * MOST);  // of p_1 .. p_{i+1}, and from MOST on of q_1 .. q_{i+1}
SHARED(float, inverses, 2 * MOST);
SHARED(float, shared_c, 1);
SHARED(float, totals, SIMDGROUPS);

const int most = z_q_shape[1], size = z_p_shape[2], slices = sums_shape[3], i = int(group.y) + 1;
if (i >= depths[group.z]) return;
const auto logits_p = z_p + size_t(group.z) * (most + 1) * size, logits_q = z_q + size_t(group.z) * most * size;
const auto own_sums = sums + size_t(group.z) * (2 * most + 1) * 2 * slices;

float drafted_p = 0, drafted_q = 0;
if (int(worker) < i) {
  const size_t at = size_t(worker) * size + drafts[size_t(group.z) * drafts_shape[1] + worker];
  drafted_p = logits_p[at], drafted_q = logits_q[at];
}
const int begin = int(group.x) * THREADS * OWN + int(worker);
float next_p[OWN], next_q[OWN];
UNROLL for (int j = 0; j < OWN; ++j) {
  const int at = begin + j * THREADS;
  next_p[j] = at < size ? logits_p[size_t(i) * size + at] : lowest();
  next_q[j] = at < size ? logits_q[size_t(i) * size + at] : lowest();
}

for (int job = simdgroup; job < 2 * (i + 1); job += SIMDGROUPS) {
  const bool of_q = job > i;
  const int position = of_q ? job - i - 1 : job;
  const Law law = joined_law(own_sums + size_t(of_q ? most + 1 + position : position) * 2 * slices, slices, lane);
  if (lane == 0) tops[of_q ? MOST + position : position] = law.top, inverses[of_q ? MOST + position : position] = law.inverse;
}
BARRIER();
if (simdgroup == 0) {
  float ratio = 1;
  if (int(lane) < i) {
    const Law p = {tops[lane], inverses[lane]}, q = {tops[MOST + lane], inverses[MOST + lane]};
    ratio = chance(p, drafted_p) / chance(q, drafted_q);
  }
  const float c = carried(ratio, i, lane), last = simd_from(c, i - 1);
  if (lane == 0) shared_c[0] = last;
}
BARRIER();

const Law p = {tops[i], inverses[i]}, q = {tops[MOST + i], inverses[MOST + i]};
float total = 0;
UNROLL for (int j = 0; j < OWN; ++j) {
  if (next_p[j] > lowest()) total += excess_of(shared_c[0], chance(p, next_p[j]), chance(q, next_q[j]));
}
total = simd_total(total);
if (lane == 0) totals[simdgroup] = total;
BARRIER();
if (simdgroup != 0) return;
total = simd_total(lane < SIMDGROUPS ? totals[lane] : 0.0f);
if (lane == 0) excess[(size_t(group.z) * (most - 1) + group.y) * slices + group.x] = total;
