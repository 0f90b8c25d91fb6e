// Cross-entropy of rows of logits x[C], bfloat16 or FP32, with a label l, in FP32; read once forward, once backward.
//
//   forward    most = max x,  log_sum = log(sum exp(x - most)),  lse = most + log_sum
//              loss = lse - keep x[l] - spread sum(x) + z lse^2            keep = 1 - smoothing, spread = smoothing / C
//   backward   dx = factor ((1 + 2 z lse) exp(x - lse) - spread - keep [at l])
//
// A row of the label to ignore is not read: its loss and its gradient are 0.
#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

struct Logits {
  const void* data;
  const int64_t* labels;
  int64_t rows, columns, stride, ignored;
  float smoothing, z_loss;

  float keep() const { return 1.0f - smoothing; }
  float spread() const { return smoothing / static_cast<float>(columns); }
};

inline __m512 exponential(__m512 x) {
  const __m512 log2_e = _mm512_set1_ps(kLog2E), rest = _mm512_set1_ps(kLog2EBelow);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2_e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return power(n, _mm512_fmadd_ps(x, rest, _mm512_fmsub_ps(x, log2_e, n)));  // no digit of a large exponent is lost
}

template <typename T>
inline float one(const T* x) {
  return _mm512_cvtss_f32(load(x, 1));
}

// Each vector of a row, with its lanes and a number below 4: of sums that do not wait for each other.
template <typename Do>
inline void over(int64_t columns, Do each) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= columns; j += 4 * kLanes) {
    for (int i = 0; i < 4; ++i) each(j + i * kLanes, __mmask16{0xffff}, i);
  }
  for (; j < columns; j += kLanes) each(j, first(columns - j), 0);
}

inline float total(const __m512 sums[4]) {
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

template <typename T>
void forward(const Logits& z, float* stats, float* losses, float* shares, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && z.rows > 1)
  for (int64_t r = 0; r < z.rows; ++r) {
    const T* x = static_cast<const T*>(z.data) + r * z.stride;
    const bool live = z.labels[r] != z.ignored;
    float most = 0.0f, log_sum = 0.0f, loss = 0.0f;
    if (live) {
      const __m512 least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
      __m512 largest[4] = {least, least, least, least}, sums[4] = {}, plain[4] = {};
      over(z.columns, [&](int64_t j, __mmask16 lanes, int i) {
        const __m512 value = load(x + j, lanes);
        largest[i] = _mm512_mask_max_ps(largest[i], lanes, value, largest[i]);  // of NaN the second: sums find it
        if (z.smoothing > 0) plain[i] = _mm512_add_ps(plain[i], value);
      });
      most = _mm512_reduce_max_ps(
          _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3])));
      over(z.columns, [&](int64_t j, __mmask16 lanes, int i) {
        const __m512 e = exponential(_mm512_sub_ps(load(x + j, lanes), _mm512_set1_ps(most)));
        sums[i] = _mm512_mask_add_ps(sums[i], lanes, sums[i], e);
      });
      log_sum = std::log(total(sums));
      const float lse = most + log_sum;
      loss = z.keep() * (log_sum - (one(x + z.labels[r]) - most));
      if (z.smoothing > 0) loss += z.smoothing * (lse - total(plain) / static_cast<float>(z.columns));
      loss += z.z_loss * lse * lse;
    }
    stats[r] = most;
    stats[z.rows + r] = log_sum;
    stats[2 * z.rows + r] = live;
    losses[r] = loss;
    if (shares) shares[r] = live;
  }
}

template <typename T>
void backward(const Logits& z, const float* stats, const float* factors, T* gradient, int64_t stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && z.rows > 1)
  for (int64_t r = 0; r < z.rows; ++r) {
    const T* x = static_cast<const T*>(z.data) + r * z.stride;
    T* dx = gradient + r * stride;
    const bool live = z.labels[r] != z.ignored;
    const __m512 most = _mm512_set1_ps(stats[r]), log_sum = _mm512_set1_ps(stats[z.rows + r]);
    const __m512 mass = _mm512_set1_ps(1.0f + 2.0f * z.z_loss * (stats[r] + stats[z.rows + r]));
    const __m512 spread = _mm512_set1_ps(z.spread()), factor = _mm512_set1_ps(factors[r]);
    const auto value = [&](__m512 logits, __m512 target) {
      const __m512 p = exponential(_mm512_sub_ps(_mm512_sub_ps(logits, most), log_sum));
      return _mm512_mul_ps(_mm512_sub_ps(_mm512_mul_ps(p, mass), target), factor);
    };
    over(z.columns, [&](int64_t j, __mmask16 lanes, int) {
      store_rounded(dx + j, live ? value(load(x + j, lanes), spread) : _mm512_setzero_ps(), lanes);
    });
    if (live) {
      const int64_t l = z.labels[r];
      store_rounded(dx + l, value(load(x + l, 1), _mm512_add_ps(spread, _mm512_set1_ps(z.keep()))), 1);
    }
  }
}

}  // namespace

// stats: [3, rows]: most, log_sum, and 1, or 0 of a row that is ignored; shares: the last of these, or null.
extern "C" void fxprec_cross_entropy_forward(const Logits* logits, int low, float* stats, float* losses, float* shares,
                                             int threads) {
  (low ? forward<Bits> : forward<float>)(*logits, stats, losses, shares, threads);
}

// factors: of each row's gradient, which is written in the logits' dtype.
extern "C" void fxprec_cross_entropy_backward(const Logits* logits, int low, const float* stats, const float* factors,
                                              void* gradient, int64_t stride, int threads) {
  if (low) {
    backward(*logits, stats, factors, static_cast<Bits*>(gradient), stride, threads);
  } else {
    backward(*logits, stats, factors, static_cast<float*>(gradient), stride, threads);
  }
}
