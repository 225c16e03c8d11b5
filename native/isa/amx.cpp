#define FF_NS amx
#define FF_BASE avx512
#define FF_ISA_AVX512 1
#define FF_BF16 1
#include "isa/tiles.inc"
