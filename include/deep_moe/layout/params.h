// Kernel arguments. Plain data: the host fills them once per plan and patches the per-call part.
#pragma once

#include "deep_moe/layout/buffer.h"
#include "deep_moe/layout/tensor_maps.h"

namespace deep_moe {

enum class KernelKind : u32 { Mega = 1, Stage = 2 };

constexpr u32 kStageThreads = 256;  // of a block of the stage kernel; the mega kernel's: MegaMoeConfig::num_threads

// 128 opaque bytes: CUtensorMap on the GPU, emu::TensorMapImage in the emulator.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

struct MegaMoeParams {
    u8* peers[kMaxRanks];  // base of every rank's symmetric buffer, as this rank sees it
    const u8* l1_weights;  // layout/weights.h
    const u8* l2_weights;
    const float* l1_scales;  // weight scale records
    const float* l2_scales;
    u64* host_status;  // host-mapped copy of the abort record, or nullptr
    u64 timeout_ns;    // of every wait on another CTA or rank
    u32 rank;
    float activation_clamp;  // +inf: none
    // Per call.
    void* y;                 // bf16 [T][H]
    u64 y_stride;            // bytes between rows
    u32 y_rows;              // rows of y: a token beyond them is not written
    float activation_alpha;  // of SwiGLUOai; constant, in what would be padding
    i32* recv_stats;         // i32 [E_local], accumulated; or nullptr
    // Constant again. Last, so that a kernel without them is the same code as before there were any.
    u8* trace;               // layout/trace.h; nullptr without trace_events
    const float* l1_biases;  // layout/weights.h; nullptr without bias
    const float* l2_biases;
};

struct MegaMoeTensorMaps {
    TensorMap maps[u32(MapIndex::kCount)];
};

struct StageParams {
    u8* buffer;                 // this rank's symmetric buffer
    const void* x;              // bf16 [T][H], or e4m3 [T][H] when x_sf is set
    u64 x_stride;               // bytes between rows
    const float* x_sf;          // f32 [T][H/128], or nullptr
    u64 x_sf_stride;            // bytes between rows
    const void* topk_idx;       // i32 or i64 [T][K]
    u64 topk_idx_stride;        // bytes between rows
    const float* topk_weights;  // f32 [T][K]
    u64 topk_weights_stride;    // bytes between rows
    const i32* num_tokens;      // device scalar, or nullptr: the count is max_count
    u32 max_count;              // T
    u32 topk_idx_is_i64;
    float routed_scaling_factor;
};

}  // namespace deep_moe
