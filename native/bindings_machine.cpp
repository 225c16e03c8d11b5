// What the runtime does with the machine it finds: memory nodes, and threads beside other processes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "numa.h"
#include "team_size.h"

namespace nb = nanobind;

namespace ff {

void bind_machine(nb::module_& m) {
  using namespace nb::literals;
  m.def("spread_memory", &spread_memory, "nodes"_a);
  m.def("memory_policy_is_set", &memory_policy_is_set);
  nb::class_<TeamSize>(m, "TestTeamSize")
      .def(nb::init<int>(), "most"_a)
      .def("ran", &TeamSize::ran, "begin"_a, "end"_a, "away"_a, "waited"_a)
      .def_prop_ro("now", &TeamSize::now);
}

}  // namespace ff
