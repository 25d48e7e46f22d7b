#include "launch_order.h"

#include <atomic>
#include <map>
#include <utility>

namespace deep_moe {

using cuda::Driver;

// The lanes of one device.
class DeviceLaunches {
public:
    explicit DeviceLaunches(int device) {
        const Driver& driver = Driver::get();
        cuda::Device handle = 0;
        int count = 0;
        driver.check(driver.device_get(&handle, device), "cuDeviceGet");
        driver.check(driver.device_get_attribute(&count, cuda::DeviceAttribute::MultiprocessorCount, handle),
                     "cuDeviceGetAttribute");
        num_sms = u32(count);
    }

    // The lane of (group, rank) when there is one; group 0 always gets a new lane.
    std::shared_ptr<LaunchLane> find(u64 group, u32 rank) {
        for (const auto& weak : lanes)
            if (auto lane = weak.lock(); lane && group != 0 && lane->group_ == group && lane->rank_ == rank)
                return lane;
        return nullptr;
    }

    // Live lanes; also notes whether they fit beside each other.
    std::vector<std::shared_ptr<LaunchLane>> live() {
        std::vector<std::shared_ptr<LaunchLane>> found;
        for (const auto& weak : lanes)
            if (auto lane = weak.lock()) found.push_back(std::move(lane));
        if (found.size() != lanes.size()) lanes.assign(found.begin(), found.end());
        u32 total = 0;
        for (const auto& lane : found) total += lane->num_sms_;
        crowded = total > num_sms;
        return found;
    }

    std::mutex mutex;
    std::vector<std::weak_ptr<LaunchLane>> lanes;
    u32 num_sms = 0;
    bool crowded = false;  // the lanes do not fit beside each other
};

namespace {

std::shared_ptr<DeviceLaunches> launches_of(int device) {
    static std::mutex mutex;
    static std::map<int, std::shared_ptr<DeviceLaunches>> devices;
    std::lock_guard lock(mutex);
    auto& entry = devices[device];
    if (!entry) entry = std::make_shared<DeviceLaunches>(device);
    return entry;
}

// Id of the capture that the stream takes part in, or 0.
u64 capture_of(cuda::Stream stream) {
    int status = 0;
    u64 id = 0;
    const auto result = Driver::get().stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr);
    return result == 0 && status == cuda::kCaptureStatusActive ? id : 0;
}

void record(cuda::Event& event, cuda::Stream stream) {
    const Driver& driver = Driver::get();
    if (!event) driver.check(driver.event_create(&event, cuda::kEventDisableTiming), "cuEventCreate");
    driver.check(driver.event_record(event, stream), "cuEventRecord");
}

}  // namespace

std::shared_ptr<LaunchLane> LaunchLane::acquire(int device, u64 group, u32 rank, u32 num_sms) {
    auto launches = launches_of(device);
    const cuda::ScopedContext current(Driver::get().primary_context(device));
    std::lock_guard lock(launches->mutex);
    auto lane = launches->find(group, rank);
    if (!lane) {
        // From now on there are several lanes, and each keeps an event right behind its last launch: waiting for the
        // end of another lane's stream would be too much, since a launch that must run beside ours may be there.
        for (const auto& other : launches->live())
            if (other->used_ && !other->recorded_) other->record_launch();
        lane = std::make_shared<LaunchLane>();
        lane->device_ = launches;
        lane->group_ = group;
        lane->rank_ = rank;
        launches->lanes.push_back(lane);
    }
    lane->num_sms_ = max_of(lane->num_sms_, num_sms);
    launches->live();
    return lane;
}

LaunchLane::~LaunchLane() {
    for (cuda::Event event : {event_, capture_event_})
        if (event) Driver::get().event_destroy(event);  // at exit the driver may be gone: the result does not matter
}

bool LaunchLane::conflicts_with(const LaunchLane& other) const {
    if (&other == this) return true;
    const bool same_group = group_ != 0 && other.group_ == group_;
    return device_->crowded && !same_group;
}

void LaunchLane::wait_for(LaunchLane& other, cuda::Stream stream) {
    const Driver& driver = Driver::get();
    if (const u64 capture = capture_of(stream)) {
        if (other.capture_id_ != capture || other.capture_stream_ == stream) return;
        record(other.capture_event_, other.capture_stream_);
        driver.check(driver.stream_wait_event(stream, other.capture_event_, 0), "cuStreamWaitEvent");
        return;
    }
    if (!other.used_ || other.stream_ == stream) return;
    if (waiting_stream_ != stream) waited_.clear();
    waiting_stream_ = stream;
    u64& waited = waited_[other.id_];
    if (waited == other.launches_) return;  // this stream is behind that launch already
    if (!other.recorded_) other.record_launch();
    driver.check(driver.stream_wait_event(stream, other.event_, 0), "cuStreamWaitEvent");
    waited = other.launches_;
}

u64 LaunchLane::next_id() {
    static std::atomic<u64> last = 0;
    return ++last;
}

void LaunchLane::record_launch() {
    record(event_, stream_);
    recorded_ = true;
}

bool LaunchLane::enter(cuda::Stream stream) {
    std::lock_guard lock(device_->mutex);
    if (device_->lanes.size() == 1) {
        wait_for(*this, stream);
        return true;
    }
    for (const auto& lane : device_->live())
        if (conflicts_with(*lane)) wait_for(*lane, stream);
    return false;
}

void LaunchLane::leave(cuda::Stream stream) {
    std::lock_guard lock(device_->mutex);
    if (const u64 capture = capture_of(stream)) {
        capture_id_ = capture;
        capture_stream_ = stream;
        return;
    }
    used_ = true;
    ++launches_;
    stream_ = stream;
    recorded_ = false;
    if (device_->lanes.size() > 1) record_launch();
}

}  // namespace deep_moe
