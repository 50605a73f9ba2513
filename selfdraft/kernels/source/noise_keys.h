// Keys of a row's noise at every position, and its uniforms.
//
//   streams [2 B], counters [B], shift [B or more] -> keys [B, K+1, 2], uniforms [B, K], or [B, 1] of K = 0
//
// Threadgroups: (K+1, 1, B) of 32 threads. Needs the part `threefry`.
// Template: UNIFORM, which separates uniforms from the noise at the same counter.
if (lane != 0) return;
const int row = group.z, at = group.x, count = grid.x, drawn = count > 1 ? count - 1 : 1, half_of = (drawn + 1) / 2;
const uint high = streams[2 * row], low = streams[2 * row + 1] + counters[row] + uint(shift[row]);
keys[2 * (row * count + at)] = high, keys[2 * (row * count + at) + 1] = low + uint(at);
if (at >= drawn) return;
const int pair = at < half_of ? at : at - half_of, other = pair + half_of;
const Words words = threefry(high ^ uint(UNIFORM), low, pair, other < drawn ? other : 0);
uniforms[row * drawn + at] = uniform_of(at < half_of ? words.x : words.y);
