// Attention of bfloat16 in blocks of rows that stay in the cache: products with FP32 results, the softmax in FP32.
//
// For each head, rows R at a time (S keys, E wide; under a causal mask only the keys that the block sees):
//
//   forward    S = q k^T,  e = exp(scale S + mask - max),  out = (e v) / sum(e)
//   backward   p = e / sum(e),  dP = dout v^T,  dS = scale p (dP - sum(p dP))
//              dq = dS k,  dk^T += q^T dS,  dv^T += dout^T p
//
// The backward makes sum(e) again: rows of exp(scale S + mask - log sum) do not add up to 1 where scores are large, and
// what they are off by is multiplied by dP.
//
// brgemm multiplies A[M, K] by B in "VNNI" order: B[k, n] and B[k + 1, n] side by side, an odd last k beside zeros.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "vectors.h"

namespace c10 {
struct BFloat16;
}

// As torch's ATen/native/CPUBlas.h declares them, which takes a second and a half to read.
namespace at::native::cpublas {
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, const bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool vnni);
void brgemm_release(bool vnni);
}  // namespace at::native::cpublas

namespace {

using Low = c10::BFloat16;

constexpr float kLargest = std::numeric_limits<float>::max();

struct Strides {
  int64_t batch, head, row;
};

struct Shape {
  int64_t batch, heads, groups, rows, keys, width;
};

struct Mask {
  const float* data;
  int64_t batch, head, row;
};

inline int64_t even(int64_t n) { return n + (n & 1); }

template <typename T>
struct Buffer {
  explicit Buffer(int64_t size) : data(new T[size]()) {}
  std::unique_ptr<T[]> data;
  T* get() { return data.get(); }
};

// 16 x 16 words: out[j][i] = in[i][j].
inline void transpose(__m512i x[kLanes]) {
  __m512i y[kLanes];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = i; j < i + 4; ++j) {
      y[j] = _mm512_shuffle_i32x4(x[j], x[j + 4], 0x88);
      y[j + 4] = _mm512_shuffle_i32x4(x[j], x[j + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
  }
}

// Words in[rows, columns], of which `stride` elements of type T are a row -> put(column, first row, words, lanes).
template <typename T, typename Put>
inline void transposed(const T* in, int64_t stride, int64_t rows, int64_t columns, Put put) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    const __mmask16 lanes = first(rows - i);
    for (int64_t j = 0; j < columns; j += kLanes) {
      const __mmask16 present = first(columns - j);
      __m512i x[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) {
        const __mmask16 here = i + l < rows ? present : 0;
        x[l] = _mm512_maskz_loadu_epi32(here, reinterpret_cast<const uint32_t*>(in + (here ? i + l : i) * stride) + j);
      }
      transpose(x);
      for (int64_t l = 0; l < kLanes && j + l < columns; ++l) put(j + l, i, x[l], lanes);
    }
  }
}

// x[n, width] -> [width / 2, n, 2]: VNNI of the transposed.
void pack_transposed(const Bits* x, int64_t stride, int64_t n, int64_t width, uint32_t* out) {
  transposed(x, stride, n, width / 2, [&](int64_t e, int64_t i, __m512i words, __mmask16 lanes) {
    _mm512_mask_storeu_epi32(out + e * n + i, lanes, words);
  });
  if (width % 2 == 0) return;
  for (int64_t i = 0; i < n; ++i) out[width / 2 * n + i] = x[i * stride + width - 1];
}

// x[n, width] -> [n / 2, width, 2].
void pack(const Bits* x, int64_t stride, int64_t n, int64_t width, uint32_t* out) {
  for (int64_t i = 0; i < even(n) / 2; ++i) {
    const Bits* first = x + 2 * i * stride;
    const bool both = 2 * i + 1 < n;
    const Bits* second = both ? first + stride : first;
    const uint32_t keep = both ? 0xffff0000u : 0u;
    for (int64_t e = 0; e < width; ++e) {
      out[i * width + e] = static_cast<uint32_t>(first[e]) | ((static_cast<uint32_t>(second[e]) << 16) & keep);
    }
  }
}

// x[n, width] -> [width, n], n made even by zeros; pairs: [n / 2, width], what `pack` makes of it.
void turn(const Bits* x, int64_t stride, int64_t n, int64_t width, uint32_t* pairs, uint32_t* out) {
  pack(x, stride, n, width, pairs);
  const int64_t pitch = even(n) / 2;
  transposed(pairs, width, pitch, width, [&](int64_t e, int64_t i, __m512i words, __mmask16 lanes) {
    _mm512_mask_storeu_epi32(out + e * pitch + i, lanes, words);
  });
}

