// What verify_qmv makes of a product: as it is; added to `residual`; or, of a matrix whose second half of rows stands beside
// the first, silu(first) second. Rounded where operations one by one would round.
enum Form { PLAIN, ADDED, GATED };

template <class T> FUNCTION T gated(float gate, float up) {
  const float g = float(T(gate));
  const float share = float(T(1.0f / (1.0f + exp(-g))));
  return T(float(T(g * share)) * float(T(up)));
}
