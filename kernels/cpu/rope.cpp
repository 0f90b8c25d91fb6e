// Rotary position embedding of x [batch, heads, positions, dim], bfloat16 or FP32, whose columns lie next to each other.
//
//   a' = a c1 - b s1      b' = b c2 + a s2      of pairs (a, b): columns i and i + half, or neighbours 2 i and 2 i + 1
//   a' = a c1 + b s2      b' = b c2 - a s1      the transposed rotation
//
// in FP32, rounded once. Columns from 2 half on are copied. c1 = c2 and s1 = s2 where tables have an entry a pair.
#include <utility>

#include "vectors.h"

namespace {

struct Rope {
  int64_t batch, heads, positions, dim, half;
  int64_t x_batch, x_head, x_position, out_batch, out_head, out_position;  // strides
  int64_t cos_batch, cos_position, sin_batch, sin_position;
  int64_t wide, neighbours, inverse;  // an entry a column; which columns are a pair; the transposed rotation
};

using Pair = std::pair<__m512, __m512>;

// The first and the second columns of pairs i, i + 1, ... that are neighbours; at most kLanes of them.
template <typename T>
inline Pair load_neighbours(const T* x, int64_t i, int64_t pairs) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 low = load(x + 2 * i, first(2 * pairs));
  const __m512 high = pairs > kLanes / 2 ? load(x + 2 * i + kLanes, first(2 * pairs - kLanes)) : _mm512_setzero_ps();
  return {_mm512_permutex2var_ps(low, even, high),
          _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high)};
}

template <typename T>
inline void store_neighbours(T* to, int64_t i, int64_t pairs, Pair of) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  store_rounded(to + 2 * i, _mm512_permutex2var_ps(of.first, low, of.second), first(2 * pairs));
  if (pairs > kLanes / 2) {
    const __m512 above = _mm512_permutex2var_ps(of.first, high, of.second);
    store_rounded(to + 2 * i + kLanes, above, first(2 * pairs - kLanes));
  }
}

template <typename T>
inline Pair load_pairs(const Rope& r, const T* x, int64_t i, int64_t pairs) {
  if (r.neighbours) return load_neighbours(x, i, pairs);
  return {load(x + i, first(pairs)), load(x + r.half + i, first(pairs))};
}

template <typename T>
inline Pair load_table(const Rope& r, const T* table, int64_t i, int64_t pairs) {
  if (r.wide) return load_pairs(r, table, i, pairs);
  const __m512 both = load(table + i, first(pairs));
  return {both, both};
}

template <typename T, typename Table>
void rotate(const Rope& r, const void* x, const void* cosines, const void* sines, void* out, int threads) {
  const int64_t rows = r.batch * r.positions;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t batch = row / r.positions, t = row % r.positions;
    const Table* cos = static_cast<const Table*>(cosines) + batch * r.cos_batch + t * r.cos_position;
    const Table* sin = static_cast<const Table*>(sines) + batch * r.sin_batch + t * r.sin_position;
    const T* from = static_cast<const T*>(x) + batch * r.x_batch + t * r.x_position;
    T* to = static_cast<T*>(out) + batch * r.out_batch + t * r.out_position;
    for (int64_t i = 0; i < r.half; i += kLanes) {
      const int64_t pairs = r.half - i < kLanes ? r.half - i : kLanes;
      const auto [c1, c2] = load_table(r, cos, i, pairs);
      auto [s1, s2] = load_table(r, sin, i, pairs);
      if (r.inverse) {
        const __m512 minus = _mm512_set1_ps(-0.0f), before = s1;
        s1 = _mm512_xor_ps(s2, minus);
        s2 = _mm512_xor_ps(before, minus);
      }
      for (int64_t h = 0; h < r.heads; ++h) {
        const auto [a, b] = load_pairs(r, from + h * r.x_head, i, pairs);
        const Pair turned = {_mm512_sub_ps(_mm512_mul_ps(a, c1), _mm512_mul_ps(b, s1)),
                             _mm512_add_ps(_mm512_mul_ps(b, c2), _mm512_mul_ps(a, s2))};
        T* row_to = to + h * r.out_head;
        if (r.neighbours) {
          store_neighbours(row_to, i, pairs, turned);
        } else {
          store_rounded(row_to + i, turned.first, first(pairs));
          store_rounded(row_to + r.half + i, turned.second, first(pairs));
        }
      }
    }
    for (int64_t h = 0; h < r.heads; ++h) {
      for (int64_t j = 2 * r.half; j < r.dim; ++j) to[h * r.out_head + j] = from[h * r.x_head + j];
    }
  }
}

}  // namespace

extern "C" void fxprec_rope(const Rope* rope, int low, int low_tables, const void* x, const void* cos, const void* sin,
                            void* out, int threads) {
  const auto of_low = low_tables ? rotate<Bits, Bits> : rotate<Bits, float>;
  const auto of_wide = low_tables ? rotate<float, Bits> : rotate<float, float>;
  (low ? of_low : of_wide)(*rope, x, cos, sin, out, threads);
}
