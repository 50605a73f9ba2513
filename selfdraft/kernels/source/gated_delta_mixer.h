// A gated delta mixer between its projections: conv, gates, the accepted steps of the last tape, STEPS new ones, norm.
//
// A threadgroup takes one value head of one row. Its S [DV, DK] stays in registers: a simdgroup holds 8 rows, two for
// each of four squads of 8 lanes. A lane of a squad has the columns that four lanes of gated_delta_tape.h have, keeps
// their sums apart, and adds them in the order of CUDA's simd_total: y, deltas and S have the bits that kernel gives,
// with three shuffles a sum in place of five. Channels of q, k, v are convolved by one thread each, for all steps.
// Template: T of the inputs; GATE, NORM: what a + dt_bias and the norm round to; TAPE: at least the tape's steps, or 0;
// STEPS, HK, HV, DK, DV, TAPS; EPS: the bits of the norm's epsilon.
constexpr int WIDTH = DK / 32;
constexpr int THREADS = 4 * DV;
constexpr int CHANNELS = 2 * DK + DV, ROUNDS = (CHANNELS + THREADS - 1) / THREADS;
constexpr int CONVOLVED = 2 * HK * DK + HV * DV, COLUMNS = CONVOLVED + HV * DV + 2 * HV;
constexpr int PAST = TAPS - 1;
constexpr int CHOICE = TAPE > 4 ? 0 : TAPE;  // places where the row's own window may begin, but the first
constexpr int BLOCKS = 2 * DK / 32;  // of 32 channels of q and k
constexpr int OLD_KEYS = (TAPE * DK + THREADS - 1) / THREADS, OLD_DELTAS = TAPE / 4;  // of one thread
constexpr int OUTS = (STEPS + 3) / 4;
constexpr int LATER = TAPE * (DK + DV) > STEPS * DV ? TAPE * (DK + DV) : STEPS * DV;

#ifdef __METAL_VERSION__
#define WRITE4(p, i, word) (((device uint4*)(p))[i] = (word))
#define PLACE threadgroup
#define INVERSE_ROOT(x) metal::precise::rsqrt(x)
#else
#define WRITE4(p, i, word) (((uint4*)(p))[i] = (word))
#define PLACE
#ifdef __CUDACC__
#define INVERSE_ROOT(x) rsqrtf(x)
#else
#define INVERSE_ROOT(x) (1.f / float(sqrt(x)))
#endif
#endif
#define SIGMOID(x) (1.f / (1.f + exp(-(x))))

// A lane's columns of the DK values at `from`; FOUR(from, i) is its i-th 16 bytes.
#define READ_ROW(to, from, FOUR)                                                                                  \
  UNROLL for (int j = 0; j < 4; ++j) {                                                                            \
    if (DK == 128) {                                                                                              \
      union { uint4 word; float x[4]; } part;                                                                     \
      part.word = FOUR(from, place + 8 * j);                                                                      \
      UNROLL for (int i = 0; i < 4; ++i) to[j * WIDTH + i % WIDTH] = part.x[i];                                   \
    } else {                                                                                                      \
      UNROLL for (int i = 0; i < WIDTH; ++i) to[j * WIDTH + i] = (from)[32 * i + place + 8 * j];                  \
    }                                                                                                             \
  }
#define SHARED_FOUR(p, i) (((const PLACE uint4*)(p))[i])

// Sums of the old lanes a lane stands for -> sum over the row, in all lanes of the squad.
#define TOTAL(sum, sums)                         \
  float sum = (sums[0] + sums[2]) + (sums[1] + sums[3]); \
  sum += simd_from(sum, lane ^ 4);               \
  sum += simd_from(sum, lane ^ 2);               \
  sum += simd_from(sum, lane ^ 1);

SHARED(uint4, words, (STEPS * CHANNELS + LATER) / 4);
SHARED(float, squares, STEPS * BLOCKS);
SHARED(float, gates, 2 * STEPS);
SHARED(float, old_decay, TAPE + (TAPE == 0));
PLACE float* const mixed = (PLACE float*)words;  // [STEPS, CHANNELS]: q, k, v
PLACE float* const later = mixed + STEPS * CHANNELS;  // tape: keys [TAPE, DK], deltas [TAPE, DV]; then y [STEPS, DV]

