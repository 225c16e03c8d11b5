#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace ff {

namespace {

#if defined(__x86_64__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros if the CPU does not have it. By cpuid, as compilers in use do not know AVX-VNNI and AMX by name.
Leaf leaf7(unsigned subleaf) {
  Leaf top, leaf;
  if (!__get_cpuid_count(7, 0, &top.eax, &top.ebx, &top.ecx, &top.edx) || subleaf > top.eax) return {};
  __get_cpuid_count(7, subleaf, &leaf.eax, &leaf.ebx, &leaf.ecx, &leaf.edx);
  return leaf;
}

// Tile data is large: Linux keeps it only for processes that asked (Documentation/arch/x86/xstate.rst).
bool may_use_tile_data() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

// That the system keeps the vector registers is part of __builtin_cpu_supports' answer.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avxvnni() { return has_avx2() && (leaf7(1).eax >> 4 & 1); }
bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
bool has_avx512() {
  return has_avx512vnni() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  return has_avx512() && (leaf7(0).edx & kAll) == kAll && may_use_tile_data();
}

#else

bool has_avx2() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512vnni() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }

#endif

}  // namespace

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::scalar: return true;
    case Isa::avx2: return has_avx2();
    case Isa::avxvnni: return has_avxvnni();
    case Isa::avx512vnni: return has_avx512vnni();
    case Isa::avx512: return has_avx512();
    case Isa::amx: return has_amx();
    case Isa::amx_emulated: return true;
  }
  return false;
}

Isa best_isa() {
  Isa best = Isa::scalar;
  for (Isa isa : kIsas)
    if (isa_available(isa)) best = isa;
  return best;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar: return "scalar";
    case Isa::avx2: return "avx2";
    case Isa::avxvnni: return "avxvnni";
    case Isa::avx512vnni: return "avx512vnni";
    case Isa::avx512: return "avx512";
    case Isa::amx: return "amx";
    case Isa::amx_emulated: return "amx_emulated";
  }
  return "?";
}

}  // namespace ff
