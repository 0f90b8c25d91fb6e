// What loops that a compiler makes vectors of are written with: bfloat16 as its bits, vector forms of libm's functions.
//
// glibc has these from 2.35 on (libmvec, errors below 4 units in the last place); with an older one calls are scalar.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
#define VECTORS _Pragma("omp declare simd notinbranch")
#else
#define VECTORS
#endif
extern "C" {
VECTORS float expf(float) noexcept;
VECTORS float exp2f(float) noexcept;
VECTORS float expm1f(float) noexcept;
VECTORS float logf(float) noexcept;
VECTORS float log2f(float) noexcept;
VECTORS float log1pf(float) noexcept;
VECTORS float erff(float) noexcept;
VECTORS float tanhf(float) noexcept;
}

namespace {

struct Row {  // of numbers that a task keeps from one pass over a row to the next
  explicit Row(int64_t columns) : data(static_cast<float*>(malloc(columns * sizeof(float)))) {}
  ~Row() { free(data); }
  Row(const Row&) = delete;
  float* data;
};

inline float wide(uint16_t bits) {
  const uint32_t above = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &above, 4);
  return x;
}

inline uint16_t low(float x) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t up = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? static_cast<uint16_t>(up) : static_cast<uint16_t>(0x7fc0);
}

inline uint16_t exact(float x) {  // of x that is a bfloat16
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// NaN where one of both is.
inline float larger(float a, float b) { return a > b || a != a ? a : b; }
inline float smaller(float a, float b) { return a < b || a != a ? a : b; }

#pragma omp declare reduction(larger : float : omp_out = larger(omp_in, omp_out)) initializer(omp_priv = -INFINITY)
#pragma omp declare reduction(smaller : float : omp_out = smaller(omp_in, omp_out)) initializer(omp_priv = INFINITY)

}  // namespace
