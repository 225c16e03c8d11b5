// Eight-bit codes of KV caches and weights.
#pragma once

#include <cstdint>

namespace ff {

// A sign (the highest bit) and a magnitude of seven bits:
//   int8: the magnitude is a whole number, 0 to 127
//   e4m3, e5m2: as in Micikevicius et al. 2022, FP8 Formats for Deep Learning; e4m3 has no infinity and NaN
//     is the magnitude 127
enum class Code : int32_t { int8 = 0, e4m3 = 1, e5m2 = 2 };

}  // namespace ff
