    // Attention of few queries over one split of the keys, on tensor cores. A threadgroup has the queries of one kv head (a
    // block of them, where there are many), so that a key or a value is read from memory once for all of them.
    //
    //   q [rows, HEADS, QUERIES, D], keys and values [1, HEADS, capacity, D] of each row, lengths [rows], scale [1]
    //   -> most_of, sums [rows, HEADS, splits, QUERIES], weighted [rows, HEADS, splits, QUERIES, D]
    //
    // Threadgroups: (blocks of queries * HEADS, splits, rows) of D / 2 threads; HEADS are those of the keys. Keys come in
    // tiles of 64 at fixed absolute positions.
    // Simdgroups share the keys of a tile for scores = keys q^T, and the columns for values^T weights: queries are columns of
    // mma (16 x 8 x 16) both times, and columns do not mix. A simdgroup copies what it needs through RING places in shared
    // memory of its own, ahead of what it computes; only scores go from one to another. No sum hangs on RING or BLOCK.
    // Numbers of heads and tokens are read from shapes: each would be compiled anew.
    // Template: T; D (64, 128, 256); BLOCK queries a threadgroup, a multiple of 8; RING; splits have SPLIT keys before BORDER
    // and LATE behind it, all multiples of 64.
    constexpr int TILE = 64, WARPS = D / 64, ROWS = 4 / WARPS;  // of 16 keys, of a simdgroup and a tile
    constexpr int ROUNDS = BLOCK / 8;                           // of 8 queries
    constexpr int PLACE = 256;                                  // words of 16 bytes in a place of the ring
    constexpr int HALF = D / 16, WHOLE = D / 8;                 // such words of half a key, of a key
    const float LOWEST = -1e30f, LOG2E = 1.44269504f;
    union Word { uint4 word; uint x[4]; float f[4]; };
    union Pair { uint word; T x[2]; };

    const int early = BORDER / SPLIT, split = group.y, length = lengths[group.z];
    const int first = split < early ? split * SPLIT : BORDER + (split - early) * LATE;
    if (first >= length) return;
    const int behind = first + (split < early ? SPLIT : LATE), end = length < behind ? length : behind;
    const int HEADS = keys_shape[1], TOKENS = q_shape[2], QUERIES = q_shape[1] / HEADS * TOKENS;
    int head = group.x, begin = 0;
    for (; head >= HEADS; head -= HEADS) begin += BLOCK;  // once or twice: sooner done than a division
    const auto head_keys = keys + size_t(head) * keys_shape[2] * D, head_values = values + size_t(head) * keys_shape[2] * D;
    head += group.z * HEADS;
    const int g = lane / 4, t = lane % 4;

    DYNAMIC_SHARED(uint4, memory);
    uint4* const mine = memory + simdgroup * RING * PLACE;
    uint4* const queries = memory + WARPS * RING * PLACE;
    float* const boards = (float*)(queries + ROUNDS * 8 * WHOLE);  // two, of scores [ROUNDS * 8, TILE]

    // Words are moved about within rows, so that none of the reads below has two in one bank.
    auto of_key = [](int row) { return HALF > 4 ? row % 2 * 4 : 0; };
    auto of_query = [](int row) { return row % 2 * 4; };
    auto of_value = [](int row) { return row / 4 % 4 * 2; };
    auto of_score = [](int query) { return (query / 2 % 4 * 2) ^ (query % 2 * 4); };

    // A tile comes in four pieces: halves of the columns of this simdgroup's keys; halves of the keys with its columns of
    // their values. What lies behind the length becomes 0: it may be NaN, or there may be nothing.
    const int pieces = (end - first + TILE - 1) / TILE * 4;
    auto fetch = [&](int number, int place) {
      const int start = first + number / 4 * TILE, part = number % 4;
      uint4* const to = mine + place * PLACE;
      if (part < 2) {
        const int row = lane / HALF, word = lane % HALF, key = start + 16 * ROWS * simdgroup + row;
        const T* const from = head_keys + size_t(key) * D + 8 * (part * HALF + word);
        UNROLL for (int i = 0; i < 16 * ROWS; i += 32 / HALF) {
          copy_or_zero(to + (row + i) * HALF + (word ^ of_key(row + i)), from + i * D, key + i < end);
        }
      } else {
        const int row = lane / 8, word = lane % 8, key = start + 32 * (part - 2) + row;
        const T* const from = head_values + size_t(key) * D + 64 * simdgroup + 8 * word;
        UNROLL for (int i = 0; i < 32; i += 4) {
          copy_or_zero(to + (row + i) * 8 + (word ^ of_value(row + i)), from + i * D, key + i < end);
        }
      }
    };
    int number = 0, place = 0;
    auto take = [&]() {  // the next piece
      simd_wait();       // all lanes are done with the last, whose place is filled again
      if (number + RING - 1 < pieces) fetch(number + RING - 1, place ? place - 1 : RING - 1);
      close_copies();
      await_copies<RING - 1>();
      const uint4* const here = mine + place * PLACE;
      place = place + 1 < RING ? place + 1 : 0;
      ++number;
      return here;
    };

    UNROLL for (int at = worker; at < ROUNDS * 8 * WHOLE; at += 32 * WARPS) {
      const int row = at / WHOLE, word = at % WHOLE, index = begin + row < QUERIES ? begin + row : 0;
      copy_later<16>(queries + row * WHOLE + (word ^ of_query(row)), q + (size_t(head) * QUERIES + index) * D + 8 * word);
    }
    close_copies();
    UNROLL for (int i = 0; i < RING - 1; ++i) {
      if (i < pieces) fetch(i, i);
      close_copies();
    }
    await_copies<RING - 1>();
    BARRIER();  // queries are there

    const float by = scale[0];
    int sees[ROUNDS];  // keys that query 8 n + g sees
    UNROLL for (int n = 0; n < ROUNDS; ++n) sees[n] = length - TOKENS + 1 + (begin + 8 * n + g) % TOKENS;
    float most[ROUNDS], sum[ROUNDS], out[4][ROUNDS][4];  // of query 8 n + g; of queries 8 n + 2 t, + 1, a quarter of the keys
    UNROLL for (int n = 0; n < ROUNDS; ++n) {
      most[n] = LOWEST, sum[n] = 0;
      UNROLL for (int i = 0; i < 4; ++i)
        UNROLL for (int j = 0; j < 4; ++j) out[i][n][j] = 0;
    }

    for (int start = first; start < end; start += TILE) {
      // Sums over even and over odd steps of 16 columns, which need not wait for each other.
      float scores[2][ROWS][ROUNDS][4];
      UNROLL for (int i = 0; i < 2; ++i)
        UNROLL for (int m = 0; m < ROWS; ++m)
          UNROLL for (int n = 0; n < ROUNDS; ++n)
            UNROLL for (int j = 0; j < 4; ++j) scores[i][m][n][j] = 0;
      UNROLL for (int part = 0; part < 2; ++part) {
        const uint4* const here = take();
        UNROLL for (int step = 0; step < HALF / 4; ++step) {
          uint4 key[ROWS][2];
          UNROLL for (int m = 0; m < ROWS; ++m)
            UNROLL for (int j = 0; j < 2; ++j) {
              const int row = 16 * m + 8 * j + g;
              key[m][j] = here[row * HALF + ((4 * step + t) ^ of_key(row))];
            }
          UNROLL for (int n = 0; n < ROUNDS; ++n) {
            const uint4 query = queries[(8 * n + g) * WHOLE + ((part * HALF + 4 * step + t) ^ of_query(g))];
            UNROLL for (int m = 0; m < ROWS; ++m) {
              mma<T>(scores[0][m][n], key[m][0].x, key[m][1].x, key[m][0].y, key[m][1].y, query.x, query.y);
              mma<T>(scores[1][m][n], key[m][0].z, key[m][1].z, key[m][0].w, key[m][1].w, query.z, query.w);
            }
          }
        }
      }
      float* const board = boards + (start - first) / TILE % 2 * (ROUNDS * 8 * TILE);
      UNROLL for (int n = 0; n < ROUNDS; ++n)
        UNROLL for (int m = 0; m < ROWS; ++m)
          UNROLL for (int j = 0; j < 4; ++j) {
            const int query = 8 * n + 2 * t + j % 2, key = 16 * (ROWS * simdgroup + m) + 8 * (j / 2) + g;
            board[query * TILE + ((key / 4) ^ of_score(query)) * 4 + key % 4] = (scores[0][m][n][j] + scores[1][m][n][j]) * by;
          }
      BARRIER();  // the other board is free from here on, too

      // Scores become weights relative to the most so far; what was summed before is made relative to it too. Every simdgroup
      // does this for all keys of the tile, 16 of a query to a lane.
      uint weights[ROUNDS][4][2];
      UNROLL for (int n = 0; n < ROUNDS; ++n) {
        Word four[4];
        float top = most[n];
        UNROLL for (int step = 0; step < 4; ++step) {
          four[step].word = ((const uint4*)board)[(8 * n + g) * (TILE / 4) + ((4 * step + t) ^ of_score(g))];
        }
        if (start + TILE > length - TOKENS + 1) {
          UNROLL for (int i = 0; i < 16; ++i)
            if (start + i / 4 * 16 + 4 * t + i % 4 >= sees[n]) four[i / 4].f[i % 4] = LOWEST;
        }
        UNROLL for (int i = 0; i < 16; ++i) top = four[i / 4].f[i % 4] > top ? four[i / 4].f[i % 4] : top;
        UNROLL for (int other = 1; other <= 2; other *= 2) {
          const float theirs = simd_from(top, lane ^ other);
          top = theirs > top ? theirs : top;
        }
        const float factor = two_to((most[n] - top) * LOG2E), less = -top * LOG2E;
        most[n] = top;
        sum[n] *= factor;
        UNROLL for (int step = 0; step < 4; ++step)
          UNROLL for (int two = 0; two < 2; ++two) {
            Pair pair;
            UNROLL for (int i = 0; i < 2; ++i) {
              const float weight = two_to(fma(four[step].f[2 * two + i], LOG2E, less));
              sum[n] += weight;
              pair.x[i] = T(weight);
            }
            weights[n][step][two] = pair.word;
          }
        const float left = simd_from(factor, 8 * t), right = simd_from(factor, 8 * t + 4);
        UNROLL for (int i = 0; i < 4; ++i)
          UNROLL for (int j = 0; j < 4; ++j) out[i][n][j] *= j % 2 ? right : left;
      }

      UNROLL for (int half = 0; half < 2; ++half) {
        const uint4* const here = take();
        UNROLL for (int step = 0; step < 2; ++step) {
          Word value[4];  // eight columns of keys 4 t ..
          UNROLL for (int j = 0; j < 4; ++j) {
            const int row = 16 * step + 4 * t + j;
            value[j].word = here[row * 8 + (g ^ of_value(row))];
          }
          UNROLL for (int i = 0; i < 4; ++i) {
            const uint a0 = low_halves(value[0].x[i], value[1].x[i]), a1 = high_halves(value[0].x[i], value[1].x[i]);
            const uint a2 = low_halves(value[2].x[i], value[3].x[i]), a3 = high_halves(value[2].x[i], value[3].x[i]);
            UNROLL for (int n = 0; n < ROUNDS; ++n) mma<T>(out[i][n], a0, a1, a2, a3, weights[n][2 * half + step][0], weights[n][2 * half + step][1]);
          }
        }
      }
    }
    await_copies<0>();

    const size_t to = (head * size_t(grid.y) + split) * QUERIES + begin;
    UNROLL for (int n = 0; n < ROUNDS; ++n) {
      float total = sum[n] + simd_from(sum[n], lane ^ 1);
      total += simd_from(total, lane ^ 2);
      const int slot = 8 * n + g;
      if (simdgroup == 0 && t == 0 && begin + slot < QUERIES) most_of[to + slot] = most[n], sums[to + slot] = total;
      UNROLL for (int two = 0; two < 2; ++two) {
        const int query = 8 * n + 2 * t + two;
        UNROLL for (int half = 0; half < 2; ++half) {
          Word four;
          UNROLL for (int i = 0; i < 4; ++i) four.f[i] = out[2 * half + i / 2][n][i % 2 * 2 + two];
          if (begin + query < QUERIES) ((uint4*)weighted)[(to + query) * (D / 4) + 16 * simdgroup + 2 * g + half] = four.word;
        }
      }
    }
