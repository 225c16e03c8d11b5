// The kinds of integer weights there are kernels for: what int_kind_exists (matrix.h) names.
#pragma once

#include "matrix.h"
#include "vec.h"

namespace ff::FF_NS {

template <int BITS, int GROUP, bool OFFSET>
struct IntKind {
  static constexpr int bits = BITS, group = GROUP;
  static constexpr bool offset = OFFSET;
};

// Calls body with the IntKind of the matrix, which is ints.
template <class Body>
static FF_INLINE void with_int_kind(const Matrix& m, Body&& body) {
  if (m.group == 16) {
    if (m.bits == 6) return body(IntKind<6, 16, false>());  // Q6_K
    if (m.has_offset) return body(IntKind<4, 16, true>());  // Q2_K
    return body(IntKind<4, 16, false>());                   // Q3_K
  }
  if (m.bits == 8) return body(IntKind<8, 32, false>());  // Q8_0, IQ4_NL
  if (m.bits == 4) {
    if (m.has_offset) return body(IntKind<4, 32, true>());  // Q4_1, Q4_K
    return body(IntKind<4, 32, false>());                   // Q4_0
  }
  if (m.has_offset) return body(IntKind<5, 32, true>());  // Q5_1, Q5_K
  body(IntKind<5, 32, false>());                          // Q5_0
}

}  // namespace ff::FF_NS
