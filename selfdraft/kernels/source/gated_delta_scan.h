// Gated delta rule over any number of tokens, one after the other, on a state that stays in registers.
//
// A threadgroup takes CHANNELS rows of S, which may be of several value heads, but of one key head: [Hv, Dv] counted
// through. A squad of LANES lanes holds ROWS of them. A lane has the columns that 32 / LANES lanes of gated_delta_tape.h
// have, keeps their sums apart, and adds them in the order of CUDA's simd_total: y and S have the bits that kernel gives,
// and gated_delta_mixer.h, whatever LANES and ROWS are. Lanes of a squad do not stand side by side: 16 bytes of shared
// memory that four neighbours read alike cost NVIDIA half as much.
// Keys, queries, values and gates come through shared memory, PIECE tokens at a time: while a piece is worked on, the
// next is on its way, and waits in registers as it was read, for what is converted is waited for. y is summed over a
// squad four tokens at a time, each quarter of the squad keeping one of them.
// Template: T of q, k, v; BETA of beta; DK, DV; LANES: 8, 16 or 32; ROWS; SIMDGROUPS; PIECE: a multiple of 4.
constexpr int WIDTH = DK / 32, PARTS = 32 / LANES, THREADS = 32 * SIMDGROUPS;
constexpr int SQUADS = PARTS * SIMDGROUPS, CHANNELS = SQUADS * ROWS;
constexpr int HEADS = DV % CHANNELS ? (CHANNELS + DV - 2) / DV + 1 : 1;  // that a threadgroup may touch
constexpr int MANY = 16 / sizeof(T), WORDS = DK / MANY;  // of a key
constexpr int KEY_ROUNDS = (2 * PIECE * WORDS + THREADS - 1) / THREADS;
constexpr int VALUE_ROUNDS = (PIECE * CHANNELS + THREADS - 1) / THREADS;
constexpr int GATE_ROUNDS = (PIECE * HEADS + THREADS - 1) / THREADS;
constexpr int LINE = PIECE + 4;  // of a channel's values: squads then find theirs in different banks
constexpr int PLANES = DK % 128 ? 1 : MANY / 4;  // 16 bytes become two times 16: halves apart, for the sake of banks
constexpr int ROW = PLANES > 1 ? DK + 16 : DK;
constexpr int VALUES = PIECE * 2 * ROW, DECAYS = VALUES + CHANNELS * LINE, RATES = DECAYS + HEADS * LINE;  // in a piece
constexpr int SIZE = RATES + HEADS * LINE;

#ifdef __METAL_VERSION__
#define WRITE4(p, i, word) (((device uint4*)(p))[i] = (word))
#define PLACE threadgroup
#define NOT_UNROLLED _Pragma("clang loop unroll(disable)")
#else
#define WRITE4(p, i, word) (((uint4*)(p))[i] = (word))
#define PLACE
#ifdef __CUDACC__
#define NOT_UNROLLED _Pragma("unroll 1")
#else
#define NOT_UNROLLED
#endif
#endif
#define SHARED_FOUR(p, i) (((const PLACE uint4*)(p))[i])
#define FOURTH(i) ((i) % PLANES * (DK / 8 + 4) + (i) / PLANES)  // where the i-th four of a key is

// A lane's columns of the DK values at `from`, where FOUR(from, i) is its i-th 16 bytes.
#define COLUMN(n) \
  (DK % 128 ? 32 * ((n) % WIDTH) + place + LANES * ((n) / WIDTH) \
            : 128 * ((n) % WIDTH / 4) + 4 * (place + LANES * ((n) / WIDTH)) + (n) % 4)
