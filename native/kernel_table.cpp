#include "kernel_table.h"

namespace ff {

namespace scalar {
const KernelTable& table();
}
#if defined(__x86_64__)
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
#endif

const KernelTable& kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512::table();
  if (isa == Isa::avx2) return avx2::table();
#endif
  (void)isa;
  return scalar::table();
}

}  // namespace ff
