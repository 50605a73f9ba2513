// What a cycle tells the host, in parts that it reads, and what it leaves to the next.
//
//   accepted, following, depths, coupled [B or more], drafts, draft_flaws [B, K] (anything of K = 0), flaws [B, K+1]
//   -> tokens [B, K+1], counts [B], and in turn, of each row: drafts that stay, whether what they hang on are numbers,
//   tokens; PIECE of these in each report, the rest 0
//
// Threadgroups: (1, 1, reports) of 32 threads; a report is an array of its own.
// Template: PIECE; 0 for all in one.
const int positions = flaws_shape[1], most = positions - 1, line = positions + 2, all = flaws_shape[0] * line;
const int piece = PIECE ? PIECE : all;
for (int i = worker; i < piece; i += 32) {
  const int at = int(group.z) * piece + i, row = at / line, place = at % line;
  uint number = 0;
  if (at < all) {
    const int stay = accepted[row], depth = depths[row];
    if (place == 0) {
      number = uint(stay);
      counts[row] = stay + 1;
    } else if (place == 1) {
      // What stays of a rejection window may hang on all of it; a coupled row's only on what was emitted.
      const int decisive = coupled[row] ? stay : depth;
      number = 1;
      for (int p = 0; p <= decisive; ++p) {
        if (flaws[row * positions + p] > 0 || (p < depth && draft_flaws[row * most + p] > 1)) number = 0;
      }
    } else {
      const int p = place - 2;
      number = p < stay ? drafts[row * most + p] : following[row];
      tokens[row * positions + p] = number;
    }
  }
  report[i] = number;
}
