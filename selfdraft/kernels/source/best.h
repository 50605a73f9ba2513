// The largest of some numbers and its id, the lowest of equal ones. Ids are exact as floats: below 2^24.
struct Best { float value, id; };

// What stands for -inf: no number is below it, and only what is above it counts.
FUNCTION float lowest() { return -3.402823466e38f; }

FUNCTION Best better(Best best, float value, int id) {
  const float own = float(id);
  if (value > best.value || (value == best.value && own < best.id)) return {value, own};
  return best;
}

FUNCTION Best best_of_simd(Best mine) {
  const float value = simd_most(mine.value), id = simd_most(mine.value == value ? -mine.id : lowest());
  return {value, -id};
}
