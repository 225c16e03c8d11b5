#define FF_NS avx512vnni
#define FF_ISA_AVX512 1
#include "bench/limit_kernels.inc"
