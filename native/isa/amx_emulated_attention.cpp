#define FF_NS amx_emulated
#define FF_BASE scalar
#define FF_ISA_SCALAR 1
#include "isa/attention_tiles.inc"