const uint head = group.x, batch = group.y, key_head = head / (HV / HK);
const bool first = head % (HV / HK) == 0;  // of its key head: it writes what they share
const int place = lane % 8, row = simdgroup * 8 + lane / 8;  // its rows are row and row + 4
const size_t matrix = (size_t(batch) * HV + head) * DV;

// All is asked for before anything is used: one trip to memory. That includes all of the tape, and of a short window,
// so that no load waits for `accepted`; what lies past it is dropped, whatever it is. A long window would take too many
// registers: CUDA has 128 for each of 512 threads.
const int count = TAPE ? int(accepted[batch]) : 0, held = TAPE ? int(tape_keys_shape[1]) : 0;
int columns[ROUNDS];
float weight[ROUNDS][TAPS], past[ROUNDS][PAST + CHOICE], fresh[ROUNDS][STEPS];
UNROLL for (int n = 0; n < ROUNDS; ++n) {
  const int channel = n * THREADS + thread;
  if (channel < CHANNELS) {  // as all of a simdgroup
    columns[n] = channel < DK ? key_head * DK + channel
                 : channel < 2 * DK ? (HK + key_head - 1) * DK + channel
                                    : 2 * HK * DK + head * DV + channel - 2 * DK;
    UNROLL for (int t = 0; t < STEPS; ++t)
      fresh[n][t] = float(projected[(size_t(batch) * STEPS + t) * COLUMNS + columns[n]]);
    UNROLL for (int i = 0; i < PAST + CHOICE; ++i) {
      const int at = CHOICE ? i : count + i;
      const size_t token = size_t(batch) * (PAST + held) + at;
      past[n][i] = at < PAST + held ? float(window[token * CONVOLVED + columns[n]]) : 0.f;
    }
    UNROLL for (int i = 0; i < TAPS; ++i) weight[n][i] = float(conv_weight[columns[n] * TAPS + i]);
  }
}
const int step = THREADS - 1 - thread;  // whose gates it makes; from the end, where simdgroups have no channels
float rate = 0, speed = 0, log_decay = 0, bias = 0;
if (step < STEPS) {
  const size_t from = (size_t(batch) * STEPS + step) * COLUMNS + CONVOLVED + HV * DV + head;
  rate = float(projected[from]);
  speed = float(projected[from + HV]);
  log_decay = float(a_log[head]);
  bias = float(dt_bias[head]);
}
float tape_key[OLD_KEYS + (TAPE == 0)], tape_delta[OLD_DELTAS + (TAPE == 0)], tape_factor = 0;
if (TAPE) {
  UNROLL for (int n = 0; n < OLD_KEYS; ++n) {
    const int at = n * THREADS + thread, t = at / DK;
    if (t < held) tape_key[n] = float(tape_keys[((size_t(batch) * held + t) * HK + key_head) * DK + at % DK]);
  }
  UNROLL for (int n = 0; n < OLD_DELTAS; ++n) {
    const int t = 4 * n + thread / DV;
    if (t < held) tape_delta[n] = float(tape_deltas[((size_t(batch) * held + t) * HV + head) * DV + thread % DV]);
  }
  if (int(thread) < held) tape_factor = float(tape_decay[(size_t(batch) * held + thread) * HV + head]);
}
float s[2][4 * WIDTH];
UNROLL for (int r = 0; r < 2; ++r) {
  auto from = state + (matrix + row + 4 * r) * DK;
  READ_ROW(s[r], from, load4);
}
const int element = thread % DV;  // of y, for the norm
const float scale = float(norm_weight[element]);
float z[OUTS];
UNROLL for (int n = 0; n < OUTS; ++n) {
  const int t = 4 * n + thread / DV;
  z[n] = t < STEPS ? float(projected[(size_t(batch) * STEPS + t) * COLUMNS + CONVOLVED + head * DV + element]) : 0.f;
}

