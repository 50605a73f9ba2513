// A gated delta mixer between its projections: conv, gates, the accepted steps of the last tape, new ones, norm.
//
// A threadgroup takes one value head of one row. Its S [DV, DK] stays in registers: a simdgroup holds 8 rows, two for
// each of four squads of 8 lanes. A lane of a squad has the columns that four lanes of gated_delta_tape.h have, keeps
// their sums apart, and adds them in the order of CUDA's simd_total: y, deltas and S have the bits that kernel gives,
// with three shuffles a sum in place of five. Channels of q, k, v are convolved by one thread each, four steps at a time.
// Numbers of heads, steps and steps of the tape are read from shapes: each would be compiled anew.
// Template: T of the inputs; GATE, NORM: what a + dt_bias and the norm round to; MOST_STEPS, MOST_TAPE: what there is
// room for; DK, DV, TAPS.
constexpr int WIDTH = DK / 32;
constexpr int THREADS = 4 * DV;
constexpr int CHANNELS = 2 * DK + DV, ROUNDS = (CHANNELS + THREADS - 1) / THREADS;
constexpr int PAST = TAPS - 1, CHUNK = 4;  // steps that are convolved at a time
constexpr int CHOICE = 4;  // of a tape that is no longer, the window is read whole, before it is known where it begins
constexpr int BLOCKS = 2 * DK / 32;  // of 32 channels of q and k
constexpr int OLD_KEYS = (CHOICE * DK + THREADS - 1) / THREADS, ALL_OLD_KEYS = (MOST_TAPE * DK + THREADS - 1) / THREADS;
constexpr int OUTS = (MOST_STEPS + 3) / 4;
constexpr int OLD = MOST_TAPE * (DK + DV), LATER = OLD > MOST_STEPS * DV ? OLD : MOST_STEPS * DV;

#ifdef __METAL_VERSION__
#define WRITE4(p, i, word) (((device uint4*)(p))[i] = (word))
#define PLACE threadgroup
#define NOT_UNROLLED _Pragma("clang loop unroll(disable)")
#define INVERSE_ROOT(x) metal::precise::rsqrt(x)
#else
#define WRITE4(p, i, word) (((uint4*)(p))[i] = (word))
#define PLACE
#ifdef __CUDACC__
#define NOT_UNROLLED _Pragma("unroll 1")
#define INVERSE_ROOT(x) rsqrtf(x)
#else
#define NOT_UNROLLED
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

SHARED(uint4, words, (MOST_STEPS * CHANNELS + LATER) / 4);
SHARED(float, squares, MOST_STEPS * BLOCKS);
SHARED(float, gates, 2 * MOST_STEPS);
SHARED(float, old_decay, MOST_TAPE);
PLACE float* const mixed = (PLACE float*)words;  // [steps, CHANNELS]: q, k, v
PLACE float* const later = mixed + MOST_STEPS * CHANNELS;  // tape: keys [MOST_TAPE, DK], deltas [.., DV]; then y [steps, DV]

const int HV = state_shape[1], steps = projected_shape[1], held = window_shape[1] - PAST;
const int CONVOLVED = conv_weight_shape[0], COLUMNS = projected_shape[2], HK = (CONVOLVED - HV * DV) / (2 * DK);
const int DELTAS = HK * DK, DECAYS = CONVOLVED - DELTAS, LINE = DECAYS + HV;  // of a step of a tape: keys, deltas, decay
const uint head = group.x, batch = group.y, key_head = head * uint(HK) / uint(HV);
const bool first = key_head * HV == head * HK;  // of its key head: it writes what they share
const int place = lane % 8, row = simdgroup * 8 + lane / 8;  // its rows are row and row + 4
const size_t matrix = (size_t(batch) * HV + head) * DV, step_0 = size_t(batch) * steps;

// All is asked for before anything is used: one trip to memory, if there are at most CHUNK steps. That includes all of
// the tape, and of a short window, so that no load waits for `accepted`; what lies past it is dropped, whatever it is.
// A long window would take too many registers: CUDA has 128 for each of 512 threads.
const int count = held ? int(accepted[batch]) : 0;
int columns[ROUNDS];
float weight[ROUNDS][TAPS], past[ROUNDS][PAST + CHOICE], fresh[ROUNDS][CHUNK];
const auto given = projected + step_0 * COLUMNS;  // this row's; offsets of 32 bits from here on, for registers are few
const auto taped = tape + size_t(batch) * held * LINE;
const auto before = window + size_t(batch) * (PAST + held) * CONVOLVED;
#define FETCH(n, from)                                             \
  UNROLL for (int t = 0; t < CHUNK; ++t)                           \
    fresh[n][t] = (from) + t < steps ? float(given[((from) + t) * COLUMNS + columns[n]]) : 0.f;
