// Thread indices, warp collectives, conversions and timers, for the emulator. Names and meaning: hw/cuda/common.cuh.
#pragma once

#include "deep_moe/hw/emu/api.h"

namespace deep_moe::hw {

DM_DEVICE u32 thread_idx() { return emu::self()->thread_idx; }
DM_DEVICE u32 block_idx() { return emu::self()->block_idx; }
DM_DEVICE u32 grid_dim() { return emu::self()->grid_dim; }
DM_DEVICE u32 lane_idx() { return emu::self()->thread_idx % kWarpSize; }
DM_DEVICE bool elect_one() { return lane_idx() == 0; }
DM_DEVICE u32 warp_idx() { return emu::self()->thread_idx / kWarpSize; }

DM_DEVICE u64 emu_collective(emu::Collective op, u64 value, u32 argument) {
    emu::ThreadHead* t = emu::self();
    return t->api->collective(t, op, value, argument);
}
template <typename To, typename From>
DM_DEVICE To emu_bits(From from) {
    static_assert(sizeof(From) <= sizeof(To) || sizeof(To) <= sizeof(From));
    To to{};
    __builtin_memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
    return to;
}

DM_DEVICE void sync_block() { emu_collective(emu::Collective::SyncBlock, 0, 0); }
DM_DEVICE void sync_warp() { emu_collective(emu::Collective::SyncWarp, 0, 0); }

template <typename T>
DM_DEVICE T shfl(T value, u32 source_lane) {
    return emu_bits<T>(emu_collective(emu::Collective::Shfl, emu_bits<u64>(value), source_lane));
}
template <typename T>
DM_DEVICE T shfl_xor(T value, u32 lane_mask) {
    return emu_bits<T>(emu_collective(emu::Collective::ShflXor, emu_bits<u64>(value), lane_mask));
}
// A value that all lanes have anyway.
DM_DEVICE u32 uniform(u32 value) { return shfl(value, 0); }
// Value of lane - delta; lanes below delta keep their own.
template <typename T>
DM_DEVICE T shfl_up(T value, u32 delta) {
    return emu_bits<T>(emu_collective(emu::Collective::ShflUp, emu_bits<u64>(value), delta));
}
DM_DEVICE u32 ballot(bool predicate) { return u32(emu_collective(emu::Collective::Ballot, predicate, 0)); }
DM_DEVICE u32 keep(u32 value) { return value; }
DM_DEVICE bool all_lanes(bool predicate) { return emu_collective(emu::Collective::AllLanes, predicate, 0) != 0; }
DM_DEVICE u32 min_of_lanes(u32 x) {
    for (u32 mask = 1; mask < kWarpSize; mask *= 2) x = min_of(x, shfl_xor(x, mask));
    return x;
}
DM_DEVICE u32 popcount(u32 x) { return u32(__builtin_popcount(x)); }
DM_DEVICE u32 lowest_bit(u32 x) { return u32(__builtin_ctz(x)); }  // x != 0

DM_DEVICE u32 float_bits(float x) { return emu_bits<u32>(x); }
DM_DEVICE float bits_float(u32 x) { return emu_bits<float>(x); }

// The next four round to nearest even and never fuse with their neighbours: the emulator is built with
// -ffp-contract=off.
DM_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DM_DEVICE float mul(float a, float b) { return a * b; }
DM_DEVICE float add(float a, float b) { return a + b; }
DM_DEVICE float div(float a, float b) { return a / b; }
// Larger of two; a NaN loses.
DM_DEVICE float max(float a, float b) { return __builtin_isnan(a) ? b : (b > a ? b : a); }
// Smaller and larger of two; a NaN wins.
DM_DEVICE float min_nan(float a, float b) { return __builtin_isnan(a) || a < b ? a : b; }
DM_DEVICE float max_nan(float a, float b) { return __builtin_isnan(a) || a > b ? a : b; }
DM_DEVICE float abs(float a) { return __builtin_fabsf(a); }
DM_DEVICE float emu_flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
// 2^x and 1/x to about 2 ulp (denormals flushed).
DM_DEVICE float exp2_approx(float x) { return emu_flush(__builtin_exp2f(emu_flush(x))); }
DM_DEVICE float rcp_approx(float x) { return emu_flush(1.0f / emu_flush(x)); }

// One e4m3 byte: nearest even, saturating to 448; NaN becomes 0x7f.
DM_DEVICE u32 emu_e4m3(float x) {
    const u32 bits = float_bits(x), sign = bits >> 24 & 0x80;
    const float magnitude = __builtin_fabsf(x);
    if (!(magnitude < 464.0f)) return sign * (magnitude == magnitude) | (magnitude == magnitude ? 0x7e : 0x7f);
    if (magnitude < 0x1p-6f) {                      // subnormal: multiples of 2^-9; the sum rounds to nearest even
        const float shifted = magnitude + 0x1p14f;  // its last place is 2^-9
        return sign | ((float_bits(shifted) - float_bits(0x1p14f)) & 0xff);
    }
    const u32 m = float_bits(magnitude);
    const u32 rounded = m + 0x7ffff + (m >> 20 & 1);  // keep 3 of 23 mantissa bits
    const u32 code = (rounded >> 20) - (120u << 3);   // exponent bias 127 -> 7
    return sign | min_of(code, 0x7eu);
}
// Two e4m3 bytes, saturating, `low` in the low byte. NaN stays NaN.
DM_DEVICE u32 pack_e4m3x2(float low, float high) { return emu_e4m3(low) | emu_e4m3(high) << 8; }
DM_DEVICE u32 emu_bf16(float x) {
    const u32 bits = float_bits(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DM_DEVICE u32 pack_bf16x2(float low, float high) { return emu_bf16(low) | emu_bf16(high) << 16; }
// Byte permutation: each selector nibble picks a byte of {b, a} (PTX prmt).
DM_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 nibble = selector >> (4 * i);
        u32 byte = u32(bytes >> (8 * (nibble & 7))) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;  // replicate the sign
        result |= byte << (8 * i);
    }
    return result;
}

DM_DEVICE u64 timer_ns() {
    emu::ThreadHead* t = emu::self();
    return t->api->timer_ns(t);
}
// The SM's clock runs like the world's.
DM_DEVICE u32 clock() { return u32(timer_ns()); }
// The thread sleeps until the word that it last read from `address` changes.
DM_DEVICE void poll_pause(u32 site, u32 index, const void* address) {
    emu::ThreadHead* t = emu::self();
    t->api->poll_pause(t, site, index, address);
}
DM_DEVICE void exit_thread() {
    emu::ThreadHead* t = emu::self();
    t->api->exit_thread(t);
}

// The emulator keeps the register file of the SM: raising waits until other warpgroups have lowered theirs.
template <u32 kRegisters>
DM_DEVICE void raise_max_registers() {
    emu_collective(emu::Collective::SetMaxRegisters, 1, kRegisters);
}
template <u32 kRegisters>
DM_DEVICE void lower_max_registers() {
    emu_collective(emu::Collective::SetMaxRegisters, 0, kRegisters);
}

}  // namespace deep_moe::hw
