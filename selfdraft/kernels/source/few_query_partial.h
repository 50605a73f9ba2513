// Attention of few queries over one split of the keys. A threadgroup has the queries of one kv head (a block of them,
// where there are many), so that a key or a value is read from memory once for all of them.
//
//   q [rows, HEADS, QUERIES, D], keys and values [1, HEADS, capacity, D] of each row, lengths [rows], scale [1]
//   -> most_of, sums [rows, HEADS, splits, QUERIES], weighted [rows, HEADS, splits, QUERIES, D]
//
// Threadgroups: (splits, blocks of queries * HEADS, rows) of D / 2 threads; HEADS are those of the keys. Keys come in
// tiles at fixed absolute positions. The order of a query's sums is fixed by T and D alone; which thread has which query is not, and depends on BLOCK.
// Numbers of heads and tokens are read from shapes: each would be compiled anew.
// Template: T; D; BLOCK queries a threadgroup, at most 32; SPLIT, a multiple of 16.
constexpr int THREADS = D / 2, TILE = 16;
constexpr int PACK = 16 / sizeof(T);               // numbers in 16 bytes
constexpr int PACKS = TILE * D / PACK / THREADS;   // of a tile, a thread
// Scores: 8 teams of lanes, each lane with 16 columns. A team has SOME of the queries, and every WAYS-th key.
constexpr int TEAM = D / 16, PARTS = 16 / PACK;
constexpr int SHARES = BLOCK <= 4 ? 1 : BLOCK <= 8 ? 2 : BLOCK <= 16 ? 4 : 8, WAYS = 8 / SHARES;
constexpr int SOME = (BLOCK + SHARES - 1) / SHARES;
// Softmax: 16 lanes have one query, a key of the tile each. Values: a thread has two columns, of all queries.
constexpr int ABREAST = THREADS / TILE, PASSES = (BLOCK + ABREAST - 1) / ABREAST, WORDS = sizeof(T) / 2;
const float LOWEST = -3e38f;
union Pack { uint4 word; T x[PACK]; };
union Pair { uint words[WORDS]; T x[2]; };

SHARED(uint4, tile, TILE * D / PACK);
SHARED(float, weights, SHARES * SOME * TILE);
SHARED(float, factors, BLOCK);

#ifdef __METAL_VERSION__
#define WORDS_OF_TILE ((const threadgroup uint*)tile)
#else
#define WORDS_OF_TILE ((const uint*)tile)
#endif

const int length = lengths[group.z], first = group.x * SPLIT;
if (first >= length) return;
const int end = length < first + SPLIT ? length : first + SPLIT;
const int HEADS = keys_shape[1], TOKENS = q_shape[2], QUERIES = q_shape[1] / HEADS * TOKENS;
int head = group.y, begin = 0;
for (; head >= HEADS; head -= HEADS) begin += BLOCK;
const auto head_keys = keys + size_t(head) * keys_shape[2] * D, head_values = values + size_t(head) * keys_shape[2] * D;
head += group.z * HEADS;

// A team's queries, for the whole split.
const int member = worker % TEAM, share = worker / TEAM % SHARES, way = worker / TEAM / SHARES;
const bool second = member >= TEAM / 2;
auto my_scores = weights + share * SOME * TILE + (second ? WAYS : 0);
float query[SOME][16];
UNROLL for (int i = 0; i < SOME; ++i) {
  const int slot = share * SOME + i, index = begin + slot;
  UNROLL for (int part = 0; part < PARTS; ++part) {
    Pack pack;
    pack.word = load4(q, (size_t(head) * QUERIES + (index < QUERIES ? index : 0)) * (D / PACK) + part * TEAM + member);
    UNROLL for (int j = 0; j < PACK; ++j) query[i][part * PACK + j] = float(pack.x[j]);
  }
}

// A tile is fetched from memory one step before it is needed. What lies behind the length is not read: it may be NaN.
uint4 ahead[PACKS];
const uint4 nothing = {0, 0, 0, 0};
#define FETCH(array, start)                                                                            \
  UNROLL for (int i = 0; i < PACKS; ++i) {                                                             \
    const uint at = i * THREADS + worker;                                                              \
    ahead[i] = nothing;                                                                                \
    if ((start) + int(at / (D / PACK)) < end) ahead[i] = load4(array, uint(start) * (D / PACK) + at);  \
  }
#define STORE() UNROLL for (int i = 0; i < PACKS; ++i) tile[i * THREADS + worker] = ahead[i]

