// Thread indices, warp collectives, conversions and timers.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe::hw {

DM_DEVICE u32 thread_idx() { return threadIdx.x; }
DM_DEVICE u32 block_idx() { return blockIdx.x; }
DM_DEVICE u32 grid_dim() { return gridDim.x; }
DM_DEVICE u32 lane_idx() { return threadIdx.x % kWarpSize; }
// True in one lane of a warp that is together here, always the same one (on SM90 the first, as the tracer expects).
//
// NOTES: of a branch on this ptxas knows that one lane takes it; of lane_idx() == 0 it does not. There it builds a loop
// over the active lanes around every bulk copy and TMA load (300 clocks instead of 60), and adds up an atomic's lanes
// and hands its result out with a shuffle, so that the thread waits for memory where it asks and not where it uses the
// answer.
DM_DEVICE bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}
// Warp-uniform, and known to the compiler as such.
DM_DEVICE u32 warp_idx() { return __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0); }

DM_DEVICE void sync_block() { __syncthreads(); }
DM_DEVICE void sync_warp() { __syncwarp(); }

template <typename T>
DM_DEVICE T shfl(T value, u32 source_lane) {
    return __shfl_sync(0xffffffffu, value, source_lane);
}
template <typename T>
DM_DEVICE T shfl_xor(T value, u32 lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
// A value that all lanes have anyway: the compiler then keeps what follows from it in uniform registers.
DM_DEVICE u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }
// Value of lane - delta; lanes below delta keep their own.
template <typename T>
DM_DEVICE T shfl_up(T value, u32 delta) {
    return __shfl_up_sync(0xffffffffu, value, delta);
}
// The same value, of which the compiler knows nothing: it stays in a register instead of being computed again.
DM_DEVICE u32 keep(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
DM_DEVICE u32 ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
DM_DEVICE bool all_lanes(bool predicate) { return __all_sync(0xffffffffu, predicate); }
DM_DEVICE u32 min_of_lanes(u32 x) { return __reduce_min_sync(0xffffffffu, x); }
DM_DEVICE u32 popcount(u32 x) { return __popc(x); }
DM_DEVICE u32 lowest_bit(u32 x) { return __ffs(int(x)) - 1; }  // x != 0

DM_DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DM_DEVICE float bits_float(u32 x) { return __uint_as_float(x); }

// The next four round to nearest even and never fuse with their neighbours.
DM_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DM_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DM_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DM_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
// Larger of two; a NaN loses.
DM_DEVICE float max(float a, float b) { return fmaxf(a, b); }
// Smaller and larger of two; a NaN wins.
DM_DEVICE float min_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
DM_DEVICE float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
DM_DEVICE float abs(float a) { return fabsf(a); }
// 2^x and 1/x to about 2 ulp (denormals flushed).
DM_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DM_DEVICE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two e4m3 bytes, saturating, `low` in the low byte. NaN stays NaN.
DM_DEVICE u32 pack_e4m3x2(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}
DM_DEVICE u32 pack_bf16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
// Byte permutation: each selector nibble picks a byte of {b, a} (PTX prmt).
// NOTES: __byte_perm masks the selector first, with an instruction of its own: it has no sign replication.
DM_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}

DM_DEVICE u64 timer_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Low half of the SM's clock; equal for all threads of a CTA.
DM_DEVICE u32 clock() {
    u32 t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t));
    return t;
}

// Called in every polling loop. `address` is what the loop waits on; the emulator sleeps until it changes and prints
// (site, index) in its deadlock report.
DM_DEVICE void poll_pause(u32 /*site*/, u32 /*index*/, const void* /*address*/) { __nanosleep(20); }

DM_DEVICE void exit_thread() { asm volatile("exit;"); }

template <u32 kRegisters>
DM_DEVICE void raise_max_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters>
DM_DEVICE void lower_max_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace deep_moe::hw