#define PAST_AT(n, i) float(before[(i) * CONVOLVED + columns[n]])
UNROLL for (int n = 0; n < ROUNDS; ++n) {
  const int channel = n * THREADS + worker;
  if (channel < CHANNELS) {  // as all of a simdgroup
    columns[n] = channel < DK ? key_head * DK + channel
                 : channel < 2 * DK ? (HK + key_head - 1) * DK + channel
                                    : 2 * HK * DK + head * DV + channel - 2 * DK;
    FETCH(n, 0);
    UNROLL for (int i = 0; i < PAST + CHOICE; ++i)
      past[n][i] = held <= CHOICE && i < PAST + held ? PAST_AT(n, i) : 0.f;
    UNROLL for (int i = 0; i < TAPS; ++i) weight[n][i] = float(conv_weight[columns[n] * TAPS + i]);
  }
}
const int step = THREADS - 1 - worker;  // whose gates it makes; from the end, where simdgroups have no channels
float rate = 0, speed = 0, log_decay = 0, bias = 0;
if (step < steps) {
  const int from = step * COLUMNS + CONVOLVED + HV * DV + head;
  rate = float(given[from]);
  speed = float(given[from + HV]);
  log_decay = float(a_log[head]);
  bias = float(dt_bias[head]);
}
float tape_key[OLD_KEYS], tape_delta = 0, tape_factor = 0;
#define TAPE_KEY(at) taped[(at) / DK * LINE + key_head * DK + (at) % DK]
#define TAPE_DELTA(at) taped[(at) / DV * LINE + DELTAS + head * DV + (at) % DV]
UNROLL for (int n = 0; n < OLD_KEYS; ++n) {
  const int at = n * THREADS + worker;
  tape_key[n] = at < held * DK ? TAPE_KEY(at) : 0.f;
}
if (int(worker) < held * DV) tape_delta = TAPE_DELTA(int(worker));
if (int(worker) < held) tape_factor = taped[worker * LINE + DECAYS + head];
float s[2][4 * WIDTH];
UNROLL for (int r = 0; r < 2; ++r) {
  auto from = state + (matrix + row + 4 * r) * DK;
  READ_ROW(s[r], from, load4);
}
const int element = worker % DV;  // of y, for the norm
const float scale = float(norm_weight[element]), epsilon = eps[0];
float z[OUTS];
UNROLL for (int n = 0; n < OUTS; ++n) {
  const int t = 4 * n + worker / DV;
  z[n] = t < steps ? float(given[t * COLUMNS + CONVOLVED + head * DV + element]) : 0.f;
}
if (held > CHOICE) {  // what is longer comes behind the rest, and the tape's part of it goes on to its place at once
  UNROLL for (int n = 0; n < ROUNDS; ++n)
    if (n * THREADS + int(worker) < CHANNELS) UNROLL for (int i = 0; i < PAST; ++i) past[n][i] = PAST_AT(n, count + i);
  UNROLL for (int n = OLD_KEYS; n < ALL_OLD_KEYS; ++n) {
    const int at = n * THREADS + worker;
    if (at < held * DK) later[at] = TAPE_KEY(at);
  }
  UNROLL for (int n = 1; n < (MOST_TAPE + 3) / 4; ++n) {
    const int at = n * THREADS + worker;
    if (at < held * DV) later[MOST_TAPE * DK + at] = TAPE_DELTA(at);
  }
}

// Convolution and silu, which rounds between its operations as MLX does. Of the steps that a chunk lacks zeros are
// convolved, and not stored.
UNROLL for (int n = 0; n < ROUNDS; ++n) {
  const int channel = n * THREADS + worker;
  if (channel < CHANNELS) {
    const bool writes = first || channel >= 2 * DK;
    float line[PAST + CHUNK];
    UNROLL for (int i = 0; i < PAST; ++i) {
      line[i] = past[n][i];
      UNROLL for (int c = 1; c <= CHOICE; ++c) line[i] = held <= CHOICE && c == count ? past[n][c + i] : line[i];
    }
    const auto now = window_now + size_t(batch) * (PAST + steps) * CONVOLVED + columns[n];
    if (writes) {
      UNROLL for (int i = 0; i < PAST; ++i) now[i * CONVOLVED] = T(line[i]);
    }
    NOT_UNROLLED for (int from = 0; from < steps; from += CHUNK) {
      UNROLL for (int t = 0; t < CHUNK; ++t) line[PAST + t] = fresh[n][t];
      FETCH(n, from + CHUNK);
      float value[CHUNK], sigmoid[CHUNK], total[CHUNK];
      UNROLL for (int t = 0; t < CHUNK; ++t) {
        float sum = 0;
        UNROLL for (int i = 0; i < TAPS; ++i) sum = fma(line[t + i], weight[n][i], sum);
        value[t] = float(T(sum));
      }
      // Loops of their own, for divisions branch, and would keep what is around them from overlapping.
      UNROLL for (int t = 0; t < CHUNK; ++t) sigmoid[t] = 1.f + exp(-value[t]);
      UNROLL for (int t = 0; t < CHUNK; ++t) sigmoid[t] = 1.f / sigmoid[t];
      UNROLL for (int t = 0; t < CHUNK; ++t) value[t] = float(T(value[t] * float(T(sigmoid[t]))));
      if (channel < 2 * DK) {  // a product might be fused with the sum
        UNROLL for (int t = 0; t < CHUNK; ++t) total[t] = simd_total(fma(value[t], value[t], 0.f));
      }
      UNROLL for (int t = 0; t < CHUNK; ++t) {
        if (from + t < steps) {
          mixed[(from + t) * CHANNELS + channel] = value[t];
          if (channel < 2 * DK && lane == 0) squares[(from + t) * BLOCKS + channel / 32] = total[t];
          if (writes) now[(PAST + from + t) * CONVOLVED] = T(line[PAST + t]);
        }
      }
      UNROLL for (int i = 0; i < PAST; ++i) line[i] = line[i + CHUNK];
    }
  }
}
const auto noted = tape_now + step_0 * LINE;
if (step < steps) {
  const float x = float(GATE(speed + bias)), small = exp(x < 0.f ? x : -x), more = 1.f + small;
  const float tail = more == 1.f ? 1.f : log(more) / (more - 1.f);  // log1p(small) over small
  const float softplus = float(GATE(fma(small, tail, x < 0.f ? 0.f : x)));
  const float factor = exp(-exp(log_decay) * softplus);
  gates[2 * step] = factor;
  gates[2 * step + 1] = float(T(SIGMOID(rate)));
  noted[step * LINE + DECAYS + head] = factor;
}
UNROLL for (int n = 0; n < OLD_KEYS; ++n) {
  const int at = n * THREADS + worker;
  if (at < held * DK) later[at] = tape_key[n];
}
if (int(worker) < held * DV) later[MOST_TAPE * DK + worker] = tape_delta;
if (int(worker) < held) old_decay[worker] = tape_factor;
BARRIER();