// Convolution and silu, which rounds between its operations as MLX does.
float value[ROUNDS][STEPS];
UNROLL for (int n = 0; n < ROUNDS; ++n) {
  const int channel = n * THREADS + thread;
  if (channel < CHANNELS) {
    float line[PAST + STEPS];
    UNROLL for (int i = 0; i < PAST; ++i) {
      line[i] = past[n][i];
      UNROLL for (int c = 1; c <= CHOICE; ++c) line[i] = c == count ? past[n][c + i] : line[i];
    }
    UNROLL for (int t = 0; t < STEPS; ++t) line[PAST + t] = fresh[n][t];
    UNROLL for (int t = 0; t < STEPS; ++t) {
      float sum = 0;
      UNROLL for (int i = 0; i < TAPS; ++i) sum = fma(line[t + i], weight[n][i], sum);
      value[n][t] = float(T(sum));
    }
    if (first || channel >= 2 * DK) {
      UNROLL for (int i = 0; i < PAST + STEPS; ++i)
        window_now[(size_t(batch) * (PAST + STEPS) + i) * CONVOLVED + columns[n]] = T(line[i]);
    }
    // Loops of their own, for divisions branch, and would keep what is around them from overlapping.
    float sigmoid[STEPS];
    UNROLL for (int t = 0; t < STEPS; ++t) sigmoid[t] = 1.f + exp(-value[n][t]);
    UNROLL for (int t = 0; t < STEPS; ++t) sigmoid[t] = 1.f / sigmoid[t];
    UNROLL for (int t = 0; t < STEPS; ++t) value[n][t] = float(T(value[n][t] * float(T(sigmoid[t]))));
    if (channel < 2 * DK) {
      UNROLL for (int t = 0; t < STEPS; ++t) {
        const float total = simd_total(fma(value[n][t], value[n][t], 0.f));  // a product might be fused with the sum
        if (lane == 0) squares[t * BLOCKS + channel / 32] = total;
      }
    }
  }
}
if (step < STEPS) {
  const float x = float(GATE(speed + bias)), small = exp(x < 0.f ? x : -x), more = 1.f + small;
  const float tail = more == 1.f ? 1.f : log(more) / (more - 1.f);  // log1p(small) over small
  const float softplus = float(GATE(fma(small, tail, x < 0.f ? 0.f : x)));
  const float factor = exp(-exp(log_decay) * softplus);
  gates[2 * step] = factor;
  gates[2 * step + 1] = float(T(SIGMOID(rate)));
  decay[(size_t(batch) * STEPS + step) * HV + head] = factor;
}
if (TAPE) {
  UNROLL for (int n = 0; n < OLD_KEYS; ++n) {
    const int at = n * THREADS + thread;
    if (at < held * DK) later[at] = tape_key[n];
  }
  UNROLL for (int n = 0; n < OLD_DELTAS; ++n) {
    const int at = n * THREADS + thread;
    if (at < held * DV) later[TAPE * DK + at] = tape_delta[n];
  }
  if (int(thread) < held) old_decay[thread] = tape_factor;
}
BARRIER();

UNROLL for (int n = 0; n < ROUNDS; ++n) {
  const int channel = n * THREADS + thread;
  if (channel < CHANNELS) {
    if (channel < 2 * DK) {
      const bool is_key = channel >= DK;
      const float length = float(T(is_key ? INVERSE_ROOT(float(DK)) : 1.f / DK));
      UNROLL for (int t = 0; t < STEPS; ++t) {
        float total = 0;
        UNROLL for (int i = 0; i < WIDTH; ++i) total += squares[t * BLOCKS + channel / DK * WIDTH + i];
        const float inverse = INVERSE_ROOT(fma(total, 1.f / DK, 1e-6f / DK));
        value[n][t] = float(T(length * float(T(value[n][t] * inverse))));
      }
      if (is_key && first) {
        UNROLL for (int t = 0; t < STEPS; ++t)
          keys[((size_t(batch) * STEPS + t) * HK + key_head) * DK + channel - DK] = T(value[n][t]);
      }
    }
    UNROLL for (int t = 0; t < STEPS; ++t) mixed[t * CHANNELS + channel] = value[n][t];
  }
}

