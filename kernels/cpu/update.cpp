// The updates of Adam and SGD, of all parameters in one call; each element is read once and written once.
//
//   gradient = scale * g  (+ decay * p, with L2)
//   ADAM     p = decay p (decoupled);  m = lerp(m, gradient);  v = beta2 v + (1 - beta2) gradient^2
//            v^ = max(v^, v) (AMSGRAD);  p -= size m / (correction sqrt(v) + eps)
//   SGD      b = momentum b + share gradient (MOMENTUM);  p -= rate (b, or with NESTEROV gradient + momentum b)
//
// Macros: ADAM, L2, AMSGRAD, MOMENTUM, NESTEROV are 0 or 1; GRADIENT and SHADOW are float, BFloat16 or _Float16; CHUNK
// is how many elements a thread takes at a time.
#include "loops.h"

namespace {

struct BFloat16 {
  uint16_t bits;
};

inline float number(float x) { return x; }
inline float number(BFloat16 x) { return wide(x.bits); }
inline void put(float* to, float x) { *to = x; }
inline void put(BFloat16* to, float x) { to->bits = low(x); }
#ifdef __FLT16_MAX__
inline float number(_Float16 x) { return static_cast<float>(x); }
inline void put(_Float16* to, float x) { *to = static_cast<_Float16>(x); }
#endif

// Of one parameter. No shadow: null; what Adam or SGD does not have: null.
struct Tensors {
  float* params;
  const GRADIENT* grads;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;
  float* momentum_buffer;
  SHADOW* shadow;
  const float* scalars;
  int64_t size, before;  // `before`: chunks of the parameters before it
};

constexpr int64_t kChunk = CHUNK;

template <bool shadowed>
inline void update(const Tensors& t, int64_t begin, int64_t end) {
  float* __restrict__ params = t.params;
  const GRADIENT* __restrict__ grads = t.grads;
  SHADOW* __restrict__ shadow = t.shadow;
  const float scale = t.scalars[0], decay = t.scalars[1];
#if ADAM
  float* __restrict__ exp_avg = t.exp_avg;
  float* __restrict__ exp_avg_sq = t.exp_avg_sq;
  [[maybe_unused]] float* __restrict__ max_exp_avg_sq = t.max_exp_avg_sq;
  const float share = t.scalars[2], beta2 = t.scalars[3], share2 = t.scalars[4], correction = t.scalars[5],
              eps = t.scalars[6], size = t.scalars[7];
#else
  [[maybe_unused]] float* __restrict__ momentum_buffer = t.momentum_buffer;
  [[maybe_unused]] const float momentum = t.scalars[2], share = t.scalars[3];
  const float rate = t.scalars[4];
#endif
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    float param = params[i], gradient = number(grads[i]) * scale;
    if constexpr (L2) gradient += param * decay;
#if ADAM
    if constexpr (!L2) param *= decay;
    const float apart = gradient - exp_avg[i];
    const float first = share < 0.5f ? exp_avg[i] + share * apart : gradient - apart * (1.0f - share);
    float second = exp_avg_sq[i] * beta2 + gradient * share2 * gradient;
    exp_avg[i] = first;
    exp_avg_sq[i] = second;
    if constexpr (AMSGRAD) second = max_exp_avg_sq[i] = larger(max_exp_avg_sq[i], second);
    param -= first * size / (sqrtf(second) * correction + eps);
#else
    if constexpr (MOMENTUM) {
      const float kept = momentum_buffer[i] * momentum + gradient * share;
      momentum_buffer[i] = kept;
      gradient = NESTEROV ? gradient + kept * momentum : kept;
    }
    param -= gradient * rate;
#endif
    params[i] = param;
    if constexpr (shadowed) put(shadow + i, param);
  }
}

}  // namespace

extern "C" void fxprec_update(const Tensors* all, int64_t count, int threads) {
  const Tensors& last = all[count - 1];
  const int64_t chunks = last.before + (last.size + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && chunks > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    int64_t here = 0;  // the last parameter that begins at this chunk or before
    for (int64_t end = count; end - here > 1;) {
      const int64_t middle = (here + end) / 2;
      (all[middle].before <= chunk ? here : end) = middle;
    }
    const Tensors& t = all[here];
    const int64_t begin = (chunk - t.before) * kChunk, end = begin + kChunk < t.size ? begin + kChunk : t.size;
    t.shadow ? update<true>(t, begin, end) : update<false>(t, begin, end);
  }
}
