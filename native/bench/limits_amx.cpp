#define FF_NS amx
#define FF_ISA_AVX512 1
#define FF_BF16 1
#define FF_TILES 1
#include "bench/limit_kernels.inc"