// What follows has the expressions of gated_delta_tape.h.
UNROLL for (int t = 0; t < TAPE; ++t) {
  if (t < count) {
    float key[4 * WIDTH];
    READ_ROW(key, later + t * DK, SHARED_FOUR);
    UNROLL for (int r = 0; r < 2; ++r) {
      const float delta = later[TAPE * DK + t * DV + row + 4 * r];
      UNROLL for (int i = 0; i < 4 * WIDTH; ++i) {
        const float decayed = old_decay[t] * s[r][i];
        s[r][i] = fma(delta, key[i], decayed);
      }
    }
  }
}
UNROLL for (int r = 0; r < 2; ++r) {
  auto to = state_now + (matrix + row + 4 * r) * DK;
  UNROLL for (int j = 0; j < 4; ++j) {
    if (DK == 128) {
      union { uint4 word; float x[4]; } part;
      UNROLL for (int i = 0; i < 4; ++i) part.x[i] = s[r][j * WIDTH + i % WIDTH];
      WRITE4(to, place + 8 * j, part.word);
    } else {
      UNROLL for (int i = 0; i < WIDTH; ++i) to[32 * i + place + 8 * j] = s[r][j * WIDTH + i];
    }
  }
}
UNROLL for (int n = 0; n < OUTS; ++n) z[n] = z[n] * SIGMOID(z[n]);
BARRIER();

UNROLL for (int t = 0; t < STEPS; ++t) {
  const float g = gates[2 * t], beta = gates[2 * t + 1];
  float key[4 * WIDTH], query[4 * WIDTH], delta[2], result[2];
  READ_ROW(key, mixed + t * CHANNELS + DK, SHARED_FOUR);
  READ_ROW(query, mixed + t * CHANNELS, SHARED_FOUR);
  UNROLL for (int r = 0; r < 2; ++r) {
    float remembered[4], seen[4];
    UNROLL for (int j = 0; j < 4; ++j) {
      remembered[j] = 0;
      UNROLL for (int i = 0; i < WIDTH; ++i) {
        const int at = j * WIDTH + i;
        s[r][at] = g * s[r][at];
        remembered[j] = fma(s[r][at], key[at], remembered[j]);
      }
    }
    TOTAL(known, remembered);
    delta[r] = beta * (mixed[t * CHANNELS + 2 * DK + row + 4 * r] - known);
    UNROLL for (int j = 0; j < 4; ++j) {
      seen[j] = 0;
      UNROLL for (int i = 0; i < WIDTH; ++i) {
        const int at = j * WIDTH + i;
        s[r][at] = fma(delta[r], key[at], s[r][at]);
        seen[j] = fma(s[r][at], query[at], seen[j]);
      }
    }
    TOTAL(sum, seen);
    result[r] = sum;
  }
  if (place < 2) {
    const int mine = row + 4 * place;
    deltas[((size_t(batch) * STEPS + t) * HV + head) * DV + mine] = place ? delta[1] : delta[0];
    later[t * DV + mine] = float(T(place ? result[1] : result[0]));
  }
}
BARRIER();

// Each simdgroup sums the squares of all of y, for the 32 elements that it writes.
union { uint bits; float value; } epsilon;
epsilon.bits = EPS;
UNROLL for (int n = 0; n < OUTS; ++n) {
  const int t = 4 * n + thread / DV;
  if (t < STEPS) {  // as all of a simdgroup
    float sum = 0;
    UNROLL for (int i = 0; i < DV / 32; ++i) {
      const float y = later[t * DV + lane + 32 * i];
      sum = fma(y, y, sum);
    }
    const float inverse = INVERSE_ROOT(fma(simd_total(sum), 1.f / DV, epsilon.value));
    const float normed = float(NORM(scale * float(NORM(later[t * DV + element] * inverse))));
    out[((size_t(batch) * STEPS + t) * HV + head) * DV + element] = T(z[n] * normed);
  }
}
#undef WRITE4
#undef PLACE
#undef INVERSE_ROOT
#undef SIGMOID
#undef READ_ROW
#undef SHARED_FOUR
#undef TOTAL