void multiply(int64_t m, int64_t n, int64_t k, const void* a, int64_t lda, const void* b, int64_t ldb, float* c,
              int64_t ldc, bool add) {
  const auto *left = static_cast<const Low*>(a), *right = static_cast<const Low*>(b);
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, left, right, c, true);
}

// A row of exponents of 2: factor * s + log2(e) * mask, and -inf from `limit` to the next whole vector. Its maximum.
template <bool masked>
inline float exponents(float* s, int64_t limit, float factor_, const float* mask) {
  const __m512 factor = _mm512_set1_ps(factor_), least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 most = least;
  for (int64_t j = 0; j < limit; j += kLanes) {
    const __mmask16 lanes = first(limit - j);
    __m512 t = _mm512_mul_ps(_mm512_loadu_ps(s + j), factor);
    if constexpr (masked) {
      const __m512 more = _mm512_maskz_loadu_ps(lanes, mask + j), most_negative = _mm512_set1_ps(-kLargest);
      t = _mm512_fmadd_ps(more, _mm512_set1_ps(kLog2E), t);
      // Models write the least finite number for -inf; in a row of nothing else all weigh the same.
      // (Of a NaN the maximum is the second operand.)
      t = _mm512_mask_max_ps(t, _mm512_cmp_ps_mask(more, most_negative, _CMP_GE_OQ), most_negative, t);
      const __mmask16 nan = _mm512_cmp_ps_mask(t, t, _CMP_UNORD_Q);  // of any bits in a mask: see `upper`
      t = _mm512_mask_mov_ps(t, nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
    }
    t = _mm512_mask_mov_ps(least, lanes, t);
    most = _mm512_max_ps(t, most);
    _mm512_storeu_ps(s + j, t);
  }
  return _mm512_reduce_max_ps(most);
}

// Rows that the A of brgemm has, when width is odd: copies with a zero behind each.
const Bits* rows_of(const Bits* x, int64_t stride, int64_t n, int64_t width, Bits* copy, int64_t* pitch) {
  if (width % 2 == 0) {
    *pitch = stride;
    return x;
  }
  *pitch = width + 1;
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(copy + i * (width + 1), x + i * stride, width * sizeof(Bits));
    copy[i * (width + 1) + width] = 0;
  }
  return copy;
}

// factor * x, rounded.
void put_row(Bits* to, const float* x, int64_t width, float factor) {
  for (int64_t e = 0; e < width; e += kLanes) {
    const __mmask16 lanes = first(width - e);
    store_rounded(to + e, _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + e), _mm512_set1_ps(factor)), lanes);
  }
}

// x[width, n] -> [n, width], rounded.
void put_columns(Bits* to, int64_t stride, const float* x, int64_t n, int64_t width) {
  for (int64_t first = 0; first < n; first += kLanes) {  // row after row is written whole
    transposed(x + first, n, width, std::min(kLanes, n - first), [&](int64_t j, int64_t e, __m512i words, __mmask16 lanes) {
      store_rounded(to + (first + j) * stride + e, _mm512_castsi512_ps(words), lanes);
    });
  }
}

// The upper halves of words become one half of each pair: of an even row, whose partner is 0 until it comes, or odd.
inline void put_half(uint32_t* to, __m512i words, bool odd) {
  const __m512i high = _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __m512i pairs = odd ? _mm512_or_si512(high, _mm512_loadu_si512(to)) : _mm512_srli_epi32(words, 16);
  _mm512_storeu_si512(to, pairs);
}

// Even, since rows come in pairs.
int64_t block_rows(int64_t keys) { return keys > 1024 ? 32 : 64; }

// run(begin, end) of a thread's part of the tasks. 0: done; 1: something was thrown, which must not leave C++: of
// brgemm, where the CPU has no AVX-512, or of memory.
template <typename Run>
int shared(int64_t tasks, int threads, Run run) {
  int failed = 0;
#pragma omp parallel num_threads(static_cast<int>(std::min<int64_t>(threads, tasks))) reduction(| : failed)
  {
    const int64_t each = (tasks + omp_get_num_threads() - 1) / omp_get_num_threads();
    const int64_t begin = omp_get_thread_num() * each, end = std::min(begin + each, tasks);
    try {
      if (begin < end) run(begin, end);
    } catch (...) {
      failed = 1;
    }
  }
  return failed;
}

