#define FF_NS avxvnni
#define FF_BASE avx2
#define FF_ISA_AVX2 1
#define FF_AVXVNNI 1
#include "isa/matmul.inc"
