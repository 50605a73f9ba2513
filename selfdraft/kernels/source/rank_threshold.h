// The least number of a row that top-k and then top-p keep. The text runs twice: for slices of the row (JOIN 0), which
// list at most MOST numbers each, all that can be among the k largest; and for what they listed (JOIN 1).
//
//   values [B, P, V], top_k [B], top_p [B] -> found [B, P, SLICES (MOST + 2)]     JOIN 0
//   found, top_k, top_p                    -> found [B, P, 1]                     JOIN 1
//
// Of a row, found has MOST numbers a slice, filled up with -inf; then a bound for each slice, which k of its numbers
// reach, so that no number below it is wanted; then how many more are equal to the bound than are listed.
//
// Threadgroups: (SLICES, B P) or (1, B P), of THREADS threads, which have PER numbers each. THREADS is at least MOST and
// SLICES. Numbers are compared as integers of the same order; 0 and -0 are one, NaN is infinite. What is summed is sorted
// first: the sum does not depend on where in the row a number stood.
// Template: JOIN; SLICES; THREADS; PER; MOST, 128.
constexpr int SIMDGROUPS = THREADS / 32, INFINITE = 0x7f800000, OWN = MOST / 32;
union Word { float x; int bits; } word;
#define MAGNITUDE ((word.bits & 0x7fffffff) < INFINITE ? word.bits & 0x7fffffff : INFINITE)
#define TO_KEY(key, number) word.x = (number), (key) = word.bits < 0 ? -MAGNITUDE : MAGNITUDE
#define TO_NUMBER(number, key) word.bits = (key) < 0 ? int(uint(-(key)) | 0x80000000u) : (key), (number) = word.x

SHARED(float, tops, SIMDGROUPS);
SHARED(float, bounds, SIMDGROUPS);
SHARED(int, counts, 2 * SIMDGROUPS);
SHARED(int, places, SIMDGROUPS);
SHARED(int, listed, MOST);
SHARED(float, sorted, MOST);
SHARED(int, at_rank_k, 3);  // the number there, how many are above it, how many equal to it

// Slices of one width, so that no thread of the last has nothing.
const int row = group.y, length = JOIN ? SLICES * MOST : values_shape[2];
const int width = JOIN ? length : (length + SLICES - 1) / SLICES, first = group.x * width;
const int end = first + width < length ? first + width : length;
const auto numbers = values + size_t(row) * values_shape[2];
const int wanted = top_k[row / values_shape[1]], k = wanted < 1 ? 1 : wanted < MOST ? wanted : MOST;

float lowest;
TO_NUMBER(lowest, -INFINITE);
int keys[PER], largest = -INFINITE;
UNROLL for (int i = 0; i < PER; ++i) {
  const int at = first + i * THREADS + int(worker);
  TO_KEY(keys[i], at < end ? numbers[at] : lowest);
  largest = keys[i] > largest ? keys[i] : largest;
}

// Where to look for the k-th largest: at most at the largest; in a slice, at least at the least of the threads'
// largest, for there are k threads; in what slices listed, at least at the highest of their bounds.
float top, bound = lowest;
TO_NUMBER(top, largest);
if (JOIN) {
  if (worker < SLICES) bound = numbers[SLICES * MOST + worker];
} else {
  bound = -top;
}
top = simd_most(top), bound = simd_most(bound);
if (lane == 0) tops[simdgroup] = top, bounds[simdgroup] = bound;
BARRIER();
UNROLL for (int i = 0; i < SIMDGROUPS; ++i) {
  top = tops[i] > top ? tops[i] : top;
  bound = bounds[i] > bound ? bounds[i] : bound;
}
int low, high;
TO_KEY(low, JOIN ? bound : -bound);
TO_KEY(high, top);

// Halved until few enough reach `low`, or until it is the k-th largest itself, which many are equal to.
int reach = 0, middle = low;
for (int turn = 0;; ++turn) {
  int mine = 0, all = 0;
  UNROLL for (int i = 0; i < PER; ++i) mine += keys[i] >= middle;
  const auto totals = counts + turn % 2 * SIMDGROUPS;  // the other half may still be read
  const int total = int(simd_total(float(mine)));
  if (lane == 0) totals[simdgroup] = total;
  BARRIER();
  UNROLL for (int i = 0; i < SIMDGROUPS; ++i) all += totals[i];
  if (all >= k) low = middle, reach = all; else high = middle - 1;
  if (reach <= MOST || low >= high) break;
  middle = low + int((uint(high) - uint(low) + 1) / 2);
}

