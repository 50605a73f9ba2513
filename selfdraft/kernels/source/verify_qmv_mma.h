    // y[M, N] = x[M, K] times dequantised weight[N, K] on tensor cores. A simdgroup takes 16 TILES rows of the weight as the
    // left operand of mma (16 x 8 x 16) and 8 rows of x as the right one. The groups of K are dealt out to WARPS shares, UNIT
    // at a time; TEAMS simdgroups work on a share, each with rows of its own, and have its part of x in common. They are neighbours,
    // which run on different parts of a multiprocessor: where one waits for its team, others go on. Weights and x are copied through
    // STAGES places in shared memory, PIECE groups in each, ahead of what is computed. The outputs are dealt out evenly to as many
    // threadgroups as the device runs at once, or a multiple of them.
    // The order of sums hangs on UNIT and WARPS alone: not on M, ROWS, TILES, TEAMS, PIECE, STAGES or PLACES.
    // What is made of the product: see verify_qmv_end.h. Where it is gated, half of a simdgroup's 16 rows are of the first half.
// SCALED: what comes out is divided by the root of the mean of `squares` (whose pieces a row has in `squares`) and EPS. NORMS: of
// every sum that is put out, `scaled` is the same times norm_weight, and `squares_now` the squares, added up over ALIKE outputs.
    // Constants: T, FORM, BITS (4, 8), GROUP, WARPS, TEAMS, UNIT, PIECE, TILES, STAGES, ROWS (of x; the rest in group.y), PLACES,
