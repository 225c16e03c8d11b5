// Which instruction sets this build has and this CPU runs.
#pragma once

namespace ff {

enum class Isa { scalar = 0, avx2 = 1, avx512 = 2 };

// True when the code was built for it and the CPU has every feature it uses.
bool isa_available(Isa isa);
Isa best_isa();
const char* isa_name(Isa isa);

}  // namespace ff
