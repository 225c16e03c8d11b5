// Which instruction sets this build has and this CPU runs.
#pragma once

namespace ff {

// Worst first. amx_emulated is amx with its tile unit written out in C++: for tests, on any CPU.
enum class Isa { scalar, avx2, avxvnni, avx512vnni, avx512, amx, amx_emulated };

constexpr int kIsaCount = 7;
// Those a user may choose, worst first.
constexpr Isa kIsas[] = {Isa::scalar, Isa::avx2, Isa::avxvnni, Isa::avx512vnni, Isa::avx512, Isa::amx};

// True when the code was built for it and CPU and system have every feature it uses:
//   avx2        AVX2, FMA, F16C
//   avxvnni     the same and AVX-VNNI (Intel since Alder Lake, AMD since Zen 5)
//   avx512vnni  AVX-512 F, BW, DQ, VL, VNNI (Intel since Cascade Lake)
//   avx512      the same and BF16, VBMI (Intel since Sapphire Rapids, AMD since Zen 4)
//   amx         the same and AMX-TILE, AMX-INT8, AMX-BF16 (Intel since Sapphire Rapids). Asking for it asks
//               Linux, once per process, for the right to use tile data.
bool isa_available(Isa isa);
Isa best_isa();
const char* isa_name(Isa isa);

}  // namespace ff
