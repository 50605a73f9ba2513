// Joins what slices found in acceptance_choice.h: the best of what is left of p after q or, where nothing is, of p.
//
//   found [B, 5, slices] -> accepted [B], following [B]
//
// Threadgroups: (1, 1, B) of 32 threads. Needs the part `best`.
const int slices = found_shape[2];
const auto own = found + size_t(group.z) * 5 * slices;
Best left = {lowest(), 0.0f}, plain = left;
for (int slice = lane; slice < slices; slice += 32) {
  left = better(left, own[slice], int(own[slices + slice]));
  plain = better(plain, own[2 * slices + slice], int(own[3 * slices + slice]));
}
left = best_of_simd(left), plain = best_of_simd(plain);
if (lane == 0) {
  accepted[group.z] = int(own[4 * slices]);
  following[group.z] = uint(left.value > lowest() ? left.id : plain.id);
}
