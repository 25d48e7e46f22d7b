// deep_moe._C: takes integers, links neither torch nor CUDA.
#include "bindings.h"

PYBIND11_MODULE(_C, m) {
    m.doc() = "Host side of deep_moe: layouts, CUDA driver, launch plans, emulator.";
    deep_moe::bind_config(m);
    deep_moe::bind_layout(m);
    deep_moe::bind_sched(m);
    deep_moe::bind_driver(m);
    deep_moe::bind_plan(m);
    deep_moe::bind_trace(m);
    deep_moe::bind_emulator(m);
    deep_moe::bind_emulator_plan(m);
}
