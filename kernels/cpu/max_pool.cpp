// Max pooling of [samples, height, width, channels], bfloat16 or FP32, whose windows of kh x kw have a number an element.
//
//   forward    y = max of the window,  where = i * kw + j of the first of equal ones; a NaN is a maximum
//   backward   dx = sum of dy of those windows that chose an element
#include <algorithm>

#include "vectors.h"

namespace {

struct Pool {
  int64_t samples, channels, height, width, out_height, out_width, kh, kw, sh, sw, ph, pw;
};

struct Range {
  int64_t begin, end;
};

// Of the elements of a window that begins at `first`, those that lie in `size`: never none.
inline Range inside(int64_t first, int64_t window, int64_t size) {
  return {std::max<int64_t>(0, -first), std::min(window, size - first)};
}

// The windows that hold a place: w * stride - padding <= place < w * stride - padding + window.
inline Range holding(int64_t place, int64_t window, int64_t stride, int64_t padding, int64_t count) {
  const int64_t past = place + padding - window;  // the last place before which a window may not begin
  return {past < 0 ? 0 : past / stride + 1, std::min(count, (place + padding) / stride + 1)};
}

inline void store_exact(float* to, __m512 x, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, x); }

inline void store_exact(Bits* to, __m512 x, __mmask16 lanes) {
  store(to, _mm512_srli_epi32(_mm512_castps_si512(x), 16), lanes);  // it came from bfloat16
}

template <typename T, bool kWhere>
void forward(const Pool& p, const T* x, T* y, int8_t* where, int threads) {
  const int64_t rows = p.samples * p.out_height;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t top = row % p.out_height * p.sh - p.ph;
    const T* image = x + row / p.out_height * p.height * p.width * p.channels;
    const Range down = inside(top, p.kh, p.height);
    for (int64_t column = 0; column < p.out_width; ++column) {
      const int64_t left = column * p.sw - p.pw, result = (row * p.out_width + column) * p.channels;
      const Range across = inside(left, p.kw, p.width);
      for (int64_t c = 0; c < p.channels; c += kLanes) {
        const __mmask16 lanes = first(p.channels - c);
        const auto at = [&](int64_t i, int64_t j) {
          return load(image + ((top + i) * p.width + left + j) * p.channels + c, lanes);
        };
        __m512 best = at(down.begin, across.begin);
        __m512i chosen = _mm512_set1_epi32(static_cast<int>(down.begin * p.kw + across.begin));
        for (int64_t i = down.begin; i < down.end; ++i) {
          for (int64_t j = across.begin; j < across.end; ++j) {
            const __m512 value = at(i, j);
            const __mmask16 takes =
                _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ) | _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
            best = _mm512_mask_mov_ps(best, takes, value);
            if (kWhere) chosen = _mm512_mask_set1_epi32(chosen, takes, static_cast<int>(i * p.kw + j));
          }
        }
        store_exact(y + result + c, best, lanes);
        if (kWhere) _mm_mask_storeu_epi8(where + result + c, lanes, _mm512_cvtepi32_epi8(chosen));
      }
    }
  }
}

template <typename T>
void backward(const Pool& p, const T* dy, const int8_t* where, T* dx, int threads) {
  const int64_t rows = p.samples * p.height;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t h = row % p.height, sample = row / p.height;
    const Range down = holding(h, p.kh, p.sh, p.ph, p.out_height);
    for (int64_t w = 0; w < p.width; ++w) {
      const Range across = holding(w, p.kw, p.sw, p.pw, p.out_width);
      for (int64_t c = 0; c < p.channels; c += kLanes) {
        const __mmask16 lanes = first(p.channels - c);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = down.begin; i < down.end; ++i) {
          for (int64_t j = across.begin; j < across.end; ++j) {
            const int64_t result = ((sample * p.out_height + i) * p.out_width + j) * p.channels + c;
            const int64_t number = (h + p.ph - i * p.sh) * p.kw + w + p.pw - j * p.sw;
            const __m512i chosen = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, where + result));
            const __mmask16 own = _mm512_cmpeq_epi32_mask(chosen, _mm512_set1_epi32(static_cast<int>(number)));
            sum = _mm512_mask_add_ps(sum, own, sum, load(dy + result, lanes));
          }
        }
        store_rounded(dx + (row * p.width + w) * p.channels + c, sum, lanes);
      }
    }
  }
}

template <typename T>
void forward_of(const Pool& p, const void* x, void* y, int8_t* where, int threads) {
  const auto run = where ? forward<T, true> : forward<T, false>;
  run(p, static_cast<const T*>(x), static_cast<T*>(y), where, threads);
}

}  // namespace

// where: of y's shape, or null.
extern "C" void fxprec_max_pool_forward(const Pool* pool, int low, const void* x, void* y, int8_t* where, int threads) {
  (low ? forward_of<Bits> : forward_of<float>)(*pool, x, y, where, threads);
}

extern "C" void fxprec_max_pool_backward(const Pool* pool, int low, const void* dy, const int8_t* where, void* dx,
                                         int threads) {
  if (low) {
    backward(*pool, static_cast<const Bits*>(dy), where, static_cast<Bits*>(dx), threads);
  } else {
    backward(*pool, static_cast<const float*>(dy), where, static_cast<float*>(dx), threads);
  }
}
