// Eight-bit codes (codes.h of the contract) as pairs for dot products, and a row of floats as codes.
//
// A code is a sign and a magnitude of seven bits; every magnitude is a bf16 exactly, so that decoding never
// rounds. AVX-512 looks the two bytes of the bf16 up (vpermi2b: 128 entries); AVX2 computes the float.
#pragma once

#include "../codes.h"
#include "../vec.h"

namespace ff::FF_NS {

// m * 2^exponent as bf16, 0 <= m < 256.
constexpr uint16_t exact_bf16(int m, int exponent) {
  if (m == 0) return 0;
  int top = 0;
  while (m >> (top + 1)) top++;
  return uint16_t(((top + exponent + 127) << 7) | ((m << 7 >> top) & 0x7f));
}

constexpr uint16_t magnitude_bf16(Code code, int m) {
  switch (code) {
    case Code::int8: return exact_bf16(m, 0);
    case Code::e4m3: return m == 127 ? 0x7fc0 : m < 8 ? exact_bf16(m, -9) : exact_bf16(8 + m % 8, m / 8 - 10);
    case Code::e5m2:
      if (m >= 124) return m == 124 ? 0x7f80 : 0x7fc0;
      return m < 4 ? exact_bf16(m, -16) : exact_bf16(4 + m % 4, m / 4 - 17);
  }
  return 0;
}

struct alignas(64) CodeBytes {  // of the bf16 of each magnitude
  uint8_t low[128], high[128];
};

template <Code code>
constexpr CodeBytes code_bytes() {
  CodeBytes t{};
  for (int m = 0; m < 128; m++) {
    t.low[m] = uint8_t(magnitude_bf16(code, m));
    t.high[m] = uint8_t(magnitude_bf16(code, m) >> 8);
  }
  return t;
}

// ---- Sixteen pairs: 32 numbers that are bf16 exactly, in registers

#if defined(FF_BF16)

struct Pairs {
  __m512i v;
};
static FF_INLINE Pairs load_pairs(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }  // of bf16
static FF_INLINE F dot(F acc, Pairs w, uint32_t pair) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(int(pair)))};
}
static FF_INLINE void store_pairs(uint16_t* p, Pairs w) { _mm512_storeu_si512(p, w.v); }  // as bf16
static FF_INLINE F even(Pairs w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
static FF_INLINE F odd(Pairs w) {
  return {_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(int(0xffff0000u))))};
}

template <Code code>
class CodeReader {
 public:
  static constexpr int kBytes = 32;
  static constexpr bool kFloats = false;
  FF_INLINE CodeReader() {
    static constexpr CodeBytes kTable = code_bytes<code>();
    for (int i = 0; i < 2; i++) {
      low_[i] = _mm512_load_si512(kTable.low + 64 * i);
      high_[i] = _mm512_load_si512(kTable.high + 64 * i);
    }
  }
  FF_INLINE void two(const uint8_t* p, Pairs& a, Pairs& b) const {
    // The unpacks work within lanes of 16 bytes: the first pairs go to the lanes' low halves.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    halves(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(p)), a, b);
  }
  FF_INLINE Pairs one(const uint8_t* p) const {
    const __m512i order = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    Pairs a, b;
    halves(_mm512_permutexvar_epi64(order, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p))), a,
           b);
    return a;
  }

 private:
  FF_INLINE void halves(__m512i x, Pairs& a, Pairs& b) const {
    const __m512i low = _mm512_permutex2var_epi8(low_[0], x, low_[1]);
    const __m512i high = _mm512_permutex2var_epi8(high_[0], x, high_[1]);
    const __m512i sign = _mm512_set1_epi8(int8_t(0x80));
    const __m512i top = _mm512_ternarylogic_epi64(high, x, sign, 0xf8);  // high | (x & sign)
    a.v = _mm512_unpacklo_epi8(low, top);
    b.v = _mm512_unpackhi_epi8(low, top);
  }
  __m512i low_[2], high_[2];
};

#else

struct Pairs {
  F low, high;
};
static FF_INLINE Pairs load_pairs(const uint8_t* p) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(p);
  return {bf16_even(w), bf16_odd(w)};
}
static FF_INLINE F dot(F acc, Pairs w, uint32_t pair) {
  acc = fma(w.high, set1(bf16_to_f32(uint16_t(pair >> 16))), acc);
  return fma(w.low, set1(bf16_to_f32(uint16_t(pair))), acc);
}
static FF_INLINE void store_pairs(uint16_t* p, Pairs w) {  // as bf16, which they are exactly
  uint16_t low[16], high[16];
  store_bf16(low, w.low), store_bf16(high, w.high);
  for (int i = 0; i < 16; i++) p[2 * i] = low[i], p[2 * i + 1] = high[i];
}
static FF_INLINE F even(Pairs w) { return w.low; }
static FF_INLINE F odd(Pairs w) { return w.high; }

