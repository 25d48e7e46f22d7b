#include "plan.h"

#include <stdexcept>
#include <string>

#include "deep_moe/layout/smem.h"
#include "deep_moe/layout/trace.h"

namespace deep_moe {
namespace {

constexpr u32 kStageBlocksPerSm = 8;

template <typename T>
T* pointer(u64 address) {
    return reinterpret_cast<T*>(address);
}

u64 field_address(const MegaArguments& arguments, BufferField field) {
    return arguments.peers.at(arguments.rank) + buffer_offset(arguments.config, field);
}

}  // namespace

MegaMoeParams make_params(const MegaArguments& arguments) {
    if (const char* error = config_error(arguments.config)) throw std::invalid_argument(error);
    if (arguments.peers.size() != arguments.config.num_ranks || arguments.rank >= arguments.config.num_ranks)
        throw std::invalid_argument("a launch plan needs one buffer address per rank, and a rank among them");
    if (arguments.config.bias != (arguments.l1_biases != 0) || arguments.config.bias != (arguments.l2_biases != 0))
        throw std::invalid_argument("a launch plan has addresses of biases exactly when its configuration has biases");
    MegaMoeParams params{};
    for (size_t i = 0; i < arguments.peers.size(); ++i) params.peers[i] = pointer<u8>(arguments.peers[i]);
    params.l1_weights = pointer<u8>(arguments.l1_weights);
    params.l2_weights = pointer<u8>(arguments.l2_weights);
    params.l1_scales = pointer<float>(arguments.l1_scales);
    params.l2_scales = pointer<float>(arguments.l2_scales);
    params.host_status = pointer<u64>(arguments.host_status);
    params.timeout_ns = arguments.timeout_ns;
    params.rank = arguments.rank;
    params.activation_clamp = arguments.activation_clamp;
    params.trace = pointer<u8>(arguments.trace);
    params.l1_biases = pointer<float>(arguments.l1_biases);
    params.l2_biases = pointer<float>(arguments.l2_biases);
    params.activation_alpha = arguments.activation_alpha;
    return params;
}

void check_trace(const MegaMoeConfig& config, u64 bytes, u32 num_sms) {
    const u64 needed = trace_bytes(config, num_sms);
    if (bytes < needed)
        throw std::invalid_argument("the trace of a launch on " + std::to_string(num_sms) + " SMs needs " +
                                    std::to_string(needed) + " bytes, but its array has " + std::to_string(bytes));
}

void check_ctas(const MegaMoeConfig& config, u32 num_sms) {
    if (num_sms < config.min_ctas())
        throw std::invalid_argument("num_sms is " + std::to_string(num_sms) +
                                    "; MXFP4 weights and many tokens need at least " +
                                    std::to_string(config.min_ctas()) + ": one decodes weights");
}

u64 tensor_map_address(const MegaArguments& arguments, MapIndex map) {
    switch (map) {
        case MapIndex::L1Acts:
        case MapIndex::L1ActsBox: return field_address(arguments, BufferField::L1Pool);
        case MapIndex::StagedRow: return field_address(arguments, BufferField::X);
        default: return field_address(arguments, BufferField::L2Pool);
    }
}

void patch(MegaMoeParams& params, const MegaCall& call) {
    params.y = pointer<void>(call.y);
    params.y_stride = call.y_stride;
    params.y_rows = u32(call.y_rows);
    params.recv_stats = pointer<i32>(call.recv_stats);
}

StageParams make_params(u64 buffer, const StageCall& call) {
    StageParams params{};
    params.buffer = pointer<u8>(buffer);
    params.x = pointer<void>(call.x);
    params.x_stride = call.x_stride;
    params.x_sf = pointer<float>(call.x_sf);
    params.x_sf_stride = call.x_sf_stride;
    params.topk_idx = pointer<void>(call.topk_idx);
    params.topk_idx_stride = call.topk_idx_stride;
    params.topk_weights = pointer<float>(call.topk_weights);
    params.topk_weights_stride = call.topk_weights_stride;
    params.num_tokens = pointer<i32>(call.num_tokens);
    params.max_count = call.max_count;
    params.topk_idx_is_i64 = call.topk_idx_is_i64;
    params.routed_scaling_factor = call.routed_scaling_factor;
    return params;
}

u32 stage_grid(u32 max_count, u32 num_sms) { return max_of(1u, min_of(max_count, num_sms * kStageBlocksPerSm)); }

cuda::KernelInfo mega_kernel_info(const MegaMoeConfig& config) {
    return {buffer_layout_hash(config), smem_bytes(config), config.num_threads(), u64(KernelKind::Mega)};
}

cuda::KernelInfo stage_kernel_info(const MegaMoeConfig& config) {
    return {buffer_layout_hash(config), 0, kStageThreads, u64(KernelKind::Stage)};
}

LaunchPlan::LaunchPlan(const cuda::Kernel& kernel, std::shared_ptr<LaunchLane> lane, const MegaArguments& arguments,
                       u32 num_sms)
    : kernel_(kernel), lane_(std::move(lane)), params_(make_params(arguments)), num_sms_(num_sms) {
    check_trace(arguments.config, arguments.trace_bytes, num_sms);
    check_ctas(arguments.config, num_sms);
    for (u32 i = 0; i < u32(MapIndex::kCount); ++i)
        cuda::encode_tensor_map(tensor_map_spec(arguments.config, MapIndex(i)),
                                tensor_map_address(arguments, MapIndex(i)), maps_.maps[i]);
}

void LaunchPlan::run(u64 stream, const MegaCall& call) const {
    MegaMoeParams params = params_;  // a copy: two threads may launch one plan
    patch(params, call);
    void* arguments[] = {&params, const_cast<MegaMoeTensorMaps*>(&maps_)};
    const cuda::ScopedContext current(kernel_.context());
    const auto queue = pointer<cuda::StreamImpl>(stream);
    const bool alone = lane_->enter(queue);
    // NOTES: a CTA of this kernel leaves no room for another one on its SM. Where several ranks share a GPU, one that
    // waits for its own predecessor could keep another rank's from starting.
    kernel_.launch(num_sms_, queue, arguments, alone);
    lane_->leave(queue);
}

StagePlan::StagePlan(const cuda::Kernel& kernel, u64 buffer, u32 num_sms)
    : kernel_(kernel), buffer_(buffer), num_sms_(num_sms) {}

void StagePlan::run(u64 stream, const StageCall& call) const {
    StageParams params = make_params(buffer_, call);
    void* arguments[] = {&params};
    const u32 grid = stage_grid(call.max_count, num_sms_);
    kernel_.launch(grid, pointer<cuda::StreamImpl>(stream), arguments);
}

}  // namespace deep_moe