UNROLL for (int n = 0; n < ROUNDS; ++n) {
  const int channel = n * THREADS + worker;
  if (channel < 2 * DK) {
    const bool is_key = channel >= DK;
    const float length = float(T(is_key ? INVERSE_ROOT(float(DK)) : 1.f / DK));
    NOT_UNROLLED for (int from = 0; from < steps; from += CHUNK) {
      float value[CHUNK];
      UNROLL for (int i = 0; i < CHUNK; ++i) {
        const int t = from + i < steps ? from + i : 0;
        float total = 0;
        UNROLL for (int j = 0; j < WIDTH; ++j) total += squares[t * BLOCKS + channel / DK * WIDTH + j];
        const float inverse = INVERSE_ROOT(fma(total, 1.f / DK, 1e-6f / DK));
        value[i] = float(T(length * float(T(mixed[t * CHANNELS + channel] * inverse))));
      }
      UNROLL for (int i = 0; i < CHUNK; ++i) {
        const int t = from + i;
        if (t < steps) {
          mixed[t * CHANNELS + channel] = value[i];
          if (is_key && first) noted[t * LINE + key_head * DK + channel - DK] = value[i];
        }
      }
    }
  }
}

// What follows has the expressions of gated_delta_tape.h.
NOT_UNROLLED for (int t = 0; t < count; ++t) {
  float key[4 * WIDTH];
  READ_ROW(key, later + t * DK, SHARED_FOUR);
  UNROLL for (int r = 0; r < 2; ++r) {
    const float delta = later[MOST_TAPE * DK + t * DV + row + 4 * r];
    UNROLL for (int i = 0; i < 4 * WIDTH; ++i) {
      const float decayed = old_decay[t] * s[r][i];
      s[r][i] = fma(delta, key[i], decayed);
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
UNROLL for (int n = 0; n < OUTS; ++n)
  if (4 * n < steps) z[n] = z[n] * SIGMOID(z[n]);
BARRIER();

NOT_UNROLLED for (int t = 0; t < steps; ++t) {
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
    noted[t * LINE + DELTAS + head * DV + mine] = place ? delta[1] : delta[0];
    later[t * DV + mine] = float(T(place ? result[1] : result[0]));
  }
}
BARRIER();

// Each simdgroup sums the squares of all of y, for the 32 elements that it writes.
UNROLL for (int n = 0; n < OUTS; ++n) {
  const int t = 4 * n + worker / DV;
  if (t < steps) {  // as all of a simdgroup
    float sum = 0;
    UNROLL for (int i = 0; i < DV / 32; ++i) {
      const float y = later[t * DV + lane + 32 * i];
      sum = fma(y, y, sum);
    }
    const float inverse = INVERSE_ROOT(fma(simd_total(sum), 1.f / DV, epsilon));
    const float normed = float(NORM(scale * float(NORM(later[t * DV + element] * inverse))));
    out[((step_0 + t) * HV + head) * DV + element] = T(z[n] * normed);
  }
}
#undef WRITE4
#undef PLACE
#undef INVERSE_ROOT
#undef SIGMOID
#undef READ_ROW
#undef SHARED_FOUR
#undef TOTAL
#undef FETCH
#undef PAST_AT
#undef NOT_UNROLLED
#undef TAPE_KEY
#undef TAPE_DELTA
