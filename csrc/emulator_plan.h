// The launch plans of the emulator: the arguments are filled by the same code as for the GPU (plan.h).
#pragma once

#include <string>

#include "emu/world.h"
#include "plan.h"

namespace deep_moe {

// A kernel compiled by g++ (the body of one thread), loaded for the life of the process.
class EmulatorKernel {
public:
    // Throws std::runtime_error when it cannot be loaded, or when its deep_moe_info is not `expected`.
    EmulatorKernel(const std::string& path, const std::string& name, const cuda::KernelInfo& expected);

    const std::string& name() const { return name_; }
    void* entry() const { return entry_; }
    u32 threads() const { return u32(info_[2]); }
    u32 smem_bytes() const { return u32(info_[1]); }

private:
    std::string name_;
    cuda::KernelInfo info_;
    void* entry_ = nullptr;
};

class EmulatorLaunchPlan {
public:
    EmulatorLaunchPlan(emu::World& world, const EmulatorKernel& kernel, const MegaArguments& arguments);
    // Returns when this rank's grid has ended.
    emu::Counts run(const emu::Options& options, u32 num_sms, const MegaCall& call) const;

private:
    emu::World& world_;
    MegaMoeConfig config_;
    u64 trace_bytes_;
    MegaMoeParams params_;
    MegaMoeTensorMaps maps_;
    emu::LaunchRequest request_;  // without the per-call part
};

class EmulatorStagePlan {
public:
    EmulatorStagePlan(emu::World& world, const EmulatorKernel& kernel, const MegaMoeConfig& config, u32 rank,
                      u64 buffer);
    emu::Counts run(const emu::Options& options, u32 num_sms, const StageCall& call) const;

private:
    emu::World& world_;
    MegaMoeConfig config_;
    u64 buffer_;
    emu::LaunchRequest request_;
};

}  // namespace deep_moe
