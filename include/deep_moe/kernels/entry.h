// Entry points of a rendered kernel, for the GPU and for the emulator, and what a binary says about itself.
#pragma once

#include "deep_moe/hw/hw.h"
#include "deep_moe/layout/params.h"
#include "deep_moe/layout/smem.h"

// deep_moe_info: {layout hash, shared-memory bytes, threads, kind}; the loader refuses a binary whose values differ from
// the host's. Usage: DM_ENTRY(name, parameter list, call, info...).
#if defined(DM_EMULATOR)
#define DM_ENTRY(name, threads, parameters, call, ...)               \
    extern "C" const deep_moe::u64 deep_moe_info[4] = {__VA_ARGS__}; \
    extern "C" void name parameters { call; }
#define DM_ARGUMENT(type, name) const type* name##_pointer
#define DM_ARGUMENT_REF(name) (*name##_pointer)
#else
#define DM_ENTRY(name, threads, parameters, call, ...)                            \
    extern "C" __constant__ const deep_moe::u64 deep_moe_info[4] = {__VA_ARGS__}; \
    extern "C" __global__ void __launch_bounds__(threads, 1) name parameters { call; }
#define DM_ARGUMENT(type, name) const __grid_constant__ type name
#define DM_ARGUMENT_REF(name) name
#endif