float most[PASSES], sum[PASSES], values_of[BLOCK][2];
int seen[PASSES];  // keys: the last tokens of the row are the queries' own
UNROLL for (int i = 0; i < PASSES; ++i) {
  most[i] = LOWEST, sum[i] = 0;
  seen[i] = length - TOKENS + 1 + (begin + i * ABREAST + int(worker) / TILE) % TOKENS;
}
UNROLL for (int i = 0; i < BLOCK; ++i) values_of[i][0] = values_of[i][1] = 0;

FETCH(head_keys, first);
for (int start = first; start < end; start += TILE) {
  STORE();
  BARRIER();
  FETCH(head_values, start);
  for (int key = way; key < TILE; key += 2 * WAYS) {  // and key + WAYS
    Pack pack[2][PARTS];
    UNROLL for (int two = 0; two < 2; ++two)
      UNROLL for (int part = 0; part < PARTS; ++part)
        pack[two][part].word = tile[(key + two * WAYS) * (D / PACK) + part * TEAM + member];
    float score[2][SOME], total[SOME];
    UNROLL for (int two = 0; two < 2; ++two) {
      UNROLL for (int i = 0; i < SOME; ++i) score[two][i] = 0;
      UNROLL for (int j = 0; j < 16; ++j)
        UNROLL for (int i = 0; i < SOME; ++i)
          score[two][i] = fma(query[i][j], float(pack[two][j / PACK].x[j % PACK]), score[two][i]);
    }
    // Sums over the team: a first step leaves each half with one of the two keys, so the other steps serve both.
    UNROLL for (int i = 0; i < SOME; ++i) {
      const float mine = second ? score[1][i] : score[0][i], other = second ? score[0][i] : score[1][i];
      total[i] = mine + simd_from(other, lane ^ (TEAM / 2));
    }
    UNROLL for (int step = TEAM / 4; step; step /= 2)
      UNROLL for (int i = 0; i < SOME; ++i) total[i] += simd_from(total[i], lane ^ step);
    if (member % (TEAM / 2) == 0)
      UNROLL for (int i = 0; i < SOME; ++i) my_scores[key + i * TILE] = total[i] * scale[0];
  }
  BARRIER();

  // Scores become weights relative to the most so far; what was summed before is made relative to it too.
  STORE();
  UNROLL for (int pass = 0; pass < PASSES; ++pass) {
    const int slot = pass * ABREAST + worker / TILE, key = worker % TILE;
    const bool sees = slot < BLOCK && start + key < seen[pass];
    const float score = sees ? weights[slot * TILE + key] : LOWEST;
    float top = score > most[pass] ? score : most[pass];
    UNROLL for (int step = TILE / 2; step; step /= 2) {
      const float other = simd_from(top, lane ^ step);
      top = other > top ? other : top;
    }
    const float factor = exp(most[pass] - top), weight = sees ? exp(score - top) : 0.0f;
    most[pass] = top;
    sum[pass] = fma(sum[pass], factor, weight);
    if (slot < BLOCK) {
      weights[slot * TILE + key] = weight;
      if (key == 0) factors[slot] = factor;
    }
  }
  BARRIER();

  FETCH(head_keys, start + TILE);
  UNROLL for (int i = 0; i < BLOCK; ++i) values_of[i][0] *= factors[i], values_of[i][1] *= factors[i];
  for (int four = 0; four < TILE; four += 4)
    UNROLL for (int key = four; key < four + 4; ++key) {
      Pair pair;
      UNROLL for (int i = 0; i < WORDS; ++i) pair.words[i] = WORDS_OF_TILE[(key * THREADS + worker) * WORDS + i];
      const float left = float(pair.x[0]), right = float(pair.x[1]);
      UNROLL for (int i = 0; i < BLOCK; ++i) {
        values_of[i][0] = fma(weights[i * TILE + key], left, values_of[i][0]);
        values_of[i][1] = fma(weights[i * TILE + key], right, values_of[i][1]);
      }
    }
  BARRIER();
}

const size_t out = (head * size_t(grid.x) + group.x) * QUERIES + begin;
UNROLL for (int pass = 0; pass < PASSES; ++pass) {
  const int slot = pass * ABREAST + worker / TILE;
  float total = sum[pass];
  UNROLL for (int step = TILE / 2; step; step /= 2) total += simd_from(total, lane ^ step);
  if (worker % TILE == 0 && slot < BLOCK && begin + slot < QUERIES) {
    most_of[out + slot] = most[pass];
    sums[out + slot] = total;
  }
}
UNROLL for (int i = 0; i < BLOCK; ++i)
  if (begin + i < QUERIES)
    UNROLL for (int j = 0; j < 2; ++j) weighted[(out + i) * D + 2 * worker + j] = values_of[i][j];

#undef WORDS_OF_TILE
#undef FETCH
#undef STORE
