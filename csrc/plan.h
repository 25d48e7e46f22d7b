// Launch plans: everything that stays the same between calls is filled in once; a call patches the rest and launches.
// The GPU and the emulator differ only in how tensor maps are encoded and how a grid is started.
#pragma once

#include <memory>
#include <vector>

#include "deep_moe/layout/params.h"
#include "driver.h"
#include "launch_order.h"

namespace deep_moe {

// The constant part of a mega launch. Addresses are as this rank sees them.
struct MegaArguments {
    MegaMoeConfig config;
    u32 rank = 0;
    std::vector<u64> peers;  // base of every rank's buffer
    u64 l1_weights = 0;      // layout/weights.h
    u64 l1_scales = 0;
    u64 l2_weights = 0;
    u64 l2_scales = 0;
    u64 host_status = 0;  // or 0
    u64 timeout_ns = 0;
    float activation_clamp = 0;  // +inf: none
    u64 trace = 0;               // layout/trace.h; 0 without trace_events
    u64 trace_bytes = 0;         // what there is
    u64 l1_biases = 0;           // layout/weights.h; 0 without bias
    u64 l2_biases = 0;
    float activation_alpha = 0;  // of SwiGLUOai
};

// The per-call part.
struct MegaCall {
    u64 y = 0;
    u64 y_stride = 0;    // bytes
    u64 y_rows = 0;      // that y has room for
    u64 recv_stats = 0;  // or 0
};

// One call of `stage`; pointers and strides in bytes as in StageParams.
struct StageCall {
    u64 x = 0, x_stride = 0;
    u64 x_sf = 0, x_sf_stride = 0;
    u64 topk_idx = 0, topk_idx_stride = 0;
    bool topk_idx_is_i64 = false;
    u64 topk_weights = 0, topk_weights_stride = 0;
    u64 num_tokens = 0;
    u32 max_count = 0;
    float routed_scaling_factor = 1;
};

MegaMoeParams make_params(const MegaArguments& arguments);
// Throws invalid_argument when a trace array of these bytes has no room for a launch on num_sms SMs.
void check_trace(const MegaMoeConfig& config, u64 bytes, u32 num_sms);
// Throws when a launch of the variant needs more CTAs.
void check_ctas(const MegaMoeConfig& config, u32 num_sms);
StageParams make_params(u64 buffer, const StageCall& call);
// Of what the tensor map describes.
u64 tensor_map_address(const MegaArguments& arguments, MapIndex map);
void patch(MegaMoeParams& params, const MegaCall& call);
// One block per token, grid-stride; at least one, which writes the token count.
u32 stage_grid(u32 max_count, u32 num_sms);

cuda::KernelInfo mega_kernel_info(const MegaMoeConfig& config);
cuda::KernelInfo stage_kernel_info(const MegaMoeConfig& config);

class LaunchPlan {
public:
    // num_sms: blocks, at most what the device has: all must be resident at once, for they wait for each other.
    LaunchPlan(const cuda::Kernel& kernel, std::shared_ptr<LaunchLane> lane, const MegaArguments& arguments,
               u32 num_sms);
    void run(u64 stream, const MegaCall& call) const;

private:
    const cuda::Kernel& kernel_;
    std::shared_ptr<LaunchLane> lane_;
    MegaMoeParams params_;
    u32 num_sms_;
    MegaMoeTensorMaps maps_;
};

class StagePlan {
public:
    StagePlan(const cuda::Kernel& kernel, u64 buffer, u32 num_sms);
    void run(u64 stream, const StageCall& call) const;

private:
    const cuda::Kernel& kernel_;
    u64 buffer_;
    u32 num_sms_;
};

}  // namespace deep_moe
