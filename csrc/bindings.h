// The parts of deep_moe._C. Each adds its names to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_moe {

void bind_config(pybind11::module_& m);         // Config, its enums, constants
void bind_layout(pybind11::module_& m);         // buffer, shared memory and weight layouts
void bind_sched(pybind11::module_& m);          // the order of tiles
void bind_driver(pybind11::module_& m);         // _C.driver: libcuda, found at run time
void bind_plan(pybind11::module_& m);           // LaunchPlan, StagePlan and their arguments
void bind_trace(pybind11::module_& m);          // what a traced kernel has left
void bind_emulator(pybind11::module_& m);       // _C.emu (csrc/emu)
void bind_emulator_plan(pybind11::module_& m);  // the same plans for the emulator

}  // namespace deep_moe
