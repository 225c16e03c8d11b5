#define FF_NS avx512
#define FF_ISA_AVX512 1
#define FF_BF16 1
#include "bench/limit_kernels.inc"
