// _C.EmulatorKernel, _C.EmulatorLaunchPlan, _C.EmulatorStagePlan. World and Options are bound by csrc/emu.
#include <pybind11/stl.h>

#include "bindings.h"
#include "emulator_plan.h"

namespace py = pybind11;

namespace deep_moe {
namespace {

py::dict as_dict(const emu::Counts& counts) {
    py::dict d;
    d["wgmma"] = counts.wgmma;
    d["tma_loads"] = counts.tma_loads;
    d["bulk_loads"] = counts.bulk_loads;
    d["bulk_stores"] = counts.bulk_stores;
    d["mbarrier_arrivals"] = counts.mbarrier_arrivals;
    d["mbarrier_waits"] = counts.mbarrier_waits;
    d["switches"] = counts.switches;
    d["macs"] = counts.macs;
    return d;
}

// A launch without the GIL: the emulator waits for the threads of other ranks.
template <typename Launch>
py::dict counts_of(const Launch& launch) {
    emu::Counts counts;
    {
        py::gil_scoped_release release;
        counts = launch();
    }
    return as_dict(counts);
}

}  // namespace

void bind_emulator_plan(py::module_& m) {
    py::class_<EmulatorKernel>(m, "EmulatorKernel",
                               "A kernel compiled for the CPU, loaded for the life of the process.")
        .def(py::init<const std::string&, const std::string&, const cuda::KernelInfo&>(), py::arg("path"),
             py::arg("name"), py::arg("info"))
        .def_property_readonly("threads", &EmulatorKernel::threads)
        .def_property_readonly("smem_bytes", &EmulatorKernel::smem_bytes);
    py::class_<EmulatorLaunchPlan>(m, "EmulatorLaunchPlan", "A mega launch on the emulator.")
        .def(py::init<emu::World&, const EmulatorKernel&, const MegaArguments&>(), py::keep_alive<1, 2>(),
             py::keep_alive<1, 3>(), py::arg("world"), py::arg("kernel"), py::arg("arguments"))
        .def("run", [](const EmulatorLaunchPlan& plan, const emu::Options& options, u32 num_sms, u64 y, u64 y_stride,
                       u64 y_rows, u64 recv_stats) {
            return counts_of([&] { return plan.run(options, num_sms, {y, y_stride, y_rows, recv_stats}); });
        });
    py::class_<EmulatorStagePlan>(m, "EmulatorStagePlan", "A stage launch on the emulator.")
        .def(py::init<emu::World&, const EmulatorKernel&, const MegaMoeConfig&, u32, u64>(), py::keep_alive<1, 2>(),
             py::keep_alive<1, 3>(), py::arg("world"), py::arg("kernel"), py::arg("config"), py::arg("rank"),
             py::arg("buffer"))
        .def("run", [](const EmulatorStagePlan& plan, const emu::Options& options, u32 num_sms, const StageCall& call) {
            return counts_of([&] { return plan.run(options, num_sms, call); });
        });
}

}  // namespace deep_moe
