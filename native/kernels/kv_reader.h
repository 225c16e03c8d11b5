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
template <KvType type>
using Reader = typename ReaderOf<type>::Reader;

}  // namespace attention
}  // namespace ff::FF_NS
