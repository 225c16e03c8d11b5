// Row-wise kernels: norms, activation quantization, gating, embedding. A row's result depends on that row
// alone.
#pragma once

#include "kernels/matmul.h"
#include "rows.h"

namespace ff::FF_NS {

// y = norm(x) [+ residual] over k columns; any of the three may be the same memory.
static FF_INLINE void norm_row(const NormArgs& n, const float* x, int k, const float* residual, float* y) {
  float mean = 0;
  if (n.layer) {
    F s = zero();
    for (int i = 0; i < k; i += kLanes) s = add(s, load_n(x + i, k - i < kLanes ? k - i : kLanes));
    mean = hsum(s) / float(k);
  }
  F s = zero();
  int i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    const F d = sub(load(x + i), set1(mean));
    s = fma(d, d, s);
  }
  if (i < k) {
    const F d = first_n(sub(load_n(x + i, k - i), set1(mean)), zero(), k - i);
    s = fma(d, d, s);
  }
  const float r = 1.0f / __builtin_sqrtf(hsum(s) / float(k) + n.eps);
  for (i = 0; i < k; i += kLanes) {
    const int left = k - i < kLanes ? k - i : kLanes;
    F v = mul(sub(load_n(x + i, left), set1(mean)), set1(r));
    v = mul(v, add(load_n(n.weight + i, left), set1(n.offset)));
    if (n.bias) v = add(v, load_n(n.bias + i, left));
    if (residual) v = add(load_n(residual + i, left), v);
    store_n(y + i, v, left);
  }
}

// int8 with one scale per kActGroup columns: scale = max|x| / 127, q = round(x / scale) to nearest even. The
// error of an element is at most scale / 2. A group with a number that is not finite has scale NaN, which
// every product then is. k is a multiple of 16 (every integer format's group is).
static FF_INLINE void quantize_row(const float* x, int k, const ActRows& to, int row) {
  int8_t* q = to.q + size_t(row) * to.q_stride;
  float* scale = to.scale + size_t(row) * to.scale_stride;
  int32_t* s16 = to.sums16 + size_t(row) * to.sum_stride;
  int32_t* s32 = to.sums32 + size_t(row) * to.sum_stride;
  for (int k0 = 0, g = 0; k0 < k; k0 += kActGroup, g++) {
    const int n = k - k0 < kActGroup ? k - k0 : kActGroup;
    F m = zero(), bad = zero();
    for (int i = 0; i < n; i += kLanes) {
      const F v = load(x + k0 + i);
      m = max(abs(v), m);
      bad = fma(v, zero(), bad);  // max drops NaN; 0 * v keeps it, and makes it of infinity
    }
    const float largest = hmax(m);
    scale[g] = largest / 127.0f + hsum(bad);
    if (scale[g] != scale[g]) {
      memset(q + k0, 0, size_t(n));
      memset(s16 + k0 / 16, 0, size_t(n) / 16 * sizeof(int32_t));
      continue;
    }
    // Below, the inverse would overflow: such numbers count as zero.
    const F inverse = set1(largest > 1e-36f ? 127.0f / largest : 0.0f);
    for (int i = 0; i < n; i += kLanes) {
      const I v = to_int(mul(load(x + k0 + i), inverse));
      store_i8(q + k0 + i, v);
      s16[(k0 + i) / 16] = ihsum(v);
    }
  }
  for (int i = 0; i < k / 32; i++) s32[i] = s16[2 * i] + s16[2 * i + 1];
}

