// What the small kernels of the emulator's own tests share.
#pragma once

#include "deep_moe/hw/hw.h"

using namespace deep_moe;

struct Args {
    u8* peers[8];       // memory of every rank
    u8* out;            // of this rank
    const u8* weights;  // read-only
    u32 rank, num_ranks;
    u32 plant;  // which fault to plant; 0: none
    u32 count;
};

struct Maps {
    TensorMap maps[2];
};

// An entry whose body(const Args*, const Maps*) is compiled for the emulator and for the GPU alike.
#if defined(DM_EMULATOR)
#define DM_TEST_KERNEL(name, threads, body) \
    extern "C" void name(const Args* a, const Maps* maps) { body(a, maps); }
#else
#define DM_TEST_KERNEL(name, threads, body)                                       \
    extern "C" __global__ void __launch_bounds__(threads)                         \
        name(const __grid_constant__ Args a, const __grid_constant__ Maps maps) { \
        body(&a, &maps);                                                          \
    }
#endif

DM_DEVICE void wait_barrier(u64* barrier, u32 parity) {
    while (!hw::mbarrier_try_wait(barrier, parity)) hw::poll_pause(7, 0, barrier);
}
