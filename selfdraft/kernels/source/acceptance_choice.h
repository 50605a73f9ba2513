// How many drafts stay, and of each slice the best token to follow them.
//
//   z_p [B, K+1, V], z_q [B, K, V], drafts, uniforms [B or more, K or more], depths [B or more], keys [B or more, 2],
//   sums [B, K+1 + K, 2, slices], excess [B, K-1, slices]: anything unless BLOCK is 1 and a row is deeper than 1
//   -> found [B, 5, slices]: of what is left of p after q the best and its id, of p the best and its id, how many stay
//
// Threadgroups: (slices, 1, B) of THREADS threads, which have PER pairs of ids each, as in draw.h. Needs the parts
// `threefry`, `best`, `acceptance`.
// Template: BLOCK; THREADS; PER; MOST, which K does not exceed.
constexpr int SIMDGROUPS = THREADS / 32;
SHARED(float, tops, 2 * MOST + 1);  // of p_1 .. p_{depth+1}, and from MOST + 1 on of q_1 .. q_depth
SHARED(float, inverses, 2 * MOST + 1);
SHARED(float, excesses, MOST);
SHARED(float, decided, 2);  // how many stay, and the scale of p behind them
SHARED(float, values, 2 * SIMDGROUPS);
SHARED(float, ids, 2 * SIMDGROUPS);

const int most = z_q_shape[1], size = z_p_shape[2], slices = sums_shape[3], depth = depths[group.z];
const auto logits_p = z_p + size_t(group.z) * (most + 1) * size, logits_q = z_q + size_t(group.z) * most * size;
const auto own_sums = sums + size_t(group.z) * (2 * most + 1) * 2 * slices;

float drafted_p = 0, drafted_q = 0, coin = 1;
if (int(worker) < depth) {
  const size_t at = size_t(worker) * size + drafts[size_t(group.z) * drafts_shape[1] + worker];
  drafted_p = logits_p[at], drafted_q = logits_q[at];
  coin = uniforms[size_t(group.z) * uniforms_shape[1] + worker];
}
for (int job = simdgroup; job <= 2 * depth; job += SIMDGROUPS) {
  const bool of_q = job > depth;
  const int position = of_q ? job - depth - 1 : job, place = of_q ? MOST + 1 + position : position;
  const Law law = joined_law(own_sums + size_t(of_q ? most + 1 + position : position) * 2 * slices, slices, lane);
  if (lane == 0) tops[place] = law.top, inverses[place] = law.inverse;
}
if (BLOCK) {
  for (int i = simdgroup; i < depth - 1; i += SIMDGROUPS) {
    float total = 0;
    for (int slice = lane; slice < slices; slice += 32) {
      total += excess[(size_t(group.z) * (most - 1) + i) * slices + slice];
    }
    total = simd_total(total);
    if (lane == 0) excesses[i] = total;
  }
}
BARRIER();

if (simdgroup == 0) {
  const bool drafted = int(lane) < depth;
  float ratio = 1;
  if (drafted) {
    const Law p = {tops[lane], inverses[lane]}, q = {tops[MOST + 1 + lane], inverses[MOST + 1 + lane]};
    ratio = chance(p, drafted_p) / chance(q, drafted_q);
  }
  float c = 1, passing = ratio > 1 ? 1.0f : ratio, stay;
  if (BLOCK) {
    c = carried(ratio, depth, lane);
    passing = c;
    if (int(lane) + 1 < depth) {
      const float missing = excesses[lane] + 1 - c;
      passing = missing > 0 ? excesses[lane] / missing : 1.0f;  // 0 / 0: nothing is missing so far
    }
  }
  const bool passes = drafted && coin < passing;
  if (BLOCK) {
    stay = simd_most(passes ? float(lane + 1) : 0.0f);
  } else {
    stay = -simd_most(drafted && !passes ? -float(lane) : -float(depth));
  }
  const float scale = simd_from(c, stay > 0 ? uint(stay) - 1 : 0);
  if (lane == 0) decided[0] = stay, decided[1] = stay > 0 ? scale : 1.0f;
}
BARRIER();

const int stay = int(decided[0]), apart = (size + 1) / 2, begin = int(group.x) * THREADS * PER + int(worker);
const float scale = decided[1];
const bool corrected = stay < depth;
const int compared = corrected ? stay : 0;  // of q, where there is one
const Law p = {tops[stay], inverses[stay]}, q = {tops[MOST + 1 + compared], inverses[MOST + 1 + compared]};
const auto next_p = logits_p + size_t(stay) * size, next_q = logits_q + size_t(compared) * size;
const uint key_x = keys[2 * group.z], key_y = keys[2 * group.z + 1];
float of_p[2 * PER], of_q[2 * PER];
UNROLL for (int i = 0; i < 2 * PER; ++i) {
  const int at = begin + i / 2 * THREADS + i % 2 * apart;
  const bool within = i % 2 ? at < size : at < apart;
  of_p[i] = within ? next_p[at] : lowest();
  of_q[i] = within && corrected ? next_q[at] : lowest();
}
Best left = {lowest(), 0.0f}, plain = left;
UNROLL for (int i = 0; i < PER; ++i) {
  const int at = begin + i * THREADS;
  if (of_p[2 * i] > lowest() || of_p[2 * i + 1] > lowest()) {
    const Words words = threefry(key_x, key_y, at, at + apart < size ? at + apart : 0);
    UNROLL for (int j = 0; j < 2; ++j) {
      const float chance_p = chance(p, of_p[2 * i + j]);
      if (of_p[2 * i + j] > lowest() && chance_p > 0) {
        const int id = at + j * apart;
        const float noise = gumbel(j ? words.y : words.x);
        const float rest = excess_of(scale, chance_p, corrected ? chance(q, of_q[2 * i + j]) : 0.0f);
        if (rest > 0) left = better(left, log(rest) + noise, id);
        plain = better(plain, log(chance_p) + noise, id);
      }
    }
  }
}

left = best_of_simd(left), plain = best_of_simd(plain);
if (lane == 0) {
  values[simdgroup] = left.value, ids[simdgroup] = left.id;
  values[SIMDGROUPS + simdgroup] = plain.value, ids[SIMDGROUPS + simdgroup] = plain.id;
}
BARRIER();
if (simdgroup != 0) return;
const bool mine = lane < SIMDGROUPS;
left = {mine ? values[lane] : lowest(), mine ? ids[lane] : 0.0f};
plain = {mine ? values[SIMDGROUPS + lane] : lowest(), mine ? ids[SIMDGROUPS + lane] : 0.0f};
left = best_of_simd(left), plain = best_of_simd(plain);
if (lane == 0) {
  const auto own = found + size_t(group.z) * 5 * slices + group.x;
  own[0] = left.value, own[slices] = left.id, own[2 * slices] = plain.value, own[3 * slices] = plain.id;
  own[4 * slices] = float(stay);
}