#define READ_ROW(to, from, FOUR)                                                                     \
  if (DK % 128) {                                                                                    \
    UNROLL for (int n = 0; n < PARTS * WIDTH; ++n) to[n] = (from)[COLUMN(n)];                        \
  } else {                                                                                           \
    UNROLL for (int n = 0; n < PARTS * WIDTH; n += 4) {                                              \
      union { uint4 word; float x[4]; } part;                                                        \
      part.word = FOUR(from, COLUMN(n) / 4);                                                         \
      UNROLL for (int i = 0; i < 4; ++i) to[n + i] = part.x[i];                                      \
    }                                                                                                \
  }
#define KEPT_FOUR(p, i) SHARED_FOUR(p, FOURTH(place) + ((i) - place) / PLANES)  // lanes are even many
// Sums of the old lanes that a lane stands for, in the order in which a simdgroup would add them.
#define JOINED(sums) \
  (PARTS == 4 ? (sums[0] + sums[2 % PARTS]) + (sums[1 % PARTS] + sums[3 % PARTS]) \
   : PARTS == 2 ? sums[0] + sums[1 % PARTS] : sums[0])

SHARED(uint4, words, 2 * SIZE / 4);
PLACE float* const shared = (PLACE float*)words;

const int tokens = q_shape[1], HK = q_shape[2], HV = v_shape[2], ratio = HV / HK;
const uint key_head = group.y, batch = group.z, head = key_head * ratio;  // the first of its value heads
const int place = lane / PARTS, squad = lane % PARTS;
const int channels = ratio * DV, base = group.x * CHANNELS;  // of the key head
const int head_0 = base / DV;  // of the threadgroup's first channel
const size_t token_0 = size_t(batch) * tokens;
const size_t row_0 = (size_t(batch) * HV + head) * DV;  // of S

int channel[ROWS], line[ROWS], gate[ROWS];  // past the last channel: that one again, unwritten
UNROLL for (int r = 0; r < ROWS; ++r) {
  const int mine = (r * SIMDGROUPS + simdgroup) * PARTS + squad, last = channels - 1 - base;
  channel[r] = base + mine;
  line[r] = (mine < last ? mine : last) * LINE;
  gate[r] = HEADS == 1 ? 0 : ((mine < last ? channel[r] : channels - 1) / DV - head_0) * LINE;
}
float s[ROWS][PARTS * WIDTH];
UNROLL for (int r = 0; r < ROWS; ++r) {
  auto from = state + (row_0 + (channel[r] < channels ? channel[r] : channels - 1)) * DK;
  READ_ROW(s[r], from, load4);
}

uint4 key_word[KEY_ROUNDS];
T value_next[VALUE_ROUNDS];
float decay_next[GATE_ROUNDS];
BETA rate_next[GATE_ROUNDS];
// What each thread brings of the piece that begins at `begin`; behind the end nothing is read.
#define FETCH(begin)                                                                                             \
  {                                                                                                              \
    const size_t first = token_0 + (begin);                                                                      \
    const int left = tokens - (begin);                                                                           \
    const auto keys = k + (first * HK + key_head) * DK, queries = q + (first * HK + key_head) * DK;              \
    const auto values = v + (first * HV + head) * DV + base;                                                     \
    const auto factors = decay + first * HV + head + head_0;                                                     \
    const auto rates = beta + first * HV + head + head_0;                                                        \
    UNROLL for (int n = 0; n < KEY_ROUNDS; ++n) {                                                                \
      const int at = n * THREADS + worker, t = at / WORDS % PIECE, from = t * HK * WORDS + at % WORDS;           \
      if (at < 2 * PIECE * WORDS && t < left)                                                                    \
        key_word[n] = at < PIECE * WORDS ? load4(keys, from) : load4(queries, from);                             \
    }                                                                                                            \
    UNROLL for (int n = 0; n < VALUE_ROUNDS; ++n) {                                                              \
      const int at = n * THREADS + worker, t = at / CHANNELS, c = at % CHANNELS;                                 \
      if (at < PIECE * CHANNELS && t < left && base + c < channels) value_next[n] = values[t * HV * DV + c];     \
    }                                                                                                            \
    UNROLL for (int n = 0; n < GATE_ROUNDS; ++n) {                                                               \
      const int at = n * THREADS + worker, t = at / HEADS, h = at % HEADS;                                       \
      if (at < PIECE * HEADS && t < left && head_0 + h < ratio) {                                                \
        decay_next[n] = factors[t * HV + h];                                                                     \
        rate_next[n] = rates[t * HV + h];                                                                        \
      }                                                                                                          \
    }                                                                                                            \
  }

