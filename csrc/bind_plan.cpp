// _C.LaunchPlan and _C.StagePlan, and the same for the emulator.
#include <pybind11/stl.h>

#include "bindings.h"
#include "plan.h"

namespace py = pybind11;

namespace deep_moe {
namespace {

void bind_arguments(py::module_& m) {
    py::class_<MegaArguments>(m, "MegaArguments", "The constant part of a mega launch (csrc/plan.h).")
        .def(py::init([](const MegaMoeConfig& config, u32 rank, std::vector<u64> peers, u64 l1_weights, u64 l1_scales,
                         u64 l2_weights, u64 l2_scales, u64 host_status, u64 timeout_ns, float activation_clamp,
                         u64 trace, u64 trace_bytes, u64 l1_biases, u64 l2_biases, float activation_alpha) {
                 return MegaArguments{config,     rank,        std::move(peers), l1_weights, l1_scales,
                                      l2_weights, l2_scales,   host_status,      timeout_ns, activation_clamp,
                                      trace,      trace_bytes, l1_biases,        l2_biases,  activation_alpha};
             }),
             py::kw_only(), py::arg("config"), py::arg("rank"), py::arg("peers"), py::arg("l1_weights"),
             py::arg("l1_scales"), py::arg("l2_weights"), py::arg("l2_scales"), py::arg("host_status"),
             py::arg("timeout_ns"), py::arg("activation_clamp"), py::arg("trace") = 0, py::arg("trace_bytes") = 0,
             py::arg("l1_biases") = 0, py::arg("l2_biases") = 0, py::arg("activation_alpha") = 0.0f);
}

// StageCall(x, x_stride, x_sf, x_sf_stride, topk_idx, topk_idx_stride, topk_idx_is_i64, topk_weights,
// topk_weights_stride, num_tokens, max_count, routed_scaling_factor); positional for speed.
void bind_stage_call(py::module_& m) {
    py::class_<StageCall>(m, "StageCall", "One call of stage: addresses, strides in bytes (csrc/plan.h).")
        .def(py::init([](u64 x, u64 x_stride, u64 x_sf, u64 x_sf_stride, u64 topk_idx, u64 topk_idx_stride,
                         bool topk_idx_is_i64, u64 topk_weights, u64 topk_weights_stride, u64 num_tokens, u32 max_count,
                         float routed_scaling_factor) {
            return StageCall{x,
                             x_stride,
                             x_sf,
                             x_sf_stride,
                             topk_idx,
                             topk_idx_stride,
                             topk_idx_is_i64,
                             topk_weights,
                             topk_weights_stride,
                             num_tokens,
                             max_count,
                             routed_scaling_factor};
        }));
}

// run(stream, y, y_stride in bytes, y_rows, recv_stats or 0); positional for speed.
void run_mega(const LaunchPlan& plan, u64 stream, u64 y, u64 y_stride, u64 y_rows, u64 recv_stats) {
    py::gil_scoped_release release;  // the launch may wait, and another rank's thread must go on
    plan.run(stream, {y, y_stride, y_rows, recv_stats});
}

}  // namespace

void bind_plan(py::module_& m) {
    bind_arguments(m);
    bind_stage_call(m);
    m.def("mega_kernel_info", &mega_kernel_info, "deep_moe_info that a mega kernel of this config must export.");
    m.def("stage_kernel_info", &stage_kernel_info, "deep_moe_info that a stage kernel of this config must export.");
    py::class_<LaunchLane, std::shared_ptr<LaunchLane>>(m, "LaunchLane", "A share of a device's SMs (launch_order.h).")
        .def(py::init(&LaunchLane::acquire), py::arg("device"), py::arg("group"), py::arg("rank"), py::arg("num_sms"));
    py::class_<LaunchPlan>(m, "LaunchPlan", "A mega launch on the GPU.")
        .def(py::init<const cuda::Kernel&, std::shared_ptr<LaunchLane>, const MegaArguments&, u32>(),
             py::keep_alive<1, 2>(), py::arg("kernel"), py::arg("lane"), py::arg("arguments"), py::arg("num_sms"))
        .def("run", &run_mega);
    py::class_<StagePlan>(m, "StagePlan", "A stage launch on the GPU.")
        .def(py::init<const cuda::Kernel&, u64, u32>(), py::keep_alive<1, 2>(), py::arg("kernel"), py::arg("buffer"),
             py::arg("num_sms"))
        .def("run", [](const StagePlan& plan, u64 stream, const StageCall& call) {
            py::gil_scoped_release release;
            plan.run(stream, call);
        });
}

}  // namespace deep_moe