int forward(const Bits* query, const Bits* key, const Bits* value, const float* mask, Bits* out, const int64_t* shape,
            const int64_t* strides, int64_t causal, double scale, int threads) {
  const Shape z{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  const Strides q{strides[0], strides[1], strides[2]}, k{strides[3], strides[4], strides[5]},
      v{strides[6], strides[7], strides[8]}, o{strides[9], strides[10], strides[11]};
  const Mask m{mask, strides[12], strides[13], strides[14]};
  const float factor = static_cast<float>(scale * kLog2E);
  const int64_t group = z.heads / z.groups, height = block_rows(z.keys), wide = even(z.width), pitch = whole(z.keys);
  return shared(z.batch * z.groups, threads, [&](int64_t begin, int64_t end) {
    Buffer<uint32_t> keys(wide / 2 * z.keys), values(even(z.keys) / 2 * z.width);
    Buffer<float> scores(height * pitch), result(height * z.width), total(height);
    Buffer<Bits> p(height * pitch), copy(height * wide);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / z.groups, g = task % z.groups;
      pack_transposed(key + b * k.batch + g * k.head, k.row, z.keys, z.width, keys.get());
      pack(value + b * v.batch + g * v.head, v.row, z.keys, z.width, values.get());
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        for (int64_t r = 0; r < z.rows; r += height) {
          const int64_t n = std::min(height, z.rows - r), seen = causal ? std::min(r + n, z.keys) : z.keys;
          int64_t lda;
          const Bits* a = rows_of(query + b * q.batch + h * q.head + r * q.row, q.row, n, z.width, copy.get(), &lda);
          multiply(n, seen, wide, a, lda, keys.get(), z.keys, scores.get(), pitch, false);
          for (int64_t i = 0; i < n; ++i) {
            const int64_t limit = causal ? std::min(r + i + 1, seen) : seen;
            float* s = scores.get() + i * pitch;
            const float most =
                mask ? exponents<true>(s, limit, factor, m.data + b * m.batch + h * m.head + (r + i) * m.row)
                     : exponents<false>(s, limit, factor, nullptr);
            Bits* row = p.get() + i * pitch;
            __m512 sums = _mm512_setzero_ps();
            for (int64_t j = 0; j < limit; j += kLanes) {
              const __m512 e = power(_mm512_sub_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(most)));
              sums = _mm512_add_ps(sums, e);
              store(row + j, lower(e));
            }
            std::fill(row + whole(limit), row + whole(seen), Bits{0});
            const float sum = _mm512_reduce_add_ps(sums);
            total.get()[i] = 1.0f / sum;
          }
          multiply(n, z.width, even(seen), p.get(), pitch, values.get(), z.width, result.get(), z.width, false);
          for (int64_t i = 0; i < n; ++i) {
            put_row(out + b * o.batch + h * o.head + (r + i) * o.row, result.get() + i * z.width, z.width,
                    total.get()[i]);
          }
        }
      }
    }
    at::native::cpublas::brgemm_release(true);
  });
}