// What was fetched -> the piece.
#define STORE                                                                                                    \
  UNROLL for (int n = 0; n < KEY_ROUNDS; ++n) {                                                                  \
    const int at = n * THREADS + worker;                                                                         \
    if (at < 2 * PIECE * WORDS) {                                                                                \
      union { uint4 word; T x[MANY]; } from;                                                                     \
      union { uint4 word; float x[4]; } part;                                                                    \
      from.word = key_word[n];                                                                                   \
      const int to = at / WORDS % PIECE * 2 * ROW + (at < PIECE * WORDS ? 0 : ROW), four = at % WORDS * (MANY / 4); \
      UNROLL for (int i = 0; i < MANY / 4; ++i) {                                                                \
        UNROLL for (int j = 0; j < 4; ++j) part.x[j] = float(from.x[4 * i + j]);                                 \
        ((PLACE uint4*)(piece + to))[FOURTH(four + i)] = part.word;                                              \
      }                                                                                                          \
    }                                                                                                            \
  }                                                                                                              \
  UNROLL for (int n = 0; n < VALUE_ROUNDS; ++n) {                                                                \
    const int at = n * THREADS + worker;                                                                         \
    if (at < PIECE * CHANNELS) piece[VALUES + at % CHANNELS * LINE + at / CHANNELS] = float(value_next[n]);      \
  }                                                                                                              \
  UNROLL for (int n = 0; n < GATE_ROUNDS; ++n) {                                                                 \
    const int at = n * THREADS + worker;                                                                         \
    if (at < PIECE * HEADS) {                                                                                    \
      piece[DECAYS + at % HEADS * LINE + at / HEADS] = decay_next[n];                                            \
      piece[RATES + at % HEADS * LINE + at / HEADS] = float(rate_next[n]);                                       \
    }                                                                                                            \
  }

// One token, the t-th of its piece; the other arguments are of row r.
#define STEP(t, g, rate, value, seen)                                                                            \
  {                                                                                                              \
    float key[PARTS * WIDTH], query[PARTS * WIDTH];                                                              \
    READ_ROW(key, piece + (t) * 2 * ROW, KEPT_FOUR);                                                             \
    READ_ROW(query, piece + (t) * 2 * ROW + ROW, KEPT_FOUR);                                                     \
    UNROLL for (int r = 0; r < ROWS; ++r) {                                                                      \
      float sums[PARTS];                                                                                         \
      UNROLL for (int j = 0; j < PARTS; ++j) {                                                                   \
        sums[j] = 0;                                                                                             \
        UNROLL for (int n = j * WIDTH; n < (j + 1) * WIDTH; ++n) {                                               \
          s[r][n] = (g) * s[r][n];                                                                              \
          sums[j] = fma(s[r][n], key[n], sums[j]);                                                               \
        }                                                                                                        \
      }                                                                                                          \
      float known = JOINED(sums);                                                                                \
      UNROLL for (int step = LANES / 2; step; step /= 2) known += simd_from(known, lane ^ (step * PARTS));      \
      const float delta = (rate) * ((value) - known);                                                            \
      UNROLL for (int j = 0; j < PARTS; ++j) {                                                                   \
        sums[j] = 0;                                                                                             \
        UNROLL for (int n = j * WIDTH; n < (j + 1) * WIDTH; ++n) {                                               \
          s[r][n] = fma(delta, key[n], s[r][n]);                                                                 \
          sums[j] = fma(s[r][n], query[n], sums[j]);                                                             \
        }                                                                                                        \
      }                                                                                                          \
      seen = JOINED(sums);                                                                                       \
    }                                                                                                            \
  }

