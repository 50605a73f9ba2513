// What top-k, then top-p, then min-p keep of a row's logits over its temperature. The text runs twice: slices of the row
// (JOIN 0) list at most MOST numbers each, all that can be among the k largest; then (JOIN 1) every slice finds the least
// number that is kept from what all have listed, and writes its own.
//
//   values: logits [B, P, V], rules [4 B]         -> found [B, P, SLICES (MOST + 3)]     JOIN 0
//   values: that, rules, logits                   -> found [B, P, V], flaws [B, P]       JOIN 1
//
// Of a row, rules have temperature, k (0: ranks do not matter), top_p and the logarithm of min_p. What slices found is
// MOST numbers each, filled up with -inf; then a bound for each slice, which k of its numbers reach, so that no number
// below it is wanted; then how many more are equal to the bound than are listed; then its flaws.
//
// Threadgroups: (SLICES, B P) of THREADS threads, which have PER of the values each, and WIDE of the logits. THREADS is at
// least MOST and SLICES. Numbers are compared as integers of the same order; 0 and -0 are one, NaN is infinite. What is
// summed is sorted first: the sum does not depend on where in the row a number stood.
// Template: JOIN; SLICES; THREADS; PER; WIDE; MOST, 128.
constexpr int SIMDGROUPS = THREADS / 32, INFINITE = 0x7f800000, OWN = MOST / 32;
union Word { float x; int bits; } word;
#define MAGNITUDE ((word.bits & 0x7fffffff) < INFINITE ? word.bits & 0x7fffffff : INFINITE)
#define TO_KEY(key, number) word.x = (number), (key) = word.bits < 0 ? -MAGNITUDE : MAGNITUDE
#define TO_NUMBER(number, key) word.bits = (key) < 0 ? int(uint(-(key)) | 0x80000000u) : (key), (number) = word.x

SHARED(float, tops, SIMDGROUPS);
SHARED(float, bounds, SIMDGROUPS);
SHARED(float, flawed, SIMDGROUPS);
SHARED(int, counts, 2 * SIMDGROUPS);
SHARED(int, places, SIMDGROUPS);
SHARED(int, listed, MOST);
SHARED(float, sorted, MOST);
SHARED(int, at_rank_k, 3);  // the number there, how many are above it, how many equal to it
SHARED(int, least_kept, 1);

// Slices of one width, so that no thread of the last has nothing.
const int row = group.y, length = JOIN ? SLICES * MOST : values_shape[2];
const int width = JOIN ? length : (length + SLICES - 1) / SLICES, first = JOIN ? 0 : group.x * width;
const int end = first + width < length ? first + width : length;
const auto numbers = values + size_t(row) * values_shape[2];
const auto rule = rules + 4 * (row / values_shape[1]);
const float temperature = rule[0];
const int wanted = int(rule[1]), k = wanted < 1 ? 1 : wanted < MOST ? wanted : MOST;

float lowest;
TO_NUMBER(lowest, -INFINITE);
float own[WIDE];  // read early, for the join takes a while
const int size = JOIN ? logits_shape[2] : 0, own_width = (size + SLICES - 1) / SLICES, own_first = group.x * own_width;
const int own_end = own_first + own_width < size ? own_first + own_width : size;
if (JOIN) {
  UNROLL for (int i = 0; i < WIDE; ++i) {
    const int at = own_first + i * THREADS + int(worker);
    own[i] = at < own_end ? float(logits[size_t(row) * size + at]) : lowest;
  }
}

int keys[PER], largest = -INFINITE, flaw = 0;
UNROLL for (int i = 0; i < PER; ++i) {
  const int at = first + i * THREADS + int(worker);
  const float number = at < end ? float(numbers[at]) : lowest;
  if (!JOIN && at < end) {
    word.x = number;
    const int own_flaw = MAGNITUDE < INFINITE ? 0 : word.bits == int(0xff800000u) ? 1 : 2;
    flaw = own_flaw > flaw ? own_flaw : flaw;
  }
  TO_KEY(keys[i], JOIN ? number : number / temperature);
  largest = keys[i] > largest ? keys[i] : largest;
}

// Where to look for the k-th largest: at most at the largest; in a slice, at least at the least of the threads'
// largest, for there are k threads; in what slices listed, at least at the highest of their bounds.
float top, bound = lowest;
TO_NUMBER(top, largest);
if (JOIN) {
  if (worker < SLICES) bound = numbers[SLICES * MOST + worker], flaw = int(float(numbers[SLICES * (MOST + 2) + worker]));
} else {
  bound = -top;
}
top = simd_most(top), bound = simd_most(bound);
float worst = simd_most(float(flaw));
if (lane == 0) tops[simdgroup] = top, bounds[simdgroup] = bound, flawed[simdgroup] = worst;
BARRIER();
UNROLL for (int i = 0; i < SIMDGROUPS; ++i) {
  top = tops[i] > top ? tops[i] : top;
  bound = bounds[i] > bound ? bounds[i] : bound;
  worst = flawed[i] > worst ? flawed[i] : worst;
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
  const size_t begin = size_t(row) * SLICES * (MOST + 3), behind = begin + SLICES * MOST + group.x;
  const size_t slice = begin + group.x * MOST;
  UNROLL for (int i = 0; i < PER; ++i) {
    if (keys[i] >= least) {
      TO_NUMBER(number, keys[i]);
      found[slice + place++] = number;
    }
  }
  for (int at = count + int(worker); at < MOST; at += THREADS) found[slice + at] = at < k ? limit : lowest;
  if (worker == 0) {
    found[behind] = limit, found[behind + SLICES] = complete ? 0.0f : float(reach - k);
    found[behind + 2 * SLICES] = worst;
  }
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

if (simdgroup == 0) {
  const int kth = complete ? at_rank_k[0] : low, above = complete ? at_rank_k[1] : count;
  float limit, ties = 0;
  TO_NUMBER(limit, kth);
  for (int slice = lane; slice < SLICES; slice += 32) {
    int key;
    TO_KEY(key, float(numbers[SLICES * MOST + slice]));
    if (key == kth) ties += float(numbers[SLICES * (MOST + 1) + slice]);
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
  const float share = rule[2], floor = top + rule[3];

  // The k-th is kept if less than the share lies before it; else the last of which that is so, and always the first.
  float last = -top;
  UNROLL for (int i = 0; i < OWN; ++i) {
    const int at = lane * OWN + i;
    if (at < above && (before + mass[i]) / all < share) last = -sorted[at];
  }
  last = simd_most(last);
  if (lane == 0) {
    limit = wanted < 1 ? lowest : share >= 1 || all_above / all < share ? limit : -last;
    TO_KEY(least_kept[0], floor > limit ? floor : limit);
    if (group.x == 0) flaws[row] = int(worst);
  }
}
BARRIER();

UNROLL for (int i = 0; i < WIDE; ++i) {
  const int at = own_first + i * THREADS + int(worker);
  if (at < own_end) {
    const float number = own[i] / temperature;
    int key;
    TO_KEY(key, number);
    found[size_t(row) * size + at] = key >= least_kept[0] ? number : lowest;
  }
}
#undef TO_NUMBER
#undef TO_KEY
#undef MAGNITUDE
