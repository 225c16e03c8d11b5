#define FF_NS avx512
#define FF_ISA_AVX512 1
#include "bench/limit_kernels.inc"
