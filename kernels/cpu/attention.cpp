// Attention of bfloat16 in blocks of rows that stay in the cache: products with FP32 results, the softmax in FP32.
//
// For each head, rows R at a time (S keys, E wide; under a causal mask only the keys that the block sees):
//
//   forward    S = q k^T,  p = exp(scale S + mask - max),  out = (p v) / sum(p),  lse = max + log(sum(p))
//   backward   p = exp(scale S + mask - lse),  dP = dout v^T,  dS = scale p (dP - sum(p dP))
//              dq = dS k,  dk^T += q^T dS,  dv^T += dout^T p
//
// brgemm multiplies A[M, K] by B in "VNNI" order: B[k, n] and B[k + 1, n] side by side, an odd last k beside zeros.
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace {

using Low = at::BFloat16;
using Bits = uint16_t;

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

inline Bits rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t up = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? static_cast<Bits>(up) : static_cast<Bits>(0x7fc0);
}

// exp for x <= 0, and what is above a little; 0 from -87 down. Cephes' polynomial, some 2 units in the last place.
inline float exponential(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float n = std::nearbyint(clamped * 1.44269504088896341f);
  float r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, 4);
  return x < -87.0f ? 0.0f : y * scale;
}

template <typename T>
struct Buffer {
  explicit Buffer(int64_t size) : data(new T[size]()) {}
  std::unique_ptr<T[]> data;
  T* get() { return data.get(); }
};

// x[n, width] -> [width / 2, n, 2]: VNNI of the transposed.
void pack_transposed(const Bits* x, int64_t stride, int64_t n, int64_t width, uint32_t* out) {
  for (int64_t e = 0; e < even(width) / 2; ++e) {
    const bool both = 2 * e + 1 < width;
    for (int64_t i = 0; i < n; ++i) {
      const Bits* at = x + i * stride + 2 * e;
      out[e * n + i] = static_cast<uint32_t>(at[0]) | (both ? static_cast<uint32_t>(at[1]) << 16 : 0u);
    }
  }
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

// x[n, width] -> [width, n], n made even by zeros.
void transpose(const Bits* x, int64_t stride, int64_t n, int64_t width, Bits* out) {
  const int64_t pitch = even(n);
  for (int64_t e = 0; e < width; ++e) {
    for (int64_t i = 0; i < n; ++i) out[e * pitch + i] = x[i * stride + e];
    if (pitch != n) out[e * pitch + n] = 0;
  }
}

void multiply(int64_t m, int64_t n, int64_t k, const void* a, int64_t lda, const void* b, int64_t ldb, float* c,
              int64_t ldc, bool add) {
  const auto *left = static_cast<const Low*>(a), *right = static_cast<const Low*>(b);
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, left, right, c, true);
}

