#define FF_NS scalar
#define FF_ISA_SCALAR 1
#include "bench/limit_kernels.inc"