// SCALED, EPS, NORMS, ALIKE (1 but for NORMS).
    constexpr int kWords = GROUP * BITS / 128;     // of a group that one lane holds: a quarter
    constexpr int kPairs = GROUP / 8;              // pairs of x that go with them
    constexpr int kRounds = (ROWS + 7) / 8;        // of 8 rows of x
    constexpr int kAlike = ROWS < 8 ? ROWS : 8;    // of a round, that differ
    constexpr int kRows = 16 * TILES;              // of a simdgroup
    constexpr int kRowWords = PIECE * 4 * kWords;  // of a row and a piece
    constexpr int kApart = kWords < 8 ? 8 / kWords : 1;  // rows read at once, whose groups must lie in other banks
    constexpr int kScales = PIECE / 2;             // words of scales of a row and a piece
    constexpr int kXWords = PIECE * GROUP / 2, kXStride = kXWords + 4;
    constexpr int kOwnWords = kRows * (kRowWords + 2 * kScales);  // of a simdgroup and a stage
    constexpr int kStage = TEAMS * kOwnWords + ROWS * kXStride;
    constexpr int kFilled = WARPS * STAGES * kStage, kLine = TEAMS * kRows + 4;
    constexpr int kParts = WARPS * 8 * kLine, kSums = kParts + NORMS * TEAMS * kRows * 8;
    constexpr int kEnd = kFilled > kSums ? kFilled : kSums;  // words of memory
    constexpr int kPieces = UNIT / PIECE;
    // Where there is one round, registers suffice for all tiles at once, so that no product waits for the one before; and two groups
    // are taken together where teams fill the multiprocessor (with several threadgroups on it that was slower).
    constexpr int kTogether = kRounds == 1 && kWords <= 2 ? TILES : 1, kSteps = kRounds == 1 && TEAMS > 1 ? 2 : 1;
    constexpr uint kOnes = Pairs<T>::kOnes;
    const int M = x_shape[0] * x_shape[1], N = weight_shape[0], K = x_shape[2];
    const int groups = K / GROUP;  // of a row
    const int g = lane / 4, t = lane % 4, share = simdgroup / TEAMS, team = simdgroup % TEAMS;
    constexpr int kOwn = (FORM == GATED ? kRows / 2 : kRows) * TEAMS;  // outputs that a threadgroup has room for
    const int ends = FORM == GATED ? N / 2 : N, top = group.y * ROWS;
    constexpr int kRoom = kOwn / ALIKE * ALIKE;
    const int turns = (ends + PLACES * kRoom - 1) / (PLACES * kRoom), even = (ends + PLACES * turns - 1) / (PLACES * turns);
    const int most = ((even > 8 ? even : 8) + ALIKE - 1) / ALIKE * ALIKE, first = group.x * most, own = most < ends - first ? most : ends - first;
    DYNAMIC_SHARED(uint, memory);
    uint* const stages = memory + share * STAGES * kStage;
    const int pieces = (groups / UNIT - share + WARPS - 1) / WARPS * kPieces;  // of this share

    // Where group u of a row is kept: elsewhere in rows that are read at once.
    auto place = [&](uint row, uint u) { return kApart <= PIECE ? u ^ row % kApart : u ^ row / (kApart / PIECE) % PIECE; };
    // The outputs of this simdgroup, and the one behind a row of its tiles. Beyond them nothing is copied, and nothing written.
    const int begin = first + team * (kOwn / TEAMS);
    const uint left = begin - first < own ? own - (begin - first) : 0;
    auto output = [&](uint row) { return FORM == GATED ? row / 16 * 8 + row % 8 : row; };
    auto source = [&](uint row) { return output(row) + (FORM == GATED && row % 16 >= 8 ? ends : 0); };
    const auto shared = shared_address(stages);
    // Addresses are worked out anew for every piece, for the sake of registers.
    auto fetch = [&](int number, int stage) {
      const uint piece = (share + number / kPieces * WARPS) * kPieces + number % kPieces;
      const auto base = shared + 4 * stage * kStage, to = base + 4 * team * kOwnWords;
      {
        constexpr uint parts = kRowWords / 4, together = 32 / parts;  // of 16 bytes; rows
        const uint row = lane / parts, part = lane % parts, bytes = not_kept(groups * 16 * kWords);
        const char* const from = not_kept((const char*)weight + (size_t)begin * bytes + (piece * kRowWords + 4 * part) * 4);
        const auto at = to + 4 * (row * kRowWords + part % kWords * 4);
        UNROLL for (uint i = 0; i < kRows; i += together) {
          const auto its = at + 4 * (i * kRowWords + place(i + row, part / kWords) * 4 * kWords);
          copy_if<16>(output(i + row) < left, its, from + (size_t)source(i + row) * bytes);
        }
      }
      {
        const uint row = lane / 2, bytes = not_kept(2 * groups);
        const char* const from = not_kept((const char*)(lane % 2 ? biases : scales) + (size_t)begin * bytes + 2 * PIECE * piece);
        const auto at = to + 4 * (kRows * kRowWords + lane * kScales);
        UNROLL for (uint i = 0; i < kRows; i += 16)
          copy_if<2 * PIECE>(output(i + row) < left, at + 8 * i * kScales, from + (size_t)source(i + row) * bytes);
      }
      {
        constexpr uint parts = kXWords / 4, together = 32 * TEAMS / parts;
        const uint each = team * 32 + lane, row = each / parts, part = each % parts, bytes = not_kept(2 * K);
        const char* const from = not_kept((const char*)x + (size_t)(top + row) * bytes + (piece * kXWords + 4 * part) * 4);
        const auto at = base + 4 * (TEAMS * kOwnWords + row * kXStride + 4 * part);
        UNROLL for (uint i = 0; i < ROWS; i += together)
          copy_if<16>((ROWS % together == 0 || i + row < ROWS) && top + i + row < M, at + 4 * i * kXStride, from + (size_t)i * bytes);
      }
    };

    float sums[TILES][kRounds][4];
    UNROLL for (int i = 0; i < TILES; ++i)
      UNROLL for (int m = 0; m < kRounds; ++m)
        UNROLL for (int j = 0; j < 4; ++j) sums[i][m][j] = 0;

    UNROLL for (int stage = 0; stage < STAGES - 1; ++stage) {
      if (stage < pieces) fetch(stage, stage);
      close_copies();
    }
    float* const shrink = (float*)memory + kEnd;  // the reciprocal of a row's root mean square
    if (SCALED)
      for (int row = simdgroup; row < ROWS; row += WARPS * TEAMS) {
        const int parts = squares_shape[2];
        float sum = 0;
        for (int i = lane; i < parts && top + row < M; i += 32) sum += squares[(top + row) * parts + i];
        sum = simd_total(sum);
        if (lane == 0) shrink[row] = 1.0f / sqrtf(sum / K + EPS);
      }

    int stage = 0;
    for (int number = 0; number < pieces; ++number) {
      if (number + STAGES - 1 < pieces) fetch(number + STAGES - 1, stage ? stage - 1 : STAGES - 1);
      close_copies();
      await_copies<STAGES - 1>();
      if (TEAMS > 1) team_wait<TEAMS>(share);  // for the others' part of x
      const uint* const here = stages + stage * kStage + team * kOwnWords;
      const uint* const its_x = stages + stage * kStage + TEAMS * kOwnWords;
      stage = stage + 1 < STAGES ? stage + 1 : 0;
      ROLLED for (int base = 0; base < PIECE; base += kSteps) {
        uint pairs[TILES][2][2];  // scales and biases of two groups
        if (kSteps == 2)
          UNROLL for (int i = 0; i < TILES; ++i)
            UNROLL for (int half = 0; half < 2; ++half)
              UNROLL for (int kind = 0; kind < 2; ++kind)
                pairs[i][half][kind] = here[kRows * kRowWords + ((16 * i + 8 * half + g) * 2 + kind) * kScales + base / 2];
        UNROLL for (int step = 0; step < kSteps; ++step) {
          const int u = base + step;
          uint b[kRounds][kPairs];
          float xs[kRounds][4];  // sums of x over the group
          UNROLL for (int m = 0; m < kRounds; ++m) {
            load_shared<kPairs>(its_x + (8 * m + g % kAlike) * kXStride + (4 * u + t) * kPairs, b[m]);
            pair_up<kPairs, BITS>(b[m]);
            if (kTogether == 1)
              UNROLL for (int j = 0; j < kPairs; j += 2) mma_next<T>(j > 0, xs[m], kOnes, kOnes, kOnes, kOnes, b[m][j], b[m][j + 1]);
          }
          UNROLL for (int tile = 0; tile < TILES; tile += kTogether) {
            uint a[kTogether][kWords][8];  // unpacked once for all rows of x
            float by[kTogether][2], rest[kTogether][2];
            UNROLL for (int i = 0; i < kTogether; ++i) {
              const int row = 16 * (tile + i) + g;
              uint words[2][kWords];
              UNROLL for (int half = 0; half < 2; ++half)
                load_shared<kWords>(here + (row + 8 * half) * kRowWords + (4 * place(g, u) + t) * kWords, words[half]);
              UNROLL for (int j = 0; j < kWords; ++j)
                UNROLL for (int half = 0; half < 2; ++half) {
                  a[i][j][half] = nibbles<T, 0>(words[half][j]);
                  a[i][j][half + 2] = nibbles<T, 1>(words[half][j]);
                  a[i][j][half + 4] = nibbles<T, 2>(words[half][j]);
                  a[i][j][half + 6] = nibbles<T, 3>(words[half][j]);
                }
              UNROLL for (int half = 0; half < 2; ++half) {
                const T* const scale = (const T*)(here + kRows * kRowWords + (row + 8 * half) * 2 * kScales);
                by[i][half] = kSteps == 2 ? half_float<T>(pairs[tile + i][half][0], step) : float(scale[u]);
                const float bias = kSteps == 2 ? half_float<T>(pairs[tile + i][half][1], step) : float(scale[PIECE + u]);
                rest[i][half] = fma(BITS == 4 ? -16.f : -272.f, by[i][half], bias);  // nibbles came as 16 + n
              }
            }
            UNROLL for (int m = 0; m < kRounds; ++m) {
              float low[kTogether][4], high[kTogether][4];
              UNROLL for (int j = 0; j < kPairs; j += 2) {
                const uint c0 = b[m][j], c1 = b[m][j + 1];
                if (kTogether > 1) mma_next<T>(j > 0, xs[m], kOnes, kOnes, kOnes, kOnes, c0, c1);
                UNROLL for (int i = 0; i < kTogether; ++i) {
                  if (BITS == 4) {
                    const uint* const n = a[i][j / 4] + j % 4 * 2;
                    mma_next<T>(j > 0, low[i], n[0], n[1], n[2], n[3], c0, c1);
                  } else {
                    const uint* const n = a[i][j / 2];
                    mma_next<T>(j > 0, low[i], n[0], n[1], n[4], n[5], c0, c1);
                    mma_next<T>(j > 0, high[i], n[2], n[3], n[6], n[7], c0, c1);
                  }
                }
              }
              UNROLL for (int i = 0; i < kTogether; ++i)
                UNROLL for (int j = 0; j < 4; ++j) {
                  const float product = BITS == 4 ? low[i][j] : fma(16.f, high[i][j], low[i][j]);
                  float* const sum = sums[tile + i][m] + j;
                  *sum = fma(by[i][j / 2], product, fma(rest[i][j / 2], xs[m][j % 2], *sum));
                }
            }
          }
        }
      }
      if (TEAMS > 1) team_wait<TEAMS>(share);  // before the place is filled again
      else simd_wait();
    }
    await_copies<0>();

    float* const parts = (float*)memory;  // [WARPS][8 rows of x][kLine], so that neither writing nor reading meets a bank twice
    float* const put_out = parts + kParts;
    UNROLL for (int m = 0; m < kRounds; ++m) {
      BARRIER();
      UNROLL for (int i = 0; i < TILES; ++i)
        UNROLL for (int j = 0; j < 4; ++j) parts[(share * 8 + 2 * t + j % 2) * kLine + team * kRows + 16 * i + 8 * (j / 2) + g] = sums[i][m][j];
      BARRIER();
      auto total = [&](int row, int column) {
        float sum = 0;
        UNROLL for (int warp = 0; warp < WARPS; ++warp) sum += parts[(warp * 8 + column) * kLine + row];
        return SCALED ? sum * shrink[8 * m + column] : sum;
      };
      for (int each = worker; each < kOwn * kAlike; each += 32 * WARPS * TEAMS) {
        const int column = each / kOwn, mine = each % kOwn, row = FORM == GATED ? mine / 8 * 16 + mine % 8 : mine;
        const int to = top + 8 * m + column;
        if (8 * m + column < ROWS && to < M && mine < own) {
          const size_t at = (size_t)to * ends + first + mine;
          const float sum = total(row, column);
          const T found = FORM == GATED  ? gated<T>(sum, total(row + 8, column))
                          : FORM == ADDED ? T(float(T(sum)) + float(residual[at]))
                                          : T(sum);
          y[at] = found;
          if (NORMS) scaled[at] = T(float(found) * float(norm_weight[first + mine])), put_out[each] = float(found);
        }
      }
      if (NORMS) {
        BARRIER();
        for (int each = worker; each < kRoom / ALIKE * 8; each += 32 * WARPS * TEAMS) {
          const int column = each % 8, begin = each / 8 * ALIKE, to = top + 8 * m + column;
          if (8 * m + column < ROWS && to < M && begin < own) {
            float sum = 0;
            for (int i = begin; i < begin + ALIKE && i < own; ++i) sum = fma(put_out[column * kOwn + i], put_out[column * kOwn + i], sum);
            squares_now[to * ((ends + ALIKE - 1) / ALIKE) + (first + begin) / ALIKE] = sum;
          }
        }
      }
    }