// scale * s + mask, and what is above the diagonal -inf.
inline void prepare(float* s, int64_t keys, float scale, const float* mask, int64_t seen) {
  if (mask) {
#pragma omp simd
    for (int64_t j = 0; j < keys; ++j) s[j] = s[j] * scale + mask[j];
  } else {
#pragma omp simd
    for (int64_t j = 0; j < keys; ++j) s[j] = s[j] * scale;
  }
  for (int64_t j = seen; j < keys; ++j) s[j] = -std::numeric_limits<float>::infinity();
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

int64_t block_rows(int64_t keys) { return keys > 1024 ? 32 : 64; }

void forward(const Bits* query, const Bits* key, const Bits* value, const float* mask, Bits* out, float* lse,
             const int64_t* shape, const int64_t* strides, int64_t causal, double scale_) {
  const Shape z{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  const Strides q{strides[0], strides[1], strides[2]}, k{strides[3], strides[4], strides[5]},
      v{strides[6], strides[7], strides[8]}, o{strides[9], strides[10], strides[11]};
  const Mask m{mask, strides[12], strides[13], strides[14]};
  const float scale = static_cast<float>(scale_);
  const int64_t group = z.heads / z.groups, height = block_rows(z.keys), wide = even(z.width), pitch = even(z.keys);
  at::parallel_for(0, z.batch * z.groups, 1, [&](int64_t begin, int64_t end) {
    Buffer<uint32_t> keys(wide / 2 * z.keys), values(pitch / 2 * z.width);
    Buffer<float> scores(height * z.keys), result(height * z.width), total(height);
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
          multiply(n, seen, wide, a, lda, keys.get(), z.keys, scores.get(), seen, false);
          for (int64_t i = 0; i < n; ++i) {
            float* s = scores.get() + i * seen;
            prepare(s, seen, scale, mask ? m.data + b * m.batch + h * m.head + (r + i) * m.row : nullptr,
                    causal ? std::min(r + i + 1, seen) : seen);
            float most = -std::numeric_limits<float>::infinity(), sum = 0.0f;
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < seen; ++j) most = s[j] > most ? s[j] : most;
            Bits* row = p.get() + i * pitch;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < seen; ++j) {
              const float e = exponential(s[j] - most);
              sum += e;
              row[j] = rounded(e);
            }
            if (seen % 2) row[seen] = 0;
            total.get()[i] = 1.0f / sum;
            lse[(b * z.heads + h) * z.rows + r + i] = most + std::log(sum);
          }
          multiply(n, z.width, even(seen), p.get(), pitch, values.get(), z.width, result.get(), z.width, false);
          for (int64_t i = 0; i < n; ++i) {
            Bits* row = out + b * o.batch + h * o.head + (r + i) * o.row;
            const float* from = result.get() + i * z.width;
            const float inverse = total.get()[i];
#pragma omp simd
            for (int64_t e = 0; e < z.width; ++e) row[e] = rounded(from[e] * inverse);
          }
        }
      }
    }
    at::native::cpublas::brgemm_release(true);
  });
}

