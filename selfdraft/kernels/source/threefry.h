// MLX's random numbers by address: Threefry-2x32 of 20 rounds (Salmon et al., 2011, "Parallel random numbers: as easy as
// 1, 2, 3"), and what mlx/random.cpp makes of a word. An array of n words shares a hash between elements i and i + half,
// half = ceil(n / 2), whose counters these are; of an odd n the last hash has a second counter of 0, and its second
// word is dropped.
struct Words { uint x, y; };

FUNCTION Words threefry(uint key_x, uint key_y, uint x, uint y) {
  const uint keys[3] = {key_x, key_y, key_x ^ key_y ^ 0x1BD11BDAu};
  const uint turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x += keys[0], y += keys[1];
  UNROLL for (int round = 0; round < 20; ++round) {
    x += y;
    y = (y << turns[round % 8]) | (y >> (32 - turns[round % 8]));
    y ^= x;
    if (round % 4 == 3) {
      const int group = round / 4 + 1;
      x += keys[group % 3], y += keys[(group + 1) % 3] + uint(group);
    }
  }
  return {x, y};
}

// As mx.random.uniform, in [0, 1).
FUNCTION float uniform_of(uint word) {
  const float scaled = float(word) * 2.3283064365386963e-10f;  // of 2^-32: exact
  return scaled < 0.99999994f ? scaled : 0.99999994f;
}

// Standard Gumbel noise, as mx.random.gumbel; that of a uniform of 0 is as small as the engine has it.
FUNCTION float gumbel(uint word) {
  const float noise = -log(-log(uniform_of(word)));
  return noise > -4.0f ? noise : -4.0f;
}
