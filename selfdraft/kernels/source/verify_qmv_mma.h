    // y[M, N] = x[M, K] times dequantised weight[N, K] on tensor cores. A simdgroup takes 16 TILES rows of the weight as the
    // left operand of mma (16 x 8 x 16) and 8 rows of x as the right one. The groups of K are dealt out to the simdgroups,
    // UNIT at a time; each copies weights and x through STAGES places in shared memory, PIECE groups in each, ahead of what it
    // computes. The order of sums hangs on UNIT and WARPS alone: not on M, ROWS, TILES, PIECE or STAGES.
    // What is made of the product: see verify_qmv_end.h. Where it is gated, half of a simdgroup's 16 rows are of the first half.
    // Constants: T, FORM, BITS (4, 8), GROUP, WARPS, UNIT, PIECE, TILES, STAGES, ROWS (of x; the rest in group.y).
    constexpr int kWords = GROUP * BITS / 128;     // of a group that one lane holds: a quarter
    constexpr int kPairs = GROUP / 8;              // pairs of x that go with them
    constexpr int kRounds = (ROWS + 7) / 8;        // of 8 rows of x
    constexpr int kRows = 16 * TILES;
    constexpr int kRowWords = PIECE * 4 * kWords;  // of a row and a piece
    constexpr int kStride = kRowWords + 4 * kWords;  // no two rows of a fragment in one bank
    constexpr int kScales = PIECE / 2;             // words of scales of a row and a piece
    constexpr int kXWords = PIECE * GROUP / 2, kXStride = kXWords + 4;
    constexpr int kX = kRows * (kStride + 2 * kScales);  // words before x
    constexpr int kStage = kX + ROWS * kXStride;
    constexpr int kPieces = UNIT / PIECE;
    constexpr uint kOnes = Pairs<T>::kOnes;
    const int M = x_shape[0] * x_shape[1], N = weight_shape[0], K = x_shape[2];
    const int groups = K / GROUP;  // of a row
    const int g = lane / 4, t = lane % 4;
    constexpr int kOwn = FORM == GATED ? kRows / 2 : kRows;  // outputs
    const int ends = FORM == GATED ? N / 2 : N, first = group.x * kOwn, top = group.y * ROWS;
    // The row of the weight behind one of the tile; what is behind the end is read again, and not written.
    auto source = [&](int row) {
      const int own = first + (FORM == GATED ? row / 16 * 8 + row % 8 : row), most = own < ends ? own : ends - 1;
      return FORM == GATED && row % 16 >= 8 ? most + ends : most;
    };
    DYNAMIC_SHARED(uint, memory);
    uint* const mine = memory + simdgroup * STAGES * kStage;
    const int pieces = (groups / UNIT - (int)simdgroup + WARPS - 1) / WARPS * kPieces;  // of this simdgroup

    auto fetch = [&](int number, int stage) {
      const int piece = (simdgroup + number / kPieces * WARPS) * kPieces + number % kPieces;
      uint* const to = mine + stage * kStage;
      UNROLL for (int each = lane; each < kRows * (kRowWords / 4); each += 32) {
        const int row = each / (kRowWords / 4), part = each % (kRowWords / 4);
        const int from = source(row);
        copy_later<16>(to + row * kStride + 4 * part, weight + (size_t)from * (groups * 4 * kWords) + piece * kRowWords + 4 * part);
      }
      UNROLL for (int row = lane; row < 2 * kRows; row += 32) {
        const int from = source(row % kRows);
        copy_later<2 * PIECE>(to + kRows * kStride + row * kScales, (row < kRows ? scales : biases) + (size_t)from * groups + piece * PIECE);
      }
      for (int each = lane; each < ROWS * (kXWords / 4); each += 32) {
        const int row = each / (kXWords / 4), part = each % (kXWords / 4);
        const int from = top + row < M ? top + row : M - 1;
        copy_later<16>(to + kX + row * kXStride + 4 * part, (const uint*)x + (size_t)from * (K / 2) + piece * kXWords + 4 * part);
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
    int stage = 0;
    for (int number = 0; number < pieces; ++number) {
      if (number + STAGES - 1 < pieces) fetch(number + STAGES - 1, stage ? stage - 1 : STAGES - 1);
      close_copies();
      await_copies<STAGES - 1>();
      const uint* const here = mine + stage * kStage;
      stage = stage + 1 < STAGES ? stage + 1 : 0;
      T scale[TILES][2][PIECE], bias[TILES][2][PIECE];
      UNROLL for (int i = 0; i < TILES; ++i)
        UNROLL for (int half = 0; half < 2; ++half) {
          const int row = 16 * i + 8 * half + g;
          load_shared<PIECE>((const T*)(here + kRows * kStride + row * kScales), scale[i][half]);
          load_shared<PIECE>((const T*)(here + kRows * kStride + (kRows + row) * kScales), bias[i][half]);
        }
      UNROLL for (int u = 0; u < PIECE; ++u) {
        uint words[TILES][2][kWords];
        UNROLL for (int i = 0; i < TILES; ++i)
          UNROLL for (int half = 0; half < 2; ++half)
            load_shared<kWords>(here + (16 * i + 8 * half + g) * kStride + (4 * u + t) * kWords, words[i][half]);
        UNROLL for (int m = 0; m < kRounds; ++m) {
          uint b[kPairs];
          if (8 * m + g < ROWS) {
            load_shared<kPairs>(here + kX + (8 * m + g) * kXStride + (4 * u + t) * kPairs, b);
          } else {
            UNROLL for (int j = 0; j < kPairs; ++j) b[j] = 0;
          }
          pair_up<kPairs, BITS>(b);
          float xs[4] = {0, 0, 0, 0};  // sums of x over the group
          UNROLL for (int j = 0; j < kPairs; j += 2) mma<T>(xs, kOnes, kOnes, kOnes, kOnes, b[j], b[j + 1]);
          UNROLL for (int i = 0; i < TILES; ++i) {
            float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
            UNROLL for (int j = 0; j < kWords; ++j) {
              const uint one = words[i][0][j], two = words[i][1][j];
              if (BITS == 4) {
                mma<T>(low, nibbles<T, 0>(one), nibbles<T, 0>(two), nibbles<T, 1>(one), nibbles<T, 1>(two), b[4 * j], b[4 * j + 1]);
                mma<T>(low, nibbles<T, 2>(one), nibbles<T, 2>(two), nibbles<T, 3>(one), nibbles<T, 3>(two), b[4 * j + 2], b[4 * j + 3]);
              } else {
                mma<T>(low, nibbles<T, 0>(one), nibbles<T, 0>(two), nibbles<T, 2>(one), nibbles<T, 2>(two), b[2 * j], b[2 * j + 1]);
                mma<T>(high, nibbles<T, 1>(one), nibbles<T, 1>(two), nibbles<T, 3>(one), nibbles<T, 3>(two), b[2 * j], b[2 * j + 1]);
              }
            }
            UNROLL for (int half = 0; half < 2; ++half) {
              const float by = float(scale[i][half][u]);
              const float rest = fma(BITS == 4 ? -16.f : -272.f, by, float(bias[i][half][u]));  // nibbles came as 16 + n
              UNROLL for (int j = 0; j < 2; ++j) {
                const float product = BITS == 4 ? low[2 * half + j] : fma(16.f, high[2 * half + j], low[2 * half + j]);
                sums[i][m][2 * half + j] = fma(by, product, fma(rest, xs[j], sums[i][m][2 * half + j]));
              }
            }
          }
        }
      }
      simd_wait();  // before the place is filled again
    }
    await_copies<0>();

    float* const parts = (float*)memory;  // of 8 rows of x at a time
    UNROLL for (int m = 0; m < kRounds; ++m) {
      BARRIER();
      UNROLL for (int i = 0; i < TILES; ++i)
        UNROLL for (int j = 0; j < 4; ++j) parts[((simdgroup * TILES + i) * 16 + 8 * (j / 2) + g) * 8 + 2 * t + j % 2] = sums[i][m][j];
      BARRIER();
      auto total = [&](int row, int column) {
        float sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[(warp * kRows + row) * 8 + column];
        return sum;
      };
      for (int each = thread; each < kOwn * 8; each += 32 * WARPS) {
        const int column = each / kOwn, own = each % kOwn, row = FORM == GATED ? own / 8 * 16 + own % 8 : own;
        const int to = top + 8 * m + column;
        if (8 * m + column < ROWS && to < M && first + own < ends) {
          const size_t at = (size_t)to * ends + first + own;
          const float sum = total(row, column);
          y[at] = FORM == GATED  ? gated<T>(sum, total(row + 8, column))
                  : FORM == ADDED ? T(float(T(sum)) + float(residual[at]))
                                  : T(sum);
        }
      }
    }
