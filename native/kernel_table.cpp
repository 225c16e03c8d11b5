#include "kernel_table.h"

namespace ff {

// Each in isa/<name>.cpp.
namespace scalar {
const KernelTable& table();
}
namespace amx_emulated {
const KernelTable& table();
}
#if defined(__x86_64__)
namespace avx2 {
const KernelTable& table();
}
namespace avxvnni {
const KernelTable& table();
}
namespace avx512vnni {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
namespace amx {
const KernelTable& table();
}
#endif

const KernelTable& kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2: return avx2::table();
    case Isa::avxvnni: return avxvnni::table();
    case Isa::avx512vnni: return avx512vnni::table();
    case Isa::avx512: return avx512::table();
    case Isa::amx: return amx::table();
#endif
    case Isa::amx_emulated: return amx_emulated::table();
    default: return scalar::table();
  }
}

}  // namespace ff
