// What C++ kernels on a CPU are written with: bfloat16 as its bits, in vectors of 16 lanes, and a power of 2.
#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace {

using Bits = uint16_t;

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLog2EBelow = 1.92596299e-8f;  // what FP32 leaves out of it
constexpr int64_t kLanes = 16;

// The next whole number of vectors.
inline int64_t whole(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The lanes of a vector that n elements take.
inline __mmask16 first(int64_t n) { return n >= kLanes ? 0xffff : static_cast<__mmask16>((1u << n) - 1u); }

// x rounded to bfloat16, ties to even, in the upper halves. NaN stays NaN where its lower half is zero, as it is of
// NaN that came from bfloat16 or from an operation.
inline __m512i upper(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

inline __m512i lower(__m512 x) { return _mm512_srli_epi32(upper(x), 16); }

inline __m512 load(const Bits* x, __mmask16 lanes = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, x)), 16));
}

inline __m512 load(const float* x, __mmask16 lanes = 0xffff) { return _mm512_maskz_loadu_ps(lanes, x); }

inline void store(Bits* to, __m512i words, __mmask16 lanes = 0xffff) {
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(words));
}

inline void store_rounded(float* to, __m512 x, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, x); }

inline void store_rounded(Bits* to, __m512 x, __mmask16 lanes) {
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  store(to, _mm512_mask_mov_epi32(lower(x), nan, _mm512_set1_epi32(0x7fc0)), lanes);
}

// 2^(n + f) of whole n up to a little above 0 and f within 0.5 of 0; 0 for n below -125, since some CPUs take a hundred
// cycles for a result that is denormal. Cephes' polynomial, some 2 units in the last place.
inline __m512 power(__m512 n, __m512 f) {
  const __mmask16 normal = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);  // NaN as well, and stays
  __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
  for (float each : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                     6.931472028550421e-1f, 1.0f}) {
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(each));
  }
  return _mm512_maskz_scalef_ps(normal, y, n);
}

inline __m512 power(__m512 t) {
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return power(n, _mm512_sub_ps(t, n));
}

}  // namespace