int backward(const Bits* grad, const Bits* query, const Bits* key, const Bits* value, const float* mask,
             Bits* dquery, Bits* dkey, Bits* dvalue, const int64_t* shape, const int64_t* strides, int64_t causal,
             double scale_, int threads) {
  const Shape z{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  const Strides y{strides[0], strides[1], strides[2]}, q{strides[3], strides[4], strides[5]},
      k{strides[6], strides[7], strides[8]}, v{strides[9], strides[10], strides[11]};
  const Mask m{mask, strides[12], strides[13], strides[14]};
  const float factor = static_cast<float>(scale_ * kLog2E);
  const __m512 scale = _mm512_set1_ps(static_cast<float>(scale_));
  const int64_t group = z.heads / z.groups, height = block_rows(z.keys), wide = even(z.width), pitch = whole(z.keys);
  return shared(z.batch * z.groups, threads, [&](int64_t begin, int64_t end) {
    Buffer<uint32_t> keys(wide / 2 * z.keys), values(wide / 2 * z.keys), rows_of_keys(even(z.keys) / 2 * z.width);
    Buffer<float> scores(height * pitch), of_p(height * pitch), result(height * z.width);
    Buffer<float> dk(z.width * z.keys), dv(z.width * z.keys);
    Buffer<Bits> ds(height * pitch), copy(height * wide), copy_of_grad(height * wide);
    Buffer<uint32_t> p_pairs(height / 2 * pitch), ds_pairs(height / 2 * pitch);
    Buffer<uint32_t> pairs(height / 2 * z.width), turned(height / 2 * z.width);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / z.groups, g = task % z.groups;
      const Bits* key_at = key + b * k.batch + g * k.head;
      pack_transposed(key_at, k.row, z.keys, z.width, keys.get());
      pack_transposed(value + b * v.batch + g * v.head, v.row, z.keys, z.width, values.get());
      pack(key_at, k.row, z.keys, z.width, rows_of_keys.get());
      std::fill_n(dk.get(), z.width * z.keys, 0.0f);
      std::fill_n(dv.get(), z.width * z.keys, 0.0f);
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        for (int64_t r = 0; r < z.rows; r += height) {
          const int64_t n = std::min(height, z.rows - r), seen = causal ? std::min(r + n, z.keys) : z.keys;
          const Bits* q_at = query + b * q.batch + h * q.head + r * q.row;
          const Bits* y_at = grad + b * y.batch + h * y.head + r * y.row;
          int64_t lda;
          const Bits* a = rows_of(q_at, q.row, n, z.width, copy.get(), &lda);
          multiply(n, seen, wide, a, lda, keys.get(), z.keys, scores.get(), pitch, false);
          a = rows_of(y_at, y.row, n, z.width, copy_of_grad.get(), &lda);
          multiply(n, seen, wide, a, lda, values.get(), z.keys, of_p.get(), pitch, false);
          for (int64_t i = 0; i < n; ++i) {
            const int64_t limit = causal ? std::min(r + i + 1, seen) : seen;
            float *s = scores.get() + i * pitch, *d = of_p.get() + i * pitch;
            const float most =
                mask ? exponents<true>(s, limit, factor, m.data + b * m.batch + h * m.head + (r + i) * m.row)
                     : exponents<false>(s, limit, factor, nullptr);
            __m512 sums = _mm512_setzero_ps(), totals = _mm512_setzero_ps();
            for (int64_t j = 0; j < limit; j += kLanes) {
              const __m512 e = power(_mm512_sub_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(most)));
              _mm512_storeu_ps(s + j, e);
              totals = _mm512_add_ps(totals, e);
              sums = _mm512_mask3_fmadd_ps(e, _mm512_loadu_ps(d + j), sums, first(limit - j));
            }
            const float total = 1.0f / _mm512_reduce_add_ps(totals);
            const __m512 share = _mm512_set1_ps(total), sum = _mm512_set1_ps(_mm512_reduce_add_ps(sums) * total);
            Bits* row = ds.get() + i * pitch;
            uint32_t *of_p_pairs = p_pairs.get() + i / 2 * pitch, *of_ds_pairs = ds_pairs.get() + i / 2 * pitch;
            for (int64_t j = 0; j < whole(seen); j += kLanes) {
              const __mmask16 lanes = j < limit ? first(limit - j) : 0;
              const __m512 e = _mm512_maskz_mul_ps(lanes, _mm512_maskz_loadu_ps(lanes, s + j), share);
              const __m512 x = _mm512_maskz_mul_ps(
                  lanes, _mm512_mul_ps(scale, e), _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, d + j), sum));
              const __m512i ds_words = upper(x), p_words = upper(e);
              store(row + j, _mm512_srli_epi32(ds_words, 16));
              put_half(of_ds_pairs + j, ds_words, i % 2);
              put_half(of_p_pairs + j, p_words, i % 2);
            }
          }
          multiply(n, z.width, even(seen), ds.get(), pitch, rows_of_keys.get(), z.width, result.get(), z.width, false);
          for (int64_t i = 0; i < n; ++i) {
            put_row(dquery + ((b * z.rows + r + i) * z.heads + h) * z.width, result.get() + i * z.width, z.width, 1.0f);
          }
          turn(q_at, q.row, n, z.width, pairs.get(), turned.get());
          multiply(z.width, seen, even(n), turned.get(), even(n), ds_pairs.get(), pitch, dk.get(), z.keys, true);
          turn(y_at, y.row, n, z.width, pairs.get(), turned.get());
          multiply(z.width, seen, even(n), turned.get(), even(n), p_pairs.get(), pitch, dv.get(), z.keys, true);
        }
      }
      put_columns(dkey + (b * z.keys * z.groups + g) * z.width, z.groups * z.width, dk.get(), z.keys, z.width);
      put_columns(dvalue + (b * z.keys * z.groups + g) * z.width, z.groups * z.width, dv.get(), z.keys, z.width);
    }
    at::native::cpublas::brgemm_release(true);
  });
}

}  // namespace

extern "C" int fxprec_attention_forward(const Bits* query, const Bits* key, const Bits* value, const float* mask,
                                        Bits* out, const int64_t* shape, const int64_t* strides, int64_t causal,
                                        double scale, int threads) {
  return forward(query, key, value, mask, out, shape, strides, causal, scale, threads);
}

extern "C" int fxprec_attention_backward(const Bits* grad, const Bits* query, const Bits* key, const Bits* value,
                                         const float* mask, Bits* dquery, Bits* dkey, Bits* dvalue,
                                         const int64_t* shape, const int64_t* strides, int64_t causal, double scale,
                                         int threads) {
  return backward(grad, query, key, value, mask, dquery, dkey, dvalue, shape, strides, causal, scale, threads);
}
