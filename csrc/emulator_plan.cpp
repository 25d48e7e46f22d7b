#include "emulator_plan.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

#include "deep_moe/layout/smem.h"
#include "deep_moe/layout/weights.h"

namespace deep_moe {
namespace {

template <typename T>
std::vector<u8> bytes_of(const T& value) {
    std::vector<u8> bytes(sizeof(T));
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
}

emu::Region region(const char* name, u64 address, u64 bytes, bool writable) {
    return {name, reinterpret_cast<u8*>(address), bytes, writable, -1};
}

// Bytes from the first to the last element of a matrix with strided rows.
u64 strided_bytes(u64 rows, u64 stride, u64 row_bytes) { return rows == 0 ? 0 : (rows - 1) * stride + row_bytes; }

bool is_staged(BufferField field) {
    return field == BufferField::X || field == BufferField::XSf || field == BufferField::TopkIdx ||
           field == BufferField::TopkWeights;
}

// The fields marked (remote) in layout/buffer.h.
bool is_written_by_peers(BufferField field) {
    switch (field) {
        case BufferField::Header:
        case BufferField::CountFlags:
        case BufferField::DoneFlags:
        case BufferField::RecvCounts:
        case BufferField::SourceLists:
        case BufferField::CombineSlots: return true;
        default: return false;
    }
}

// One region per field of one rank's buffer. Writable: (field) -> bool.
template <typename Writable>
void add_buffer(emu::LaunchRequest& request, const MegaMoeConfig& config, u32 rank, u64 base, Writable&& writable) {
    for (u32 i = 0; i < u32(BufferField::kCount); ++i) {
        const auto field = BufferField(i);
        const FieldSpec spec = buffer_field_spec(config, field);
        request.regions.push_back({spec.name, reinterpret_cast<u8*>(base + buffer_offset(config, field)), spec.bytes(),
                                   writable(field), i32(rank)});
    }
}

void add_weights(emu::LaunchRequest& request, const MegaArguments& a) {
    const MegaMoeConfig& c = a.config;
    const u64 local = c.experts_per_rank(), record = kWeightScaleRecord * sizeof(float);
    request.regions.push_back(region("l1_weights", a.l1_weights, local * l1_weight_bytes(c), false));
    request.regions.push_back(region("l1_scales", a.l1_scales, local * l1_scale_records(c) * record, false));
    request.regions.push_back(region("l2_weights", a.l2_weights, local * l2_weight_bytes(c), false));
    request.regions.push_back(region("l2_scales", a.l2_scales, local * l2_scale_records(c) * record, false));
    if (!c.bias) return;
    const u64 l1_floats = local * bias_floats(c.l1_weight_tiles()),
              l2_floats = local * bias_floats(c.l2_weight_tiles());
    request.regions.push_back(region("l1_biases", a.l1_biases, l1_floats * sizeof(float), false));
    request.regions.push_back(region("l2_biases", a.l2_biases, l2_floats * sizeof(float), false));
}

void add_smem_fields(emu::LaunchRequest& request, const MegaMoeConfig& config) {
    for (u32 i = 0; i < u32(SmemField::kCount); ++i) {
        const auto field = SmemField(i);
        const FieldSpec spec = smem_field_spec(config, field);
        request.smem_fields.push_back(
            {spec.name, smem_offset(config, field), u32(spec.bytes()), field == SmemField::State});
    }
}

emu::LaunchRequest base_request(const EmulatorKernel& kernel, u32 rank) {
    emu::LaunchRequest request;
    request.rank = rank;
    request.name = kernel.name();
    request.entry = kernel.entry();
    request.threads = kernel.threads();
    request.smem_bytes = kernel.smem_bytes();
    return request;
}

}  // namespace

EmulatorKernel::EmulatorKernel(const std::string& path, const std::string& name, const cuda::KernelInfo& expected)
    : name_(name), info_(expected) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error("kernel " + path + " cannot be loaded: " + dlerror());
    entry_ = dlsym(library, name.c_str());
    const auto* info = static_cast<const u64*>(dlsym(library, "deep_moe_info"));
    if (!entry_ || !info)
        throw std::runtime_error("kernel " + path + " does not export " + name + " and deep_moe_info");
    cuda::check_kernel_info(path, {info[0], info[1], info[2], info[3]}, expected);
}

