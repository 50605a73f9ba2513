// What the texts of acceptance share. Needs the part `best` before it.

// softmax of a row of logits: exp(z - top) / total.
struct Law { float top, inverse; };

FUNCTION float chance(Law law, float z) { return exp(z - law.top) * law.inverse; }

// Of a row's slices: their largest logits, then their sums of exp(z - largest). By a simdgroup, for all its lanes.
template <class P> FUNCTION Law joined_law(P sums, int slices, uint lane) {
  float top = lowest(), total = 0;
  for (int slice = lane; slice < slices; slice += 32) top = sums[slice] > top ? sums[slice] : top;
  top = simd_most(top);
  for (int slice = lane; slice < slices; slice += 32) {
    if (sums[slice] > lowest()) total = fma(sums[slices + slice], exp(sums[slice] - top), total);
  }
  return {top, 1.0f / simd_total(total)};
}

// c_{lane + 1} of the block rule, from p(d) / q(d) of the first `count` drafts, a lane each; NaN stays NaN.
FUNCTION float carried(float ratio, int count, uint lane) {
  float c = 1, mine = 1;
  for (int i = 0; i < count; ++i) {
    c *= simd_from(ratio, i);
    c = c > 1 ? 1.0f : c;
    if (int(lane) == i) mine = c;
  }
  return mine;
}

// What is left of a chance of p after q. One rounding, so that nothing is left of equal laws, whatever a compiler joins.
FUNCTION float excess_of(float scale, float p, float q) {
  const float left = fma(scale, p, -q);
  return left > 0 ? left : 0.0f;
}
