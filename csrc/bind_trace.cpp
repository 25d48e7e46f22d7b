// What a traced kernel has left in memory (include/deep_moe/layout/trace.h), for Python: only this file unpacks it.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "deep_moe/layout/trace.h"

namespace py = pybind11;

namespace deep_moe {
namespace {

// (kind, phase 1 or 2 or 0 for none, row block or argument, tile of N, begin, end, stalled): begin and end in ns since
// the warp's begin_ns, stalled in clocks of the SM
using Span = std::tuple<TraceKind, u32, std::optional<u32>, std::optional<u32>, u32, u32, u32>;

struct Warp {
    u32 cta, warp, bound_class;
    u64 begin_ns, end_ns;
    u32 clocks;  // of the SM, between these moments
    u32 dropped;
    std::vector<Span> spans;
};

Span span_of(const TraceEvent& event, u32 begin_ns) {
    const auto kind = TraceKind(event.what & 0x3f);
    const auto phase = TracePhase(event.what >> 6 & 3);
    const u32 begin = event.begin - begin_ns, end = event.end - begin_ns;
    const u32 stalled = (event.what >> 8) * kStallUnit;
    if (phase != TracePhase::None)
        return {kind, u32(phase) + 1, event.argument >> 12, event.argument & 0xfff, begin, end, stalled};
    std::optional<u32> argument;
    if (event.argument != kNoArgument) argument = event.argument;
    return {kind, 0, argument, std::nullopt, begin, end, stalled};
}

// The warps that have finished, of a copy of the array in host memory.
std::vector<Warp> warps_of(const MegaMoeConfig& config, u64 address, u64 bytes) {
    const u64 slice_bytes = trace_slice_bytes(config);
    const u32 cta_warps = trace_warps(config);
    if (config.trace_events == 0 || bytes % (cta_warps * slice_bytes) != 0)
        throw std::invalid_argument("the array is not a trace of this configuration");
    const u8* base = reinterpret_cast<const u8*>(address);
    std::vector<Warp> warps;
    for (u64 i = 0; i < bytes / slice_bytes; ++i) {
        TraceHeader header;
        std::memcpy(&header, base + i * slice_bytes, sizeof(header));
        if (header.end_ns == 0) continue;
        const u32 kept = min_of(header.recorded, config.trace_events);
        Warp warp{u32(i / cta_warps),     u32(i % cta_warps),
                  header.bound_class,     header.begin_ns,
                  header.end_ns,          header.end_clock - header.begin_clock,
                  header.recorded - kept, {}};
        for (u32 j = 0; j < kept; ++j) {
            TraceEvent event;
            std::memcpy(&event, base + i * slice_bytes + sizeof(header) + j * sizeof(event), sizeof(event));
            warp.spans.push_back(span_of(event, u32(header.begin_ns)));
        }
        warps.push_back(std::move(warp));
    }
    return warps;
}

std::string warp_name(u32 slot) {
    if (slot == 0) return "load A";
    if (slot == 1) return "load B";
    slot -= 2;
    if (slot < kNumDispatchWarps) return "dispatch " + std::to_string(slot);
    return "math " + std::to_string(slot - kNumDispatchWarps);
}

std::vector<std::string> warp_names(const MegaMoeConfig& config) {
    std::vector<std::string> names;
    for (u32 slot = 0; slot < trace_warps(config); ++slot) names.push_back(warp_name(slot));
    return names;
}

}  // namespace

void bind_trace(py::module_& m) {
    py::enum_<TraceKind> kinds(m, "TraceKind");
#define DM_TRACE_KIND(name) kinds.value(#name, TraceKind::name)
    DM_TRACE_KIND(Route);
    DM_TRACE_KIND(WaitRouteCounts);
    DM_TRACE_KIND(WaitCountFlags);
    DM_TRACE_KIND(Receive);
    DM_TRACE_KIND(WaitCounts);
    DM_TRACE_KIND(Pull);
    DM_TRACE_KIND(WaitRingSlot);
    DM_TRACE_KIND(WaitRows);
    DM_TRACE_KIND(Load);
    DM_TRACE_KIND(WaitTask);
    DM_TRACE_KIND(WaitFirstStage);
    DM_TRACE_KIND(Multiply);
    DM_TRACE_KIND(Epilogue);
    DM_TRACE_KIND(WaitDone);
    DM_TRACE_KIND(Combine);
#undef DM_TRACE_KIND
    py::class_<Warp>(m, "TraceWarp", "One warp of a traced launch.")
        .def_readonly("cta", &Warp::cta)
        .def_readonly("warp", &Warp::warp, "Index in trace_warp_names().")
        .def_readonly("bound_class", &Warp::bound_class, "The variant that was launched.")
        .def_readonly("begin_ns", &Warp::begin_ns)
        .def_readonly("end_ns", &Warp::end_ns)
        .def_readonly("clocks", &Warp::clocks, "Of the SM, from begin_ns to end_ns.")
        .def_readonly("dropped", &Warp::dropped, "Spans that had no room.")
        .def_readonly(
            "spans", &Warp::spans,
            "[(kind, phase 1 or 2 or 0, row block or argument or None, tile of N or None, begin, end, stalled)]: begin "
            "and end in ns since begin_ns, stalled in clocks of the SM.");
    m.def("trace_bytes", &trace_bytes, py::arg("config"), py::arg("num_sms"), "Size of the trace array of a launch.");
    m.def("trace_warps", &warps_of, py::arg("config"), py::arg("address"), py::arg("num_bytes"),
          "[TraceWarp] of a copy of the trace array in host memory; those that have not finished are left out.");
    m.def("trace_warp_names", &warp_names, py::arg("config"), "The traced warps of a CTA, in order.");
}

}  // namespace deep_moe