EmulatorLaunchPlan::EmulatorLaunchPlan(emu::World& world, const EmulatorKernel& kernel, const MegaArguments& arguments)
    : world_(world),
      config_(arguments.config),
      trace_bytes_(arguments.trace_bytes),
      params_(make_params(arguments)),
      request_(base_request(kernel, arguments.rank)) {
    for (u32 i = 0; i < u32(MapIndex::kCount); ++i)
        maps_.maps[i] = emu::encode_tensor_map(tensor_map_spec(config_, MapIndex(i)),
                                               reinterpret_cast<void*>(tensor_map_address(arguments, MapIndex(i))));
    for (u32 rank = 0; rank < config_.num_ranks; ++rank)
        add_buffer(request_, config_, rank, arguments.peers[rank], [&](BufferField field) {
            return is_written_by_peers(field) || (rank == arguments.rank && !is_staged(field));
        });
    add_weights(request_, arguments);
    if (arguments.trace) request_.regions.push_back(region("trace", arguments.trace, arguments.trace_bytes, true));
    add_smem_fields(request_, config_);
}

emu::Counts EmulatorLaunchPlan::run(const emu::Options& options, u32 num_sms, const MegaCall& call) const {
    check_trace(config_, trace_bytes_, num_sms);
    check_ctas(config_, num_sms);
    MegaMoeParams params = params_;
    patch(params, call);
    emu::LaunchRequest request = request_;
    request.num_sms = num_sms;
    request.args = {bytes_of(params), bytes_of(maps_)};
    request.regions.push_back(region("y", call.y, strided_bytes(call.y_rows, call.y_stride, config_.hidden * 2), true));
    if (call.recv_stats)
        request.regions.push_back(region("stats", call.recv_stats, config_.experts_per_rank() * 4, true));
    return world_.launch(request, options);
}

EmulatorStagePlan::EmulatorStagePlan(emu::World& world, const EmulatorKernel& kernel, const MegaMoeConfig& config,
                                     u32 rank, u64 buffer)
    : world_(world), config_(config), buffer_(buffer), request_(base_request(kernel, rank)) {
    add_buffer(request_, config_, rank, buffer,
               [](BufferField field) { return is_staged(field) || field == BufferField::Header; });
}

emu::Counts EmulatorStagePlan::run(const emu::Options& options, u32 num_sms, const StageCall& call) const {
    const u64 rows = call.max_count, topk = config_.num_topk;
    emu::LaunchRequest request = request_;
    request.num_sms = min_of(num_sms, stage_grid(call.max_count, num_sms));
    request.args = {bytes_of(make_params(buffer_, call))};
    const u64 row_bytes = call.x_sf ? config_.hidden : config_.hidden * 2;
    request.regions.push_back(region("input x", call.x, strided_bytes(rows, call.x_stride, row_bytes), false));
    if (call.x_sf)
        request.regions.push_back(
            region("input x_sf", call.x_sf, strided_bytes(rows, call.x_sf_stride, config_.l1_k_blocks() * 4), false));
    request.regions.push_back(region("input topk_idx", call.topk_idx,
                                     strided_bytes(rows, call.topk_idx_stride, topk * (call.topk_idx_is_i64 ? 8 : 4)),
                                     false));
    request.regions.push_back(region("input topk_weights", call.topk_weights,
                                     strided_bytes(rows, call.topk_weights_stride, topk * 4), false));
    if (call.num_tokens) request.regions.push_back(region("input num_tokens", call.num_tokens, 4, false));
    return world_.launch(request, options);
}

}  // namespace deep_moe
