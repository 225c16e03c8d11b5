// The amx kernels with the tile unit written out in C++, so that they are tested where there is no such unit.
#define FF_NS amx_emulated
#define FF_BASE scalar
#define FF_ISA_SCALAR 1
#include "isa/tiles.inc"
