#define FF_NS avx2
#define FF_ISA_AVX2 1
#include "bench/limit_kernels.inc"
