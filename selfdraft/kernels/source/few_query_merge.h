// Joins what few_query_partial found in the splits of the keys that a query sees; the others were never written.
//
//   most_of, sums [rows, HEADS, splits, QUERIES], weighted [rows, HEADS, splits, QUERIES, D], lengths [rows]
//   -> out [rows, HEADS, QUERIES, D]
//
// Threadgroups: (QUERIES, HEADS, rows) of 512 threads. A thread has four columns of every WAYS-th split.
// Template: T of out; D; HEADS; GROUP; TOKENS; SPLIT.
constexpr int QUERIES = GROUP * TOKENS, THREADS = 512, ACROSS = D / 4, WAYS = THREADS / ACROSS;

SHARED(float, tops, THREADS / 32);
SHARED(float, totals, WAYS);
SHARED(float, columns, WAYS * D);

const int seen = lengths[group.z] - TOKENS + 1 + int(group.x) % TOKENS;
const int splits = seen > 0 ? (seen + SPLIT - 1) / SPLIT : 0, all = most_of_shape[2];
const size_t head = group.z * HEADS + group.y;
#define AT(split) ((head * all + (split)) * QUERIES + group.x)

float top = -3e38f;
for (int split = thread; split < splits; split += THREADS) top = most_of[AT(split)] > top ? most_of[AT(split)] : top;
top = simd_most(top);
if (lane == 0) tops[simdgroup] = top;
BARRIER();
UNROLL for (int i = 0; i < THREADS / 32; ++i) top = tops[i] > top ? tops[i] : top;

const int way = thread / ACROSS, column = thread % ACROSS;
union Four { uint4 word; float x[4]; } four;
float total = 0, sum[4] = {0, 0, 0, 0};
for (int split = way; split < splits; split += WAYS) {
  const float weight = exp(most_of[AT(split)] - top);
  four.word = load4(weighted, AT(split) * ACROSS + column);
  total = fma(weight, sums[AT(split)], total);
  UNROLL for (int i = 0; i < 4; ++i) sum[i] = fma(weight, four.x[i], sum[i]);
}
if (column == 0) totals[way] = total;
UNROLL for (int i = 0; i < 4; ++i) columns[way * D + 4 * column + i] = sum[i];
BARRIER();

if (thread < D) {
  float weights = 0, values = 0;
  UNROLL for (int i = 0; i < WAYS; ++i) weights += totals[i], values += columns[i * D + thread];
  out[((head * QUERIES) + group.x) * D + thread] = T(splits ? values / weights : 0.0f);
}
#undef AT