#if defined(FF_ISA_AVX2)
// Codes in the low bytes of eight ints -> floats.
template <Code code>
static FF_INLINE __m256 code_floats(__m256i x) {
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
  const __m256i m = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
  const __m256 whole = _mm256_cvtepi32_ps(m);
  if constexpr (code == Code::int8) return _mm256_or_ps(whole, _mm256_castsi256_ps(sign));
  constexpr bool wide = code == Code::e5m2;
  constexpr int shift = wide ? 21 : 20, bias = wide ? 112 : 120, subnormals = wide ? 4 : 8,
                special = wide ? 123 : 126, exponent_there = wide ? 143 : 135;
  const __m256 small = _mm256_mul_ps(whole, _mm256_set1_ps(wide ? 0x1p-16f : 0x1p-9f));
  const __m256i up = _mm256_and_si256(_mm256_cmpgt_epi32(m, _mm256_set1_epi32(special)),
                                      _mm256_set1_epi32((255 - exponent_there) << 23));
  const __m256i bits =
      _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(m, shift), up), _mm256_set1_epi32(bias << 23));
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(subnormals), m);
  return _mm256_or_ps(_mm256_blendv_ps(_mm256_castsi256_ps(bits), small, _mm256_castsi256_ps(below)),
                      _mm256_castsi256_ps(sign));
}
#elif defined(FF_ISA_AVX512)
template <Code code>
static FF_INLINE F code_floats(__m512i x) {
  const __m512 sign =
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24));
  const __m512i m = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
  const __m512 whole = _mm512_cvtepi32_ps(m);
  if constexpr (code == Code::int8) return {_mm512_or_ps(whole, sign)};
  constexpr bool wide = code == Code::e5m2;
  constexpr int shift = wide ? 21 : 20, bias = wide ? 112 : 120, subnormals = wide ? 4 : 8,
                special = wide ? 123 : 126, exponent_there = wide ? 143 : 135;
  const __m512 small = _mm512_mul_ps(whole, _mm512_set1_ps(wide ? 0x1p-16f : 0x1p-9f));
  __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(m, shift), _mm512_set1_epi32(bias << 23));
  bits = _mm512_mask_add_epi32(bits, _mm512_cmpgt_epi32_mask(m, _mm512_set1_epi32(special)), bits,
                               _mm512_set1_epi32((255 - exponent_there) << 23));
  const __mmask16 below = _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(subnormals), m);
  return {_mm512_or_ps(_mm512_mask_blend_ps(below, _mm512_castsi512_ps(bits), small), sign)};
}
#endif

template <Code code>
class CodeReader {
 public:
  static constexpr int kBytes = 32;
  static constexpr bool kFloats = false;
  FF_INLINE void two(const uint8_t* p, Pairs& a, Pairs& b) const { a = one(p), b = one(p + 32); }
#if defined(FF_ISA_AVX2)
  FF_INLINE Pairs one(const uint8_t* p) const {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i y = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 16)));
    return {{code_floats<code>(x), code_floats<code>(y)},
            {code_floats<code>(_mm256_srli_epi32(x, 8)), code_floats<code>(_mm256_srli_epi32(y, 8))}};
  }
#elif defined(FF_ISA_AVX512)
  FF_INLINE Pairs one(const uint8_t* p) const {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {code_floats<code>(x), code_floats<code>(_mm512_srli_epi32(x, 8))};
  }
#else
  FF_INLINE Pairs one(const uint8_t* p) const {
    static constexpr CodeBytes kTable = code_bytes<code>();
    Pairs w;
    for (int i = 0; i < 32; i++) {
      const int m = p[i] & 0x7f;
      const float f = bf16_to_f32(uint16_t(kTable.low[m] | (kTable.high[m] | (p[i] & 0x80)) << 8));
      (i & 1 ? w.high : w.low).v[i / 2] = f;
    }
    return w;
  }
#endif
};

#endif

class Bf16Reader {
 public:
  static constexpr int kBytes = 64;
  static constexpr bool kFloats = false;
  FF_INLINE void two(const uint8_t* p, Pairs& a, Pairs& b) const {
    a = load_pairs(p), b = load_pairs(p + 64);
  }
  FF_INLINE Pairs one(const uint8_t* p) const { return load_pairs(p); }
};

// ---- A row as codes

// n (a multiple of 16) floats as int8 or e4m3 codes times the returned scale: the largest magnitude has the
// largest code, the others are rounded to nearest, ties to even. A row that is not finite has the scale NaN;
// one of nothing but numbers below 1e-30, zero.
template <Code code>
static inline float encode_row(const float* x, int n, uint8_t* out) {
  static_assert(code != Code::e5m2);
  F most = zero(), bad = zero();
  for (int i = 0; i < n; i += 16) {
    most = max(abs(load(x + i)), most);
    bad = fma(load(x + i), zero(), bad);  // NaN from NaN and from infinity
  }
  const float largest = hmax(most), top = code == Code::int8 ? 127.0f : 448.0f;
  const bool finite = hsum(bad) == 0.0f;
  if (!finite || largest < 1e-30f) {
    memset(out, 0, size_t(n));
    return finite ? 0.0f : __builtin_nanf("");
  }
  const F factor = set1(top / largest);
  for (int i = 0; i < n; i += 16) {
    float y[16];
    store(y, mul(load(x + i), factor));
    for (int j = 0; j < 16; j++) {
      uint32_t bits, whole;
      memcpy(&bits, &y[j], 4);
      const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
      // Adding 1.5 * 2^23 rounds to a whole number, which is then in the low bits.
      float rounded = __builtin_fabsf(y[j]) * (code == Code::int8 ? 1.0f : 512.0f) + 12582912.0f;
      memcpy(&whole, &rounded, 4);
      whole &= 0x3fffffu;
      if constexpr (code == Code::int8) {
        out[i + j] = uint8_t(sign | whole);
      } else {  // subnormal below 2^-6, in steps of 2^-9
        const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
        out[i + j] = uint8_t(sign | (magnitude < 0x3c800000u ? whole : normal));
      }
    }
  }
  return largest / top;
}

}  // namespace ff::FF_NS
