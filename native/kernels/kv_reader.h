// How numbers of a KV cache that lie in pairs (attention.h) are read.
#pragma once

#include "../attention.h"
#include "codes.h"

namespace ff::FF_NS {
namespace attention {

template <KvType type>
struct ReaderOf {
  using Reader = CodeReader<type == KvType::int8 ? Code::int8 : Code::e4m3>;
};
template <>
struct ReaderOf<KvType::bf16> {
  using Reader = Bf16Reader;
};
struct FloatReader {  // not in pairs
  static constexpr bool kFloats = true;
  static constexpr int kBytes = 64;  // of sixteen numbers
};
template <>
struct ReaderOf<KvType::f32> {
  using Reader = FloatReader;
};
template <KvType type>
using Reader = typename ReaderOf<type>::Reader;

// Codes of a half block as bf16, which they are exactly; n: a multiple of 32.
template <KvType type>
static FF_INLINE void decode_codes(const uint8_t* from, int n, uint16_t* to) {
  const Reader<type> reader;
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    Pairs a, b;
    reader.two(from + i, a, b);
    store_pairs(to + i, a), store_pairs(to + i + 32, b);
  }
  for (; i < n; i += 32) store_pairs(to + i, reader.one(from + i));
}

}  // namespace attention
}  // namespace ff::FF_NS