const bool upper = place & (LANES / 2), second = place & (LANES / 4);
const size_t token_size = size_t(HV) * DV;
auto out = y + (token_0 * HV + head) * DV + channel[0];  // of a token; a row's is NEXT behind that of the row before
auto kept = out + (2 * upper + second) * token_size;     // of the token that this lane keeps
constexpr int NEXT = SIMDGROUPS * PARTS;
FETCH(0);
int buffer = 0;
NOT_UNROLLED for (int begin = 0; begin < tokens; begin += PIECE) {
  PLACE float* const piece = shared + buffer * SIZE;
  buffer = 1 - buffer;
  STORE;
  BARRIER();  // the only one of a piece: whoever passed it has left the piece before
  FETCH(begin + PIECE);
  const int count = tokens - begin < PIECE ? tokens - begin : PIECE;
  int t = 0;
  NOT_UNROLLED for (; t + 4 <= count; t += 4) {
    union { uint4 word; float x[4]; } g[ROWS], rate[ROWS], value[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      g[r].word = SHARED_FOUR(piece + DECAYS + gate[r] + t, 0);
      rate[r].word = SHARED_FOUR(piece + RATES + gate[r] + t, 0);
      value[r].word = SHARED_FOUR(piece + VALUES + line[r] + t, 0);
    }
    float seen[4][ROWS];
    UNROLL for (int i = 0; i < 4; ++i) STEP(t + i, g[r].x[i], rate[r].x[i], value[r].x[i], seen[i][r]);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      float both[2];
      UNROLL for (int i = 0; i < 2; ++i) {
        const float sent = upper ? seen[i][r] : seen[2 + i][r];
        both[i] = (upper ? seen[2 + i][r] : seen[i][r]) + simd_from(sent, lane ^ (LANES / 2 * PARTS));
      }
      float sum = (second ? both[1] : both[0]) + simd_from(second ? both[0] : both[1], lane ^ (LANES / 4 * PARTS));
      UNROLL for (int step = LANES / 8; step; step /= 2) sum += simd_from(sum, lane ^ (step * PARTS));
      if (place % (LANES / 4) == 0 && channel[r] < channels) kept[r * NEXT] = T(sum);
    }
    kept += 4 * token_size;
  }
  NOT_UNROLLED for (; t < count; ++t) {
    float seen[ROWS];
    STEP(t, piece[DECAYS + gate[r] + t], piece[RATES + gate[r] + t], piece[VALUES + line[r] + t], seen[r]);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      UNROLL for (int step = LANES / 2; step; step /= 2) seen[r] += simd_from(seen[r], lane ^ (step * PARTS));
      if (place == 0 && channel[r] < channels) out[(begin + t) * token_size + r * NEXT] = T(seen[r]);
    }
  }
}

UNROLL for (int r = 0; r < ROWS; ++r) {
  if (channel[r] < channels) {
    auto to = state_now + (row_0 + channel[r]) * DK;
    UNROLL for (int n = 0; n < PARTS * WIDTH; n += DK % 128 ? 1 : 4) {
      if (DK % 128) {
        to[COLUMN(n)] = s[r][n];
      } else {
        union { uint4 word; float x[4]; } part;
        UNROLL for (int i = 0; i < 4; ++i) part.x[i] = s[r][n + i];
        WRITE4(to, COLUMN(n) / 4, part.word);
      }
    }
  }
}
#undef WRITE4
#undef PLACE
#undef NOT_UNROLLED
#undef SHARED_FOUR
#undef FOURTH
#undef KEPT_FOUR
#undef COLUMN
#undef READ_ROW
#undef JOINED
#undef FETCH
#undef STORE
#undef STEP