// List what reaches it; or, where that is too many, what is above it, which fewer than k are.
const bool complete = reach <= MOST;
const int least = complete ? low : low + 1;
int mine = 0;
UNROLL for (int i = 0; i < PER; ++i) mine += keys[i] >= least;
int upto = mine;
UNROLL for (uint step = 1; step < 32; step *= 2) {
  const int other = int(simd_from(float(upto), lane < step ? lane : lane - step));
  if (lane >= step) upto += other;
}
if (lane == 31) places[simdgroup] = upto;
BARRIER();
int place = upto - mine, count = 0;
UNROLL for (int i = 0; i < SIMDGROUPS; ++i) {
  if (i < int(simdgroup)) place += places[i];
  count += places[i];
}

if (!JOIN) {
  float limit, number;
  TO_NUMBER(limit, low);
  const size_t begin = size_t(row) * SLICES * (MOST + 2), behind = begin + SLICES * MOST + group.x;
  const size_t own = begin + group.x * MOST;
  UNROLL for (int i = 0; i < PER; ++i) {
    if (keys[i] >= least) {
      TO_NUMBER(number, keys[i]);
      found[own + place++] = number;
    }
  }
  for (int at = count + int(worker); at < MOST; at += THREADS) found[own + at] = at < k ? limit : lowest;
  if (worker == 0) found[behind] = limit, found[behind + SLICES] = complete ? 0.0f : float(reach - k);
  return;
}

UNROLL for (int i = 0; i < PER; ++i) {
  if (keys[i] >= least) listed[place++] = keys[i];
}
BARRIER();
if (int(worker) < count) {
  const int key = listed[worker];
  int above = 0, equal = 0, before = 0;
  for (int i = 0; i < count; ++i) {
    above += listed[i] > key;
    equal += listed[i] == key;
    before += listed[i] == key && i < int(worker);
  }
  TO_NUMBER(sorted[above + before], key);
  if (complete && above + before == k - 1) at_rank_k[0] = key, at_rank_k[1] = above, at_rank_k[2] = equal;
}
BARRIER();
if (simdgroup != 0) return;

const int kth = complete ? at_rank_k[0] : low, above = complete ? at_rank_k[1] : count;
float limit, ties = 0;
TO_NUMBER(limit, kth);
for (int slice = lane; slice < SLICES; slice += 32) {
  int key;
  TO_KEY(key, numbers[SLICES * MOST + slice]);
  if (key == kth) ties += numbers[SLICES * (MOST + 1) + slice];
}
ties = simd_total(ties) + float(complete ? at_rank_k[2] : reach - count);

// The mass before each number above the k-th: a lane has OWN in a row.
float mass[OWN], sum = 0;
UNROLL for (int i = 0; i < OWN; ++i) {
  const int at = lane * OWN + i;
  mass[i] = sum;
  if (at < above) sum += exp(sorted[at] - top);
}
float until = sum;
UNROLL for (uint step = 1; step < 32; step *= 2) {
  const float other = simd_from(until, lane < step ? lane : lane - step);
  if (lane >= step) until += other;
}
const float earlier = simd_from(until, lane ? lane - 1 : 0), before = lane ? earlier : 0.0f;
const float all_above = simd_from(until, 31), all = fma(ties, exp(limit - top), all_above);
const float share = top_p[row / values_shape[1]];

// The k-th is kept if less than the share lies before it; else the last of which that is so, and always the first.
float last = -top;
UNROLL for (int i = 0; i < OWN; ++i) {
  const int at = lane * OWN + i;
  if (at < above && (before + mass[i]) / all < share) last = -sorted[at];
}
last = simd_most(last);
if (lane == 0) found[row] = share >= 1 || all_above / all < share ? limit : -last;
#undef TO_NUMBER
#undef TO_KEY
#undef MAGNITUDE