void backward(const Bits* grad, const Bits* query, const Bits* key, const Bits* value, const float* mask,
              const float* lse, Bits* dquery, Bits* dkey, Bits* dvalue, const int64_t* shape, const int64_t* strides,
              int64_t causal, double scale_) {
  const Shape z{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  const Strides y{strides[0], strides[1], strides[2]}, q{strides[3], strides[4], strides[5]},
      k{strides[6], strides[7], strides[8]}, v{strides[9], strides[10], strides[11]};
  const Mask m{mask, strides[12], strides[13], strides[14]};
  const float scale = static_cast<float>(scale_);
  const int64_t group = z.heads / z.groups, height = block_rows(z.keys), wide = even(z.width), pitch = even(z.keys);
  at::parallel_for(0, z.batch * z.groups, 1, [&](int64_t begin, int64_t end) {
    Buffer<uint32_t> keys(wide / 2 * z.keys), values(wide / 2 * z.keys), rows_of_keys(pitch / 2 * z.width);
    Buffer<float> scores(height * z.keys), of_p(height * z.keys), result(height * z.width);
    Buffer<float> dk(z.width * z.keys), dv(z.width * z.keys);
    Buffer<Bits> ds(height * pitch), copy(height * wide), copy_of_grad(height * wide), turned(even(height) * z.width);
    Buffer<uint32_t> p_pairs(even(height) / 2 * z.keys), ds_pairs(even(height) / 2 * z.keys);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / z.groups, g = task % z.groups;
      const Bits* key_at = key + b * k.batch + g * k.head;
      pack_transposed(key_at, k.row, z.keys, z.width, keys.get());
      pack_transposed(value + b * v.batch + g * v.head, v.row, z.keys, z.width, values.get());
      pack(key_at, k.row, z.keys, z.width, rows_of_keys.get());
      std::memset(dk.get(), 0, sizeof(float) * z.width * z.keys);
      std::memset(dv.get(), 0, sizeof(float) * z.width * z.keys);
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        for (int64_t r = 0; r < z.rows; r += height) {
          const int64_t n = std::min(height, z.rows - r), seen = causal ? std::min(r + n, z.keys) : z.keys;
          const Bits* q_at = query + b * q.batch + h * q.head + r * q.row;
          const Bits* y_at = grad + b * y.batch + h * y.head + r * y.row;
          int64_t lda;
          const Bits* a = rows_of(q_at, q.row, n, z.width, copy.get(), &lda);
          multiply(n, seen, wide, a, lda, keys.get(), z.keys, scores.get(), seen, false);
          a = rows_of(y_at, y.row, n, z.width, copy_of_grad.get(), &lda);
          multiply(n, seen, wide, a, lda, values.get(), z.keys, of_p.get(), seen, false);
          for (int64_t i = 0; i < n; ++i) {
            float *s = scores.get() + i * seen, *d = of_p.get() + i * seen;
            prepare(s, seen, scale, mask ? m.data + b * m.batch + h * m.head + (r + i) * m.row : nullptr,
                    causal ? std::min(r + i + 1, seen) : seen);
            const float norm = lse[(b * z.heads + h) * z.rows + r + i];
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < seen; ++j) {
              s[j] = exponential(s[j] - norm);
              sum += s[j] * d[j];
            }
            Bits* row = ds.get() + i * pitch;
            uint32_t *pairs = p_pairs.get() + i / 2 * seen, *of_pairs = ds_pairs.get() + i / 2 * seen;
            if (i % 2 == 0) {
#pragma omp simd
              for (int64_t j = 0; j < seen; ++j) {
                const Bits x = rounded(scale * s[j] * (d[j] - sum));
                row[j] = x;
                of_pairs[j] = x;
                pairs[j] = rounded(s[j]);
              }
            } else {
#pragma omp simd
              for (int64_t j = 0; j < seen; ++j) {
                const Bits x = rounded(scale * s[j] * (d[j] - sum));
                row[j] = x;
                of_pairs[j] |= static_cast<uint32_t>(x) << 16;
                pairs[j] |= static_cast<uint32_t>(rounded(s[j])) << 16;
              }
            }
            if (seen % 2) row[seen] = 0;
          }
          multiply(n, z.width, even(seen), ds.get(), pitch, rows_of_keys.get(), z.width, result.get(), z.width, false);
          for (int64_t i = 0; i < n; ++i) {
            Bits* row = dquery + ((b * z.rows + r + i) * z.heads + h) * z.width;
            const float* from = result.get() + i * z.width;
#pragma omp simd
            for (int64_t e = 0; e < z.width; ++e) row[e] = rounded(from[e]);
          }
          transpose(q_at, q.row, n, z.width, turned.get());
          multiply(z.width, seen, even(n), turned.get(), even(n), ds_pairs.get(), seen, dk.get(), z.keys, true);
          transpose(y_at, y.row, n, z.width, turned.get());
          multiply(z.width, seen, even(n), turned.get(), even(n), p_pairs.get(), seen, dv.get(), z.keys, true);
        }
      }
      for (int64_t j = 0; j < z.keys; ++j) {
        Bits* to_k = dkey + ((b * z.keys + j) * z.groups + g) * z.width;
        Bits* to_v = dvalue + ((b * z.keys + j) * z.groups + g) * z.width;
        for (int64_t e = 0; e < z.width; ++e) {
          to_k[e] = rounded(dk.get()[e * z.keys + j]);
          to_v[e] = rounded(dv.get()[e * z.keys + j]);
        }
      }
    }
    at::native::cpublas::brgemm_release(true);
  });
}

// 0: done; 1: something was thrown, which must not leave C++: of brgemm, where the CPU has no AVX-512, or of memory.
template <typename Run>
int guarded(Run run) {
  try {
    run();
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace

extern "C" int fxprec_attention_forward(const Bits* query, const Bits* key, const Bits* value, const float* mask,
                                        Bits* out, float* lse, const int64_t* shape, const int64_t* strides,
                                        int64_t causal, double scale) {
  return guarded([&] { forward(query, key, value, mask, out, lse, shape, strides, causal, scale); });
}

extern "C" int fxprec_attention_backward(const Bits* grad, const Bits* query, const Bits* key, const Bits* value,
                                         const float* mask, const float* lse, Bits* dquery, Bits* dkey, Bits* dvalue,
                                         const int64_t* shape, const int64_t* strides, int64_t causal, double scale) {
  return guarded([&] {
    backward(grad, query, key, value, mask, lse, dquery, dkey, dvalue, shape, strides, causal, scale);
  });
}
