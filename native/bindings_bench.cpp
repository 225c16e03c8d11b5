// What `fourfold bench` calls: the machine's limits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "bench/limits.h"

namespace nb = nanobind;

void bind_bench(nb::module_& m) {
  using namespace ff;
  using namespace nb::literals;

  struct Limits {
    Limits(const std::string& isa, int threads, size_t bytes)
        : kernels(limit_kernels(parse(isa))), bench(checked(parse(isa), threads, bytes)) {}

    static Isa parse(const std::string& name) {
      for (Isa isa : kIsas)
        if (name == isa_name(isa) && isa_available(isa)) return isa;
      throw std::invalid_argument("this CPU or build does not have the instruction set " + name);
    }
    static LimitBench checked(Isa isa, int threads, size_t bytes) {
      if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
      if (bytes < 1) throw std::invalid_argument("bytes must be positive");
      return LimitBench(isa, threads, bytes);
    }
    const PeakLoop& loop(const std::string& kind) const {
      if (kind == "int8") return kernels.int8;
      if (kind == "bf16") return kernels.bf16;
      if (kind == "fp32") return kernels.fp32;
      throw std::invalid_argument("unknown kind " + kind + "; known are int8, bf16, fp32");
    }

    const LimitKernels& kernels;
    LimitBench bench;
  };

  nb::class_<Limits>(m, "LimitBench")
      .def(nb::init<const std::string&, int, size_t>(), "isa"_a, "threads"_a, "bytes"_a)
      .def_prop_ro("bytes", [](const Limits& l) { return l.bench.bytes(); })
      .def(
          "instructions",
          [](const Limits& l, const std::string& kind) -> nb::object {
            const char* name = l.loop(kind).instructions;
            return name ? nb::object(nb::str(name)) : nb::none();
          },
          "kind"_a)
      .def(
          "read", [](Limits& l) { return l.bench.read(); }, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "peak",
          [](Limits& l, const std::string& kind, double seconds) {
            const PeakLoop& loop = l.loop(kind);
            if (!loop.run)
              throw std::invalid_argument("this instruction set has no " + kind + " multiply-add");
            nb::gil_scoped_release release;
            return l.bench.peak(loop, seconds);
          },
          "kind"_a, "seconds"_a);
}
