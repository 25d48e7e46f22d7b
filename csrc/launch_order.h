// Keeps mega launches of one device from sharing SMs. Two grids that spin for their peers and only got a part of the
// SMs each can dead-lock across GPUs, so launches from different streams run one after the other, unless all the lanes
// of a device fit beside each other. In the common case (one stream) nothing is added to a launch.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"

namespace deep_moe {

class DeviceLaunches;

// A share of a device's SMs. Launches of one lane are always serialised. Lanes of one local group (its ranks) never
// wait for each other: they must run together, and their budgets are disjoint by construction.
class LaunchLane {
public:
    // group: 0, or a number that the ranks of one LocalGroup share.
    static std::shared_ptr<LaunchLane> acquire(int device, u64 group, u32 rank, u32 num_sms);

    LaunchLane() = default;
    ~LaunchLane();
    LaunchLane(const LaunchLane&) = delete;
    LaunchLane& operator=(const LaunchLane&) = delete;

    // Call around a launch on `stream`, with the device's context current. enter: whether this is the device's only lane.
    bool enter(cuda::Stream stream);
    void leave(cuda::Stream stream);

private:
    friend class DeviceLaunches;

    bool conflicts_with(const LaunchLane& other) const;
    void wait_for(LaunchLane& other, cuda::Stream stream);
    void record_launch();
    static u64 next_id();  // unlike an address, never used again

    std::shared_ptr<DeviceLaunches> device_;
    u64 group_ = 0;
    u32 rank_ = 0, num_sms_ = 0;
    // The last eager launch.
    bool used_ = false, recorded_ = false;
    cuda::Stream stream_ = nullptr;
    cuda::Event event_ = nullptr;
    const u64 id_ = next_id();
    u64 launches_ = 0;
    // Launches of other lanes that `waiting_stream_` is behind already.
    std::map<u64, u64> waited_;  // by lane id
    cuda::Stream waiting_stream_ = nullptr;
    // The last launch into a graph capture; graphs are ordered by the stream that replays them.
    u64 capture_id_ = 0;
    cuda::Stream capture_stream_ = nullptr;
    cuda::Event capture_event_ = nullptr;
};

}  // namespace deep_moe
