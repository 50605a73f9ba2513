// Joins what few_query_partial found in the splits of the keys that a query sees; the others were never written.
//
//   most_of, sums [rows, HEADS, splits, QUERIES], weighted [rows, HEADS, splits, QUERIES, D], lengths [rows],
//   gate [rows, TOKENS, N]: of query head h at columns (2 h + 1) D ..; if GATED is 0, anything [rows, .., TOKENS, ..]
//   -> out [rows, HEADS, QUERIES, D]; if GATED is 1, out [rows, TOKENS, HEADS * GROUP * D], times sigmoid(gate)
//
// Threadgroups: (QUERIES, HEADS, rows) of 512 threads. A thread has four columns of every WAYS-th split.
// Template: T of out; D; GATED; splits have SPLIT keys before BORDER and LATE behind it.
constexpr int THREADS = 512, ACROSS = D / 4, WAYS = THREADS / ACROSS, AHEAD = 2;
const float LOWEST = -3e38f;
union Four { uint4 word; float x[4]; };

SHARED(float, tops, WAYS);
SHARED(float, totals, WAYS);
SHARED(float, columns, WAYS * D);

const int HEADS = most_of_shape[1], QUERIES = most_of_shape[3], TOKENS = gate_shape[GATED ? 1 : 2];
const int way = worker / ACROSS, column = worker % ACROSS, all = most_of_shape[2];
const int first = (int(group.z) * HEADS + int(group.y)) * all * QUERIES + int(group.x);
#define AT(split) (size_t(first) + size_t(split) * QUERIES)

// The first splits are asked for before it is known whether they were written, so that memory is waited for once.
Four four[AHEAD];
float most[AHEAD], sum_of[AHEAD];
UNROLL for (int i = 0; i < AHEAD; ++i) {
  const int split = way + i * WAYS < all ? way + i * WAYS : 0;
  most[i] = most_of[AT(split)], sum_of[i] = sums[AT(split)];
  four[i].word = load4(weighted, AT(split) * ACROSS + column);
}
const int in_group = group.x / uint(TOKENS), token = int(group.x) - in_group * TOKENS;  // its head, and its token
const int seen = lengths[group.z] - TOKENS + 1 + token;
const int splits = seen <= 0 ? 0 : seen <= BORDER ? (seen + SPLIT - 1) / SPLIT : BORDER / SPLIT + (seen - BORDER + LATE - 1) / LATE;

float top = LOWEST, total = 0, sum[4] = {0, 0, 0, 0};
for (int start = way; start < splits; start += AHEAD * WAYS) {
  if (start > way) {
    UNROLL for (int i = 0; i < AHEAD; ++i) {
      const int split = start + i * WAYS < splits ? start + i * WAYS : start;
      most[i] = most_of[AT(split)], sum_of[i] = sums[AT(split)];
      four[i].word = load4(weighted, AT(split) * ACROSS + column);
    }
  }
  UNROLL for (int i = 0; i < AHEAD; ++i)
    if (start + i * WAYS < splits) {
      const float next = most[i] > top ? most[i] : top, factor = exp(top - next), weight = exp(most[i] - next);
      top = next;
      total = fma(total, factor, weight * sum_of[i]);
      UNROLL for (int j = 0; j < 4; ++j) sum[j] = fma(sum[j], factor, weight * four[i].x[j]);
    }
}
if (column == 0) tops[way] = top, totals[way] = total;
UNROLL for (int i = 0; i < 4; ++i) columns[way * D + 4 * column + i] = sum[i];
BARRIER();

if (worker < D) {
  float highest = LOWEST, weights = 0, values = 0;
  UNROLL for (int i = 0; i < WAYS; ++i) highest = tops[i] > highest ? tops[i] : highest;
  UNROLL for (int i = 0; i < WAYS; ++i) {
    const float factor = exp(tops[i] - highest);
    weights = fma(factor, totals[i], weights);
    values = fma(factor, columns[i * D + worker], values);
  }
  const T found = T(splits ? values / weights : 0.0f);
  if (GATED) {
    const int groups = QUERIES / TOKENS, row = group.z * TOKENS + token, head = group.y * groups + in_group;
    const float opening = float(gate[size_t(row) * gate_shape[2] + (2 * head + 1) * D + worker]);
    out[(size_t(row) * (HEADS * groups) + head) * D + worker] = T(float(found) / (1.0f + exp(-opening)));
  } else {
    out[((group.z * HEADS + group.y) * size_t(QUERIES) + group.x) * D + worker] = found;
  }
}
#undef AT