static void prepare_rows(const PrepareArgs& a, int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    const float* x = a.x + size_t(r) * a.x_stride;
    float* y = a.normed + size_t(r) * a.normed_stride;
    if (a.norm.weight) {
      norm_row(a.norm, x, a.k, nullptr, y);
      x = y;
    }
    if (a.want_q && a.outlier_count) {
      float* kept = a.to.outliers + size_t(r) * kMaxOutliers;
      if (x != y) memcpy(y, x, size_t(a.k) * sizeof(float));
      for (int i = 0; i < a.outlier_count; i++) kept[i] = y[a.outliers[i]];
      for (int i = 0; i < a.outlier_count; i++) y[a.outliers[i]] = 0.0f;
      quantize_row(y, a.k, a.to, r);
      for (int i = 0; i < a.outlier_count; i++) y[a.outliers[i]] = kept[i];
    } else if (a.want_q) {
      quantize_row(x, a.k, a.to, r);
    }
    if (a.want_bf16) {
      uint16_t* b = a.to.bf16 + size_t(r) * a.to.q_stride;
      int i = 0;
      for (; i + kLanes <= a.k; i += kLanes) store_bf16(b + i, load(x + i));
      for (; i < a.k; i++) b[i] = f32_to_bf16(x[i]);
      if (a.k & 1) b[a.k] = 0;
    }
  }
}

// out = norm(x), each of `heads` equal runs of columns by itself, + residual.
static void norm_rows(const NormArgs& n, const float* x, size_t x_stride, float* out, size_t out_stride,
                      const float* residual, size_t residual_stride, int width, int heads, int row0,
                      int row1) {
  const int k = width / heads;
  for (int r = row0; r < row1; r++) {
    const float* from = x + size_t(r) * x_stride;
    float* to = out + size_t(r) * out_stride;
    for (int h = 0; h < heads; h++)
      norm_row(n, from + h * k, k, residual ? residual + size_t(r) * residual_stride + h * k : nullptr,
               to + h * k);
  }
}

static void gate_rows(Act act, const float* g, size_t g_stride, const float* u, size_t u_stride, float* out,
                      size_t out_stride, int width, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    for (int i = 0; i < width; i += kLanes) {
      const int n = width - i < kLanes ? width - i : kLanes;
      store_n(out + size_t(r) * out_stride + i,
              mul(activate(act, load_n(g + size_t(r) * g_stride + i, n)),
                  load_n(u + size_t(r) * u_stride + i, n)),
              n);
    }
}

// out = a * factor [+ b]
static void add_rows(const float* a, size_t a_stride, float factor, const float* b, size_t b_stride,
                     float* out, size_t out_stride, int width, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    for (int i = 0; i < width; i += kLanes) {
      const int n = width - i < kLanes ? width - i : kLanes;
      F y = load_n(a + size_t(r) * a_stride + i, n);
      if (factor != 1.0f) y = mul(y, set1(factor));
      if (b) y = add(y, load_n(b + size_t(r) * b_stride + i, n));
      store_n(out + size_t(r) * out_stride + i, y, n);
    }
}

// Rotates columns i and i + dim / 2 of each head; the other columns are copied.
static void rope_rows(const float* x, size_t x_stride, float* out, size_t out_stride, int heads, int head_dim,
                      int dim, const float* cos, const float* sin, int row0, int row1) {
  const int half = dim / 2;
  for (int r = row0; r < row1; r++)
    for (int h = 0; h < heads; h++) {
      const float* from = x + size_t(r) * x_stride + h * head_dim;
      float* to = out + size_t(r) * out_stride + h * head_dim;
      const float *c = cos + size_t(r) * half, *s = sin + size_t(r) * half;
      for (int i = 0; i < half; i++) {
        const float a = from[i], b = from[i + half];
        to[i] = a * c[i] - b * s[i];
        to[i + half] = b * c[i] + a * s[i];
      }
      for (int i = dim; i < head_dim; i++) to[i] = from[i];
    }
}

static void embed_rows(const Matrix& m, const int32_t* ids, float factor, float* out, size_t out_stride,
                       int row0, int row1) {
  for (int r = row0; r < row1; r++) decode_row(m, ids[r], factor, out + size_t(r) * out_stride);
}

}  // namespace ff::FF_NS
