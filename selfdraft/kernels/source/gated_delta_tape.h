// Gated delta rule: the accepted steps of the last call's tape, then STEPS new ones, on a state that stays in registers.
//
// A simdgroup holds ROWS rows of one head's S [DV, DK], DK / 32 columns of each a lane. Where DK is a multiple of 128 these
// are fours of neighbours: a simdgroup reads and writes 512 bytes of S at a time, 16 a lane. Rows need nothing of each
// other, so there is no barrier; ROWS = 4 lets a key serve four rows and four sums overlap.
// Template: T of q, k, v; BETA of beta; TAPE: at least the tape's steps; STEPS or TAPE may be 0, and what would be of that length is not touched.
constexpr int WIDTH = DK / 32;
constexpr int KEPT = (STEPS * ROWS + 31) / 32 + (STEPS == 0);
constexpr int DELTAS = HK * DK, DECAYS = DELTAS + HV * DV, LINE = DECAYS + HV;  // of a step of a tape: keys, deltas, decay

#ifdef __METAL_VERSION__
#define WRITE4(p, i, word) (((device uint4*)(p))[i] = (word))
#else
#define WRITE4(p, i, word) (((uint4*)(p))[i] = (word))
#endif

// A lane's columns of the DK values at `from`. Of 16-bit types, 16 bytes hold what two lanes want: both read them.
#define COLUMN(i) (DK % 128 ? lane + 32 * (i) : (32 * ((i) / 4) + lane) * 4 + (i) % 4)
#define READ_ROW(to, Type, from, aligned)                                                            \
  if (DK % 128 || !(aligned)) {                                                                      \
    UNROLL for (int i = 0; i < WIDTH; ++i) to[i] = float((from)[COLUMN(i)]);                         \
  } else {                                                                                           \
    constexpr int MANY = 16 / sizeof(Type);                                                          \
    UNROLL for (int j = 0; j < WIDTH / 4; ++j) {                                                     \
      union { uint4 word; Type x[MANY]; } part;                                                      \
      part.word = load4(from, (32 * j + lane) * 4 / MANY);                                           \
      UNROLL for (int i = 0; i < 4; ++i)                                                             \
        to[4 * j + i] = lane % 2 ? float(part.x[(4 + i) % MANY]) : float(part.x[i]);                 \
    }                                                                                                \
  }

const uint head = group.y, batch = group.z, key_head = head / (HV / HK);
const uint first = (group.x * SIMDGROUPS + simdgroup) * ROWS;
const size_t matrix = (size_t(batch) * HV + head) * DV;
uint rows[ROWS];  // past the last one: that one again, unwritten
UNROLL for (int r = 0; r < ROWS; ++r) rows[r] = first + r < DV ? first + r : DV - 1;

float s[ROWS][WIDTH];
UNROLL for (int r = 0; r < ROWS; ++r) {
  READ_ROW(s[r], float, state + (matrix + rows[r]) * DK, true);
}

// Everything else is asked for before S is here: one trip to memory. That includes the whole tape, so that no load waits
// for `accepted`; what lies past it is dropped, whatever it is.
const int count = TAPE ? int(accepted[batch]) : 0, held = tape_shape[1];
float old_key[TAPE + (TAPE == 0)][WIDTH], old_decay[TAPE + (TAPE == 0)], old_delta[TAPE + (TAPE == 0)][ROWS];
UNROLL for (int t = 0; t < TAPE; ++t) {
  const auto line = tape + (size_t(batch) * held + (t < held ? t : held - 1)) * LINE;
  READ_ROW(old_key[t], float, line + key_head * DK, LINE % 4 == 0);
  old_decay[t] = line[DECAYS + head];
  UNROLL for (int r = 0; r < ROWS; ++r) old_delta[t][r] = line[DELTAS + head * DV + rows[r]];
}
float key[STEPS + (STEPS == 0)][WIDTH], query[STEPS + (STEPS == 0)][WIDTH], value[STEPS + (STEPS == 0)][ROWS];
float g[STEPS + (STEPS == 0)], rate[STEPS + (STEPS == 0)];
UNROLL for (int t = 0; t < STEPS; ++t) {
  const size_t token = size_t(batch) * STEPS + t;
  READ_ROW(key[t], T, k + (token * HK + key_head) * DK, true);
  READ_ROW(query[t], T, q + (token * HK + key_head) * DK, true);
  g[t] = decay[token * HV + head];
  rate[t] = float(beta[token * HV + head]);
  UNROLL for (int r = 0; r < ROWS; ++r) value[t][r] = float(v[(token * HV + head) * DV + rows[r]]);
}

UNROLL for (int t = 0; t < TAPE; ++t) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int i = 0; i < WIDTH; ++i) {
      const float decayed = old_decay[t] * s[r][i];
      const float next = fma(old_delta[t][r], old_key[t][i], decayed);
      s[r][i] = t < count ? next : s[r][i];
    }
  }
}

UNROLL for (int r = 0; r < ROWS; ++r) {
  if (first + r < DV) {
    auto to = state_now + (matrix + rows[r]) * DK;
    if (DK % 128) {
      UNROLL for (int i = 0; i < WIDTH; ++i) to[lane + 32 * i] = s[r][i];
    } else {
      UNROLL for (int j = 0; j < WIDTH / 4; ++j) {
        union { uint4 word; float x[4]; } part;
        UNROLL for (int i = 0; i < 4; ++i) part.x[i] = s[r][4 * j + i];
        WRITE4(to, 32 * j + lane, part.word);
      }
    }
  }
}

// Step t's results wait in lanes t * ROWS + r, modulo 32, so that one write takes them all.
float kept_y[KEPT], kept_delta[KEPT];
UNROLL for (int t = 0; t < STEPS; ++t) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    float remembered = 0, seen = 0;
    UNROLL for (int i = 0; i < WIDTH; ++i) {
      s[r][i] = g[t] * s[r][i];
      remembered = fma(s[r][i], key[t][i], remembered);
    }
    const float delta = rate[t] * (value[t][r] - simd_total(remembered));
    UNROLL for (int i = 0; i < WIDTH; ++i) {
      s[r][i] = fma(delta, key[t][i], s[r][i]);
      seen = fma(s[r][i], query[t][i], seen);
    }
    const float result = simd_total(seen);
    const int slot = t * ROWS + r;
    if (slot % 32 == int(lane)) {
      kept_y[slot / 32] = result;
      kept_delta[slot / 32] = delta;
    }
  }
}
UNROLL for (int i = 0; i < KEPT; ++i) {
  const int slot = 32 * i + lane, t = slot / ROWS, row = first + slot % ROWS;
  if (t < STEPS && row < DV) {
    const size_t token = size_t(batch) * STEPS + t;
    y[(token * HV + head) * DV + row] = kept_y[i];
    tape_now[token * LINE + DELTAS + head * DV + row] = kept_delta[i];
  }
}

// What the new tape has of the inputs, read again, for registers are few: all threads of a head share in that.
const auto noted = tape_now + size_t(batch) * STEPS * LINE;
const auto given = k + size_t(batch) * STEPS * HK * DK;
for (uint at = 32 * SIMDGROUPS * group.x + worker; at < STEPS * DK; at += 32 * SIMDGROUPS * grid.x) {
  const uint t = at / DK, element = key_head * DK + at % DK;
  if (head % (HV / HK) == 0) noted[t * LINE + element] = float(given[t * HK * DK + element]);
  if (at < STEPS) noted[at * LINE + DECAYS + head] = decay[(size_t(batch) * STEPS + at) * HV + head];
}
#undef COLUMN
#undef READ_ROW
#undef WRITE4
