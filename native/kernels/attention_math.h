// Scalar functions of attention, sixteen at a time.
#pragma once

#include "../vec.h"

namespace ff::FF_NS {
namespace attention {

constexpr float kLog2e = 1.44269504088896341f;

static FF_INLINE float minus_infinity() { return -__builtin_inff(); }

// 2^x for x <= 127; below -125 zero or denormal, NaN stays NaN. Relative error 1e-7, or 9e-5 if fast: ample
// for what is rounded to bf16 (2e-3).
template <bool fast>
static FF_INLINE F exp2(F x) {
#if defined(FF_ISA_AVX512)
  if constexpr (fast) {  // 2^(x - floor(x)) * 2^floor(x); -inf: 1 * 0
    const __m512 r = _mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    F g = fma(set1(7.706705481e-02f), {r}, set1(2.276449800e-01f));
    g = fma(g, {r}, set1(6.951168180e-01f));
    return {_mm512_scalef_ps(fma(g, {r}, set1(1.0f)).v, x.v)};
  }
#endif
  const F lowest = set1(-125.0f);
  const F c = max(lowest, x);
  const F n = round_even(c), r = sub(c, n);
  F g;
  if constexpr (fast) {
    g = fma(set1(9.666373693e-03f), r, set1(5.583834273e-02f));
    g = fma(g, r, set1(2.402234894e-01f));
    g = fma(g, r, set1(6.931367264e-01f));
  } else {
    g = fma(set1(1.546144746e-04f), r, set1(1.339086735e-03f));
    g = fma(g, r, set1(9.618056670e-03f));
    g = fma(g, r, set1(5.550357104e-02f));
    g = fma(g, r, set1(2.402265092e-01f));
    g = fma(g, r, set1(6.931471880e-01f));
  }
  return select_gt(lowest, x, zero(), shift_exponent(fma(g, r, set1(1.0f)), to_int(n)));
}

static FF_INLINE float exp2_scalar(float x) {
  float t[16];
  store(t, exp2<false>(set1(x)));
  return t[0];
}

// cap * tanh(s / cap), with factor = scale / cap already in it; NaN stays NaN.
static FF_INLINE F soft_cap(F s, F factor, F cap) {
  const F e = exp2<false>(min(set1(28.0f), mul(mul(s, factor), set1(2.0f * kLog2e))));
  return mul(cap, sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
}

// Lanes [begin, end) of 16 come from a, the others from b.
static FF_INLINE F only(F a, F b, int begin, int end) {
  begin = begin < 0 ? 0 : begin > 16 ? 16 : begin;
  end = end < 0 ? 0 : end > 16 ? 16 : end;
  return first_n(b, first_n(a, b, end), begin);
}

// Lanes [begin, end) of 16 keep their score, the others get -inf.
static FF_INLINE F visible(F s, int begin, int end) { return only(s, set1(minus_infinity()), begin, end); }

}  // namespace attention
}  // namespace ff::FF_NS
